"""Inverted lists built on disk: rows sorted by list go to a file in parts, which are then joined.

FAISS's own ``merge_ondisk`` maps the file that it writes, so that a full disk ends the process.
"""

import os
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from whiten_index.index.factory import lists_of
from whiten_index.index.library import load_faiss

Codes = NDArray[np.uint8]

IVF_DATA = "index.ivfdata"
# One file for all parts: a file each would be more than a process may hold open.
PARTS = "parts"
_ALIGN = _ID = 8
# A row that waits has its list and number next to its code; sorting adds its place and a copy.
_SORTED = 4 + 8 + 8 + 8
_WRITTEN_ROWS = 4_096


def lists_on_disk(inner: Any) -> bool:
    """Return whether the lists of an index can be built on disk, from blocks of vectors."""
    faiss = load_faiss()
    if not isinstance(inner, faiss.IndexIVF) or isinstance(inner, faiss.IndexIVFPQR):
        return False
    # Fast-scan codes are interleaved in blocks, and Panorama's are kept by level, in lists of
    # kinds that inherit from the plain one.
    return type(faiss.downcast_InvertedLists(inner.invlists)) is faiss.ArrayInvertedLists


class OnDiskLists:
    """Fills an index with lists, whose rows go to disk each time they reach a size.

    FAISS's own lists are not used on the way: each grows by doubling, and frees its memory in
    pieces.
    """

    def __init__(self, inner: Any, folder: Path, *, most: int) -> None:
        """Start with a trained index; ``most`` bytes of rows are held in memory.

        The data of the lists, and meanwhile the file of parts, go into ``folder``.
        """
        self.inner, self.folder = inner, folder
        lists = lists_of(inner)
        self._nlist, self._size = int(lists.nlist), int(lists.code_size)
        self._prefix = int(lists.coarse_code_size())
        rows = max(most // (self._size + _SORTED), 1)
        self._codes = np.empty((rows, self._size), dtype=np.uint8)
        self._lists = np.zeros(rows, dtype="<i4")
        self._numbers = np.empty(rows, dtype=np.int64)
        self._parts: list[tuple[int, int]] = []  # offset and rows of each
        self._added = self._held = 0

    def add_codes(self, coded: Codes, numbers: NDArray[np.int64] | None = None) -> None:
        """Add codes of ``sa_encode`` (m, bytes) under row numbers (m,), by default the next."""
        if numbers is None:
            numbers = np.arange(self._added, self._added + len(coded))
        while len(coded):
            room = len(self._codes) - self._held
            some, coded = coded[:room], coded[room:]
            to = slice(self._held, self._held + len(some))
            # Codes begin with their list, little-endian, in as many bytes as the number needs.
            self._lists.view(np.uint8).reshape(-1, 4)[to, : self._prefix] = some[:, : self._prefix]
            self._codes[to] = some[:, self._prefix :]
            self._numbers[to], numbers = numbers[:room], numbers[room:]
            self._held += len(some)
            self._added += len(some)
            if self._held == len(self._codes):
                self._spill()

    def join(self, *, keep: bool = True) -> None:
        """Join the parts, each list by row number, and give the index the lists.

        These stay in their file, or without ``keep`` are read into memory and the file is removed.
        """
        if self._held:
            self._spill()
        # What held the rows is free from here on.
        self._codes = self._codes[:0].copy()
        self._lists, self._numbers = self._lists[:0].copy(), self._numbers[:0].copy()
        self._replace_lists(self.folder / IVF_DATA)
        self.inner.ntotal = self._added
        if not keep:
            _read_into_memory(self.inner)
            (self.folder / IVF_DATA).unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        (self.folder / PARTS).unlink(missing_ok=True)

    def _spill(self) -> None:
        lists = self._lists[: self._held]
        order = np.argsort(lists, kind="stable")
        counts = np.bincount(lists, minlength=self._nlist)
        starts = np.concatenate([[0], np.cumsum(counts)])
        with (self.folder / PARTS).open("ab") as file:
            self._parts.append((file.tell(), self._held))
            file.write(starts.astype("<i8").tobytes())
            for values in (self._codes, self._numbers.astype("<i8", copy=False)):
                for first in range(0, len(order), _WRITTEN_ROWS):
                    file.write(values[order[first : first + _WRITTEN_ROWS]].tobytes())
        self._held = 0

    def _replace_lists(self, path: Path) -> None:
        faiss = load_faiss()
        joined, end = self._join(path, self._mapped())
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

    def _mapped(self) -> list[tuple[NDArray[np.int64], Codes, Codes]]:
        """Return list starts, codes and row numbers of every part; only what is touched is read."""
        if not self._parts:
            return []
        spilled = np.asarray(np.memmap(self.folder / PARTS, np.uint8, "r"))
        mapped = []
        for offset, rows in self._parts:
            at = offset + (self._nlist + 1) * _ID
            starts = spilled[offset:at].view("<i8")
            codes, numbers = np.split(
                spilled[at : at + rows * (self._size + _ID)], [rows * self._size]
            )
            # Row numbers are bytes (n, 8), since int64 would be aligned.
            mapped.append((starts, codes.reshape(rows, -1), numbers.reshape(rows, _ID)))
        return mapped

    def _join(
        self, path: Path, parts: list[tuple[NDArray[np.int64], Codes, Codes]]
    ) -> tuple[list[tuple[int, int]], int]:
        """Write each list's codes, then its ids; return its start and rows, and the end of all."""
        joined = []
        with path.open("wb") as file:
            for number in range(self._nlist):
                start = file.tell()
                own = [slice(*bounds[number : number + 2].tolist()) for bounds, _, _ in parts]
                pieces = [
                    (codes[rows], numbers[rows])
                    for rows, (_, codes, numbers) in zip(own, parts, strict=True)
                ]
                joined.append((start, self._write_list(file, pieces)))
            # An empty file cannot be mapped.
            file.write(bytes(_ALIGN))
            end = file.tell()
            file.flush()
            os.fsync(file.fileno())
        return joined, end

    def _write_list(self, file: BinaryIO, pieces: list[tuple[Codes, Codes]]) -> int:
        """Write a list by row number; return its rows."""
        numbers = np.frombuffer(b"".join(some.tobytes() for _, some in pieces), dtype="<i8")
        spare = _room(len(numbers)) - len(numbers)
        if (numbers[1:] > numbers[:-1]).all():
            for codes, _ in pieces:
                file.write(codes.data)
        else:
            order, codes = np.argsort(numbers), np.concatenate([codes for codes, _ in pieces])
            numbers = numbers[order]
            for first in range(0, len(order), _WRITTEN_ROWS):
                file.write(codes[order[first : first + _WRITTEN_ROWS]].data)
        file.write(bytes(spare * self._size))
        file.write(numbers.tobytes())
        file.write(bytes(spare * _ID))
        return len(numbers)


def _room(rows: int) -> int:
    """Return a list's capacity: with ids behind the codes, both start on a multiple of 8."""
    return -(-rows // _ALIGN) * _ALIGN


def _read_into_memory(inner: Any) -> None:
    """Replace lists on disk by lists in memory without spare room."""
    faiss = load_faiss()
    lists = lists_of(inner)
    nlist, size, old = int(lists.nlist), int(lists.code_size), lists.invlists
    held = faiss.ArrayInvertedLists(nlist, size)
    for number in range(nlist):
        if rows := int(old.list_size(number)):
            held.add_entries(number, rows, old.get_ids(number), old.get_codes(number))
    lists.replace_invlists(held, True)
    held.this.disown()
