"""Query to hits: open a published index, encode queries with its own encoder, name the rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.batch import TextBatch
from whiten_index.corpus import CorpusConfig, OnBadRow, ParquetCorpus, RowFilter
from whiten_index.encoding import EncoderConfig, EncoderSpec, resolve_encoder
from whiten_index.errors import ConfigError, EncoderError
from whiten_index.index import Bundle, maps_by_default, open_bundle, set_threads
from whiten_index.rerank import Reranker, open_reranker

if TYPE_CHECKING:
    from whiten_index.encoding import Encoder

_QUERY_ROWS = 1024


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


@dataclass
class SearchIndex:
    """A published index, opened for search.

    Attributes:
        bundle: the opened version.
        encoder_config: the encoder of queries, loaded on the first query by text.
        reranker: ranks what the index finds again, None where it does not.
    """

    bundle: Bundle
    encoder_config: EncoderConfig | None
    reranker: Reranker | None = None
    _encoder: Encoder | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.bundle)

    @property
    def dim(self) -> int:
        """Width d of the raw embeddings that queries are."""
        return self.bundle.dim

    @property
    def grouped(self) -> bool:
        """Whether the index holds passages; a hit is then a document with its best one."""
        return self.bundle.grouped

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
        chosen = self._filter(row_filter)
        return self._search(self.encode(texts), top_k, chosen)

    def search_embeddings(
        self,
        embeddings: NDArray[np.floating],
        *,
        top_k: int = 10,
        row_filter: str | None = None,
    ) -> list[list[Hit]]:
        """Return the hits of each raw, unwhitened embedding (n, d), best first; see ``search``."""
        return self._search(embeddings, top_k, self._filter(row_filter))

    def search_like(
        self, document_id: str | int, *, top_k: int = 10, row_filter: str | None = None
    ) -> list[Hit]:
        """Return the documents nearest to a document, itself left out; see ``search``.

        Raises:
            CorpusError: no document has this id.
        """
        row = self.bundle.documents.find(document_id)
        scores, rows = self.bundle.search_like(
            row, top_k, row_filter=self._filter(row_filter), rescorer=self.reranker
        )
        return self._hits(scores[0], rows[0])

    def matches(self, row_filter: str) -> int:
        """Return how many rows pass a filter; rows are passages where the index holds these.

        Raises:
            ConfigError: it is not understood, or reads a column that is not kept.
            CorpusError: it compares a column with a value of another type.
        """
        return self.bundle.documents.matching(RowFilter.parse(row_filter)).count

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the raw embeddings of queries, (n, d)."""
        if isinstance(texts, str):
            raise ConfigError("search takes a list of texts; put the one text in brackets")
        if any(not text.strip() for text in texts):
            raise ConfigError("a query is blank; give it some text")
        return self.encoder.encode_queries(texts)

    @property
    def encoder(self) -> Encoder:
        """The encoder of queries, loaded when first needed."""
        if self._encoder is None:
            self._encoder = self._load()
        return self._encoder

    def rank(
        self, queries: CorpusConfig, *, top_k: int, row_filter: str | None = None
    ) -> Iterator[Ranking]:
        """Yield the ranking of every query of a Parquet file, in its order; see ``search``.

        Raises:
            CorpusError: the file cannot be read, or a query is blank.
        """
        chosen = self._filter(row_filter)
        corpus = ParquetCorpus.open(
            replace(queries, on_bad_row=OnBadRow.ERROR, shard_rows=_QUERY_ROWS)
        )
        corpus.check_ids()
        for batch in corpus.batches():
            ids = batch.documents.column("id").to_pylist()
            embeddings = (
                self.encode(batch.texts) if isinstance(batch, TextBatch) else batch.embeddings
            )
            yield from self._rankings(ids, embeddings, top_k, chosen)

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
        chosen = self._filter(row_filter)
        for start in range(0, len(ids), _QUERY_ROWS):
            part = slice(start, start + _QUERY_ROWS)
            yield from self._rankings(ids[part], embeddings[part], top_k, chosen)

    def _rankings(
        self,
        ids: Sequence[str | int],
        embeddings: NDArray[np.floating],
        top_k: int,
        chosen: RowFilter | None,
    ) -> Iterator[Ranking]:
        scores, rows = self._nearest(embeddings, top_k, chosen)
        for query_id, row_scores, row_numbers in zip(ids, scores, rows, strict=True):
            found = row_numbers[row_numbers >= 0].tolist()
            documents = self.bundle.documents.ids(found)
            yield Ranking(query_id, documents, row_scores[: len(found)].tolist())

    def _filter(self, text: str | None) -> RowFilter | None:
        """Return a filter, checked before any query is encoded."""
        if text is None:
            return None
        chosen = RowFilter.parse(text)
        self.bundle.documents.matching(chosen)
        return chosen

    def _search(
        self, embeddings: NDArray[np.floating], top_k: int, chosen: RowFilter | None
    ) -> list[list[Hit]]:
        scores, rows = self._nearest(embeddings, top_k, chosen)
        return [self._hits(*pair) for pair in zip(scores, rows, strict=True)]

    def _nearest(
        self, embeddings: NDArray[np.floating], top_k: int, chosen: RowFilter | None
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        return self.bundle.search(embeddings, top_k, row_filter=chosen, rescorer=self.reranker)

    def _hits(self, scores: NDArray[np.float32], rows: NDArray[np.int64]) -> list[Hit]:
        hits = []
        for score, row in zip(scores.tolist(), rows.tolist(), strict=True):
            if row >= 0:
                columns = self.bundle.documents.get(row)
                hits.append(Hit(columns.pop("id"), score, row, columns))
        return hits

    def _load(self) -> Encoder:
        recorded = self._recorded_spec()
        if self.encoder_config is None or recorded is None:
            raise ConfigError(
                "this index was built from an embedding column, so it cannot encode text; search "
                "with --like or with embeddings, or build again with --model to name the encoder "
                "of the queries"
            )
        spec, folder = resolve_encoder(self.encoder_config)
        if spec.fingerprint != recorded.fingerprint:
            raise EncoderError(
                f"the index was built with {recorded.model} ({recorded.fingerprint[:8]}) and "
                f"{spec.model} ({spec.fingerprint[:8]}) gives other embeddings; search with the "
                "model it was built with, or build again with the new one"
            )
        from whiten_index.encoding import Encoder

        return Encoder(spec, folder, self.encoder_config)

    def _recorded_spec(self) -> EncoderSpec | None:
        return recorded_spec(self.bundle.manifest["encoder"])


def recorded_spec(encoder: Mapping[str, Any]) -> EncoderSpec | None:
    """Return the encoder of queries that a manifest names, None where it names none."""
    if encoder["kind"] == "transformer":
        return EncoderSpec.from_json(dict(encoder))
    query = encoder.get("query_encoder")
    return None if query is None else EncoderSpec.from_json(query)


def open_index(
    path: Path | str,
    *,
    model: str | None = None,
    device: str = "auto",
    threads: int | None = None,
    verify: str | None = None,
    mapped: bool | None = None,
    rerank: int | None = None,
    rerank_by: str | None = None,
    store: Path | str | None = None,
    index_device: str = "cpu",
) -> SearchIndex:
    """Open the published version of an index for search.

    Args:
        path: the index folder.
        model: where the encoder is now, if no longer where it was; it must be the same one.
        device: of the encoder.
        threads: CPU threads of the encoder and of FAISS.
        verify: ``full`` checks every file's checksum, ``manifest`` sizes and the manifest only;
            by default full, but manifest for what is mapped, which is not to be read as a whole.
        mapped: read the index file as it is searched, not as a whole; by default where its lists
            are in a file of their own, or it is larger than the memory budget of its build.
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
    """
    root = Path(path)
    bundle = open_bundle(root, verify=verify, mapped=mapped, device=index_device)
    if mapped is None:
        mapped = maps_by_default(bundle.manifest)
    verify = verify or ("manifest" if mapped else "full")
    reranker = open_reranker(
        bundle, root, candidates=rerank, by=rerank_by, store=store, verify=verify
    )
    if threads is not None:
        set_threads(threads)
    spec = recorded_spec(bundle.manifest["encoder"])
    if spec is None:
        return SearchIndex(bundle, None, reranker)
    config = spec.as_config(device=device, threads=threads)
    if model is not None:
        config = replace(config, model=model, revision=None)
    return SearchIndex(bundle, config, reranker)
