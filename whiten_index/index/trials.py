"""Many indexes over the same vectors, made for a sweep: what they can share is learned once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.errors import ConfigError
from whiten_index.index.exact import flat_vectors
from whiten_index.index.factory import (
    coarse_centroids,
    inner_index,
    lists_of,
    share_centroids,
)
from whiten_index.index.gpu import Placed, place, quiet, takes
from whiten_index.index.library import first_line, load_faiss
from whiten_index.index.nearest import nearest, nearest_on_gpu
from whiten_index.index.pages import gather_pages
from whiten_index.index.rotation import rotation_for
from whiten_index.index.training import require_training_rows, too_few_rows, train
from whiten_index.index.transforms import Transforms

_ADD_ROWS = 16_384
# Rows a list that centroids are learned from: FAISS advises 39 to 256.
_ROWS_A_LIST = 50
# Rows that a codec is learned from; product codes cluster each part anew, 256 ways.
_CODEC_ROWS, _PRODUCT_ROWS = 1 << 16, 1 << 14


@dataclass(frozen=True, eq=False)
class SharedLists:
    """Inverted lists without codes: which centroids, and which of them each row belongs to.

    Attributes:
        centroids: (nlist, k).
        lists: (n,) int64, the list of each row; None where a GPU learned them, which finds each
            row its list as it adds it.
        train_seconds: spent on the centroids.
        assign_seconds: spent on finding each row its list.
    """

    centroids: NDArray[np.float32]
    lists: NDArray[np.int64] | None
    train_seconds: float
    assign_seconds: float

    @classmethod
    def learn(
        cls,
        vectors: NDArray[np.float32],
        *,
        count: int,
        rng: np.random.Generator,
        device: str = "cpu",
    ) -> SharedLists:
        """Cluster unit vectors (n, k) into ``count`` lists.

        Args:
            vectors: to cluster.
            count: of lists.
            rng: draws the sample.
            device: where; ``auto`` takes a GPU where there is one.

        Raises:
            ConfigError: there are too few rows, or the memory of a GPU that was asked for ran out.
        """
        factory = f"IVF{count},Flat"
        inner = inner_index(factory, vectors.shape[1])
        sample = drawn(vectors, _ROWS_A_LIST * count, rng)
        too_few_rows(inner, len(sample))
        started = time.perf_counter()
        placed = place(inner, device, note=quiet).attempt(
            lambda index: train(index, sample, factory), instead=inner, device=device, note=quiet
        )
        inner = placed.on_cpu()
        trained = time.perf_counter()
        if placed.device != "cpu":
            return cls(coarse_centroids(inner), None, trained - started, 0.0)
        quantizer = load_faiss().downcast_index(lists_of(inner).quantizer)
        found = [quantizer.search(block, 1)[1].ravel() for _, block in _blocks(vectors)]
        ended = time.perf_counter()
        return cls(
            coarse_centroids(inner), np.concatenate(found), trained - started, ended - trained
        )


@dataclass(frozen=True, eq=False)
class Filled:
    """An index with every vector in it.

    Attributes:
        placed: the index, without transforms, where it was filled and is searched.
        rotation: (k, k) that vectors are turned by before they go in, None where they are not.
        train_seconds, add_seconds: what they took, shared lists counted in.
    """

    placed: Placed
    rotation: NDArray[np.float64] | None
    train_seconds: float
    add_seconds: float

    def turned(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return vectors (n, k) as the index has them."""
        if self.rotation is None:
            return vectors
        return vectors @ self.rotation.astype(np.float32)


def filled(
    factory: str,
    vectors: NDArray[np.float32],
    *,
    shared: SharedLists | None,
    seed: int,
    device: str = "cpu",
) -> Filled:
    """Return an index of unit vectors (n, k), which may lie in a file.

    Args:
        factory: FAISS factory string.
        vectors: what is added, in order.
        shared: lists learned before, for an index with lists.
        seed: of the training sample, and of the rotation before lossy codes.
        device: where rows are added, for kinds that go to GPUs; others stay on the CPU.

    Raises:
        ConfigError: FAISS cannot make, train or fill the factory, or the memory of a GPU that was
            asked for ran out.
    """
    k = vectors.shape[1]
    inner = inner_index(factory, k)
    rotation = rotation_for(inner, k, seed=seed)
    made = Filled(Placed(inner, "cpu"), rotation, 0.0, 0.0)
    started = time.perf_counter()
    if shared is not None:
        share_centroids(inner, made.turned(shared.centroids))
    if not inner.is_trained:
        _train(made, vectors, factory, seed=seed)
    trained = time.perf_counter()
    device = device if takes(inner) else "cpu"
    placed = place(inner, device, note=quiet)
    known = _known_lists(inner, shared) if placed.device == "cpu" else None
    placed = placed.attempt(
        lambda index: _add(index, made, vectors, known, factory),
        instead=inner,
        device=device,
        note=quiet,
    )
    ended = time.perf_counter()
    if placed.device == "cpu":
        _gather(inner)
    trained_before = 0.0 if shared is None else shared.train_seconds
    assigned_before = 0.0 if shared is None or known is None else shared.assign_seconds
    return replace(
        made,
        placed=placed,
        train_seconds=trained_before + trained - started,
        add_seconds=assigned_before + ended - trained,
    )


