"""One version of an index opened for search, with all that its queries and hits need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.corpus import RowFilter
from whiten_index.encoding import recorded_spec
from whiten_index.index import (
    Bundle,
    Current,
    Version,
    open_files,
    read_current,
    with_published,
)
from whiten_index.objects import HERE, Here, Place
from whiten_index.query_encoder import QueryEncoder, require_texts
from whiten_index.rerank import Reranker, open_reranker


@dataclass(frozen=True, slots=True)
class Hit:
    """A found document.

    Attributes:
        id: the document's id.
        score: cosine of query and document after the transform, or of their raw embeddings where
            hits are re-ranked by these; of its best passage, where the index holds passages.
        row: row number in the index.
        columns: the kept metadata, and where the index holds passages ``PASSAGE_COLUMNS`` too.
    """

    id: str | int
    score: float
    row: int
    columns: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Ranking:
    """The hits of one query, as ids and scores only.

    Attributes:
        query_id: of the query.
        ids: document ids, best first.
        scores: their cosines.
    """

    query_id: str | int
    ids: list[str | int]
    scores: list[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """How an index is opened, each version of it the same way; see ``open_index``.

    ``root`` is its folder, or that of the copies of what is in the bucket of ``mirror``.
    """

    root: Path
    mirror: Here = HERE
    model: str | None = None
    trust_remote_code: bool = False
    device: str = "auto"
    threads: int | None = None
    verify: str = "full"
    mapped: bool | None = None
    rerank: int | None = None
    rerank_by: str | None = None
    store: Path | str | None = None
    index_device: str = "cpu"

    def open(self, before: Opened | None = None) -> Opened:
        """Open the published version.

        Args:
            before: a version whose encoder is taken over where it is the same.

        Raises:
            ConfigError: an option that cannot be used.
            ArtifactError: nothing is published there, or it is damaged; or the store is not the
                one the index was built from.
        """
        return with_published(
            self.root,
            lambda version: self._opened(version, before),
            self.mirror,
            verify=self.verify,
        )

    def current(self) -> Current:
        """Return what is published now."""
        return read_current(self.root, self.mirror)

    @property
    def place(self) -> Place:
        """Where the index is, as users name it."""
        return self.mirror.uri or self.root

    def _opened(self, version: Version, before: Opened | None) -> Opened:
        bundle = open_files(version, mapped=self.mapped, device=self.index_device)
        reranker = open_reranker(
            bundle,
            self.place,
            candidates=self.rerank,
            by=self.rerank_by,
            store=self.store,
            verify=self.verify,
        )
        return Opened(bundle, reranker, self._query_encoder(bundle, before))

    def _query_encoder(self, bundle: Bundle, before: Opened | None) -> QueryEncoder:
        made = QueryEncoder(
            recorded_spec(bundle.manifest["encoder"]),
            model=self.model,
            trust_remote_code=self.trust_remote_code,
            device=self.device,
            threads=self.threads,
        )
        if before is None:
            return made
        if made.equals(before.queries):
            return before.queries
        if before.queries.loaded:
            # Who searches by text finds out now that the new one cannot be had, not query by query.
            made.get()
        return made


@dataclass(frozen=True, eq=False)
class Opened:
    """An opened version, whose vectors, ids and encoder belong together.

    Attributes:
        bundle: the version.
        reranker: ranks what the index finds again, None where it does not.
        queries: the encoder of queries.
    """

    bundle: Bundle
    reranker: Reranker | None
    queries: QueryEncoder

    def is_published(self, current: Current) -> bool:
        """Tell whether ``CURRENT`` still names this very version."""
        return current.same_version(Current(self.bundle.version, self.bundle.source.sha256 or ""))

    def filter(self, text: str | None) -> RowFilter | None:
        """Return a filter, checked before any query is encoded."""
        if text is None:
            return None
        chosen = RowFilter.parse(text)
        self.bundle.documents.matching(chosen)
        return chosen

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the raw embeddings of queries, (n, d)."""
        require_texts(texts)
        return self.queries.get().encode_queries(texts)

    def search(
        self, embeddings: NDArray[np.floating], top_k: int, chosen: RowFilter | None
    ) -> list[list[Hit]]:
        """Return the hits of raw embeddings (n, d)."""
        scores, rows = self._nearest(embeddings, top_k, chosen)
        return [hits_of(self.bundle, *pair) for pair in zip(scores, rows, strict=True)]

    def search_like(
        self, document_id: str | int, top_k: int, chosen: RowFilter | None
    ) -> list[Hit]:
        """Return the documents nearest to a document, itself left out."""
        row = self.bundle.documents.find(document_id)
        scores, rows = self.bundle.search_like(
            row, top_k, row_filter=chosen, rescorer=self.reranker
        )
        return hits_of(self.bundle, scores[0], rows[0])

    def rankings(
        self,
        ids: Sequence[str | int],
        embeddings: NDArray[np.floating],
        top_k: int,
        chosen: RowFilter | None,
    ) -> Iterator[Ranking]:
        """Yield the ranking of every query by its raw embedding, (n, d) in all."""
        scores, rows = self._nearest(embeddings, top_k, chosen)
        for query_id, row_scores, row_numbers in zip(ids, scores, rows, strict=True):
            found = row_numbers[row_numbers >= 0].tolist()
            documents = self.bundle.documents.ids(found)
            yield Ranking(query_id, documents, row_scores[: len(found)].tolist())

    def _nearest(
        self, embeddings: NDArray[np.floating], top_k: int, chosen: RowFilter | None
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        return self.bundle.search(embeddings, top_k, row_filter=chosen, rescorer=self.reranker)


def hits_of(bundle: Bundle, scores: NDArray[np.float32], rows: NDArray[np.int64]) -> list[Hit]:
    """Return the hits of one query by their row numbers, where those are not negative."""
    hits = []
    for score, row in zip(scores.tolist(), rows.tolist(), strict=True):
        if row >= 0:
            columns = bundle.documents.get(row)
            hits.append(Hit(columns.pop("id"), score, row, columns))
    return hits
