"""The work on a window of shards: read them, look which are done, encode the rest, keep them."""

from __future__ import annotations

import contextlib
import functools
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from whiten_index.artifacts.manifest import fingerprint
from whiten_index.corpus.batches import (
    PASSAGE,
    PASSAGE_END,
    PASSAGE_START,
    PASSAGE_TEXT,
    EmbeddingBatch,
    TextBatch,
)
from whiten_index.corpus.parquet_corpus import ParquetCorpus
from whiten_index.corpus.sharding import Shard
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.encoding.passages import PassageSplitter
from whiten_index.encoding.spec import EncoderSpec, resolve_encoder
from whiten_index.errors import ConfigError, CorpusError, EncoderError
from whiten_index.store.dedup import RowFinder
from whiten_index.store.digest_index import Lookup
from whiten_index.store.dtypes import StoreDtype, as_kept, folder_bytes, type_of
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.records import CorpusPart
from whiten_index.store.shard_resolver import StoredShard

if TYPE_CHECKING:
    from whiten_index.encoding.batching import PreparedWindow
    from whiten_index.encoding.encoder import Encoded, Encoder, RanWindow
    from whiten_index.encoding.passages import PassageSplitter
    from whiten_index.pipeline.build_config import BuildConfig

Window = tuple[Shard, ...]


@dataclass(frozen=True)
class ShardResult:
    """What came of one shard.

    Attributes:
        part: where its embeddings and rows are.
        stored: the finished shard, None where every row was skipped.
        encoded: rows of the corpus whose embeddings were not there already.
        remade: whether damaged embeddings were replaced.
        skipped: reason -> rows left out.
    """

    part: CorpusPart
    stored: StoredShard | None
    encoded: int
    remade: bool
    skipped: Mapping[str, int]


@dataclass(frozen=True)
class WindowResult:
    """What came of a window.

    Attributes:
        shards: the results of its shards, in order.
        counts: ``duplicates``, ``tokens``, ``padded_tokens`` and ``out_of_memory`` of what was
            encoded, as in ``Counts``; empty where nothing was.
        seconds: step -> wall seconds; the steps of different windows overlap.
    """

    shards: tuple[ShardResult, ...]
    counts: Mapping[str, int]
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class _Looked:
    """A shard that was read and looked up."""

    batch: TextBatch | EmbeddingBatch
    digests: NDArray[np.uint8]
    fingerprint: str
    there: bool
    remade: bool
    found: Lookup | None = None

    @property
    def unknown(self) -> NDArray[np.bool_]:
        """(n,) whether a row's embedding is nowhere in the store."""
        if self.there:
            return np.zeros(len(self.batch), dtype=np.bool_)
        return np.ones(len(self.batch), dtype=np.bool_) if self.found is None else ~self.found.known


@dataclass
class _WindowState:
    """A window on its way through the steps of the work."""

    shards: list[_Looked]
    seconds: dict[str, float]
    prepared: PreparedWindow | None = None
    ran: RanWindow | None = None
    out_of_memory: int = 0


class LazyEncoder:
    """An encoder that is loaded on first need; a pickled copy has loaded nothing."""

    def __init__(self, config: EncoderConfig, *, expected: str | None = None) -> None:
        """Take the encoder's configuration, and the fingerprint that it must have."""
        self._config, self._expected = config, expected
        self._encoder: Encoder | None = None

    def __call__(self) -> Encoder:
        """Return the encoder, the same one every time.

        Raises:
            EncoderError: it is not the one expected, as on a machine with another model.
        """
        if self._encoder is None:
            from whiten_index.encoding.encoder import Encoder

            spec, folder = resolve_encoder(self._config)
            if self._expected not in (None, spec.fingerprint):
                raise EncoderError(
                    f"the model {spec.model} on {platform.node()} differs from that of the machine "
                    "the build was started on; put the same one on all machines"
                )
            self._encoder = Encoder(spec, folder, self._config)
        return self._encoder

    def on_device(self, device: str, threads: int) -> LazyEncoder:
        """Return the same encoder for a device, with so many threads at most."""
        threads = min(self._config.threads or threads, threads)
        config = replace(self._config, device=device, threads=threads)
        return LazyEncoder(config, expected=self._expected)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(LazyEncoder, expected=self._expected), (self._config,)


