"""Embeddings of a corpus by row number, and rows drawn at random from a few of its parts."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from whiten_index.artifacts.prefetch import blocks
from whiten_index.corpus.batches import ID
from whiten_index.store.records import CorpusPart, CorpusRecord

if TYPE_CHECKING:
    from whiten_index.store.embedding_store import EmbeddingStore
    from whiten_index.store.segments import EmbeddingRows

_PARTS, _ENOUGH_ROWS, _BLOCK_ROWS = 8, 8_192, 8_192
# Parts kept mapped: each is a file that the process holds open.
_MAPPED = 1 << 8


def drawn_parts(record: CorpusRecord, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return the positions of parts of a corpus, drawn by their rows, in its order.

    They are eight, or more where these hold fewer than 8,192 rows together.
    """
    rows = np.array([part.rows for part in record.parts], dtype=np.float64)
    drawn = rng.choice(len(rows), np.count_nonzero(rows), replace=False, p=rows / rows.sum())
    enough = int(np.searchsorted(np.cumsum(rows[drawn]), _ENOUGH_ROWS)) + 1
    return np.sort(drawn[: max(_PARTS, enough)])


def drawn_rows(record: CorpusRecord, size: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return up to ``size`` row numbers, without repeats, from ``drawn_parts`` of a corpus."""
    starts = row_starts(record)
    parts = drawn_parts(record, rng)
    rows = np.concatenate([np.arange(starts[part], starts[part + 1]) for part in parts])
    return rng.permutation(rows)[:size]


def row_starts(record: CorpusRecord) -> NDArray[np.int64]:
    """Return the row number that each part starts with, and after them the number of rows."""
    return np.cumsum([0, *(part.rows for part in record.parts)], dtype=np.int64)


class CorpusEmbeddings:
    """The raw embeddings of a corpus by row number.

    Parts that were read by number stay mapped: they can be read even when gc has removed them.
    """

    def __init__(
        self, store: "EmbeddingStore", record: CorpusRecord, subset: NDArray[np.int64] | None = None
    ) -> None:
        self._store, self._record, self._subset = store, record, subset
        self.rows: int = record.rows if subset is None else len(subset)
        self._starts = row_starts(record)
        self._mapped: dict[int, EmbeddingRows] = {}

    def blocks(self, rows: int = _BLOCK_ROWS) -> Iterator[NDArray[np.floating]]:
        """Yield all embeddings in order, at most so many rows at a time, and hold no more."""
        if self._subset is not None:
            yield from map(self.at, blocks(np.arange(self.rows), rows))
            return
        for part in self._record.parts:
            if part.rows:
                yield from map(np.array, blocks(self._store.embeddings(part), rows))

    def split(self, rows: int) -> "Iterator[tuple[int, CorpusEmbeddings]]":
        """Yield the embeddings of about so many rows of whole parts, and their first row number."""
        assert self._subset is None, "subsets are not split"
        start, count, held = 0, 0, list[CorpusPart]()
        for part in self._record.parts:
            if held and count + part.rows > rows:
                yield start, self._of_parts(held)
                start, count, held = start + count, 0, []
            if part.rows:
                held.append(part)
                count += part.rows
        if held:
            yield start, self._of_parts(held)

    def _of_parts(self, parts: list[CorpusPart]) -> "CorpusEmbeddings":
        return CorpusEmbeddings(self._store, replace(self._record, parts=tuple(parts)))

    def at(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the embeddings (n, d) of some rows, in the order given, in float64.

        Of a part only those rows are read.
        """
        rows = rows if self._subset is None else self._subset[rows]
        found = np.empty((len(rows), self._store.dim))
        for part, inside, places in _by_part(self._starts, rows):
            # Other threads may read too.
            if (mapped := self._mapped.get(part)) is None:
                mapped = self._store.embeddings(self._record.parts[part])
                if len(self._mapped) >= _MAPPED:
                    self._mapped.clear()
                self._mapped[part] = mapped
            found[inside] = mapped[places]
        return found


def ids_of(store: "EmbeddingStore", record: CorpusRecord, rows: NDArray[np.int64]) -> list[str]:
    """Return the ids of rows of a corpus, in the order given, numbers as texts."""
    found = [""] * len(rows)
    for part, inside, places in _by_part(row_starts(record), rows):
        ids = store.documents(record.parts[part])[ID].take(pa.array(places)).to_pylist()
        for place, name in zip(np.flatnonzero(inside), ids, strict=True):
            found[place] = str(name)
    return found


def _by_part(
    starts: NDArray[np.int64], rows: NDArray[np.int64]
) -> Iterator[tuple[int, NDArray[np.bool_], NDArray[np.int64]]]:
    """Yield each part that has some of the rows, which of them it has, and their places in it."""
    if len(rows) and not 0 <= rows.min() <= rows.max() < starts[-1]:
        raise ValueError(f"rows {rows.min()} to {rows.max()} are not all among {starts[-1]}")
    parts = np.searchsorted(starts, rows, side="right") - 1
    for part in np.unique(parts).tolist():
        inside = parts == part
        yield part, inside, rows[inside] - starts[part]
