"""Which FAISS index is built, and the transforms that go inside its file."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.errors import ConfigError
from whiten_index.index.library import first_line, load_faiss
from whiten_index.whitening import Kind, Whitening

AUTO = "auto"
_EXACT_UP_TO_ROWS = 200_000
_MOST_TRAINING_BYTES = 1 << 30
_PROBED = 16
_ROWS_A_LIST = 39
_WITHOUT_PARTS = re.compile(r"[A-Za-z]0+(?![0-9])|(HNSW|NSG)1(?![0-9])")


def choose_factory(factory: str, *, rows: int) -> str:
    """Return the factory string; ``auto`` is exact search up to 200,000 rows, IVF above."""
    if factory != AUTO:
        return factory
    if rows <= _EXACT_UP_TO_ROWS:
        return "Flat"
    return f"IVF{4 * math.isqrt(rows)},Flat"


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
    if isinstance(index, faiss.IndexIDMap):
        raise ConfigError(
            f"{factory!r} maps ids, and rows are found by their number here; leave out IDMap"
        )
    lists = _lists(index)
    if lists is not None:
        # FAISS would look into a single one.
        lists.nprobe = max(1, lists.nlist // _PROBED)
    return index


def _parts(index: Any) -> list[Any]:
    """Return an index and the indexes it is made of."""
    faiss = load_faiss()
    inside = (getattr(index, name, None) for name in ("base_index", "quantizer"))
    found = [faiss.downcast_index(part) for part in inside if part is not None]
    return [index, *(part for each in found for part in _parts(each))]


def wrap(inner: Any, whitening: Whitening) -> Any:
    """Return ``inner`` behind the transforms: raw d-dim rows in, unit k-dim vectors inside.

    The mean is subtracted by a transform of its own: folded into the bias of the matrix it would
    cost float32 digits where the mean is large against the spread.
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
    if whitening.kind is not Kind.NONE:
        linear = faiss.LinearTransform(whitening.dim, whitening.k, False)
        matrix = np.ascontiguousarray(whitening.matrix().T, dtype=np.float32)
        faiss.copy_array_to_vector(matrix.ravel(), linear.A)
        linear.is_trained = True
        chain.append(linear)
    chain.append(faiss.NormalizationTransform(whitening.k, 2.0))
    index = faiss.IndexPreTransform(inner)
    for transform in reversed(chain):
        index.prepend_transform(transform)
    return index


def training_rows(inner: Any, *, rows: int, k: int) -> int:
    """Return how many rows a sample should have to train ``inner``, 0 where it needs none."""
    if inner.is_trained:
        return 0
    lists = _lists(inner)
    wanted = max(256 * (0 if lists is None else int(lists.nlist)), 1 << 16)
    return min(rows, wanted, max(_MOST_TRAINING_BYTES // (4 * k), 1))


def too_few_rows(inner: Any, sample_rows: int) -> str | None:
    """Return a sentence where lists are learned from fewer rows than FAISS advises, else None.

    FAISS's own warning, which names none of the user's options, is switched off.
    """
    lists = _lists(inner)
    if lists is None:
        return None
    lists.cp.min_points_per_centroid = 1
    if sample_rows >= _ROWS_A_LIST * lists.nlist:
        return None
    return (
        f"note: {lists.nlist} lists are learned from {sample_rows} rows, and FAISS advises "
        f"{_ROWS_A_LIST} a list; --factory with fewer lists would search better"
    )


def train(inner: Any, sample: NDArray[np.float32], factory: str) -> None:
    """Train an index on unit vectors (m, k).

    Raises:
        ConfigError: FAISS cannot train this factory on so few rows.
    """
    try:
        inner.train(sample)
    except RuntimeError as error:
        raise ConfigError(
            f"FAISS cannot train {factory!r} on {len(sample)} rows ({first_line(error)}); "
            "use --factory Flat, or fewer lists and codes"
        ) from error


def nprobe(index: Any) -> int | None:
    """Return how many lists each query looks into, None for an index without lists."""
    lists = _lists(index)
    return None if lists is None else int(lists.nprobe)


def _lists(index: Any) -> Any:
    """Return the inverted lists inside an index, at whatever depth, or None."""
    try:
        return load_faiss().extract_index_ivf(index)
    except RuntimeError:
        return None
