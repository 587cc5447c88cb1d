"""One version of an index opened for search, with all that its queries and hits need."""

import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from whiten_index.artifacts.cached_storage import place_of
from whiten_index.artifacts.prefetch import blocks
from whiten_index.artifacts.storage import Storage
from whiten_index.corpus.batches import TextBatch
from whiten_index.corpus.corpus_config import CorpusConfig
from whiten_index.corpus.parquet_corpus import ParquetCorpus
from whiten_index.corpus.row_filter import RowFilter
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.encoding.spec import EncoderOpening, recorded_spec
from whiten_index.errors import ArtifactError, ConfigError
from whiten_index.evaluation.trec_run import Ranking, kept_names
from whiten_index.index.library import set_threads
from whiten_index.paths import absolute
from whiten_index.search.query_encoder import QueryEncoder, require_texts
from whiten_index.search.rerank import EMBEDDINGS, VECTORS, Reranker
from whiten_index.versions.bundle import Bundle, open_files
from whiten_index.versions.published import (
    VERSIONS,
    Version,
    read_current,
    read_version,
    split_version,
    with_published,
)
from whiten_index.versions.references import corpus_record, open_store

if TYPE_CHECKING:
    from whiten_index.encoding.window_encoder import WindowEncoder

_REMEDY = "name the store it was built from with --store DIR, or search with --rerank 0"


@dataclass(frozen=True, slots=True)
class Hit:
    """A found document.

    Attributes:
        id: the document's id.
        score: cosine, or dot product where the index has that similarity, after the transform, or
            of raw embeddings that re-rank; of the best passage.
        row: row number in the index.
        columns: the kept metadata, and where the index holds passages ``PASSAGE_COLUMNS`` too.
    """

    id: str | int
    score: float
    row: int
    columns: Mapping[str, Any]


class Hits(list[Hit]):
    """The hits of one query, best first; ``schema`` has the types of their ids and columns."""

    schema = pa.schema({"id": pa.string()})

    def to_arrow(self) -> pa.Table:
        """Return a table of score, id and kept columns; a kept ``score`` is ``kept_score``.

        Raises:
            ConfigError: the index keeps ``kept_score`` too.
        """
        found = {"score": pa.array([h.score for h in self], pa.float64())}
        for name, shown in kept_names(self.schema.names, found).items():
            values = [h.id if name == "id" else h.columns[name] for h in self]
            found[shown] = pa.array(values, self.schema.field(name).type)
        return pa.table(found)


class OpenOptions(EncoderOpening, total=False):
    """Options of ``open_index``, where they are described."""

    verify: str
    mapped: bool | None
    rerank: int | None
    rerank_by: str | None
    store: Path | str | None
    index_device: str


