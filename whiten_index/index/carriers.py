"""How an index, or one inside another, takes old rows' codes and new rows' vectors, by its kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from whiten_index.index.library import load_faiss
from whiten_index.index.packed import KNOWN_ROWS, Codes, Packer, view_of
from whiten_index.index.renumbered import Entries, OldLists, packer_of_lists

Rows = NDArray[np.int64]
Vectors = NDArray[np.float32]
# Kinds, and not what is derived from them, which may keep more than codes.
_FLAT = ("IndexFlat", "IndexFlatIP", "IndexScalarQuantizer", "IndexPQ", "IndexRaBitQ", "IndexEDEN")
_FAST = ("IndexPQFastScan", "IndexRaBitQFastScan")
_GRAPHS = ("IndexHNSW", "IndexHNSWFlat", "IndexHNSWSQ")
_LISTS = (
    "IndexIVFFlat", "IndexIVFScalarQuantizer", "IndexIVFPQ", "IndexIVFRaBitQ", "IndexIVFEDEN",
    "IndexIVFPQFastScan", "IndexIVFRaBitQFastScan",
)  # fmt: skip
_REASONS = {
    "IndexNSG": "FAISS makes this graph of all its vectors in one call",
    "IndexIVFFlatDedup": "rows that are equal to others are kept outside its lists",
    "IndexIVFFlatPanorama": "its lists keep vectors in pieces, and give none back whole",
}


def why_not_carried(index: Any) -> str | None:
    """Return why the codes of an index cannot be carried over, None where they can.

    Args:
        index: filled or not, with or without transforms.
    """
    faiss = load_faiss()
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        return why_not_carried(index.index)
    if isinstance(index, faiss.IndexRefine):
        return why_not_carried(index.base_index) or why_not_carried(index.refine_index)
    kind = type(index).__name__
    if kind in _GRAPHS:
        plain = _is_flat(faiss.downcast_index(index.storage))
        return None if plain else _reason(kind, "its graph is not over plain codes")
    if _is_fast(index) or _is_fast_list(index):
        rows = int(index.bbs)
        why = f"FAISS gives codes in blocks of {rows} rows back wrongly"
        return None if rows == KNOWN_ROWS else _reason(kind, f"{why}; blocks of {KNOWN_ROWS} work")
    if _is_flat(index) or _is_list(index):
        return None
    reasons = (why for name, why in _REASONS.items() if isinstance(index, getattr(faiss, name)))
    return _reason(kind, next(reasons, "how it keeps them is not known here"))


def _reason(kind: str, why: str) -> str:
    return f"codes of an {kind} are not carried over to another: {why}"


def _is_flat(index: Any) -> bool:
    return type(index).__name__ in _FLAT or isinstance(index, load_faiss().IndexAdditiveQuantizer)


def _is_fast(index: Any) -> bool:
    additive = load_faiss().IndexAdditiveQuantizerFastScan
    return type(index).__name__ in _FAST or isinstance(index, additive)


def _is_list(index: Any) -> bool:
    faiss = load_faiss()
    additive = (faiss.IndexIVFAdditiveQuantizer, faiss.IndexIVFAdditiveQuantizerFastScan)
    return type(index).__name__ in _LISTS or isinstance(index, additive)


def _is_fast_list(index: Any) -> bool:
    return _is_list(index) and isinstance(index, load_faiss().IndexIVFFastScan)


class Carrier(Protocol):
    """An index, or one inside another, that takes rows in the order of their numbers."""

    def add(self, start: int, old: Rows, vectors: Vectors) -> None:
        """Take rows from number ``start`` on: old ones (n,), −1 where new, of which vectors are."""

    def finish(self) -> None:
        """Do what is done when all rows are there."""


def carrier_of(old: Any, new: Any, old_rows: Rows) -> Carrier:
    """Return what fills a new index, of whatever kind, from an old one."""
    faiss = load_faiss()
    old, new = faiss.downcast_index(old), faiss.downcast_index(new)
    if isinstance(new, faiss.IndexRefine):
        return _Refined(old, new, old_rows)
    if isinstance(new, faiss.IndexIVF):
        return _Lists(old, new, old_rows)
    if isinstance(new, faiss.IndexHNSW):
        return _Graph(old, new)
    return _Blocks(old, new, old_rows) if _is_fast(new) else _Flat(old, new, old_rows)


class Coder:
    """Gives the codes of rows, by their old row or vector, of an index without lists."""

    def __init__(self, old: Any, new: Any) -> None:
        self._new, self._read = new, _reader(old)

    def __call__(self, old: Rows, vectors: Vectors) -> Codes:
        """Return the codes (n, size) of rows: old ones (n,), −1 where vectors (m, k) are new."""
        kept = old >= 0
        codes = np.empty((len(old), int(self._new.sa_code_size())), dtype=np.uint8)
        codes[kept] = self._read(old[kept])
        if len(vectors):
            codes[~kept] = self._new.sa_encode(vectors)
        return codes


def _reader(old: Any) -> Callable[[Rows], Codes]:
    """Return what reads the codes (n, size) of rows (n,), of which nothing else is touched."""
    if not _is_fast(old):
        flat = _flat_codes(old)

        def taken(rows: Rows) -> Codes:
            codes: Codes = flat[rows]
            return codes

        return taken
    packer = Packer.of(old)
    blocks = packer.blocks_of(old.codes.get(), int(old.ntotal))

    def read(rows: Rows) -> Codes:
        touched, within = np.unique(rows // packer.rows, return_inverse=True)
        codes: Codes = packer.unpacked(blocks[touched])[within * packer.rows + rows % packer.rows]
        return codes

    return read


def _flat_codes(index: Any) -> Codes:
    """Return the codes (n, size) of an index that keeps them one by one, not copied."""
    size = int(index.code_size)
    return view_of(index.codes.data(), int(index.codes.size()) // size, size)


class _Flat:
    """Codes that lie one by one."""

    def __init__(self, old: Any, new: Any, old_rows: Rows) -> None:
        self._new, self._code = new, Coder(old, new)
        # All at once: appended to, they would grow by doubling.
        new.codes.resize(len(old_rows) * int(new.code_size))
        self._codes = _flat_codes(new)

    def add(self, start: int, old: Rows, vectors: Vectors) -> None:
        self._codes[start : start + len(old)] = self._code(old, vectors)

    def finish(self) -> None:
        self._new.ntotal = len(self._codes)


class _Blocks:
    """Codes in blocks of rows."""

    def __init__(self, old: Any, new: Any, old_rows: Rows) -> None:
        self._new, self._code, self._rows = new, Coder(old, new), len(old_rows)
        self._packer = packer = Packer.of(new)
        blocks = -(-len(old_rows) // packer.rows)
        new.codes.resize(blocks * packer.block_bytes)
        self._blocks = packer.blocks_of(new.codes.get(), len(old_rows))

    def add(self, start: int, old: Rows, vectors: Vectors) -> None:
        # Blocks of rows are whole blocks of codes, but for the last.
        assert start % self._packer.rows == 0
        packed = self._packer.packed(self._code(old, vectors))
        first = start // self._packer.rows
        self._blocks[first : first + len(packed)] = packed

    def finish(self) -> None:
        self._new.ntotal = self._rows
        self._new.ntotal2 = len(self._blocks) * self._packer.rows


class _Graph:
    """A graph over flat codes: made again, from what the codes say."""

    def __init__(self, old: Any, new: Any) -> None:
        storages = [load_faiss().downcast_index(index.storage) for index in (old, new)]
        self._new, self._storage, self._code = new, storages[1], Coder(*storages)

    def add(self, start: int, old: Rows, vectors: Vectors) -> None:
        codes = self._code(old, vectors)
        rows = self._storage.sa_decode(codes)
        rows[old < 0] = vectors
        self._new.add(rows)
        # Coded again from what they say, they need not be the same.
        _flat_codes(self._storage)[start : start + len(old)] = codes

    def finish(self) -> None:
        pass


class _Lists:
    """Lists: new rows are added by FAISS, then old ones put among them, list by list."""

    def __init__(self, old: Any, new: Any, old_rows: Rows) -> None:
        self._old, self._new, self._rows = OldLists(old, old_rows), new, len(old_rows)

    def add(self, start: int, old: Rows, vectors: Vectors) -> None:
        if len(vectors):
            self._new.add_with_ids(vectors, start + np.flatnonzero(old < 0))

    def finish(self) -> None:
        for number in range(int(self._new.nlist)):
            entries = self._old.entries(number)
            if len(entries.numbers):
                self._merge(number, entries)
        self._old.require_all()
        self._new.ntotal = self._rows

    def _merge(self, number: int, old: Entries) -> None:
        """Put rows of the old list among those that are new in a list, all by their number."""
        faiss = load_faiss()
        lists, packer = self._new.invlists, packer_of_lists(self._new)
        rows, size = int(lists.list_size(number)), int(self._new.code_size)
        pointer = lists.get_codes(number)
        numbers, codes = old.numbers, old.codes[old.places]
        if rows:
            ids = faiss.rev_swig_ptr(lists.get_ids(number), rows)
            own = (
                view_of(pointer, rows, size)
                if packer is None
                else packer.unpacked(packer.blocks_of(pointer, rows))[:rows]
            )
            order = np.argsort(numbers := np.concatenate([ids, numbers]))
            numbers, codes = numbers[order], np.concatenate([own, codes])[order]
        # A list in blocks takes them packed, and only from its start on.
        lists.resize(number, 0)
        packed = codes if packer is None else packer.packed(codes)
        lists.add_entries(number, len(numbers), faiss.swig_ptr(numbers), faiss.swig_ptr(packed))


class _Refined:
    """Candidates of one index that are scored again by the codes of another."""

    def __init__(self, old: Any, new: Any, old_rows: Rows) -> None:
        self._new, self._rows = new, len(old_rows)
        self._parts = (
            carrier_of(old.base_index, new.base_index, old_rows),
            carrier_of(old.refine_index, new.refine_index, old_rows),
        )

    def add(self, start: int, old: Rows, vectors: Vectors) -> None:
        for part in self._parts:
            part.add(start, old, vectors)

    def finish(self) -> None:
        for part in self._parts:
            part.finish()
        self._new.ntotal = self._rows
