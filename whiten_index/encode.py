"""Corpus to store: every shard that is not there yet is encoded, and the corpus remembered."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from whiten_index.config import BuildConfig
from whiten_index.corpus import ParquetCorpus
from whiten_index.encoding import EncoderConfig, EncoderSpec, resolve_encoder
from whiten_index.errors import CorpusError
from whiten_index.lock import only_writer
from whiten_index.manifest import fingerprint
from whiten_index.progress import Progress, Silent, Stages
from whiten_index.runners import LocalRunner
from whiten_index.shard import ShardResult, ShardWork
from whiten_index.store import CorpusPart, CorpusRecord, EmbeddingStore

if TYPE_CHECKING:
    from whiten_index.encoding import Encoder


@dataclass
class Counts:
    """What became of the rows: ``read`` is the sum of the others but ``truncated``.

    Attributes:
        read: rows read from the corpus.
        encoded: rows encoded in this run.
        reused: rows whose embeddings were in the store.
        truncated: texts cut to the encoder's limit, encoded and reused alike.
        skipped: reason -> rows left out.
        remade_shards: shards found damaged and encoded again.
        float32_shards: shards kept in float32 because float16 could not hold them.
    """

    read: int = 0
    encoded: int = 0
    reused: int = 0
    truncated: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    remade_shards: int = 0
    float32_shards: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the counts as JSON values."""
        return {**vars(self), "skipped": dict(sorted(self.skipped.items()))}


@dataclass(frozen=True)
class EncodeReport:
    """What an encode did.

    Attributes:
        store: where the embeddings are.
        record: the corpus as shards of the store.
        counts: what became of the rows.
        stages: seconds and rows by stage.
    """

    store: EmbeddingStore
    record: CorpusRecord
    counts: Counts
    stages: Stages

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "store": str(self.store.root),
            "encoder": self.store.encoder,
            "counts": self.counts.to_json(),
            "rows": self.record.rows,
            "bytes": {"raw": raw_bytes(self.store, self.record)},
            "seconds": self.stages.seconds,
            "stage_rows": self.stages.rows,
        }


def encode_corpus(config: BuildConfig, *, progress: Progress | None = None) -> EncodeReport:
    """Encode a corpus into a store, shard by shard, leaving out what is done.

    Args:
        config: ``corpus`` and ``store`` (or ``out``) must be there.
        progress: who is told of the stages.

    Raises:
        CorpusError: the corpus or a row of it cannot be used.
        EncoderError: the model cannot be found or loaded.
        BusyError: another process is filling the same store.
        OutputError: the store cannot be written.
    """
    stages = Stages(progress or Silent())
    corpus = open_corpus(config, stages)
    return encode_shards(config, corpus, stages)


def open_corpus(config: BuildConfig, stages: Stages) -> ParquetCorpus:
    """Open the corpus and make sure its ids are unique, before any work is done."""
    corpus = ParquetCorpus.open(config.corpus_config())
    if config.id_column is not None:
        with stages.stage("check ids", corpus.rows) as watcher:
            corpus.check_ids()
            watcher.advance(corpus.rows)
    return corpus


def encode_shards(config: BuildConfig, corpus: ParquetCorpus, stages: Stages) -> EncodeReport:
    """Encode the shards that the store does not have, and remember the corpus in it."""
    work = shard_work(config, corpus)
    with only_writer(work.store.folder, what="store"):
        work.store.tidy()
        return _encode_and_record(work, corpus, stages)


def _encode_and_record(work: ShardWork, corpus: ParquetCorpus, stages: Stages) -> EncodeReport:
    counts, parts = Counts(), list[CorpusPart]()
    with stages.stage("encode", corpus.rows) as watcher:
        for result in LocalRunner().map(replace(work, advance=watcher.advance), corpus.shards):
            parts.append(result.part)
            _count(counts, result, wanted=work.dtype.value)
            _add_seconds(stages, result)
    record = CorpusRecord(corpus.config.source_identity(), tuple(parts), dict(counts.skipped))
    if not record.rows:
        raise CorpusError(
            f"none of the {counts.read} rows read can be used "
            f"({', '.join(f'{n} {reason}' for reason, n in counts.skipped.items())}); "
            "check the columns named and the row filter"
        )
    work.store.save_corpus(record)
    return EncodeReport(work.store, record, counts, stages)


def shard_work(config: BuildConfig, corpus: ParquetCorpus, *, write: bool = True) -> ShardWork:
    """Return the work on one shard, the encoder settled but not loaded.

    Args:
        config: of the build.
        corpus: opened.
        write: make the store's folder; False to look only.
    """
    make = EmbeddingStore.create if write else EmbeddingStore
    if config.embedding_column is not None:
        encoder_json = column_encoder(config, corpus)
        identity = {key: encoder_json[key] for key in ("kind", "dim")}
        store = make(config.store_path, encoder_json, fingerprint(identity))
        return ShardWork(corpus, store, _no_encoder, config.dtype_kept())
    encoder_config = config.encoder_config()
    spec, _ = resolve_encoder(encoder_config)
    store = make(config.store_path, spec.to_json(), spec.fingerprint)
    loader = functools.cache(functools.partial(_load_encoder, encoder_config))
    return ShardWork(corpus, store, loader, config.dtype_kept())


def column_encoder(config: BuildConfig, corpus: ParquetCorpus) -> dict[str, Any]:
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


def raw_bytes(store: EmbeddingStore, record: CorpusRecord) -> int:
    """Return the bytes of a corpus's raw embeddings in the store."""
    sizes = {}
    for part in record.parts:
        if part.rows and part.shard not in sizes:
            found = store.find(part.shard, verify=False)
            sizes[part.shard] = found.bytes if found else 0
    return sum(sizes.values())


def _load_encoder(config: EncoderConfig) -> Encoder:
    from whiten_index.encoding import Encoder

    return Encoder(*resolve_encoder(config), config)


def _no_encoder() -> Encoder:
    raise AssertionError("a corpus of embeddings is never encoded")


def _count(counts: Counts, result: ShardResult, *, wanted: str) -> None:
    counts.read += result.part.read
    counts.truncated += result.part.truncated
    counts.skipped.update(result.skipped)
    if result.reused:
        counts.reused += result.part.rows
    else:
        counts.encoded += result.part.rows
    counts.remade_shards += result.remade
    if result.stored is not None and wanted == "float16":
        counts.float32_shards += result.stored.dtype == "float32"


def _add_seconds(stages: Stages, result: ShardResult) -> None:
    """Show the parts of the encode stage too: they overlap nothing here, and sum up to it."""
    for name, seconds in result.seconds.items():
        key = f"encode/{name}"
        rows = result.part.read if name == "read" else result.part.rows
        stages.seconds[key] = stages.seconds.get(key, 0.0) + seconds
        stages.rows[key] = stages.rows.get(key, 0) + rows
