"""Flat codes made on disk: written as they come, between the head and the end of FAISS's file."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from whiten_index.errors import ArtifactError
from whiten_index.index.library import load_faiss

# Rows of the two specimens whose files are compared.
_FEW, _MORE = 3, 5


class StreamedCodes:
    """Writes the codes of a flat index into its file as they come.

    The head and the end of the file are FAISS's own, for a few rows; in the head the numbers that
    count rows are set at the end.

    Attributes:
        path: of the file.
    """

    def __init__(self, index: Any, path: Path) -> None:
        """Take the trained index with its transforms, empty, and open the file."""
        self._inner = load_faiss().downcast_index(index.index)
        self._head, self._end, self._counts = _head_and_end(index, self._inner)
        self._index, self.path, self._rows = index, path, 0
        self._file: BinaryIO = path.open("wb")
        self._file.write(self._head)
        self._last: tuple[NDArray[np.uint8], int] | None = None

    def add(self, vectors: NDArray[np.float32]) -> None:
        """Write the codes of vectors (m, k)."""
        self.add_codes(self._inner.sa_encode(vectors))

    def add_codes(self, codes: NDArray[np.uint8]) -> None:
        """Write codes (m, size) as they are."""
        if len(codes):
            self._file.write(codes.tobytes())
            self._rows += len(codes)
            self._last = codes[-1:].copy(), self._rows - 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        with self._file as file:
            if error is not None:
                return
            file.write(self._end)
            for place, factor in self._counts:
                file.seek(place)
                file.write((factor * self._rows).to_bytes(8, "little"))
            file.flush()
            os.fsync(file.fileno())

    def opened(self) -> Any:
        """Return the index read from the file once that is closed, its codes mapped.

        Raises:
            ArtifactError: it does not hold what was written.
        """
        faiss = load_faiss()
        opened = faiss.read_index(str(self.path), faiss.IO_FLAG_MMAP_IFC)
        inner = faiss.downcast_index(opened.index)
        right = opened.ntotal == inner.ntotal == self._rows
        if right and self._last is not None:
            codes, row = self._last
            expected = self._inner.sa_decode(codes)[0]
            right = bool(np.allclose(inner.reconstruct(row), expected, rtol=1e-4, atol=1e-5))
        if not right:
            raise _unknown_layout(type(inner).__name__)
        return opened


def _head_and_end(index: Any, inner: Any) -> tuple[bytes, bytes, list[tuple[int, int]]]:
    """Return what stands before and after the codes in a file, and which numbers count rows.

    Each of these is its place in the head and how much a row counts. All are found by comparing
    FAISS's own files of a few rows and of some more, so that no layout is assumed.
    """
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((_MORE, int(inner.d))).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    codes = inner.sa_encode(vectors)
    few, more = (_file_of(index, inner, vectors[:rows]) for rows in (_FEW, _MORE))
    start = few.find(codes[:_FEW].tobytes())
    size = codes.shape[1]
    head, end = bytearray(few[:start]), few[start + _FEW * size :]
    if start < 0 or more[start:] != codes.tobytes() + end:
        raise _unknown_layout(type(inner).__name__)
    counts, place = [], 0
    while place < start:
        if few[place] == more[place]:
            place += 1
            continue
        found = _count_at(few, more, place, factors=(size, max(size // 4, 1), 1))
        if found is None:
            raise _unknown_layout(type(inner).__name__)
        counts.append(found)
        place = found[0] + 8
    return bytes(head), end, counts


def _count_at(
    few: bytes, more: bytes, place: int, *, factors: tuple[int, ...]
) -> tuple[int, int] | None:
    """Return where the number starts that differs at ``place``, and what a row counts in it.

    Its first bytes are alike where a row counts a multiple of 256. Should a byte 0 before it be
    taken for one of its own, it is a row's 256th part that is written one byte later: the same.
    """
    for first in range(max(place - 7, 0), place + 1):
        numbers = [int.from_bytes(file[first : first + 8], "little") for file in (few, more)]
        for factor in factors:
            if numbers == [factor * _FEW, factor * _MORE]:
                return first, factor
    return None


def _file_of(index: Any, inner: Any, vectors: NDArray[np.float32]) -> bytes:
    """Return the file of an index with a few vectors in it, which are taken out again."""
    faiss = load_faiss()
    inner.add(vectors)
    index.ntotal = inner.ntotal
    data: bytes = faiss.serialize_index(index).tobytes()
    inner.reset()
    index.ntotal = 0
    return data


def _unknown_layout(kind: str) -> ArtifactError:
    return ArtifactError(
        f"this release of FAISS keeps {kind} in a layout that is not known here, so that it cannot "
        "be made on disk; leave out --memory-budget, or use another release"
    )
