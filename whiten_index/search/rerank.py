"""Candidates of an index ranked again by the raw embeddings in the store it was built from."""

import copy
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.files import exists
from whiten_index.errors import ArtifactError
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.records import CorpusRecord
from whiten_index.store.sampling import CorpusEmbeddings
from whiten_index.whitening.transform import Whitening

Rows = NDArray[np.int64]

# Embeddings scored at once.
_HELD_ROWS = 1 << 14
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

        Scores are of exact vectors, or of raw ``EMBEDDINGS``, by the similarity of the transform.
        ``version`` is the folder of the index's version, None where that is never removed;
        ``subset`` the rows of the corpus that the index has, None for all.
        """
        self.candidates = candidates
        self._by, self._version = by, version
        self._store, self._whitening = store, whitening
        self._rows = CorpusEmbeddings(store, record, subset)

    def of(self, candidates: int) -> "Reranker":
        """Return the same one for another number of candidates."""
        other = copy.copy(self)
        other.candidates = candidates
        return other

    def embeddings(self, rows: Rows) -> NDArray[np.float64]:
        """Return the raw embeddings (n, d) of rows (n,), in the order given."""
        try:
            found = self._rows.at(rows)
        except ArtifactError as error:
            if self._version is None or exists(self._version):
                raise
            raise ArtifactError(
                f"version {self._version.name} was pruned while it was open for search, and the "
                "embeddings that rank its candidates again are gone from "
                f"{self._store.place}; call reload(), or open the index again"
            ) from error
        if not np.isfinite(found).all():
            raise ArtifactError(
                f"the store {self._store.place} holds NaN or infinity; encode the corpus again"
            )
        return found

    def __call__(self, queries: NDArray[np.float32], rows: Rows) -> NDArray[np.float32]:
        """Return the scores (n, m) of raw queries (n, d) and rows (n, m), −inf for a row of −1."""
        scores = np.full(rows.shape, -np.inf, dtype=np.float32)
        asked = self._compared(queries)
        for block in _blocks(rows.shape):
            wanted, places = np.unique(rows[block], return_inverse=True)
            vectors = self._compared(self.embeddings(np.maximum(wanted, 0)))
            some = vectors[places.reshape(rows[block].shape)]
            scores[block] = np.einsum("nmk,nk->nm", some, asked[block[0]])
        scores[rows < 0] = -np.inf
        return scores

    def _compared(self, embeddings: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return what is compared: vectors of the transform, or embeddings."""
        if self._by == EMBEDDINGS:
            return self._whitening.compared(embeddings.astype(np.float64))
        return self._whitening.vectors(embeddings)


def _blocks(shape: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of queries and candidates that hold few enough embeddings together."""
    queries, candidates = shape
    wide = min(max(candidates, 1), _HELD_ROWS)
    high = max(_HELD_ROWS // wide, 1)
    for start in range(0, queries, high):
        for first in range(0, candidates, wide):
            yield slice(start, start + high), slice(first, first + wide)
