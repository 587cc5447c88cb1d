"""A look at everything an index holds: are all rows there once, and are their codes numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.index.library import load_faiss

_ROWS_AT_A_TIME = 8192


@dataclass(frozen=True, slots=True)
class Examined:
    """What was found in an index of ``rows`` rows.

    Attributes:
        rows: rows it says it holds.
        decoded: whether its codes could be decoded, all of them; codes that are packed in blocks
            cannot, and hold whole numbers only.
        broken: codes that decode to NaN or infinity.
        lost: rows that no list holds, 0 without lists.
        strange: entries of lists that are no row, or a row that was there before.
        learned: whether all that it has learned (centroids, codebooks) is finite.
    """

    rows: int
    decoded: bool
    broken: int
    lost: int
    strange: int
    learned: bool


def examine(index: Any) -> Examined:
    """Read all of an index, with or without the transforms before it, block by block.

    Memory is that of a block, and a byte a row where there are lists.
    """
    faiss = load_faiss()
    inner = faiss.downcast_index(index)
    if isinstance(inner, faiss.IndexPreTransform):
        return examine(inner.index)
    # What holds the codes: a refined index has two, a graph keeps them in an index of its own.
    inside = [getattr(inner, name, None) for name in ("base_index", "refine_index", "storage")]
    parts = [examine(part) for part in inside if part is not None]
    if parts:
        return _joined(int(inner.ntotal), parts)
    if isinstance(inner, faiss.IndexIVF):
        return _lists(inner)
    rows = int(inner.ntotal)
    decodes = isinstance(inner, faiss.IndexFlatCodes)
    broken = 0
    for start in range(0, rows if decodes else 0, _ROWS_AT_A_TIME):
        some = inner.reconstruct_n(start, min(_ROWS_AT_A_TIME, rows - start))
        broken += _not_finite(some)
    return Examined(rows, decodes, broken, 0, 0, _learned(inner))


def _joined(rows: int, parts: list[Examined]) -> Examined:
    """Return what was found in parts, each of which should hold every row."""
    return Examined(
        rows=rows,
        decoded=all(part.decoded for part in parts),
        broken=max(part.broken for part in parts),
        lost=max(max(rows - part.rows, part.lost) for part in parts),
        strange=max(max(part.rows - rows, part.strange) for part in parts),
        learned=all(part.learned for part in parts),
    )


def _lists(inner: Any) -> Examined:
    faiss = load_faiss()
    rows, broken, strange = int(inner.ntotal), 0, 0
    seen = np.zeros(rows, dtype=np.bool_)
    kept = faiss.downcast_InvertedLists(inner.invlists)
    # Packed codes, and those kept by level, come in blocks that only a search takes apart.
    decodes = not isinstance(inner, faiss.IndexIVFFastScan)
    decodes = decodes and type(kept) in (faiss.ArrayInvertedLists, faiss.OnDiskInvertedLists)
    for place, ids in _ids(kept, int(inner.nlist)):
        inside = ids[(ids >= 0) & (ids < rows)]
        fresh = np.unique(inside[~seen[inside]])
        strange += len(ids) - len(fresh)
        seen[fresh] = True
        for start in range(0, len(ids) if decodes else 0, _ROWS_AT_A_TIME):
            count = min(_ROWS_AT_A_TIME, len(ids) - start)
            broken += _not_finite(_decoded(inner, kept, place, start, count))
    lost = rows - int(np.count_nonzero(seen))
    return Examined(rows, decodes, broken, lost, strange, _learned(inner))


def _ids(kept: Any, lists: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield each list that is not empty: its place and the row numbers in it."""
    faiss = load_faiss()
    for place in range(lists):
        size = int(kept.list_size(place))
        if size:
            held = kept.get_ids(place)
            try:
                yield place, faiss.rev_swig_ptr(held, size).copy()
            finally:
                kept.release_ids(place, held)


def _decoded(inner: Any, kept: Any, place: int, start: int, count: int) -> NDArray[np.float32]:
    """Return the vectors (count, k) of a list's codes from ``start`` on.

    FAISS decodes codes that begin with the number of their list, lowest byte first.
    """
    faiss = load_faiss()
    size, width = int(inner.code_size), int(inner.coarse_code_size())
    held = kept.get_codes(place)
    try:
        every = faiss.rev_swig_ptr(held, (start + count) * size)
        codes = every[start * size :].reshape(count, size).copy()
    finally:
        kept.release_codes(place, held)
    number = np.frombuffer(place.to_bytes(width, "little"), dtype=np.uint8)
    whole = np.hstack([np.broadcast_to(number, (count, width)), codes])
    vectors: NDArray[np.float32] = inner.sa_decode(np.ascontiguousarray(whole))
    return vectors


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
