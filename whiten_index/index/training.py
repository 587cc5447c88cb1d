"""What an index learns before it is filled: how many rows that takes, and the training itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.errors import ConfigError
from whiten_index.index.factory import lists_of
from whiten_index.index.library import first_line, load_faiss

_MOST_TRAINING_BYTES = 1 << 30
_ROWS_A_LIST = 39


def training_rows(inner: Any, *, rows: int, k: int, most_bytes: int = _MOST_TRAINING_BYTES) -> int:
    """Return how many rows a sample should have to train ``inner``, 0 where it needs none.

    Args:
        inner: the untrained index.
        rows: there are.
        k: width of a vector.
        most_bytes: of the sample, which is yet never less than FAISS takes.
    """
    if inner.is_trained:
        return 0
    lists = lists_of(inner)
    wanted = max(256 * (0 if lists is None else int(lists.nlist)), 1 << 16)
    most = max(min(most_bytes, _MOST_TRAINING_BYTES) // (4 * k), least_training_rows(inner))
    size: int = min(rows, wanted, most)
    return size


def least_training_rows(inner: Any) -> int:
    """Return how many rows FAISS needs to train ``inner`` at least: one a centroid or code."""
    if inner.is_trained:
        return 0
    lists = lists_of(inner)
    codes = [codebook.values for codebook in _codebooks(inner)]
    least: int = max(1, *codes, 0 if lists is None else int(lists.nlist))
    return least


def require_training_rows(inner: Any, factory: str, *, rows: int) -> None:
    """Refuse a factory that learns more centroids than there are rows.

    Raises:
        ConfigError: it does.
    """
    least = least_training_rows(inner)
    if rows < least:
        raise ConfigError(
            f"FAISS cannot train {factory!r} on {rows} rows: it learns {least} centroids and needs "
            "a row for each at least; use --factory Flat or SQ8, fewer lists, or codes of fewer "
            "bits such as PQ16x4"
        )


def too_few_rows(inner: Any, sample_rows: int) -> str | None:
    """Return a sentence where lists or codes are learned from fewer rows than FAISS advises.

    FAISS's own warnings, which name none of the user's options, are switched off.
    """
    lists = lists_of(inner)
    codebooks = _codebooks(inner)
    for codebook in codebooks:
        if codebook.clustering is not None:
            codebook.clustering.min_points_per_centroid = 1
    codes = max((codebook.values for codebook in codebooks), default=0)
    if lists is not None:
        lists.cp.min_points_per_centroid = 1
    if lists is None or sample_rows >= _ROWS_A_LIST * lists.nlist:
        if sample_rows >= _ROWS_A_LIST * codes:
            return None
        return (
            f"note: codes of {codes} values are learned from {sample_rows} rows, and FAISS advises "
            f"{_ROWS_A_LIST * codes}; codes of fewer bits, or --factory SQ8, would search better"
        )
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


@dataclass(frozen=True, eq=False)
class _Codebook:
    """What a quantizer learns: so many values a code, by FAISS's clustering where it uses it."""

    values: int
    clustering: Any


def _codebooks(inner: Any) -> list[_Codebook]:
    """Return the codebooks that are learned inside an index, at whatever depth."""
    faiss = load_faiss()
    inside = (getattr(inner, name, None) for name in ("base_index", "refine_index", "storage"))
    parts = [faiss.downcast_index(part) for part in inside if part is not None]
    found = [codebook for part in parts for codebook in _codebooks(part)]
    product, additive = getattr(inner, "pq", None), getattr(inner, "aq", None)
    if product is not None:
        found.append(_Codebook(2 ** int(product.nbits), product.cp))
    if additive is not None:
        found += _additive(faiss.downcast_Quantizer(additive))
    return found


def _additive(quantizer: Any) -> list[_Codebook]:
    """Return the codebooks of codes that are sums, or of each part of a vector."""
    faiss = load_faiss()
    if isinstance(quantizer, faiss.ProductAdditiveQuantizer):
        subs = (quantizer.subquantizer(place) for place in range(quantizer.nsplits))
        return [book for sub in subs for book in _additive(faiss.downcast_Quantizer(sub))]
    bits = faiss.vector_to_array(quantizer.nbits)
    return [_Codebook(2 ** int(bits.max(initial=0)), getattr(quantizer, "cp", None))]
