"""Encoding of a window of shards: read, look up in the store, encode the rest, store."""

import contextlib
import functools
import itertools
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from whiten_index import __version__
from whiten_index.artifacts.manifest import fingerprint
from whiten_index.corpus.batches import (
    ID,
    PASSAGE,
    PASSAGE_END,
    PASSAGE_START,
    PASSAGE_TEXT,
    EmbeddingBatch,
    TextBatch,
)
from whiten_index.corpus.parquet_corpus import ParquetCorpus
from whiten_index.corpus.sharding import Shard
from whiten_index.distributed.executors import Work
from whiten_index.encoding.canary import require_alike, spec_with_canary
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.encoding.load_encoder import local_model, make_encoder, resolve_encoder
from whiten_index.encoding.passages import PassageSplitter
from whiten_index.encoding.spec import Spec, recorded_spec
from whiten_index.encoding.window_encoder import WindowEncoder
from whiten_index.errors import ConfigError, CorpusError, EncoderError, RefusedTextError
from whiten_index.store.digest_index import Lookup
from whiten_index.store.dtypes import StoreDtype
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.notes import UNFINISHED
from whiten_index.store.records import CorpusPart
from whiten_index.store.segments import Segment, digests_name, keyed

if TYPE_CHECKING:
    from whiten_index.encoding.batching import Batches
    from whiten_index.encoding.remote import RemoteRun
    from whiten_index.encoding.window_encoder import Encoded, TextWindow
    from whiten_index.pipeline.build_config import BuildConfig

Window = tuple[Shard, ...]
# What an interrupted run keeps of a window.
_KEPT = {"digests": "mb", "embeddings": "md"}


@dataclass
class Counts:
    """Counts of rows: ``read`` is the sum of ``encoded``, ``reused`` and ``skipped``."""

    read: int = 0  # rows read from the corpus
    encoded: int = 0  # rows encoded in this run
    reused: int = 0  # rows whose embeddings were in the store
    truncated: int = 0  # texts cut to the encoder's limit, encoded and reused alike
    passages: int = 0  # embeddings of the rows, if texts were cut into passages; else 0
    duplicates: int = 0  # rows among the encoded that took the embedding of an identical text
    tokens: int = 0  # tokens encoded in this run
    padded_tokens: int = 0  # likewise, padding counted
    out_of_memory: int = 0  # batches that did not fit into the memory, and were halved
    skipped: Counter[str] = field(default_factory=Counter)  # reason -> rows left out
    remade_shards: int = 0  # shards whose rows were found damaged and encoded again
    kept_files: int = 0  # unchanged files, which were not read

    def add(self, other: "Counts") -> None:
        """Add the counts of other rows."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def to_json(self) -> dict[str, Any]:
        """Return the counts as JSON values."""
        return {**vars(self), "skipped": dict(sorted(self.skipped.items()))}


@dataclass(frozen=True)
class ReadShard:
    """A shard that was read and looked up in the store.

    Its digests (n, 16) have a name. ``found`` are the places of its rows, None if one segment has
    all in order. ``missing`` (n,) are in no segment, ``under_way`` if an earlier shard has them.
    """

    batch: TextBatch | EmbeddingBatch
    digests: NDArray[np.uint8]
    name: str
    missing: NDArray[np.bool_]
    found: Lookup | None = None
    under_way: bool = False

    @property
    def to_encode(self) -> NDArray[np.int64]:
        """Rows (m,) to encode."""
        return np.flatnonzero(self.missing & (not self.under_way))

    @functools.cached_property
    def texts(self) -> list[str]:
        """Texts to encode."""
        if isinstance(self.batch, EmbeddingBatch):
            return []
        return [self.batch.texts[row] for row in self.to_encode]

    @property
    def rows_to_encode(self) -> int:
        """Rows of the corpus with a text, or a passage, that is missing."""
        if PASSAGE not in self.batch.documents.column_names:
            return len(self.to_encode)
        begins = self.batch.documents[PASSAGE].to_numpy() == 0
        return len(np.unique(np.cumsum(begins)[self.to_encode]))


@dataclass
class EncodedWindow:
    """A window of shards in the course of its encoding.

    Finished, it has parts of the corpus and counts in place of texts. Seconds by step overlap.
    """

    shards: list[ReadShard]
    parts: list[tuple[CorpusPart, Mapping[str, int]]] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    seconds: dict[str, float] = field(default_factory=dict)
    prepared: "TextWindow | None" = None
    ran: "Batches | RemoteRun | None" = None
    key: dict[str, Any] = field(default_factory=dict)  # of what an interrupted run keeps of it
    saved: bool = False  # whether something is kept

    @property
    def order(self) -> NDArray[np.uint8]:
        """Digests (m, 16) of the distinct texts to encode, in the order in which they are."""
        assert self.prepared is not None
        _, first = np.unique(self.prepared.places, return_index=True)
        return np.concatenate([shard.digests[shard.to_encode] for shard in self.shards])[first]

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time the block as a step."""
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    @contextlib.contextmanager
    def naming_rows(self) -> Iterator[None]:
        """Name the row of a text that an API refuses."""
        try:
            yield
        except RefusedTextError as error:
            for shard in self.shards:
                for row in shard.to_encode[[text == error.text for text in shard.texts]]:
                    found = shard.batch.documents[ID][int(row)].as_py()
                    raise EncoderError(f"row {found}: {error}") from error
            raise


