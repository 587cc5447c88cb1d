"""Rows drawn at random from a corpus in its store, a few shards of it where it is large."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from whiten_index.store import CorpusRecord, EmbeddingStore

_PARTS = 8


def drawn_parts(record: CorpusRecord, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return the positions of up to eight parts of a corpus, drawn by their rows, in its order."""
    rows = np.array([part.rows for part in record.parts], dtype=np.float64)
    count = min(_PARTS, int(np.count_nonzero(rows)))
    return np.sort(rng.choice(len(rows), count, replace=False, p=rows / rows.sum()))


def drawn_rows(record: CorpusRecord, size: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return up to ``size`` row numbers, without repeats, from up to eight parts of a corpus."""
    starts = row_starts(record)
    parts = drawn_parts(record, rng)
    rows = np.concatenate([np.arange(starts[part], starts[part + 1]) for part in parts])
    return rng.permutation(rows)[:size]


def row_starts(record: CorpusRecord) -> NDArray[np.int64]:
    """Return the row number that each part starts with, and after them the number of rows."""
    return np.cumsum([0, *(part.rows for part in record.parts)], dtype=np.int64)


def embeddings_of(
    store: EmbeddingStore, record: CorpusRecord, rows: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the raw embeddings (n, d) of rows of a corpus, in the order given, in float64.

    Raises:
        ArtifactError: a shard cannot be read.
    """
    found = np.empty((len(rows), int(store.encoder["dim"])))
    starts = row_starts(record)
    for position in np.unique(np.searchsorted(starts, rows, side="right") - 1):
        inside = (rows >= starts[position]) & (rows < starts[position + 1])
        embeddings = store.embeddings(record.parts[position].shard)
        found[inside] = embeddings[rows[inside] - starts[position]]
    return found
