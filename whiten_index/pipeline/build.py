"""The main job: corpus → store → moments → whitening → FAISS → published index."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from whiten_index.artifacts.cached_storage import naming, place_of
from whiten_index.artifacts.lock import only_writer
from whiten_index.artifacts.object_store import Tag
from whiten_index.artifacts.storage import Here, Place
from whiten_index.corpus.parquet_corpus import ParquetCorpus
from whiten_index.distributed.executors import Executor, SerialExecutor
from whiten_index.encoding.spec import resolve_encoder
from whiten_index.errors import ArtifactError, ConfigError, StorageError
from whiten_index.index.choice import AUTO, IndexPlan
from whiten_index.index.factory import inner_index
from whiten_index.index.gpu import require_device
from whiten_index.index.library import load_faiss, set_threads
from whiten_index.index.training import require_training_rows
from whiten_index.paths import is_uri
from whiten_index.pipeline.build_config import BuildConfig
from whiten_index.pipeline.encode import (
    Counts,
    EncodeReport,
    encode_corpus,
    encode_shards,
    note_runtimes,
    open_corpus,
)
from whiten_index.pipeline.executor_session import executor_session, with_absolute_paths
from whiten_index.pipeline.fit import choose_index, fit_whitening, possible_widths, read_labels
from whiten_index.pipeline.publish import Settled, settle, write_version
from whiten_index.pipeline.select_labelled import Labels
from whiten_index.progress import Progress, Silent, Stages
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.versions import published
from whiten_index.versions.published import (
    CURRENT,
    Fill,
    ensure_index_id,
    find_version,
    next_version,
    read_published,
    set_current,
    tidy,
)
from whiten_index.whitening.transform import Whitening

__all__ = ["BuildConfig", "BuildReport", "build_index", "encode_corpus"]


@dataclass(frozen=True)
class BuildReport:
    """What a build did.

    Attributes:
        out: the index folder, or its URI.
        version: the published version.
        up_to_date: whether that version was there already, made of the same inputs and choices.
        manifest: of the version.
        encoded: the report of its first half.
    """

    out: Place
    version: str
    up_to_date: bool
    manifest: Mapping[str, Any]
    encoded: EncodeReport

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "out": str(self.out),
            "store": str(self.encoded.store.place),
            "version": self.version,
            "up_to_date": self.up_to_date,
            "counts": self.encoded.counts.to_json(),
            "rows": self.encoded.record.rows,
            "whitening": self.manifest["whitening"],
            "choice": self.manifest.get("choice"),
            "factory": self.manifest["factory"],
            "bytes": self.manifest["bytes"],
            "made_by": self.manifest["made_by"],
            "runner": self.encoded.runner,
            "seconds": self.encoded.stages.seconds,
            "stage_rows": self.encoded.stages.rows,
        }


def build_index(config: BuildConfig, *, progress: Progress | None = None) -> BuildReport:
    """Build and publish an index; what is done already is found and not done again.

    Args:
        config: ``out`` must be there, and ``corpus`` or ``store``.
        progress: who is told of the stages.

    Raises:
        CorpusError: the corpus or a row of it cannot be used.
        EncoderError: the model cannot be found or loaded.
        WhiteningError: the embeddings do not allow the whitening asked for.
        ArtifactError: the store is damaged and there is no corpus to mend it from.
        BusyError: another process is writing the same folder.
        StorageError: the disk is full or cannot be written.
        ClusterError: the cluster cannot be reached, or has no worker left.
        PartialFailureError: some shards failed on every machine; the others are in the store.
    """
    if config.out is None:
        raise ConfigError("say where the index goes: --out DIR")
    config = with_absolute_paths(config)
    out, mirror = place_of(config.out_place)
    stages = Stages(progress or Silent())
    load_faiss()
    labels = read_labels(config)
    if config.threads is not None:
        set_threads(config.threads)
    with naming(), only_writer(out, what="index"):
        before = mirror.latest(out / CURRENT)
        tidy(out)
        with executor_session(config, stages) as (config, executor):
            encoded = embeddings(config, labels, stages, executor)
            register(encoded.store, config.out_place, stages)
            settled = _settle(config, encoded, labels, stages)
            return _published(config, encoded, settled, out, mirror, before)


def _published(
    config: BuildConfig,
    encoded: EncodeReport,
    settled: Settled,
    out: Path,
    mirror: Here,
    before: Tag | None,
) -> BuildReport:
    """Publish what is settled in a folder, and in its bucket where ``CURRENT`` has that tag yet."""
    stages = encoded.stages
    # What is left to do needs no model in memory.
    encoded = replace(encoded, work=None)
    version = find_version(out, settled.identity, mirror)
    for place in mirror.mended:
        stages.watcher.note(
            f"note: {place} was missing or damaged, and was put there again from a copy here"
        )
    up_to_date = version is not None and version == _current(out)
    if version is None:
        version = next_version(out, settled.identity, mirror)

        def publish(_: Path, name: str, fill: Fill) -> dict[str, Any]:
            return published.publish(out, name, fill, mirror)

        write_version(config, encoded, settled, version, stages, publish)
    if not up_to_date:
        set_current(out, version, mirror=mirror, tag=before)
    fields = read_published(out).fields
    return BuildReport(config.out_place, version, up_to_date, fields, encoded)


def register(store: EmbeddingStore, out: Place, stages: Stages) -> None:
    """Tell a store that an index is built from it; where it cannot be written, say so."""
    index_id = None if is_uri(out) else ensure_index_id(Path(out))
    try:
        store.indexes.register(out, index_id)
    except StorageError as error:
        stages.watcher.note(
            f"note: the store cannot remember that {out} is built from it ({error}); do not gc it"
        )


def _current(out: Path) -> str | None:
    """Return the published version; a damaged ``CURRENT`` counts as none and is replaced."""
    try:
        fields = read_published(out).fields
    except ArtifactError:
        return None
    return str(fields["version"])


def embeddings(
    config: BuildConfig, labels: Labels | None, stages: Stages, executor: Executor | None = None
) -> EncodeReport:
    """Return the store filled with the corpus, or as it is where no corpus is named."""
    if labels is not None:
        check_labels(config, labels)
    if not config.corpus:
        return replace(_from_store_alone(config, stages), executor=executor or SerialExecutor())
    corpus = open_corpus(config, stages)
    check_early(config, corpus)
    return encode_shards(config, corpus, stages, executor=executor)


def check_early(config: BuildConfig, corpus: ParquetCorpus) -> None:
    """Refuse before hours of encoding what would be refused after them.

    Raises:
        ConfigError: k or the groups do not fit the embeddings' width, the factory string cannot be
            used, no index of so many rows fits the memory budget, or there is no GPU for FAISS.
    """
    require_device(config.index_device)
    dim = corpus.dim or resolve_encoder(config.encoder_config())[0].dim
    wanted = config.whitening_config()
    wanted.require_dim(dim)
    # How many rows pass a filter, and how many passages a document has, is not known yet.
    counted = config.passage_tokens is None and config.row_filter is None
    if config.chooses and config.k is None:
        possible_widths(config, dim, rows=corpus.rows if counted else None)
        return
    width = wanted.width(dim)
    if config.factory != AUTO:
        inner = inner_index(config.factory, width or dim)
        if config.passage_tokens is None:
            # More than the corpus has cannot be left of it; but a document has many passages.
            require_training_rows(inner, config.factory, rows=corpus.rows)
    if counted and width is not None and config.budget is not None:
        choose_index(config, rows=corpus.rows, dim=dim, k=width)


def check_labels(config: BuildConfig, labels: Labels) -> None:
    """Refuse before hours of encoding labels that would be refused after them.

    Raises:
        ConfigError: there is nothing to encode their texts with.
        CorpusError: they are too few, or say nothing.
    """
    labels.require_usable()
    if not config.corpus or (config.embedding_column is not None and config.model is None):
        what = (
            "the model of the embedding column with --model" if config.corpus else "the corpus too"
        )
        raise ConfigError(
            f"{labels.source} holds texts, which are to be encoded; name {what}, or leave the "
            "labels out"
        )


def _from_store_alone(config: BuildConfig, stages: Stages) -> EncodeReport:
    given = [
        option
        for option, value in (
            ("--text-column", config.text_columns),
            ("--embedding-column", config.embedding_column),
            ("--id-column", config.id_column),
            ("--keep", config.keep),
            ("--filter", config.row_filter),
            ("--limit", config.limit),
            ("--passage-tokens", config.passage_tokens),
        )
        if value
    ]
    if given:
        raise ConfigError(
            f"{' and '.join(given)} says how to read a corpus, and none is named; name it, or "
            "leave the option out to take the store as it is"
        )
    wanted = None
    if config.model is not None:
        wanted = resolve_encoder(config.encoder_config())[0].fingerprint
    store = EmbeddingStore.open(config.store_place, fingerprint=wanted)
    record = store.corpus()
    store.fetch_corpus()
    counts = Counts(passages=record.rows if record.source.get("passages") else 0)
    with stages.stage("verify store", record.rows) as watcher:
        for part in record.parts:
            counts.read += part.read
            counts.truncated += part.truncated
            if part.rows:
                store.require(part.shard)
            watcher.advance(part.rows)
    counts.skipped.update(record.skipped)
    counts.reused = counts.read - sum(record.skipped.values())
    report = EncodeReport(store, record, counts, stages)
    note_runtimes(report)
    return report


def _settle(
    config: BuildConfig, encoded: EncodeReport, labels: Labels | None, stages: Stages
) -> Settled:
    fitted = fit_whitening(config, encoded, labels, stages)
    plan = index_plan(config, rows=encoded.record.rows, whitening=fitted.whitening)
    return settle(config, encoded, fitted, plan)


def index_plan(config: BuildConfig, *, rows: int, whitening: Whitening) -> IndexPlan:
    """Return the index to make for so many rows.

    Raises:
        ConfigError: FAISS does not know the factory, or nothing fits the budget.
    """
    choice = choose_index(config, rows=rows, dim=whitening.dim, k=whitening.k)
    return IndexPlan(
        choice, config.seed, config.target_recall, budget=config.budget, device=config.index_device
    )