def _train(made: Filled, vectors: NDArray[np.float32], factory: str, *, seed: int) -> None:
    """Learn codes from a sample of the vectors (n, k)."""
    inner = made.placed.index
    product = _product_of(inner)
    size = _CODEC_ROWS if product is None else _PRODUCT_ROWS
    sample = drawn(vectors, size, np.random.default_rng(seed))
    require_training_rows(inner, factory, rows=len(sample))
    # A build says where these are few; in a sweep the recall does.
    too_few_rows(inner, len(sample))
    with _trained_alone(product):
        train(inner, made.turned(sample), factory)


def filled_peer(index: Any, rows: NDArray[np.floating], *, rng: np.random.Generator) -> Filled:
    """Train and fill an index that has FAISS's own transforms, with raw rows (n, d).

    Raises:
        ConfigError: FAISS cannot train it.
    """
    started = time.perf_counter()
    train(index, drawn(rows, _CODEC_ROWS, rng), "a peer")
    trained = time.perf_counter()
    for _, block in _blocks(rows):
        index.add(block)
    return Filled(Placed(index, "cpu"), None, trained - started, time.perf_counter() - trained)


def searcher(
    index: Any, placed: Placed
) -> Callable[[NDArray[np.float32], int], tuple[NDArray[np.float32], NDArray[np.int64]]]:
    """Return how scores and rows (q, m) nearest to raw embeddings (q, d) are found in a bundle.

    Args:
        index: behind its transforms.
        placed: the index proper, where it is searched.
    """
    inner, rows = load_faiss().downcast_index(index.index), int(index.ntotal)
    transforms = Transforms(index)

    def search(
        embeddings: NDArray[np.float32], top_k: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        vectors, most = transforms(embeddings), min(top_k, rows)
        if placed.device == "cpu":
            return nearest(inner, vectors, most)
        return nearest_on_gpu(placed.index, inner, vectors, most)

    return search


def drawn(rows: NDArray[np.floating], size: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """Return up to ``size`` rows drawn at random, in their order, as float32."""
    if len(rows) > size:
        rows = rows[np.sort(rng.choice(len(rows), size, replace=False))]
    return np.ascontiguousarray(rows, dtype=np.float32)


def _gather(inner: Any) -> None:
    """Have vectors in large pages, as an index that is opened has them."""
    vectors = flat_vectors(inner)
    gathering = None if vectors is None else gather_pages(vectors)
    if gathering is not None:
        gathering.join()


def _known_lists(inner: Any, shared: SharedLists | None) -> NDArray[np.int64] | None:
    """Return the list of each row, None where that is not known or cannot be told to the index."""
    faiss = load_faiss()
    # Fast-scan lists take blocks of their own making only.
    if shared is None or isinstance(faiss.downcast_index(inner), faiss.IndexIVFFastScan):
        return None
    return shared.lists


def _add(
    index: Any,
    made: Filled,
    vectors: NDArray[np.float32],
    known: NDArray[np.int64] | None,
    factory: str,
) -> None:
    """Add all vectors, to the lists they belong to where these are known.

    Raises:
        ConfigError: FAISS cannot add them.
    """
    faiss = load_faiss()
    try:
        for start, narrow in _blocks(vectors):
            block = np.ascontiguousarray(made.turned(narrow))
            if known is None:
                index.add(block)
                continue
            own = np.ascontiguousarray(known[start : start + len(block)])
            index.add_core(len(block), faiss.swig_ptr(block), None, faiss.swig_ptr(own))
    except RuntimeError as error:
        raise ConfigError(
            f"FAISS cannot fill {factory!r} ({first_line(error)}); leave that codec or index out"
        ) from error


def _blocks(rows: NDArray[np.floating]) -> Iterator[tuple[int, NDArray[np.float32]]]:
    for start in range(0, len(rows), _ADD_ROWS):
        yield start, np.ascontiguousarray(rows[start : start + _ADD_ROWS], dtype=np.float32)


def _product_of(inner: Any) -> Any:
    """Return the product quantizer of an index, None where it has none."""
    faiss = load_faiss()
    storage = getattr(inner, "storage", None)
    return getattr(inner if storage is None else faiss.downcast_index(storage), "pq", None)


@contextmanager
def _trained_alone(product: Any) -> Iterator[None]:
    """Let product codes be learned on one thread: many tiny problems, where threads only wait."""
    if product is None:
        yield
        return
    faiss = load_faiss()
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(threads)