@dataclass(frozen=True)
class ShardWork:
    """Work of an executor; its items are windows of shards.

    Attributes:
        corpus: where rows come from.
        store: where embeddings go.
        encoder: gives the encoder on first need; never called where all is reused.
        dtype: how embeddings are kept.
        splitter: cuts texts into passages, None where they stay whole.
        rows: looks up rows that are in the store among others, None where whole shards alone count.
    """

    corpus: ParquetCorpus
    store: EmbeddingStore
    encoder: Callable[[], Encoder]
    dtype: StoreDtype
    splitter: PassageSplitter | None = None
    rows: RowFinder | None = None
    _under_way: set[str] | None = field(default_factory=set, repr=False, compare=False)

    def on_device(self, device: str, threads: int) -> ShardWork:
        """Return the same work for a worker, which keeps neither the plan nor what others do."""
        corpus = replace(self.corpus, shards=(), footers=())
        encoder = self.encoder
        if isinstance(encoder, LazyEncoder):
            encoder = encoder.on_device(device, threads)
        return replace(self, corpus=corpus, encoder=encoder, _under_way=None)

    def read(self, window: Window) -> _WindowState:
        """Read the shards and look up which the store has.

        Raises:
            CorpusError: the file is damaged or a row cannot be used.
        """
        state = _WindowState([], {})
        with _timed(state.seconds, "read"):
            state.shards += [self._look(shard) for shard in window]
        return state

    def prepare(self, state: _WindowState) -> _WindowState:
        """Tokenise the texts that the store does not have."""
        if texts := [text for shard in state.shards for text in _texts_to_encode(shard)]:
            with _timed(state.seconds, "load encoder"):
                encoder = self.encoder()
                self.store.results.save_runtime(encoder.runtime)
            with _timed(state.seconds, "tokenise"):
                state.prepared = encoder.prepare(texts)
        return state

    def run(self, state: _WindowState, advance: Callable[[int], None]) -> _WindowState:
        """Encode the texts that the store does not have."""
        read = sum(shard.batch.read for shard in state.shards)
        if state.prepared is None:
            advance(read)
            return state
        with _timed(state.seconds, "encode"):
            encoder = self.encoder()
            halved = encoder.budget.halvings
            rows = sum(_rows(shard.batch) for shard in state.shards if _texts_to_encode(shard))
            in_rows = _in_rows(advance, rows=rows, texts=len(state.prepared.texts))
            state.ran = encoder.run(state.prepared, advance=in_rows)
            advance(read - rows)
        state.out_of_memory = encoder.budget.halvings - halved
        state.prepared = None
        return state

    def finish(self, state: _WindowState) -> WindowResult:
        """Keep embeddings, moments and rows, each shard whole or not at all.

        Raises:
            EncoderError: the model gives NaN or infinity.
            StorageError: the store cannot be written.
        """
        encoded = None
        if state.ran is not None:
            # A device finishes its work here.
            with _timed(state.seconds, "encode"):
                encoded = self.encoder().collect(state.ran)
        results, start = [], 0
        with _timed(state.seconds, "store"):
            for shard in state.shards:
                stop = start + len(_texts_to_encode(shard))
                results.append(self._keep(shard, encoded, slice(start, stop)))
                start = stop
        counts = {}
        if encoded is not None:
            counts = {
                "duplicates": len(encoded.embeddings) - encoded.distinct,
                "tokens": encoded.tokens,
                "padded_tokens": encoded.padded_tokens,
                "out_of_memory": state.out_of_memory,
            }
        return WindowResult(tuple(results), counts, state.seconds)

    def batch_of(self, shard: Shard) -> TextBatch | EmbeddingBatch:
        """Read a shard, its texts cut into passages where these are asked for."""
        batch = self.corpus.read(shard)
        if self.splitter is None or isinstance(batch, EmbeddingBatch):
            return batch
        return split_batch(batch, self.splitter)

    def bytes_of(self, batch: TextBatch | EmbeddingBatch, found: Lookup) -> int:
        """Return about what a shard that is not there will take in the store.

        New embeddings of texts are thought to be such as float16 can hold.
        """
        size, unknown = (len(batch), int(self.store.encoder["dim"])), ~found.known
        whole: NDArray[np.floating] | None
        if isinstance(batch, EmbeddingBatch):
            whole = batch.embeddings
            new = whole[unknown]
        else:
            whole = new = np.zeros((np.count_nonzero(unknown), size[1]), dtype=np.float32)
        if not unknown.all():
            refers = self._finder.refer(self.dtype, batch, found, new)
            if refers.whole is None:
                own, sources = refers.own, len(refers.picks.sources)
                return folder_bytes(*size, own.itemsize, own=len(own), sources=sources)
            whole = refers.whole
        return folder_bytes(*size, as_kept(whole, self.dtype).itemsize)

    @property
    def _finder(self) -> RowFinder:
        assert self.rows is not None, "nothing is found without it"
        return self.rows

    def _look(self, shard: Shard) -> _Looked:
        batch = self.batch_of(shard)
        digests = batch.digests()
        if not len(batch):
            return _Looked(batch, digests, "", there=True, remade=False)
        fingerprint = self.store.shard_fingerprint(digests, self.dtype)
        # A shard that occurs twice is kept once: by the time of the second the first is there.
        there = fingerprint in (self._under_way or ()) or self.store.find(fingerprint) is not None
        remade = not there and self.store.shards.resolver.is_there(fingerprint)
        if self._under_way is not None:
            self._under_way.add(fingerprint)
        looked = _Looked(batch, digests, fingerprint, there, remade)
        if there or self.rows is None:
            return looked
        found = self.rows.known(self.dtype, batch).find(digests)
        return replace(looked, found=found) if found.known.any() else looked

    def _keep(self, shard: _Looked, encoded: Encoded | None, rows: slice) -> ShardResult:
        batch = shard.batch
        if not len(batch):
            part = CorpusPart("", "", 0, batch.read, 0)
            return ShardResult(part, None, 0, False, batch.skipped)
        if shard.there:
            stored = self.store.require(shard.fingerprint, verify=False)
        elif shard.found is not None:
            stored = self._derived(shard, shard.found, encoded, rows)
        else:
            embeddings, truncated = self._new_embeddings(shard, encoded, rows)
            moments_of = None if encoded is None else encoded.moments_of(rows)
            stored = self.store.write(
                shard.fingerprint,
                shard.digests,
                embeddings,
                dtype=self.dtype,
                truncated=truncated,
                moments_of=moments_of if isinstance(batch, TextBatch) else None,
            )
        documents = self.store.write_documents(batch.documents)
        part = CorpusPart(shard.fingerprint, documents, len(batch), batch.read, stored.truncated)
        return ShardResult(part, stored, _rows_to_encode(shard), shard.remade, batch.skipped)

    def _derived(
        self, shard: _Looked, found: Lookup, encoded: Encoded | None, rows: slice
    ) -> StoredShard:
        """Keep a shard some of whose rows others hold: by reference, or whole where few are."""
        new, cut = self._new_embeddings(shard, encoded, rows)
        truncated = np.zeros(len(shard.batch), dtype=np.bool_)
        truncated[~found.known] = cut
        truncated[found.known] = self._cut_before(shard, found)
        refers = self._finder.refer(self.dtype, shard.batch, found, new)
        if refers.whole is not None:
            return self.store.write(
                shard.fingerprint,
                shard.digests,
                refers.whole,
                dtype=self.dtype,
                truncated=truncated,
            )
        return self.store.shards.derive(
            shard.fingerprint,
            shard.digests,
            refers.picks,
            refers.own,
            truncated=truncated,
            moments=self._finder.moments(refers),
            dtype=type_of(refers.gathered.dtype),
        )

    def _new_embeddings(
        self, shard: _Looked, encoded: Encoded | None, rows: slice
    ) -> tuple[NDArray[np.floating], NDArray[np.bool_]]:
        """Return the embeddings (m, d) of rows that are nowhere, and which of their texts were cut.

        ``rows`` says where they are among what was encoded.
        """
        if isinstance(shard.batch, EmbeddingBatch):
            given = shard.batch.embeddings
            own = given if shard.found is None else given[shard.unknown]
            return own, np.zeros(len(own), dtype=np.bool_)
        if rows.start == rows.stop:
            empty = np.empty((0, int(self.store.encoder["dim"])), dtype=np.float32)
            return empty, np.empty(0, dtype=np.bool_)
        assert encoded is not None
        return encoded.embeddings[rows], encoded.truncated[rows]

    def _cut_before(self, shard: _Looked, found: Lookup) -> NDArray[np.bool_]:
        """Return which of the rows that are known (m,) were cut to the encoder's limit."""
        known = self._finder.known(self.dtype, shard.batch)
        rows = np.flatnonzero(found.known)
        cut = np.zeros(len(found.shard), dtype=np.bool_)
        for number in np.unique(found.shard[rows]):
            inside = rows[found.shard[rows] == number]
            flags = self.store.shards.truncated(known.shards[number])
            cut[inside] = flags[found.row[inside]]
        return cut[rows]


