"""Inverted lists made on disk: rows sorted by list go to files, which are then joined."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from whiten_index.index.factory import lists_of
from whiten_index.index.library import load_faiss
from whiten_index.index.on_disk import IVF_DATA
from whiten_index.index.renumbered import Entries, OldLists

Bytes = NDArray[np.uint8]

# One file for all parts: a file each would be more than a process may hold open.
PARTS = "parts"
_ALIGN = _ID = 8
# A row that waits has its list beside its code; sorting adds its place, and room to sort in.
_SORTED = 4 + 8 + 8
_WRITTEN_ROWS = 4_096


@dataclass(frozen=True)
class _Part:
    """Rows sorted by list in the file of parts, which holds three arrays for them.

    These are where each list starts among the rows (nlist + 1,), codes (n, size), and row numbers.

    Attributes:
        offset: of the part in the file.
        rows: n.
    """

    offset: int
    rows: int

    def arrays(
        self, spilled: Bytes, *, nlist: int, size: int
    ) -> tuple[NDArray[np.int64], Bytes, Bytes]:
        """Return the three, not copied; row numbers as bytes (n, 8): int64 would be aligned."""
        codes = self.offset + (nlist + 1) * _ID
        numbers = codes + self.rows * size
        end = numbers + self.rows * _ID
        return (
            spilled[self.offset : codes].view("<i8"),
            spilled[codes:numbers].reshape(self.rows, size),
            spilled[numbers:end].reshape(self.rows, _ID),
        )


class SpilledLists:
    """Makes an index with lists whose rows go to disk each time they reach a size.

    FAISS's own lists are not used on the way: each grows by doubling, and frees its memory in
    pieces. Codes are kept in one array, sorted by list, and written.

    Attributes:
        inner: the trained index, empty.
        folder: where the data of the lists goes; parts are kept in a file beside it meanwhile.
    """

    def __init__(
        self, inner: Any, folder: Path, *, most: int, numbers: NDArray[np.int64] | None = None
    ) -> None:
        """Start.

        Args:
            inner: the trained index.
            folder: that is there.
            most: bytes of rows held in memory.
            numbers: (n,) rising row numbers of what will be added, 0 … n−1 where they are left out.
        """
        self.inner, self.folder, self._numbers = inner, folder, numbers
        lists = lists_of(inner)
        self._nlist, self._size = int(lists.nlist), int(lists.code_size)
        self._prefix = int(lists.coarse_code_size())
        rows = max(most // (self._size + _SORTED), 1)
        self._codes = np.empty((rows, self._size), dtype=np.uint8)
        self._lists = np.empty(rows, dtype=np.int32)
        self._parts: list[_Part] = []
        self._rows = self._held = 0

    def add(self, vectors: NDArray[np.float32]) -> None:
        """Add vectors (m, k) under the next row numbers; spill rows when there are enough.

        Codes of rows that another index has in lists are given to ``join``.
        """
        self.add_codes(self.inner.sa_encode(vectors))

    def add_codes(self, coded: Bytes) -> None:
        """Add rows as ``sa_encode`` codes them (m, bytes), the number of the list first."""
        while len(coded):
            room = len(self._codes) - self._held
            some, coded = coded[:room], coded[room:]
            to = slice(self._held, self._held + len(some))
            # Little-endian, in as many bytes as the number of lists needs.
            number = np.zeros((len(some), 4), dtype=np.uint8)
            number[:, : self._prefix] = some[:, : self._prefix]
            self._lists[to] = number.view("<i4")[:, 0]
            self._codes[to] = some[:, self._prefix :]
            self._held += len(some)
            if self._held == len(self._codes):
                self._spill()

    def join(self, old: OldLists | None = None) -> None:
        """Join the parts, each list in one piece by row, and give the index the lists on disk.

        Args:
            old: lists of another index of the same centroids, whose codes are copied.

        Raises:
            ArtifactError: these are damaged.
        """
        if self._held:
            self._spill()
        # What held the rows is free from here on.
        self._codes, self._lists = self._codes[:0].copy(), self._lists[:0].copy()
        self._replace_lists(self.folder / IVF_DATA, old)
        self.inner.ntotal = self._rows + (0 if old is None else old.rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        (self.folder / PARTS).unlink(missing_ok=True)

    def _spill(self) -> None:
        lists = self._lists[: self._held]
        order = np.argsort(lists, kind="stable")
        counts = np.bincount(lists, minlength=self._nlist)
        starts = np.concatenate([[0], np.cumsum(counts)])
        with (self.folder / PARTS).open("ab") as file:
            self._parts.append(_Part(file.tell(), self._held))
            file.write(starts.astype("<i8").tobytes())
            for first in range(0, len(order), _WRITTEN_ROWS):
                file.write(self._codes[order[first : first + _WRITTEN_ROWS]].tobytes())
            for first in range(0, len(order), _WRITTEN_ROWS):
                places = order[first : first + _WRITTEN_ROWS] + self._rows
                numbers = places if self._numbers is None else self._numbers[places]
                file.write(numbers.astype("<i8").tobytes())
        self._rows += self._held
        self._held = 0

    def _replace_lists(self, path: Path, old: OldLists | None) -> None:
        faiss = load_faiss()
        joined, end = self._join(path, self._mapped(), old)
        lists = faiss.OnDiskInvertedLists()
        lists.nlist, lists.code_size, lists.filename = self._nlist, self._size, str(path)
        for start, length in joined:
            one = faiss.OnDiskOneList()
            one.size, one.capacity, one.offset = length, _room(length), start
            lists.lists.push_back(one)
        lists.totsize, lists.read_only = end, True
        lists.do_mmap()
        lists_of(self.inner).replace_invlists(lists, True)
        lists.this.disown()

    def _mapped(self) -> list[tuple[NDArray[np.int64], Bytes, Bytes]]:
        """Return the arrays of every part, of which only what is touched is read."""
        if not self._parts:
            return []
        spilled = np.asarray(np.memmap(self.folder / PARTS, np.uint8, "r"))
        return [part.arrays(spilled, nlist=self._nlist, size=self._size) for part in self._parts]

    def _join(
        self,
        path: Path,
        parts: list[tuple[NDArray[np.int64], Bytes, Bytes]],
        old: OldLists | None,
    ) -> tuple[list[tuple[int, int]], int]:
        """Write each list's codes, then its ids; return where each starts, its rows, and the end.

        Written here and not by FAISS, which maps the file to write it: a full disk would then kill
        the process.
        """
        joined = []
        with path.open("wb") as file:
            for number in range(self._nlist):
                start = file.tell()
                own = [slice(*bounds[number : number + 2].tolist()) for bounds, _, _ in parts]
                pieces = [
                    (codes[rows], numbers[rows])
                    for rows, (_, codes, numbers) in zip(own, parts, strict=True)
                ]
                length = sum(len(codes) for codes, _ in pieces)
                if old is None:
                    self._write_list(file, pieces, length)
                else:
                    length = self._write_merged(file, pieces, old.entries(number))
                joined.append((start, length))
            if old is not None:
                old.require_all()
            # An empty file cannot be mapped.
            file.write(bytes(_ALIGN))
            end = file.tell()
            file.flush()
            os.fsync(file.fileno())
        return joined, end

    def _write_list(self, file: BinaryIO, pieces: list[tuple[Bytes, Bytes]], length: int) -> None:
        """Write a list of which every piece goes on where the one before it ends."""
        spare = _room(length) - length
        for codes, _ in pieces:
            file.write(codes.data)
        file.write(bytes(spare * self._size))
        for _, numbers in pieces:
            file.write(numbers.data)
        file.write(bytes(spare * _ID))

    def _write_merged(self, file: BinaryIO, pieces: list[tuple[Bytes, Bytes]], old: Entries) -> int:
        """Write a list with the rows of an old one among its own; return how many these are."""
        own = [piece[0] for piece in pieces]
        new = b"".join(numbers.tobytes() for _, numbers in pieces)
        numbers = np.concatenate([np.frombuffer(new, dtype="<i8"), old.numbers])
        places = np.concatenate([np.arange(len(new) // _ID), old.places + len(new) // _ID])
        order = np.argsort(numbers)
        spare = _room(len(order)) - len(order)
        for first in range(0, len(order), _WRITTEN_ROWS):
            some = places[order[first : first + _WRITTEN_ROWS]]
            file.write(_taken([*own, old.codes], some).data)
        file.write(bytes(spare * self._size))
        file.write(numbers[order].astype("<i8").tobytes())
        file.write(bytes(spare * _ID))
        return len(order)


def _taken(pieces: list[Bytes], places: NDArray[np.int64]) -> Bytes:
    """Return rows (n, size) of pieces that are counted through, with no other row copied."""
    starts = np.cumsum([0, *(len(piece) for piece in pieces)])
    within = np.searchsorted(starts, places, side="right") - 1
    taken = np.empty((len(places), pieces[0].shape[1]), dtype=np.uint8)
    for number in np.unique(within):
        here = within == number
        taken[here] = pieces[number][places[here] - starts[number]]
    return taken


def _room(rows: int) -> int:
    """Return a list's capacity: with ids behind the codes, both start on a multiple of 8."""
    return -(-rows // _ALIGN) * _ALIGN


def gather(inner: Any) -> None:
    """Take lists on disk into memory, each of the room it needs and no more."""
    faiss = load_faiss()
    lists = lists_of(inner)
    nlist, size, old = int(lists.nlist), int(lists.code_size), lists.invlists
    held = faiss.ArrayInvertedLists(nlist, size)
    for number in range(nlist):
        if rows := int(old.list_size(number)):
            held.add_entries(number, rows, old.get_ids(number), old.get_codes(number))
    lists.replace_invlists(held, True)
    held.this.disown()
