"""One version of an index opened for search, with all that its queries and hits need."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.cached_storage import place_of
from whiten_index.artifacts.storage import LOCAL, Place, Storage
from whiten_index.corpus.batches import TextBatch
from whiten_index.corpus.corpus_config import CorpusConfig
from whiten_index.corpus.parquet_corpus import ParquetCorpus
from whiten_index.corpus.row_filter import RowFilter
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.encoding.spec import recorded_spec
from whiten_index.index.library import set_threads
from whiten_index.paths import absolute
from whiten_index.search.query_encoder import QueryEncoder, require_texts
from whiten_index.search.rerank import Reranker, open_reranker
from whiten_index.versions.bundle import Bundle, open_files
from whiten_index.versions.published import Current, Version, read_current, with_published

if TYPE_CHECKING:
    from whiten_index.encoding.encoder import Encoder


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
    """Options of opening an index and each of its versions; see ``open_index``.

    ``root`` is its folder, or that of the copies of what is in the bucket of ``mirror``.
    """

    root: Path
    mirror: Storage = LOCAL
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
        """Path or URI of the index, as given."""
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
        """Return whether ``CURRENT`` still names this very version."""
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


__all__ = ["Hit", "Ranking", "SearchIndex", "open_index"]

_QUERY_ROWS = 1024


class SearchIndex:
    """A published index, opened for search; threads may share it.

    What was opened stays as it is, whatever is published since, until ``reload`` is called.
    """

    def __init__(self, opening: Opening) -> None:
        """Open the version that is published now, and later ones the same way."""
        self._opening = opening
        # Read once in a call, so that a call sees one version whatever ``reload`` does meanwhile.
        self._opened: Opened = opening.open()
        self._reloading = threading.Lock()

    @property
    def bundle(self) -> Bundle:
        """The opened version."""
        return self._opened.bundle

    @property
    def encoder_config(self) -> EncoderConfig | None:
        """The encoder of queries, which is loaded on the first query by text.

        Raises:
            EncoderError: the model needs code, and the index was opened without
                ``trust_remote_code``.
        """
        return self._opened.queries.config

    @property
    def reranker(self) -> Reranker | None:
        """Re-ranker of the index's results, ``None`` without re-ranking."""
        return self._opened.reranker

    def __len__(self) -> int:
        return len(self.bundle)

    def __repr__(self) -> str:
        return f"SearchIndex({str(self._opening.place)!r}, version {self.bundle.version})"

    @property
    def dim(self) -> int:
        """Width d of the raw embeddings that queries are."""
        return self.bundle.dim

    @property
    def grouped(self) -> bool:
        """True if the index holds passages; a hit is then a document with its best one."""
        return self.bundle.grouped

    def reload(self) -> bool:
        """Open the version published since, and return whether there is one.

        Without one, this reads one small file. Searches under way in other threads end on
        the version they began with, and until then memory holds both. An encoder that is the same
        is kept.

        Raises:
            WhitenIndexError: the new version cannot be opened, as by ``open_index``; the one
                opened before stays in use.
        """
        if self._opened.is_published(self._opening.current()):
            return False
        with self._reloading:
            before = self._opened
            # Another thread may have reloaded while this one waited.
            if before.is_published(self._opening.current()):
                return False
            self._opened = self._opening.open(before)
            return True

    def search(
        self, texts: Sequence[str], *, top_k: int = 10, row_filter: str | None = None
    ) -> list[list[Hit]]:
        """Return the hits of each text, best first, a document once.

        Args:
            texts: the queries.
            top_k: hits a query at most.
            row_filter: condition on kept columns that hits must pass, such as ``lang == 'en'``.

        Raises:
            ConfigError: a text is blank, top_k is below 1, the filter is not understood or reads a
                column that is not kept, or the index was built from an embedding column and no
                model is known for queries.
            CorpusError: the filter compares a column with a value of another type.
            EncoderError: the model is not the one the index was built with.
        """
        opened = self._opened
        chosen = opened.filter(row_filter)
        return opened.search(opened.encode(texts), top_k, chosen)

    def search_embeddings(
        self,
        embeddings: NDArray[np.floating],
        *,
        top_k: int = 10,
        row_filter: str | None = None,
    ) -> list[list[Hit]]:
        """Return the hits of each raw, unwhitened embedding (n, d), best first; see ``search``."""
        opened = self._opened
        return opened.search(embeddings, top_k, opened.filter(row_filter))

    def search_like(
        self, document_id: str | int, *, top_k: int = 10, row_filter: str | None = None
    ) -> list[Hit]:
        """Return the documents nearest to a document, itself left out; see ``search``.

        Raises:
            CorpusError: no document has this id.
        """
        opened = self._opened
        return opened.search_like(document_id, top_k, opened.filter(row_filter))

    def matches(self, row_filter: str) -> int:
        """Return how many rows pass a filter; rows are passages where the index holds these.

        Raises:
            ConfigError: it is not understood, or reads a column that is not kept.
            CorpusError: it compares a column with a value of another type.
        """
        return self.bundle.documents.matching(RowFilter.parse(row_filter)).count

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the raw embeddings of queries, (n, d)."""
        return self._opened.encode(texts)

    @property
    def encoder(self) -> Encoder:
        """The encoder of queries, loaded when first needed."""
        return self._opened.queries.get()

    def rank(
        self, queries: CorpusConfig, *, top_k: int, row_filter: str | None = None
    ) -> Iterator[Ranking]:
        """Yield the ranking of every query of a Parquet file, in its order; see ``search``.

        Raises:
            CorpusError: the file cannot be read, or a query is blank.
        """
        opened = self._opened
        chosen = opened.filter(row_filter)
        corpus = ParquetCorpus.open(replace(queries, on_bad_row="error", shard_rows=_QUERY_ROWS))
        corpus.check_ids()
        for batch in corpus.batches():
            ids = batch.documents.column("id").to_pylist()
            embeddings = (
                opened.encode(batch.texts) if isinstance(batch, TextBatch) else batch.embeddings
            )
            yield from opened.rankings(ids, embeddings, top_k, chosen)

    def rank_embeddings(
        self,
        ids: Sequence[str | int],
        embeddings: NDArray[np.floating],
        *,
        top_k: int,
        row_filter: str | None = None,
    ) -> Iterator[Ranking]:
        """Yield the ranking of every query by its raw, unwhitened embedding; see ``search``.

        Args:
            ids: of the n queries.
            embeddings: (n, d).
            top_k: hits a query.
            row_filter: condition on kept columns that hits must pass.
        """
        opened = self._opened
        chosen = opened.filter(row_filter)
        for start in range(0, len(ids), _QUERY_ROWS):
            part = slice(start, start + _QUERY_ROWS)
            yield from opened.rankings(ids[part], embeddings[part], top_k, chosen)


def open_index(
    path: Path | str,
    *,
    model: str | None = None,
    trust_remote_code: bool = False,
    device: str = "auto",
    threads: int | None = None,
    verify: str = "full",
    mapped: bool | None = None,
    rerank: int | None = None,
    rerank_by: str | None = None,
    store: Path | str | None = None,
    index_device: str = "cpu",
) -> SearchIndex:
    """Open the published version of an index for search.

    Args:
        path: the index folder, or its URI; of one in an object store the published version is
            copied to this machine, once.
        model: where the encoder is now, if no longer where it was; it must be the same one. What
            is named here may be fetched from the hub; what the index names is not.
        trust_remote_code: let the encoder run Python code that comes with its model.
        device: of the encoder.
        threads: CPU threads of the encoder and of FAISS.
        verify: ``full`` compares every file's checksum when it is opened, which reads it once, and
            that of each shard of the store before its first row ranks a hit again; ``manifest``
            compares sizes. A flipped bit that nobody looks for may give other hits or end the
            process, as FAISS and Arrow trust what they read.
        mapped: read the index file as it is searched, not as a whole; by default if its lists
            are in a file of their own.
        rerank: candidates a query, top_k at least, whose order the raw embeddings in the store
            settle; 0 for none; by default as the index was built for, which is mostly none.
        rerank_by: ``vectors``, the index's transform of the embeddings in full precision, or
            ``embeddings``, without it.
        store: where the raw embeddings are, if no longer where they were.
        index_device: ``gpu`` searches by a copy of the index on a GPU, ``auto`` where FAISS sees
            one that takes this kind; filtered searches and neighbours of a document stay on the
            CPU, and so does a mapped index.

    Raises:
        ConfigError: an option that cannot be used.
        ArtifactError: nothing is published there, or it is damaged; or the store is not the one
            the index was built from.

    Example:
        >>> hits = open_index("index").search(["a cat on a mat"], top_k=3)
        >>> len(hits[0]), hits[0][0].id
        (3, 'd0')
    """
    if threads is not None:
        EncoderConfig(threads=threads)
    # As it is opened again later, perhaps after a change of the working folder.
    root, mirror = place_of(absolute(path))
    index = SearchIndex(
        Opening(
            root=root,
            mirror=mirror,
            model=model,
            trust_remote_code=trust_remote_code,
            device=device,
            threads=threads,
            verify=verify,
            mapped=mapped,
            rerank=rerank,
            rerank_by=rerank_by,
            store=None if store is None else absolute(store),
            index_device=index_device,
        )
    )
    if threads is not None:
        set_threads(threads)
    return index
