"""The inverted lists of a published index under the row numbers that its rows have in a new one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.errors import ArtifactError
from whiten_index.index.library import load_faiss
from whiten_index.index.packed import Codes, Packer, view_of


@dataclass(frozen=True, eq=False)
class Entries:
    """What one old list gives to a new one.

    Attributes:
        codes: (n, size) of the whole old list, not copied where they lie one by one.
        places: (m,) of the codes that are carried, by their new row number.
        numbers: (m,) these numbers, rising.
    """

    codes: Codes
    places: NDArray[np.int64]
    numbers: NDArray[np.int64]


class OldLists:
    """Lists of an index, read one at a time, of which some rows are carried to a new index.

    An old row may be carried more than once.

    Attributes:
        rows: that are carried.
    """

    def __init__(self, index: Any, old_rows: NDArray[np.int64]) -> None:
        """Take a filled index with lists, and the old row (n,) of each new one, −1 for none."""
        # FAISS keeps the lists as long as it keeps the index.
        self._index = index
        self._lists = load_faiss().downcast_InvertedLists(index.invlists)
        self._size, self._packer = int(index.code_size), packer_of_lists(index)
        self._rows = int(index.ntotal)
        order = np.argsort(old_rows, kind="stable")
        kept = order[np.count_nonzero(old_rows < 0) :]
        times = np.bincount(old_rows[kept], minlength=self._rows)
        # Four bytes a row each, where there are no more rows than these can tell.
        narrow = np.int32 if len(old_rows) < 1 << 31 else np.int64
        self._starts: NDArray[np.signedinteger] = np.concatenate([[0], np.cumsum(times)]).astype(
            narrow
        )
        self._numbers: NDArray[np.signedinteger] = kept.astype(narrow)
        self.rows = len(kept)
        self._seen, self._read = np.zeros(self._rows, dtype=np.bool_), 0

    def entries(self, number: int) -> Entries:
        """Return what a list holds of the rows that are carried.

        Raises:
            ArtifactError: it holds rows that there are not.
        """
        rows = int(self._lists.list_size(number))
        ids = np.empty(0, dtype=np.int64)
        if rows:
            ids = load_faiss().rev_swig_ptr(self._lists.get_ids(number), rows)
            if ids.min() < 0 or ids.max() >= self._rows:
                raise _damaged(f"list {number} holds rows beyond {self._rows}")
        first: NDArray[np.int64] = self._starts[ids].astype(np.int64)
        times: NDArray[np.int64] = self._starts[ids + 1].astype(np.int64) - first
        places = np.repeat(np.arange(rows), times)
        within = np.arange(len(places)) - np.repeat(np.cumsum(times) - times, times)
        numbers = self._numbers[np.repeat(first, times) + within].astype(np.int64)
        order = np.argsort(numbers)
        self._seen[ids] = True
        self._read += rows
        return Entries(self._codes(number, rows), places[order], numbers[order])

    def require_all(self) -> None:
        """Check, when every list was read once, that each row was in one of them, once.

        Raises:
            ArtifactError: it was not.
        """
        seen = int(np.count_nonzero(self._seen))
        if not seen == self._read == self._rows:
            raise _damaged(f"its lists hold {self._read} rows, {seen} of them the first time")

    def _codes(self, number: int, rows: int) -> Codes:
        pointer = self._lists.get_codes(number)
        if self._packer is None:
            return view_of(pointer, rows, self._size)
        return self._packer.unpacked(self._packer.blocks_of(pointer, rows))[:rows]


def packer_of_lists(index: Any) -> Packer | None:
    """Return what takes codes out of lists in blocks, None where they lie one by one."""
    faiss = load_faiss()
    lists = faiss.downcast_InvertedLists(index.invlists)
    return Packer.of(index) if isinstance(lists, faiss.BlockInvertedLists) else None


def _damaged(what: str) -> ArtifactError:
    return ArtifactError(
        f"the published index is damaged: {what}; restore it from a copy, or build again"
    )
