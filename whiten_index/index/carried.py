"""Codes of a published index carried over to a new one, byte for byte, with new rows among them.

What the index has learned (centroids, codebooks, transforms) and is set to stays as it is, so that
a row that did not change has the code it had. Codes are taken row by row where they lie so, and
list by list where there are lists. A graph is made again, over the same codes: FAISS takes no rows
out of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from whiten_index.errors import ConfigError
from whiten_index.index.carriers import Coder, Rows, Vectors, carrier_of, why_not_carried
from whiten_index.index.factory import inner_of
from whiten_index.index.library import load_faiss
from whiten_index.index.renumbered import OldLists, packer_of_lists
from whiten_index.index.spilled import SpilledLists
from whiten_index.index.streamed import StreamedCodes

_ROWS, _LEAST_ROWS, _BLOCK_BYTES = 8192, 256, 4 << 20


class CarriedCodes:
    """Old rows' codes and new rows' vectors on their way into a new index, once.

    Attributes:
        index: the new one behind its transforms: what is to take the rows, trained and empty.
        new_rows: (m,) numbers of the rows whose vectors are wanted, rising.
    """

    def __init__(self, old: Any, again: Any, old_rows: Rows) -> None:
        """Start with the published index.

        Args:
            old: with its transforms, which is only read; mapped, it takes no memory.
            again: the same file opened once more, which is emptied and becomes the new index; FAISS
                cannot copy all kinds.
            old_rows: (n,) the row of the old index whose code each row of the new one gets, −1
                where it is new.

        Raises:
            ConfigError: this kind is not carried over; see ``why_not_carried``.
            ValueError: there are no such rows, or one object was given for both.
        """
        if (why := why_not_carried(old)) is not None:
            raise ConfigError(f"{why}; fit and build the index again")
        if again is old:
            raise ValueError("the old index would be emptied; open it twice")
        rows = int(old.ntotal)
        if len(old_rows) and not -1 <= old_rows.min() <= old_rows.max() < rows:
            raise ValueError(f"rows {old_rows.min()} to {old_rows.max()} of an index of {rows}")
        self._old, self._old_rows = old, old_rows
        self.new_rows: Rows = np.flatnonzero(old_rows < 0)
        self.index = again
        _empty(again)

    def fill(self, vectors: Iterator[Vectors]) -> Any:
        """Return the new index with every row in it, in memory.

        Args:
            vectors: of ``new_rows``, as the transforms make them, in blocks of any length.

        Raises:
            ArtifactError: the lists of the old index are damaged.
            ValueError: there are fewer or more vectors.
        """
        carrier = carrier_of(inner_of(self._old), inner_of(self.index), self._old_rows)
        for start, old, some in self._blocks(vectors, _ROWS):
            carrier.add(start, old, some)
        carrier.finish()
        self.index.ntotal = len(self._old_rows)
        return self.index

    def stream(self, vectors: Iterator[Vectors], path: Path) -> Any:
        """Write the file of an index of flat codes, and return it mapped; arguments as of ``fill``.

        Raises:
            ValueError: there are fewer or more vectors.
            OSError: the disk is full or cannot be written.
        """
        old, inner = inner_of(self._old), inner_of(self.index)
        code = Coder(old, inner)
        rows = min(max(_BLOCK_BYTES // (4 * int(inner.d)), _LEAST_ROWS), _ROWS)
        with StreamedCodes(self.index, path) as writer:
            for _, old_rows, some in self._blocks(vectors, rows):
                writer.add_codes(code(old_rows, some))
        return writer.opened()

    def spill(self, vectors: Iterator[Vectors], folder: Path, *, most: int) -> Any:
        """Return an index whose lists are in a file of a folder, by row; more as of ``fill``.

        Args:
            vectors: of ``new_rows``.
            folder: that is there.
            most: bytes of new rows held in memory.

        Raises:
            ArtifactError: the lists of the old index are damaged.
            ValueError: there are fewer or more vectors.
            OSError: the disk is full or cannot be written.
        """
        old, inner, added = inner_of(self._old), inner_of(self.index), 0
        lists = OldLists(old, self._old_rows)
        with SpilledLists(inner, folder, most=most, numbers=self.new_rows) as writer:
            for some in vectors:
                added += len(some)
                if added > len(self.new_rows):
                    break
                writer.add(some)
            if added != len(self.new_rows):
                raise self._other_number(added)
            writer.join(lists)
        self.index.ntotal = inner.ntotal
        return self.index

    def _blocks(self, vectors: Iterator[Vectors], rows: int) -> Iterator[tuple[int, Rows, Vectors]]:
        """Yield so many rows at a time: the first's number, old rows (n,), and new vectors."""
        waiting = np.empty((0, int(inner_of(self.index).d)), dtype=np.float32)
        given = 0
        for start in range(0, len(self._old_rows), rows):
            old = self._old_rows[start : start + rows]
            wanted = int(np.count_nonzero(old < 0))
            held, there = [waiting], len(waiting)
            while there < wanted:
                more = next(vectors, None)
                if more is None:
                    raise self._other_number(given + there)
                held.append(more)
                there += len(more)
            waiting = np.concatenate(held)
            yield start, old, waiting[:wanted]
            given += wanted
            waiting = waiting[wanted:]
        given += len(waiting) + sum(len(more) for more in vectors)
        if given != len(self.new_rows):
            raise self._other_number(given)

    def _other_number(self, given: int) -> ValueError:
        return ValueError(f"{given} vectors or more are given for {len(self.new_rows)} new rows")


def _empty(index: Any) -> None:
    """Drop the rows of an opened index, which FAISS's own ``reset`` cannot where they are mapped.

    What it has learned stays.
    """
    faiss = load_faiss()
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        _empty(index.index)
    elif isinstance(index, faiss.IndexRefine):
        _empty(index.base_index)
        _empty(index.refine_index)
    elif isinstance(index, faiss.IndexHNSW):
        index.hnsw.neighbors = faiss.MaybeOwnedVectorInt32()
        index.hnsw.reset()
        _empty(index.storage)
    elif isinstance(index, faiss.IndexIVF) and packer_of_lists(index) is None:
        lists = faiss.ArrayInvertedLists(int(index.nlist), int(index.code_size))
        index.replace_invlists(lists, True)
        lists.this.disown()
    elif isinstance(index, faiss.IndexFlatCodes):
        index.codes = faiss.MaybeOwnedVectorUInt8()
    else:
        index.reset()
    index.ntotal = 0
