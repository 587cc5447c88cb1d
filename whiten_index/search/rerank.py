"""Candidates of an index ranked again by the raw embeddings in the store it was built from."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.files import exists
from whiten_index.artifacts.storage import Place
from whiten_index.errors import ArtifactError, ConfigError
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.records import CorpusRecord
from whiten_index.store.row_refs import EmbeddingRows
from whiten_index.store.sampling import mapped_part, row_starts
from whiten_index.versions.bundle import Bundle
from whiten_index.versions.provenance import corpus_record, open_store
from whiten_index.whitening.spectrum import unit_rows
from whiten_index.whitening.transform import Whitening

Rows = NDArray[np.int64]

# Embeddings scored at once, and shards kept mapped: each is a file that the process holds open.
_HELD_ROWS, _MAPPED = 1 << 14, 1 << 8


class RerankBy(Enum):
    """Vectors that rank candidates: exact ones, or the raw embeddings."""

    VECTORS = "vectors"
    EMBEDDINGS = "embeddings"


class Reranker:
    """Scores rows of an index by their raw embeddings.

    Attributes:
        candidates: rows per query that the index returns.
        by: what the scores are cosines of.
    """

    def __init__(
        self,
        store: EmbeddingStore,
        record: CorpusRecord,
        whitening: Whitening,
        *,
        candidates: int,
        by: RerankBy = RerankBy.VECTORS,
        version: Path | None = None,
    ) -> None:
        """Take the store and the corpus whose rows, in order, are those of the index.

        Args:
            store: of the index's encoder.
            record: of the index's corpus.
            whitening: the index's transform.
            candidates: rows a query to rank again.
            by: what the scores are cosines of.
            version: folder of the index's version, None where that is never removed.
        """
        self.candidates = candidates
        self.by = by
        self._store, self._record, self._whitening = store, record, whitening
        self._starts = row_starts(record)
        # Of the parts and not of this object, which would keep itself, and every map, alive.
        # What is mapped can be read even when gc has removed it since.
        parts = _Parts(store, record, version=version)
        self._part = functools.lru_cache(_MAPPED)(parts)

    def embeddings(self, rows: Rows) -> NDArray[np.float64]:
        """Return the raw embeddings (n, d) of rows (n,), in the order given.

        Raises:
            ArtifactError: a shard of the store is missing or damaged.
        """
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
        """Return the cosines (n, m) of raw queries (n, d) and rows (n, m), −inf where a row is −1.

        Raises:
            ArtifactError: a shard of the store is missing or damaged.
        """
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
        if self.by is RerankBy.EMBEDDINGS:
            return unit_rows(embeddings.astype(np.float64))
        return unit_rows(self._whitening.apply(embeddings))


class _Parts:
    """Maps the parts of a corpus."""

    def __init__(
        self, store: EmbeddingStore, record: CorpusRecord, *, version: Path | None
    ) -> None:
        self._store, self._record, self._version = store, record, version

    def __call__(self, position: int) -> EmbeddingRows:
        """Return the embeddings (n, d) of a part.

        Raises:
            ArtifactError: its shard is missing or damaged.
        """
        part = self._record.parts[position]
        try:
            return mapped_part(self._store, part)
        except ArtifactError as error:
            if self._version is None or exists(self._version):
                raise
            raise ArtifactError(
                f"version {self._version.name} was pruned while it was open for search, and the "
                f"embeddings that rank its candidates again are gone from {self._store.place}; "
                "call reload(), or open the index again"
            ) from error


def open_reranker(
    bundle: Bundle,
    root: Place,
    *,
    candidates: int | None = None,
    by: str | None = None,
    store: Path | str | None = None,
    verify: str = "full",
) -> Reranker | None:
    """Return what ranks the candidates of an index again, None where nothing is to be.

    Args:
        bundle: the opened index.
        root: the index folder, or its URI.
        candidates: rows a query, 0 for no re-ranking; by default as the index was built for.
        by: ``vectors`` (default) or ``embeddings``.
        store: where the raw embeddings are, by default where the build had them.
        verify: ``full`` compares the checksums of a shard before its first row is read,
            ``manifest`` its sizes.

    Raises:
        ConfigError: the number or ``by`` cannot be used, or they are given and nothing is to be
            ranked again.
        ArtifactError: no store is found, or it holds other embeddings than those of the index.
    """
    wanted = _candidates(bundle, candidates)
    ranked_by = _member(by)
    if not wanted:
        given = [name for name, value in (("--rerank-by", by), ("--store", store)) if value]
        if given:
            raise ConfigError(
                f"{' and '.join(given)} tells how to rank candidates again; say how many with "
                "--rerank N, or leave it out"
            )
        return None
    found = open_store(
        root,
        bundle.manifest,
        given=store,
        reader="re-ranking",
        remedy=_REMEDY,
        verify=verify == "full",
    )
    record = _record(bundle, found)
    return Reranker(
        found,
        record,
        bundle.whitening,
        candidates=wanted,
        by=ranked_by,
        version=bundle.folder,
    )


def _record(bundle: Bundle, store: EmbeddingStore) -> CorpusRecord:
    """Return the rows of the index, whose shards are there.

    Raises:
        ArtifactError: the store does not hold them.
    """
    reason = None
    try:
        record = corpus_record(bundle.source)
        if all(map(store.holds, record.shards)):
            return record
    except ArtifactError as error:
        reason = error
    raise ArtifactError(
        f"the store {store.place} does not hold the corpus of the index, whose rows re-ranking "
        f"reads; {_REMEDY}"
    ) from reason


_REMEDY = "name the store it was built from with --store DIR, or search with --rerank 0"


def _candidates(bundle: Bundle, given: int | None) -> int:
    wanted = bundle.manifest["factory"].get("rerank") if given is None else given
    if wanted is not None and wanted < 0:
        raise ConfigError(f"--rerank takes how many candidates, 0 for none; {wanted} was given")
    return wanted or 0


def _member(name: str | None) -> RerankBy:
    try:
        return RerankBy.VECTORS if name is None else RerankBy(name)
    except ValueError as error:
        known = ", ".join(each.value for each in RerankBy)
        raise ConfigError(f"--rerank-by {name!r} is unknown; use {known}") from error


def _blocks(shape: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of queries and candidates that hold few enough embeddings together."""
    queries, candidates = shape
    wide = min(max(candidates, 1), _HELD_ROWS)
    high = max(_HELD_ROWS // wide, 1)
    for start in range(0, queries, high):
        for first in range(0, candidates, wide):
            yield slice(start, start + high), slice(first, first + wide)
