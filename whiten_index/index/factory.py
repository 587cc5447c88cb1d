"""Which FAISS index is built, and the transforms that go inside its file."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.errors import ConfigError
from whiten_index.index.library import first_line, load_faiss
from whiten_index.whitening import Kind, Whitening

_PROBED = 16
_WITHOUT_PARTS = re.compile(r"[A-Za-z]0+(?![0-9])|(HNSW|NSG)1(?![0-9])")


def inner_index(factory: str, k: int) -> Any:
    """Return an empty FAISS index over ``k`` dims, by inner product.

    Raises:
        ConfigError: FAISS does not know the string, or it holds a transform of its own.
    """
    faiss = load_faiss()
    if _WITHOUT_PARTS.search(factory):
        # FAISS itself would divide by zero here, and take the process along.
        raise ConfigError(f"{factory!r} asks for no list, link or code at all; give it some")
    try:
        index = faiss.index_factory(k, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise ConfigError(
            f"FAISS cannot make {factory!r} over {k} dims ({first_line(error)}); see the FAISS "
            "factory strings, such as Flat, HNSW32, IVF1024,Flat or IVF1024,PQ16"
        ) from error
    if any(isinstance(part, faiss.IndexPreTransform) for part in _parts(index)):
        raise ConfigError(
            f"{factory!r} holds a transform of its own (PCA, OPQ, L2norm …), which would nest in "
            "the whitening; leave it out and choose the width with --k"
        )
    _require_codes_to_refine_by(index, factory)
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        # FAISS makes a graph over product codes by distance, whatever is asked for.
        raise ConfigError(
            f"FAISS makes {factory!r} by Euclidean distance only, and scores here are cosines; use "
            "HNSW32, HNSW32_SQ8, or IVF with product codes"
        )
    if isinstance(index, faiss.IndexIDMap):
        raise ConfigError(
            f"{factory!r} maps ids, and rows are found by their number here; leave out IDMap"
        )
    _without_polysemous_training(index)
    lists = lists_of(index)
    if lists is not None:
        # FAISS would look into a single one.
        lists.nprobe = max(1, lists.nlist // _PROBED)
    return index


def _require_codes_to_refine_by(index: Any, factory: str) -> None:
    """Refuse a refinement by what has no distance of a single row, on which FAISS would abort.

    Raises:
        ConfigError: it is one.
    """
    faiss = load_faiss()
    for part in _parts(index):
        if isinstance(part, faiss.IndexRefine) and not isinstance(
            faiss.downcast_index(part.refine_index), faiss.IndexFlatCodes
        ):
            raise ConfigError(
                f"{factory!r} refines by an index that does not compare single rows; refine by "
                "codes, such as RFlat, Refine(SQfp16) or Refine(SQ8)"
            )


def _without_polysemous_training(index: Any) -> None:
    """Leave out the ordering of centroids for a search by Hamming distance, not done here.

    It takes a hundred times as long as the training itself (measured: 52 s for 0.5).
    """
    for part in _parts(index):
        if hasattr(part, "do_polysemous_training"):
            part.do_polysemous_training = False


def _parts(index: Any) -> list[Any]:
    """Return an index and the indexes it is made of."""
    faiss = load_faiss()
    inside = (
        getattr(index, name, None) for name in ("base_index", "quantizer", "storage", "index")
    )
    found = [faiss.downcast_index(part) for part in inside if part is not None]
    return [index, *(part for each in found for part in _parts(each))]


def wrap(inner: Any, whitening: Whitening, *, rotation: NDArray[np.floating] | None = None) -> Any:
    """Return ``inner`` behind the transforms: raw d-dim rows in, unit k-dim vectors inside.

    The mean is subtracted by a transform of its own: folded into the bias of the matrix it would
    cost float32 digits where the mean is large against the spread. A rotation (k, k) of the
    vectors is multiplied into the matrix.
    """
    faiss = load_faiss()
    chain: list[Any] = []
    if whitening.normalize_input:
        chain.append(faiss.NormalizationTransform(whitening.dim, 2.0))
    if whitening.center:
        centering = faiss.CenteringTransform(whitening.dim)
        faiss.copy_array_to_vector(whitening.mean.astype(np.float32), centering.mean)
        centering.is_trained = True
        chain.append(centering)
    if whitening.kind is not Kind.NONE or rotation is not None:
        linear = faiss.LinearTransform(whitening.dim, whitening.k, False)
        whole = whitening.matrix() if rotation is None else whitening.matrix() @ rotation
        matrix = np.ascontiguousarray(whole.T, dtype=np.float32)
        faiss.copy_array_to_vector(matrix.ravel(), linear.A)
        linear.is_trained = True
        chain.append(linear)
    chain.append(faiss.NormalizationTransform(whitening.k, 2.0))
    index = faiss.IndexPreTransform(inner)
    for transform in reversed(chain):
        index.prepend_transform(transform)
    return index


def inner_of(index: Any) -> Any:
    """Return the index proper, behind the transforms; it lives as long as ``index`` does."""
    return load_faiss().downcast_index(index.index)


def nprobe(index: Any) -> int | None:
    """Return how many lists each query looks into, None for an index without lists."""
    lists = lists_of(index)
    return None if lists is None else int(lists.nprobe)


def search_with(
    index: Any, queries: NDArray[np.float32], top_k: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return scores and row numbers (q, top_k) of a plain search, as the index is set."""
    scores, rows = index.search(np.ascontiguousarray(queries, dtype=np.float32), top_k)
    return scores, rows


def peer_index(factory: str, dim: int) -> Any:
    """Return an empty index over ``dim`` raw dims by FAISS alone, its own transforms allowed.

    Raises:
        ConfigError: FAISS cannot make it.
    """
    faiss = load_faiss()
    try:
        index = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise ConfigError(
            f"FAISS cannot make {factory!r} over {dim} dims ({first_line(error)})"
        ) from error
    _without_polysemous_training(index)
    return index


def lists_of(index: Any) -> Any:
    """Return the inverted lists inside an index, at whatever depth, or None."""
    try:
        return load_faiss().extract_index_ivf(index)
    except RuntimeError:
        return None
