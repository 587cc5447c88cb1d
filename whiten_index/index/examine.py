"""Examination of an index: each row once, and codes, centroids and codebooks finite."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.index.code_reuse import list_codes, list_ids
from whiten_index.index.library import load_faiss

_ROWS_AT_A_TIME = 8192


@dataclass(frozen=True, slots=True)
class Examined:
    """Findings in an index."""

    rows: int  # its number of rows
    # Whether all codes could be decoded; codes that are packed in blocks cannot, and hold whole
    # numbers only.
    decoded: bool
    broken: int  # codes that decode to NaN or infinity
    lost: int  # rows that no list holds, 0 without lists
    strange: int  # entries of lists that are no row, or a row for the second time
    learned: bool  # whether centroids and codebooks are finite


def examine(index: Any) -> Examined:
    """Read all of an index, with or without the transforms before it, block by block.

    Memory is that of a block, and with lists a byte a row.
    """
    faiss = load_faiss()
    inner = faiss.downcast_index(index)
    if isinstance(inner, faiss.IndexPreTransform):
        return examine(inner.index)
    rows = int(inner.ntotal)
    if isinstance(inner, faiss.IndexHNSW):
        codes = examine(inner.storage)
        lost, strange = max(rows - codes.rows, 0), max(codes.rows - rows, 0)
        return replace(codes, rows=rows, lost=lost, strange=strange)
    if isinstance(inner, faiss.IndexIVF):
        return _lists(inner)
    decodes = isinstance(inner, faiss.IndexFlatCodes)
    broken = 0
    for start in range(0, rows if decodes else 0, _ROWS_AT_A_TIME):
        some = inner.reconstruct_n(start, min(_ROWS_AT_A_TIME, rows - start))
        broken += _not_finite(some)
    return Examined(rows, decodes, broken, 0, 0, _learned(inner))


def _lists(inner: Any) -> Examined:
    faiss = load_faiss()
    rows, broken, strange = int(inner.ntotal), 0, 0
    seen = np.zeros(rows, dtype=np.bool_)
    kind = type(faiss.downcast_InvertedLists(inner.invlists))
    # Packed codes, and those kept by level, come in blocks that only a search takes apart.
    decodes = not isinstance(inner, faiss.IndexIVFFastScan)
    decodes = decodes and kind in (faiss.ArrayInvertedLists, faiss.OnDiskInvertedLists)
    for number in range(int(inner.nlist)):
        ids = list_ids(inner, number)
        inside = ids[(ids >= 0) & (ids < rows)]
        fresh = np.unique(inside[~seen[inside]])
        strange += len(ids) - len(fresh)
        seen[fresh] = True
        for start in range(0, len(ids) if decodes else 0, _ROWS_AT_A_TIME):
            places = np.arange(start, min(start + _ROWS_AT_A_TIME, len(ids)))
            broken += _not_finite(inner.sa_decode(list_codes(inner, number, places)))
    lost = rows - int(np.count_nonzero(seen))
    return Examined(rows, decodes, broken, lost, strange, _learned(inner))


def _learned(inner: Any) -> bool:
    """Return whether centroids and codebooks are finite."""
    faiss = load_faiss()
    quantizer = getattr(inner, "quantizer", None)
    if quantizer is not None:
        coarse = examine(quantizer)
        if coarse.broken or not coarse.learned:
            return False
    for owner, name in (("pq", "centroids"), ("sq", "trained"), ("aq", "codebooks")):
        numbers = getattr(getattr(inner, owner, None), name, None)
        if numbers is not None and not np.isfinite(faiss.vector_to_array(numbers)).all():
            return False
    return True


def _not_finite(vectors: NDArray[np.float32]) -> int:
    return int(len(vectors) - np.count_nonzero(np.isfinite(vectors).all(axis=1)))