class LazyEncoder:
    """An encoder that is loaded on first need; a pickled copy has loaded nothing.

    Fingerprint and canary must be those of the recorded one, if it is known.
    """

    def __init__(self, config: EncoderConfig, recorded: Spec | None = None) -> None:
        self._config, self._recorded = config, recorded
        self.loaded: WindowEncoder | None = None  # None until it is needed

    def __call__(self) -> WindowEncoder:
        """Return the encoder, the same one every time."""
        if self.loaded is None:
            (spec, folder), known = resolve_encoder(self._config), self._recorded
            if known is not None and known.fingerprint != spec.fingerprint:
                raise EncoderError(
                    f"the model {spec.model} on {platform.node()} differs from that of the store, "
                    "or of the machine the build was started on; put the same one on all machines"
                )
            loaded = make_encoder(spec, folder, self._config)
            if known is not None and known.canary:
                require_alike(known, spec_with_canary(loaded))
            self.loaded = loaded
        return self.loaded

    def on_device(self, device: str, threads: int) -> "LazyEncoder":
        """Return the same encoder for a device, with so many threads at most."""
        threads = min(self._config.threads or threads, threads)
        config = replace(self._config, device=device, threads=threads)
        return LazyEncoder(config, self._recorded)

    def __reduce__(self) -> tuple[Any, ...]:
        return LazyEncoder, (self._config, self._recorded)


