"""Candidates of an index ranked again by the raw embeddings in the store it was built from."""

import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.files import exists
from whiten_index.errors import ArtifactError
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.records import CorpusRecord
from whiten_index.store.sampling import row_starts
from whiten_index.store.segments import EmbeddingRows
from whiten_index.whitening.spectrum import unit_rows
from whiten_index.whitening.transform import Whitening

Rows = NDArray[np.int64]

# Embeddings scored at once, and parts kept mapped: each is a file that the process holds open.
_HELD_ROWS, _MAPPED = 1 << 14, 1 << 8
VECTORS, EMBEDDINGS = "vectors", "embeddings"


class Reranker:
    """Scores the ``candidates`` that an index returns for a query by their raw embeddings."""

    def __init__(
        self,
        store: EmbeddingStore,
        record: CorpusRecord,
        whitening: Whitening,
        *,
        candidates: int,
        by: str = VECTORS,
        version: Path | None = None,
        subset: Rows | None = None,
    ) -> None:
        """Take the store and the corpus whose rows, in order, are those of the index.

        Scores are cosines of exact vectors, or of raw ``EMBEDDINGS``. ``version`` is the folder of
        the index's version, None where that is never removed; ``subset`` the rows of the corpus
        that the index has, None for all.
        """
        self.candidates = candidates
        self._by, self._subset = by, subset
        self._store, self._whitening = store, whitening
        self._starts = row_starts(record)
        # Not a method, whose cache would keep this object, and every map, alive. What is mapped
        # can be read even when gc has removed it since.
        self._part = functools.lru_cache(_MAPPED)(
            functools.partial(_mapped, store, record, version)
        )

    def embeddings(self, rows: Rows) -> NDArray[np.float64]:
        """Return the raw embeddings (n, d) of rows (n,), in the order given."""
        rows = rows if self._subset is None else self._subset[rows]
        found = np.empty((len(rows), self._whitening.dim))
        parts = np.searchsorted(self._starts, rows, side="right") - 1
        for part in np.unique(parts):
            inside = parts == part
            found[inside] = self._part(int(part))[rows[inside] - self._starts[part]]
        if not np.isfinite(found).all():
            raise ArtifactError(
                f"the store {self._store.place} holds NaN or infinity; encode the corpus again"
            )
        return found

    def __call__(self, queries: NDArray[np.float32], rows: Rows) -> NDArray[np.float32]:
        """Return the cosines (n, m) of raw queries (n, d) and rows (n, m), −inf for a row of −1."""
        scores = np.full(rows.shape, -np.inf, dtype=np.float32)
        unit = self._unit(queries)
        for block in _blocks(rows.shape):
            wanted, places = np.unique(rows[block], return_inverse=True)
            vectors = self._unit(self.embeddings(np.maximum(wanted, 0)))
            some = vectors[places.reshape(rows[block].shape)]
            scores[block] = np.einsum("nmk,nk->nm", some, unit[block[0]])
        scores[rows < 0] = -np.inf
        return scores

    def _unit(self, embeddings: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return what is compared: vectors of the transform or embeddings, of unit length."""
        if self._by == EMBEDDINGS:
            return unit_rows(embeddings.astype(np.float64))
        return unit_rows(self._whitening.apply(embeddings))


def _mapped(
    store: EmbeddingStore, record: CorpusRecord, version: Path | None, position: int
) -> EmbeddingRows:
    """Return the embeddings (n, d) of a part of the corpus."""
    try:
        return store.embeddings(record.parts[position])
    except ArtifactError as error:
        if version is None or exists(version):
            raise
        raise ArtifactError(
            f"version {version.name} was pruned while it was open for search, and the embeddings "
            f"that rank its candidates again are gone from {store.place}; call reload(), or open "
            "the index again"
        ) from error


def _blocks(shape: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of queries and candidates that hold few enough embeddings together."""
    queries, candidates = shape
    wide = min(max(candidates, 1), _HELD_ROWS)
    high = max(_HELD_ROWS // wide, 1)
    for start in range(0, queries, high):
        for first in range(0, candidates, wide):
            yield slice(start, start + high), slice(first, first + wide)