@dataclass(frozen=True, eq=False)
class Opened:
    """An opened version, whose vectors, ids and encoder belong together."""

    bundle: Bundle  # the version
    reranker: Reranker | None  # ranks what the index finds again, None where it does not
    queries: QueryEncoder  # the encoder of queries

    @classmethod
    def of(
        cls,
        version: Version,
        before: "Opened | None",
        *,
        verify: str = "full",
        mapped: bool | None = None,
        rerank: int | None = None,
        rerank_by: str | None = None,
        store: Path | str | None = None,
        index_device: str = "cpu",
        **encoder: Unpack[EncoderOpening],
    ) -> "Opened":
        """Open a version of an index; an encoder that is the same is taken over."""
        bundle = open_files(version, mapped=mapped, device=index_device)
        reranker = _reranker(bundle, candidates=rerank, by=rerank_by, store=store, verify=verify)
        queries = QueryEncoder(recorded_spec(bundle.manifest["encoder"]), **encoder)
        if before is not None and queries.equals(before.queries):
            queries = before.queries
        elif before is not None and before.queries.loaded:
            # Who searches by text finds out now that the new one cannot be had, not query by query.
            queries.get()
        return cls(bundle, reranker, queries)

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
        self,
        embeddings: NDArray[np.floating],
        top_k: int,
        chosen: RowFilter | None,
        *,
        rerank: int | None = None,
    ) -> list[Hits]:
        """Return the hits of raw embeddings (n, d); ``rerank`` other candidates than opened for."""
        reranker = self._reranker(rerank)
        scores, rows = self.bundle.search(embeddings, top_k, row_filter=chosen, rescorer=reranker)
        return [hits_of(self.bundle, *pair) for pair in zip(scores, rows, strict=True)]

    def search_like(
        self,
        document_id: str | int,
        top_k: int,
        chosen: RowFilter | None,
        *,
        rerank: int | None = None,
    ) -> Hits:
        """Return the documents nearest to a document, itself left out; ``rerank`` as in search."""
        row, reranker = self.bundle.documents.find(document_id), self._reranker(rerank)
        scores, rows = self.bundle.search_like(row, top_k, row_filter=chosen, rescorer=reranker)
        return hits_of(self.bundle, scores[0], rows[0])

    def _reranker(self, candidates: int | None) -> Reranker | None:
        if self.reranker is None and candidates:
            raise ConfigError(
                "the index was opened without its store, which ranks candidates again; open it "
                "with --rerank N, or ask for 0"
            )
        if self.reranker is None or candidates == 0:
            return None
        return self.reranker if candidates is None else self.reranker.of(candidates)

    def rankings(
        self,
        ids: Sequence[str | int],
        embeddings: NDArray[np.floating],
        top_k: int,
        chosen: RowFilter | None,
    ) -> Iterator[Ranking]:
        """Yield the ranking of every query by its raw embedding, (n, d) in all."""
        scores, rows = self.bundle.search(
            embeddings, top_k, row_filter=chosen, rescorer=self.reranker
        )
        for query_id, row_scores, row_numbers in zip(ids, scores, rows, strict=True):
            found = row_numbers[row_numbers >= 0].tolist()
            documents = self.bundle.documents.ids(found)
            read = functools.partial(hits_of, self.bundle, row_scores, row_numbers)
            yield Ranking(query_id, documents, row_scores[: len(found)].tolist(), read)


def hits_of(bundle: Bundle, scores: NDArray[np.float32], rows: NDArray[np.int64]) -> Hits:
    """Return the hits of one query by their row numbers, where those are not negative."""
    hits = Hits()
    hits.schema = bundle.documents.schema
    for score, row in zip(scores.tolist(), rows.tolist(), strict=True):
        if row >= 0:
            columns = bundle.documents.get(row)
            hits.append(Hit(columns.pop("id"), score, row, columns))
    return hits


_QUERY_ROWS = 1024