@dataclass(frozen=True)
class ShardWork(Work):
    """Work of an executor on windows of shards, whose new rows are stored whole or not at all.

    ``encoder`` is only called if something is missing.
    """

    corpus: ParquetCorpus
    store: EmbeddingStore
    encoder: Callable[[], WindowEncoder]
    dtype: StoreDtype
    splitter: PassageSplitter | None = None
    # In a migration: holds a row of each text, of this model or bridged to its space.
    bridged: EmbeddingStore | None = None
    _under_way: set[str] | None = field(default_factory=set, repr=False, compare=False)

    @property
    def kept(self) -> EmbeddingStore:
        """The store that has all rows of the corpus in the end, and its record."""
        return self.store if self.bridged is None else self.bridged

    def on_device(self, device: str, threads: int) -> "ShardWork":
        """Return the same work for a worker, which keeps neither the plan nor what others do."""
        corpus = replace(self.corpus, shards=())
        encoder = self.encoder
        if isinstance(encoder, LazyEncoder):
            encoder = encoder.on_device(device, threads)
        return replace(self, corpus=corpus, encoder=encoder, _under_way=None)

    def read(self, window: Window) -> EncodedWindow:
        """Read the shards and look up which rows the store has."""
        state = EncodedWindow([])
        with state.step("read"):
            state.shards += [self.look(shard) for shard in window]
        return state

    def prepare(self, state: EncodedWindow) -> EncodedWindow:
        """Tokenise the texts that the store does not have."""
        if texts := [text for shard in state.shards for text in shard.texts]:
            with state.step("load encoder"):
                encoder = self.encoder()
                self.store.keep_canary(functools.partial(spec_with_canary, encoder))
                self.store.results.save_runtime(encoder.runtime)
            with state.step("tokenise"):
                state.prepared = encoder.prepare(texts)
            # Other shards that are finished meanwhile leave fewer texts to encode.
            texts_name = digests_name(np.concatenate([shard.digests for shard in state.shards]))
            state.key = {"texts": texts_name, "version": __version__, **encoder.runtime}
            kept = self.store.results.sample(state.key, _KEPT, UNFINISHED)
            state.saved = kept is not None
            if kept is not None and kept["embeddings"].shape[1] == self.store.dim:
                rows = {digest.tobytes(): row for row, digest in enumerate(kept["digests"])}
                found = (rows.get(digest.tobytes(), -1) for digest in state.order)
                first = list(itertools.takewhile(lambda row: row >= 0, found))
                known = kept["embeddings"][np.array(first, dtype=np.int64)]
                state.prepared = replace(state.prepared, known=known)
        return state

    def run(self, state: EncodedWindow, advance: Callable[[int], None]) -> EncodedWindow:
        """Encode the texts that the store does not have."""
        rows = sum(shard.batch.read for shard in state.shards)
        if state.prepared is None:
            advance(rows)
            return state
        with state.step("encode"), state.naming_rows():
            encoder = self.encoder()
            order = state.order
            in_rows = _in_rows(advance, rows=rows, texts=len(state.prepared.texts))

            def save(found: NDArray[np.float32]) -> None:
                state.saved = len(found) > 0
                if not state.saved:
                    self.store.results.forget_unfinished(state.key)
                    return
                kept: dict[str, NDArray[Any]] = {"digests": order[: len(found)]}
                kept["embeddings"] = found
                self.store.results.save_sample(state.key, kept, UNFINISHED)

            state.ran = encoder.run(state.prepared, advance=in_rows, stopped=save)
            state.counts.out_of_memory = state.ran.out_of_memory
        state.prepared = None
        return state

    def finish(self, state: EncodedWindow) -> EncodedWindow:
        """Store the shards."""
        counts, encoded, start = state.counts, None, 0
        if state.ran is not None:
            # A device finishes its work here.
            with state.step("encode"), state.naming_rows():
                encoded = self.encoder().collect(state.ran)
            counts.duplicates = len(encoded.embeddings) - encoded.distinct
            counts.tokens, counts.padded_tokens = encoded.tokens, encoded.padded_tokens
            rows = sum(shard.rows_to_encode for shard in state.shards)
            counts.reused = encoded.known * rows // len(encoded.embeddings)
            counts.encoded = -counts.reused  # to which all rows are added below
        with state.step("store"):
            for shard in state.shards:
                stop = start + len(shard.texts)
                part = self._keep(shard, encoded, slice(start, stop), counts)
                state.parts.append((part, shard.batch.skipped))
                start = stop
            if state.saved:
                self.store.results.forget_unfinished(state.key)
        state.shards, state.ran = [], None
        return state

    def stop(self, ran: EncodedWindow) -> None:
        """Let an API that asks for a pause be waited for no more."""
        if (window := ran.ran) is not None:  # it may be finished at any moment
            self.encoder().stop(window)

    def batch_of(self, shard: Shard) -> TextBatch | EmbeddingBatch:
        """Read a shard, its texts cut into passages if the options say so."""
        batch = self.corpus.read(shard)
        if self.splitter is None or isinstance(batch, EmbeddingBatch):
            return batch
        return _split(batch, self.splitter)

    def digests_of(self, batch: TextBatch | EmbeddingBatch) -> NDArray[np.uint8]:
        """Return the digests (n, 16) by which the store knows the rows of a batch."""
        return keyed(batch.digests(), self.dtype)

    def look(self, shard: Shard, *, verify: bool = True) -> ReadShard:
        """Read a shard and look up its rows; ``verify`` checks embeddings that are there."""
        batch = self.batch_of(shard)
        digests = self.digests_of(batch)
        name, none = digests_name(digests), np.zeros(len(batch), dtype=np.bool_)
        if not len(batch) or self.kept.segment(name, verify=verify) is not None:
            return ReadShard(batch, digests, name if len(batch) else "", none)
        found, under_way = self.store.index(verify=verify).find(digests), False
        missing = ~found.known
        if self.bridged is not None:
            missing &= ~self.bridged.index(verify=verify).find(digests).known
        if self._under_way is not None and missing.any():
            # The same rows in the same order are encoded once.
            new = digests_name(digests[missing])
            under_way = new in self._under_way
            self._under_way.add(new)
        return ReadShard(batch, digests, name, missing, found, under_way)

    def _keep(
        self, shard: ReadShard, encoded: "Encoded | None", rows: slice, counts: Counts
    ) -> CorpusPart:
        """Store the new rows of a shard, which are ``rows`` of what was encoded, and count all."""
        batch = shard.batch
        counts.read += batch.read
        counts.skipped.update(batch.skipped)
        if not len(batch):
            return CorpusPart("", "", 0, batch.read, 0, 0)
        truncated, size = self._write(shard, encoded, rows, counts)
        digests = self.kept.write_digests(shard.digests)
        documents = self.kept.write_documents(batch.documents)
        counts.encoded += shard.rows_to_encode
        counts.reused += batch.read - sum(batch.skipped.values()) - shard.rows_to_encode
        counts.truncated += truncated
        counts.passages += 0 if self.splitter is None else len(batch)
        return CorpusPart(digests, documents, len(batch), batch.read, truncated, size)

    def _write(
        self, shard: ReadShard, encoded: "Encoded | None", rows: slice, counts: Counts
    ) -> tuple[int, int]:
        """Store the new rows; return the texts cut to the limit and the bytes of all rows."""
        store, new = self.store, shard.digests[shard.missing]
        whole = self.kept.segment(shard.name, verify=False) if shard.found is None else None
        if whole is not None:
            return whole.truncated, whole.bytes
        assert shard.found is not None
        truncated, size = store.truncated_and_bytes(shard.found)
        if len(new):
            name = digests_name(new)
            if shard.under_way:
                segment = store.require_segment(name)
            else:
                # Damaged embeddings are replaced.
                counts.remade_shards += store.mirror.holds(store.segments_folder / name)
                segment = self._write_segment(shard, new, encoded, rows)
            truncated, size = truncated + segment.truncated, size + segment.bytes
        return truncated, size if self.bridged is None else self._copy(shard, self.bridged)

    def _copy(self, shard: ReadShard, bridged: EmbeddingStore) -> int:
        """Copy rows of the model that the bridged ones lack; return the bytes of all rows there."""
        places = bridged.index(verify=False).find(shard.digests)
        size = bridged.truncated_and_bytes(places)[1]
        for rows in (shard.missing, ~places.known & ~shard.missing):
            if len(digests := shard.digests[rows]):
                copied = self.store.rows(digests_name(digests), digests.copy)[:]
                size += bridged.write(digests, copied, dtype=self.dtype).bytes
        return size

    def _write_segment(
        self, shard: ReadShard, new: NDArray[np.uint8], encoded: "Encoded | None", rows: slice
    ) -> Segment:
        found, missing, truncated = shard.found, shard.missing, None
        if isinstance(shard.batch, EmbeddingBatch):
            embeddings = shard.batch.embeddings
            embeddings = embeddings if missing.all() else embeddings[missing]
        else:
            assert encoded is not None
            embeddings, truncated = encoded.embeddings[rows], encoded.truncated[rows]
        variances = None
        if self.dtype is StoreDtype.FLOAT16 and found is not None and found.known.any():
            # Few rows do not show how widely the numbers spread.
            nearest = found.names[np.argmax(np.bincount(found.segment[found.known]))]
            self.store.require_segment(nearest)  # in a bucket it may not be here
            before = self.store.segment_moments(nearest)
            variances = np.diag(before.scatter) / before.count if before.count > 1 else None
        return self.store.write(
            new, embeddings, dtype=self.dtype, truncated=truncated, variances=variances
        )