def _rows(batch: TextBatch | EmbeddingBatch) -> int:
    """Return the rows of the corpus that a batch holds, in passages or whole."""
    return batch.read - sum(batch.skipped.values())


def _in_rows(advance: Callable[[int], None], *, rows: int, texts: int) -> Callable[[int], None]:
    """Return an ``advance`` for texts that tells the rows which they are passages of."""
    done = 0

    def told(count: int) -> None:
        nonlocal done
        before, done = done, done + count
        advance(done * rows // texts - before * rows // texts)

    return told


def _texts_to_encode(shard: _Looked) -> list[str]:
    if shard.there or isinstance(shard.batch, EmbeddingBatch):
        return []
    if shard.found is None:
        return shard.batch.texts
    return [shard.batch.texts[row] for row in np.flatnonzero(shard.unknown)]


def _rows_to_encode(shard: _Looked) -> int:
    """Return the rows of the corpus that have a text, or a passage, that is to be encoded."""
    if shard.there:
        return 0
    if shard.found is None:
        return _rows(shard.batch)
    if PASSAGE not in shard.batch.documents.column_names:
        return int(np.count_nonzero(shard.unknown))
    begins = shard.batch.documents[PASSAGE].to_numpy() == 0
    return len(np.unique(np.cumsum(begins)[shard.unknown]))


@contextlib.contextmanager
def _timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[step] = seconds.get(step, 0.0) + time.perf_counter() - began


def split_batch(batch: TextBatch, splitter: PassageSplitter) -> TextBatch:
    """Return the passages of a batch, those of a document one after the other.

    The documents repeat the id and the kept columns and add ``PASSAGE_COLUMNS``; ``read`` and
    ``skipped`` stay counts of the corpus's rows.
    """
    spans = splitter.split(batch.texts)
    flat = [span for found in spans for span in found]
    counts = np.array([len(found) for found in spans], dtype=np.int64)
    source = np.repeat(np.arange(len(batch)), counts)
    texts = [batch.texts[row][start:end] for row, (start, end) in zip(source, flat, strict=True)]
    columns = {
        PASSAGE: pa.array([number for found in spans for number in range(len(found))], pa.int32()),
        PASSAGE_START: pa.array([start for start, _ in flat], pa.int32()),
        PASSAGE_END: pa.array([end for _, end in flat], pa.int32()),
        PASSAGE_TEXT: pa.array(texts, pa.large_string()),
    }
    documents = batch.documents.take(pa.array(source))
    for name, values in columns.items():
        documents = documents.append_column(name, values)
    return TextBatch(documents, texts, batch.read, batch.skipped)


def shard_work(config: BuildConfig, corpus: ParquetCorpus, *, write: bool = True) -> ShardWork:
    """Return the work on the shards of a corpus; ``write`` makes the store's folder."""
    make = EmbeddingStore.create if write else EmbeddingStore
    if config.embedding_column is not None:
        encoder_json = _column_encoder(config, corpus)
        identity = {key: encoder_json[key] for key in ("kind", "dim")}
        store = make(config.store_place, encoder_json, fingerprint(identity))
        known = encoder_json["query_encoder"]
        asked = config.encoder_config()
        queries = LazyEncoder(_at_commit(asked, known)) if known else _no_encoder
        return ShardWork(corpus, store, queries, config.dtype_kept())
    encoder_config = config.encoder_config()
    spec, folder = resolve_encoder(encoder_config)
    passages = config.passage_config()
    splitter = None if passages is None else PassageSplitter.load(spec, folder, passages)
    store = make(config.store_place, spec.to_json(), spec.fingerprint)
    source = LazyEncoder(_at_commit(encoder_config, store.encoder), expected=spec.fingerprint)
    return ShardWork(corpus, store, source, config.dtype_kept(), splitter=splitter)


def _column_encoder(config: BuildConfig, corpus: ParquetCorpus) -> dict[str, Any]:
    """Return what stands for the encoder of an embedding column.

    ``query_encoder`` is the model that queries are encoded with, where the user named one.
    """
    query: EncoderSpec | None = None
    if config.model is not None:
        query, _ = resolve_encoder(config.encoder_config())
        if query.dim != corpus.dim:
            raise CorpusError(
                f"column {config.embedding_column} holds {corpus.dim}-dim embeddings and "
                f"{config.model} gives {query.dim}; name the model they were made with"
            )
    return {
        "kind": "column",
        "column": config.embedding_column,
        "dim": corpus.dim,
        "query_encoder": None if query is None else query.to_json(),
    }


def _at_commit(config: EncoderConfig, encoder: Mapping[str, Any]) -> EncoderConfig:
    """Return a configuration with the hub's commits it was resolved to: a branch may move on."""
    found = {name: encoder.get(name) for name in ("revision", "code_revision")}
    commits = {name: each for name, each in found.items() if each not in (None, "embedded")}
    return replace(config, **commits)


def _no_encoder() -> Encoder:
    raise ConfigError(
        "texts are to be encoded beside a column of embeddings; name the model they were made with "
        "by --model"
    )