class SearchIndex:
    """A published index, opened for search; threads may share it.

    What was opened stays as it is, whatever is published since, until ``reload`` is called.
    """

    def __init__(
        self, root: Path, mirror: Storage, options: OpenOptions, version: str | None = None
    ) -> None:
        """Open the version that is published now, and later ones the same way, or this one alone.

        ``root`` is the index folder, or that of the copies of what is in the bucket of ``mirror``.
        """
        self._root, self._mirror, self._options, self._version = root, mirror, options, version
        # Read once in a call, so that a call sees one version whatever ``reload`` does meanwhile.
        self._opened = self._open(None)
        self._reloading = threading.Lock()

    def _open(self, before: Opened | None) -> Opened:
        def opened(version: Version) -> Opened:
            return Opened.of(version, before, **self._options)

        verify = self._options.get("verify", "full")
        if self._version is None:
            return with_published(self._root, opened, self._mirror, verify=verify)
        folder = self._root / VERSIONS / self._version
        self._mirror.fetch(folder, names=())
        return opened(read_version(folder, verify=verify, mirror=self._mirror))

    @property
    def opened(self) -> Opened:
        """The opened version, which stays as it is when ``reload`` opens another."""
        return self._opened

    @property
    def bundle(self) -> Bundle:
        """Its files and facts."""
        return self._opened.bundle

    @property
    def encoder_config(self) -> EncoderConfig | None:
        """The encoder of queries, which is loaded on the first query by text.

        Raises:
            EncoderError: the model needs code, which ``trust_remote_code`` allows.
        """
        return self._opened.queries.config

    def share_encoder(self, other: "SearchIndex") -> None:
        """Take the encoder of another index, if it gives queries the same embeddings."""
        opened = self._opened
        if opened.queries.equals(other._opened.queries):
            self._opened = replace(opened, queries=other._opened.queries)

    @property
    def reranker(self) -> Reranker | None:
        """Re-ranker of the index's results, ``None`` without re-ranking."""
        return self._opened.reranker

    def __len__(self) -> int:
        return len(self.bundle)

    def __repr__(self) -> str:
        return f"SearchIndex({str(self.bundle.source.place)!r}, version {self.bundle.version})"

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

        Without one, this reads one small file. Searches under way in other threads end on the
        version they began with, and until then memory holds both. An equal encoder is kept.

        Raises:
            WhitenIndexError: the new version cannot be opened, as by ``open_index``; the one
                opened before stays in use.
        """
        if self._is_current():
            return False
        with self._reloading:
            # Another thread may have reloaded while this one waited.
            if self._is_current():
                return False
            self._opened = self._open(self._opened)
            return True

    def _is_current(self) -> bool:
        """Return whether ``CURRENT`` still names this very version, or another is not wanted."""
        if self._version is not None:
            return True
        current = read_current(self._root, self._mirror)
        return current.manifest_sha256 == self.bundle.source.sha256

    @overload
    def search(self, texts: str, *, top_k: int = 10, row_filter: str | None = None) -> Hits: ...  # type: ignore[overload-overlap]

    @overload
    def search(
        self, texts: Sequence[str], *, top_k: int = 10, row_filter: str | None = None
    ) -> list[Hits]: ...

    def search(
        self, texts: str | Sequence[str], *, top_k: int = 10, row_filter: str | None = None
    ) -> Hits | list[Hits]:
        """Return the hits of each text, or of one text, best first, a document once.

        Args:
            texts: the queries, or one.
            top_k: hits a query at most.
            row_filter: condition on kept columns that hits must pass, such as ``lang == 'en'``.

        Raises:
            ConfigError: a text is blank, top_k is below 1, the filter is not understood or reads a
                column that is not kept, or no model of the queries is known.
            CorpusError: the filter compares a column with a value of another type.
            EncoderError: the model is not the one the index was built with.
        """
        opened = self._opened
        chosen = opened.filter(row_filter)
        if isinstance(texts, str):
            return opened.search(opened.encode([texts]), top_k, chosen)[0]
        return opened.search(opened.encode(texts), top_k, chosen)

    def search_embeddings(
        self, embeddings: NDArray[np.floating], *, top_k: int = 10, row_filter: str | None = None
    ) -> list[Hits]:
        """Return the hits of each raw, unwhitened embedding (n, d), best first; see ``search``.

        Raises:
            ConfigError: embeddings of another width, or with NaN or infinity.
        """
        opened = self._opened
        return opened.search(embeddings, top_k, opened.filter(row_filter))

    def search_like(
        self, document_id: str | int, *, top_k: int = 10, row_filter: str | None = None
    ) -> Hits:
        """Return the documents nearest to a document, itself left out; see ``search``.

        Raises:
            CorpusError: no document has this id.
        """
        opened = self._opened
        return opened.search_like(document_id, top_k, opened.filter(row_filter))

    def matches(self, row_filter: str) -> int:
        """Return how many rows, or passages, pass a filter, which raises what ``search`` does."""
        return self.bundle.documents.matching(RowFilter.parse(row_filter)).count

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the raw embeddings of queries, (n, d)."""
        return self._opened.encode(texts)

    @property
    def encoder(self) -> "WindowEncoder":
        """The encoder of queries, loaded when first needed."""
        return self._opened.queries.get()

    def rank(
        self, queries: CorpusConfig, *, top_k: int, row_filter: str | None = None
    ) -> Iterator[Ranking]:
        """Yield the ranking of every query of a Parquet file, in its order; see ``search``.

        Raises:
            CorpusError: a file cannot be read or changes meanwhile, or a query is blank.
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
        """Yield the ranking of each query by its raw, unwhitened embedding, (n, d) in all."""
        if len(ids) != len(embeddings):
            raise ConfigError(f"{len(ids)} ids were given for {len(embeddings)} embeddings")
        opened = self._opened
        chosen = opened.filter(row_filter)
        for pair in zip(blocks(ids, _QUERY_ROWS), blocks(embeddings, _QUERY_ROWS), strict=True):
            yield from opened.rankings(*pair, top_k, chosen)


def _reranker(
    bundle: Bundle,
    *,
    candidates: int | None = None,
    by: str | None = None,
    store: Path | str | None = None,
    verify: str = "full",
) -> Reranker | None:
    """Return what ranks the candidates of an index again, None for no re-ranking."""
    wanted = bundle.manifest["factory"].get("rerank") if candidates is None else candidates
    if wanted is not None and wanted < 0:
        raise ConfigError(f"--rerank takes how many candidates, 0 for none; {wanted} was given")
    if by not in (None, VECTORS, EMBEDDINGS):
        raise ConfigError(f"--rerank-by {by!r} is unknown; use {VECTORS}, {EMBEDDINGS}")
    if not wanted:
        needless = (("--rerank-by", by), ("--store", store if candidates == 0 else None))
        given = [name for name, value in needless if value]
        if given:
            raise ConfigError(
                f"{' and '.join(given)} tells how to rank candidates again; say how many with "
                "--rerank N, or leave it out"
            )
        return None
    full = verify == "full"
    found = open_store(bundle.source, given=store, reader="re-ranking", remedy=_REMEDY, verify=full)
    reason: ArtifactError | None = None
    try:
        record = corpus_record(bundle.source)
        if record.rows != len(bundle):
            reason = ArtifactError(f"it has {len(bundle)} rows and its record {record.rows}")
        elif not any(map(found.missing_rows, record.distinct_parts)):
            by, folder = by or VECTORS, bundle.folder
            return Reranker(
                found, record, bundle.whitening, candidates=wanted, by=by, version=folder
            )
    except ArtifactError as error:
        reason = error
    raise ArtifactError(
        f"the store {found.place} does not hold the corpus of the index, whose rows re-ranking "
        f"reads ({reason or f'{found.damaged()} is missing or damaged'}); {_REMEDY}"
    ) from reason


def open_index(
    path: Path | str, *, preload: bool = False, **options: Unpack[OpenOptions]
) -> SearchIndex:
    """Open the published version of an index for search.

    Args:
        path: the index folder, or its URI; of one in an object store the published version is
            copied to this machine, once. Or the folder of a version, which is opened instead.
        preload: load the encoder now, not on the first query by text.
        model: where the encoder is now, if no longer where it was; it must be the same one. What
            is named here may be fetched from the hub; what the index names is not.
        trust_remote_code: let the encoder run Python code that comes with its model.
        device: of the encoder: ``auto``, ``cpu``, ``cuda``.
        backend: ``torch``; ``openvino`` on a CPU, which takes less time for one query; ``onnx``.
        threads: CPU threads of the encoder and of FAISS.
        base_url: endpoint of a model behind an API, by default ``OPENAI_BASE_URL``; never the
            index's own.
        verify: ``full`` compares every file's checksum when it is opened, and that of each shard of
            the store before its first row ranks a hit again; ``manifest`` compares sizes. A flipped
            bit that nobody looks for may give other hits or end the process.
        mapped: read the index file as it is searched, not as a whole; by default if its lists
            are in a file of their own.
        rerank: candidates a query, top_k at least, that the store's raw embeddings rank again; 0
            for none; by default as the index was built for.
        rerank_by: ``vectors``, the index's transform of the embeddings in full precision, or
            ``embeddings``, without it.
        store: where the raw embeddings are, if no longer where they were.
        index_device: ``gpu`` searches a copy on a GPU, ``auto`` where FAISS sees one for this kind;
            filters, neighbours of a document and mapped indexes stay on the CPU.

    Raises:
        ConfigError: an option that cannot be used.
        ArtifactError: nothing is published there, or it is damaged, or the store is another one.

    Examples:
        >>> hits = open_index("index").search(["a cat on a mat"], top_k=3)
        >>> len(hits[0]), hits[0][0].id
        (3, 'd0')
    """
    threads = options.get("threads")
    if threads is not None:
        EncoderConfig(threads=threads)
    # As it is opened again later, perhaps after a change of the working folder.
    place, version = split_version(absolute(path))
    root, mirror = place_of(place)
    if (store := options.get("store")) is not None:
        options["store"] = absolute(store)
    index = SearchIndex(root, mirror, options, version)
    if preload:
        _ = index.encoder
    set_threads(threads)
    return index