def _in_rows(advance: Callable[[int], None], *, rows: int, texts: int) -> Callable[[int], None]:
    """Return an ``advance`` for texts, which stand for rows."""
    done = 0

    def advance_texts(count: int) -> None:
        nonlocal done
        before, done = done, done + count
        advance(done * rows // texts - before * rows // texts)

    return advance_texts


def _split(batch: TextBatch, splitter: PassageSplitter) -> TextBatch:
    """Return the passages of a batch; ``read`` and ``skipped`` stay counts of the corpus's rows."""
    spans = splitter.split(batch.texts)
    flat = [span for found in spans for span in found]
    source = np.repeat(np.arange(len(batch)), [len(found) for found in spans])
    texts = [batch.texts[row][start:end] for row, (start, end) in zip(source, flat, strict=True)]
    columns = {
        PASSAGE: [number for found in spans for number in range(len(found))],
        PASSAGE_START: [start for start, _ in flat],
        PASSAGE_END: [end for _, end in flat],
    }
    documents = batch.documents.take(pa.array(source))
    for name, values in columns.items():
        documents = documents.append_column(name, pa.array(values, pa.int32()))
    documents = documents.append_column(PASSAGE_TEXT, pa.array(texts, pa.large_string()))
    return TextBatch(documents, texts, batch.read, batch.skipped)


def shard_work(
    config: "BuildConfig",
    corpus: ParquetCorpus,
    *,
    write: bool = True,
    bridged: EmbeddingStore | None = None,
) -> ShardWork:
    """Return the work on the shards of a corpus; ``write`` makes the store's folder."""
    make = EmbeddingStore.create if write else EmbeddingStore
    if config.embedding_column is not None:
        encoder_json = _column_encoder(config, corpus)
        identity = {key: encoder_json[key] for key in ("kind", "dim")}
        store = make(config.store_place, encoder_json, fingerprint(identity))
        known, asked = encoder_json["query_encoder"], config.encoder_config()
        queries = LazyEncoder(_at_commit(asked, known or {}), recorded_spec(store.encoder))
        return ShardWork(corpus, store, queries if known else _no_encoder, config.dtype_kept())
    encoder_config = config.encoder_config()
    spec: Spec
    if config.passages is None:
        spec, splitter = resolve_encoder(encoder_config)[0], None
    else:
        spec, folder = local_model(encoder_config, by="--passage-tokens")
        splitter = PassageSplitter.load(spec, folder, *config.passages)
        folder.require_unchanged()
    store = make(config.store_place, spec.to_json(), spec.fingerprint)
    asked = _at_commit(encoder_config, store.encoder)
    source = LazyEncoder(asked, recorded_spec(store.encoder))
    return ShardWork(corpus, store, source, config.dtype_kept(), splitter, bridged)


def _column_encoder(config: "BuildConfig", corpus: ParquetCorpus) -> dict[str, Any]:
    """Return the record of an embedding column, and of the encoder of queries if one is named."""
    found = {"kind": "column", "column": config.embedding_column, "dim": corpus.dim}
    if config.model is None:
        return {**found, "query_encoder": None}
    query, _ = resolve_encoder(config.encoder_config())
    if query.dim != corpus.dim:
        raise CorpusError(
            f"column {config.embedding_column} holds {corpus.dim}-dim embeddings and "
            f"{config.model} gives {query.dim}; name the model they were made with"
        )
    return {**found, "query_encoder": query.to_json()}


def _at_commit(config: EncoderConfig, encoder: Mapping[str, Any]) -> EncoderConfig:
    """Return a configuration with the hub's commits it was resolved to: a branch may move on."""
    found = {name: encoder.get(name) for name in ("revision", "code_revision")}
    commits = {name: each for name, each in found.items() if each not in (None, "embedded")}
    return replace(config, **commits)


def _no_encoder() -> WindowEncoder:
    raise ConfigError(
        "texts must be encoded, and the corpus is a column of embeddings; name the model they were "
        "made with by --model"
    )
