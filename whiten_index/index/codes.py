"""Codes of an index: reused in a new one byte for byte with new rows among them, and examined.

The new index keeps the centroids, codebooks, transforms and settings of the published one. A row
that did not change keeps its code under its new row number.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.errors import ArtifactError
from whiten_index.index.exact import Rows, Vectors, view_of
from whiten_index.index.factory import inner_of
from whiten_index.index.library import load_faiss
from whiten_index.index.ondisk_ivf import Codes, OnDiskLists

_ROWS = 8192
# Kinds, without the kinds derived from them, which may keep more than codes.
_KINDS = (
    "IndexFlat", "IndexFlatIP", "IndexScalarQuantizer", "IndexPQ", "IndexRaBitQ", "IndexIVFFlat",
    "IndexIVFScalarQuantizer", "IndexIVFPQ", "IndexIVFRaBitQ",
)  # fmt: skip


def why_not_reusable(index: Any) -> str | None:
    """Return the reason why the codes of a kind of index cannot be reused, None if they can."""
    kind = type(inner_of(index)).__name__
    return None if kind in _KINDS else f"codes of an {kind} cannot be reused in another"


def reuse_codes(
    old: Any,
    new: Any,
    old_rows: Rows,
    vectors: Iterable[Vectors],
    *,
    on_disk: OnDiskLists | None = None,
) -> None:
    """Fill a new index with old rows' codes and new rows' vectors.

    ``old_rows`` (n,) has the row of the old index whose code each new row gets, −1 for a new row;
    a row may be reused several times. ``vectors`` has the blocks of the new rows. ``new`` is the
    file of ``old`` opened once more and emptied, because FAISS cannot copy all kinds. Its lists are
    built in memory, or by ``on_disk``, which the caller joins.
    """
    inner, rows, first = inner_of(new), len(old_rows), 0
    lists, size = isinstance(inner, load_faiss().IndexIVF), int(inner.sa_code_size())
    if on_disk is None and not lists:
        # Filled in place: a copy would double the memory.
        inner.codes.resize(rows * size)
    new_rows = np.flatnonzero(old_rows < 0)
    codes = _flat(inner) if not lists else np.empty((0 if on_disk else rows, size), dtype=np.uint8)
    for some, numbers in (_entries if lists else _stretches)(inner_of(old), old_rows):
        if on_disk is not None:
            on_disk.add_codes(some, numbers)
        else:
            codes[numbers] = some
    for block in vectors:
        numbers = new_rows[first : first + len(block)]
        first += len(block)
        if on_disk is not None:
            on_disk.add_codes(inner.sa_encode(block), numbers)
        else:
            codes[numbers] = inner.sa_encode(block)
    if lists and on_disk is None:
        inner.add_sa_codes(codes, np.arange(rows))
    inner.ntotal = new.ntotal = rows


def _stretches(index: Any, old_rows: Rows) -> Iterator[tuple[Codes, Rows]]:
    """Yield codes (m, size) of an index without lists, and the new numbers of the rows."""
    codes = _flat(index)
    for start in range(0, len(old_rows), _ROWS):
        part = old_rows[start : start + _ROWS]
        kept = np.flatnonzero(part >= 0)
        yield codes[part[kept]], start + kept


def _entries(index: Any, old_rows: Rows) -> Iterator[tuple[Codes, Rows]]:
    """Yield the codes of ``sa_encode`` of each list (m, size), and the new numbers of the rows."""
    order = np.argsort(old_rows, kind="stable")[np.count_nonzero(old_rows < 0) :]
    kept, seen = old_rows[order], np.zeros(len(old_rows), dtype=np.bool_)
    read = 0
    for number in range(int(index.nlist)):
        ids = list_ids(index, number)
        first, last = (np.searchsorted(kept, ids, side=side) for side in ("left", "right"))
        times = last - first
        places = np.repeat(np.arange(len(ids)), times)
        if not len(places):
            continue
        within = np.arange(len(places)) - np.repeat(np.cumsum(times) - times, times)
        numbers = order[np.repeat(first, times) + within]
        seen[numbers] = True
        read += len(numbers)
        yield list_codes(index, number, places), numbers
    found = int(np.count_nonzero(seen))
    if not found == read == len(kept):
        raise ArtifactError(
            f"the published index is damaged: its lists hold {found} of {len(kept)} rows; restore "
            "it from a copy, or build again"
        )


def list_ids(index: Any, number: int) -> Rows:
    """Return the row numbers (n,) of an inverted list, not copied."""
    lists = index.invlists
    return view_of(lists.get_ids(number), int(lists.list_size(number)), 1, np.int64)[:, 0]


def list_codes(index: Any, number: int, places: Rows) -> Codes:
    """Return codes of an inverted list, as ``sa_encode`` has them: after the number of the list."""
    rows, width = int(index.invlists.list_size(number)), int(index.coarse_code_size())
    codes = view_of(index.invlists.get_codes(number), rows, int(index.code_size), np.uint8)
    prefix = np.frombuffer(number.to_bytes(width, "little"), dtype=np.uint8)
    return np.hstack([np.broadcast_to(prefix, (len(places), width)), codes[places]])


def _flat(index: Any) -> Codes:
    """Return the codes (n, size) of an index that keeps them one by one, not copied."""
    size = int(index.code_size)
    return view_of(index.codes.data(), int(index.codes.size()) // size, size, np.uint8)


def remove_rows(index: Any) -> None:
    """Remove all rows of an opened index; FAISS's own ``reset`` cannot if they are mapped.

    Centroids and codebooks stay.
    """
    faiss, inner = load_faiss(), inner_of(index)
    if isinstance(inner, faiss.IndexIVF):
        lists = faiss.ArrayInvertedLists(int(inner.nlist), int(inner.code_size))
        inner.replace_invlists(lists, True)
        lists.this.disown()
    else:
        inner.codes = faiss.MaybeOwnedVectorUInt8()
    inner.ntotal = index.ntotal = 0


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
    for start in range(0, rows if decodes else 0, _ROWS):
        some = inner.reconstruct_n(start, min(_ROWS, rows - start))
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
        for start in range(0, len(ids) if decodes else 0, _ROWS):
            places = np.arange(start, min(start + _ROWS, len(ids)))
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
