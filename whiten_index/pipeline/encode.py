"""Corpus to store: encode every row that is not there yet, and remember the corpus."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.lock import only_writer
from whiten_index.artifacts.manifest import fingerprint
from whiten_index.corpus.parquet_corpus import ParquetCorpus
from whiten_index.corpus.sharding import SHARD_BYTES, Shard, plan_windows
from whiten_index.distributed.executors import Executor, Failure, ProcessExecutor, SerialExecutor
from whiten_index.distributed.ray_executor import RayExecutor
from whiten_index.encoding.encoder_config import chosen_devices
from whiten_index.encoding.load_encoder import resolve_encoder
from whiten_index.encoding.spec import RemoteSpec, recorded_spec
from whiten_index.encoding.window_encoder import WindowEncoder
from whiten_index.errors import ArtifactError, ConfigError, CorpusError, PartialFailureError
from whiten_index.options import options_of
from whiten_index.pipeline.build_config import BuildConfig
from whiten_index.pipeline.early_checks import check_early
from whiten_index.pipeline.executor_session import executor_session, with_absolute_paths
from whiten_index.pipeline.shard_encoding import (
    Counts,
    EncodedWindow,
    LazyEncoder,
    ShardWork,
    Window,
    shard_work,
)
from whiten_index.progress import Progress, Stages
from whiten_index.search.query_encoder import query_embeddings
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.records import CorpusFile, CorpusPart, CorpusRecord

# Options of reading a corpus, which a build from the store alone has no use for.
_READING = (
    "text_columns", "embedding_column", "id_column", "keep", "row_filter", "limit",
    "passage_tokens",
)  # fmt: skip
# Five shards of given embeddings at a time, each as read and as kept.
_BYTES_TO_OVERLAP = 10 * SHARD_BYTES
_NAMED = 5

KeptFile = tuple[CorpusFile, tuple[CorpusPart, ...]]
ShardResult = tuple[CorpusPart, Mapping[str, int]]


@dataclass(frozen=True)
class EncodeReport:
    """Result of an encode."""

    store: EmbeddingStore  # the embeddings
    record: CorpusRecord  # the corpus, in parts
    counts: Counts  # rows read, encoded, reused and skipped
    stages: Stages  # seconds and rows by stage
    # Reads and encodes shards of the corpus, None if a store alone was opened.
    work: ShardWork | None = field(default=None, repr=False)
    executor: Executor = field(default_factory=SerialExecutor, repr=False)  # runs the work

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "store": str(self.store.place),
            "encoder": self.store.encoder,
            "counts": self.counts.to_json(),
            "rows": self.record.rows,
            "bytes": {"raw": self.raw_bytes},
            "runner": self.executor.to_json(),
            "seconds": self.stages.seconds,
            "stage_rows": self.stages.rows,
        }

    @property
    def raw_bytes(self) -> int:
        """Bytes of the corpus's raw embeddings in the store."""
        return sum(part.bytes for part in self.record.distinct_parts)

    def encoder(self, config: BuildConfig) -> Callable[[], WindowEncoder]:
        """Return the encoder, whose one copy keeps the limits of an API."""
        if self.work is not None:
            return self.work.encoder
        return LazyEncoder(config.encoder_config(), recorded_spec(self.store.encoder))

    def embed_queries(self, config: BuildConfig, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the raw embeddings (q, d) of queries, which the store remembers."""
        encoder = self.encoder(config)
        # A model that is named for a column is not known to the store.
        store = None if recorded_spec(self.store.encoder) is None else self.store
        return query_embeddings(
            store, texts, lambda some: encoder().encode_queries(some), self.stages
        )

    def note_spent(self) -> None:
        """Note what was asked of an API, if anything was."""
        loaded = None if self.work is None else getattr(self.work.encoder, "loaded", None)
        if loaded is not None and isinstance(loaded.spec, RemoteSpec) and loaded.note is not None:
            self.stages.watcher.note(loaded.note)

    def elsewhere(self) -> "EncodeReport":
        """Return the report as another machine can take it."""
        return replace(self, stages=Stages(Progress()), executor=SerialExecutor())


def encode_corpus(config: BuildConfig, *, progress: Progress | None = None) -> EncodeReport:
    """Encode a corpus into a store, shard by shard, without the rows that are there.

    Args:
        config: options, which must name ``corpus``, and ``store`` or ``out``.
        progress: see ``build_index``.

    Returns:
        Counts of rows and the record of the corpus; ``to_json()`` has the counts.

    Raises:
        CorpusError: the corpus or a row of it cannot be used.
        EncoderError: the model cannot be found or loaded.
        BusyError, StorageError: another process fills the store, or it cannot be written.
        ClusterError: the cluster cannot be reached, or has no worker left.
        PartialFailureError: some shards failed on every machine; the others are in the store.

    Examples:
        >>> config = BuildConfig(corpus="docs.parquet", text_columns="text", store="store")
        >>> encode_corpus(config).record.rows
        60
    """
    stages = Stages(progress or Progress())
    config = with_absolute_paths(config)
    with executor_session(config, stages) as executor:
        corpus = open_corpus(config, stages)
        report = encode_shards(config, corpus, stages, executor=executor)
        report.note_spent()
        return report


def encode_or_open(
    config: BuildConfig,
    stages: Stages,
    executor: Executor,
    *,
    bridged: EmbeddingStore | None = None,
) -> EncodeReport:
    """Return the store filled with the corpus, or as it is if no corpus is named."""
    if not config.corpus:
        return _open_store(config, stages, executor)
    corpus = open_corpus(config, stages)
    check_early(config, corpus)
    return encode_shards(config, corpus, stages, executor=executor, bridged=bridged)


def open_corpus(config: BuildConfig, stages: Stages, *, dim: int | None = None) -> ParquetCorpus:
    """Open the corpus and make sure its ids are unique, before any work is done."""
    corpus = ParquetCorpus.open(config.corpus_config(), dim=dim)
    if config.id_column is not None:
        with stages.whole("check ids", corpus.rows):
            corpus.check_ids()
    return corpus


def encode_shards(
    config: BuildConfig,
    corpus: ParquetCorpus,
    stages: Stages,
    *,
    executor: Executor,
    before: CorpusRecord | None = None,
    read_all: bool = False,
    remember: bool = True,
    bridged: EmbeddingStore | None = None,
) -> EncodeReport:
    """Encode the rows that the store does not have, and remember the corpus in it.

    Files as they were in ``before``, by default the store's own record, are not read, unless
    ``read_all``. Unless ``remember``, the caller saves the record. Into ``bridged``, a store of
    bridged rows, go copies of the rows that it lacks.
    """
    work = shard_work(config, corpus, bridged=bridged)
    with only_writer(work.store.folder, what="store"):
        work.store.tidy()
        if before is None and not read_all:
            with contextlib.suppress(ArtifactError):
                before = work.kept.corpus(corpus.config.source_identity())
        before = None if read_all else before
        same = kept_parts(work, before, look=False)
        # An encode reads no embeddings, nor does an update of the same files.
        reads = config.out is not None and (remember or len(same) < len(corpus.files))
        work.kept.fetch_corpus(corpus.config.source_identity(), rows=reads)
        kept = kept_parts(work, before)
        runner = _encoding_executor(config, work, executor)
        shards = [shard for shard in corpus.shards if shard.file not in kept]
        windows = plan_windows(shards, rows=corpus.config.shard_rows)
        counts, results = Counts(kept_files=len(kept)), dict[Shard, ShardResult]()
        with stages.stage("encode", corpus.rows) as watcher:
            done = 0

            def advance(rows: int) -> None:
                nonlocal done
                done += rows
                watcher.advance(rows)

            for file, parts in kept.values():
                passages = work.splitter is not None
                counts.add(_stored_counts(parts, file.skipped, passages=passages))
                advance(sum(part.read for part in parts))
            try:
                for window, result in _window_results(work, runner, windows, advance):
                    counts.add(result.counts)
                    results.update(zip(window, result.parts, strict=True))
                    _add_seconds(stages, result)
            except KeyboardInterrupt:
                # Other processes, and readers of embeddings, keep whole windows only.
                whole = runner.remote or corpus.dim is not None
                rows = counts.read if whole else done
                raise KeyboardInterrupt(f"kept {rows:,} of {corpus.rows:,} rows") from None
        corpus.require_unchanged()
        # This run, and other processes and machines, wrote segments.
        for store in dict.fromkeys((work.store, work.kept)):
            store.look_again()
        work.store.read_canary()
        record = _record(work, kept, results, counts)
        report = EncodeReport(work.kept, record, counts, stages, work, executor)
        _note_store(report)
        if remember:
            _note_encoder(config, report, work)
            index = None if config.out is None else config.out_place
            work.kept.save_corpus(record, index=index)
        return report


def kept_parts(
    work: ShardWork, before: CorpusRecord | None, *, look: bool = True
) -> dict[int, KeptFile]:
    """Return position -> file and parts, for files that did not change since ``before``.

    ``look`` leaves out those of which the store has lost rows.
    """
    if before is None:
        return {}
    known, found = before.parts_by_file(), dict[int, KeptFile]()
    for position, shards in enumerate(_by_file(work.corpus)):
        record, parts = known.get(work.corpus.files[position].name, (CorpusFile("", "", 0), ()))
        same = record.fingerprint and record.fingerprint == _fingerprint(work, position)
        read = sum(part.read for part in parts)
        whole = len(parts) == len(shards) and read == sum(shard.rows for shard in shards)
        if same and whole and not (look and not all(map(work.kept.has, parts))):
            found[position] = record, parts
    return found


def _fingerprint(work: ShardWork, position: int) -> str:
    """Return a digest that changes with a file, the columns read or the type that is kept."""
    read = work.corpus.fingerprints[position]
    return read and fingerprint({"read": read, "kept_as": work.dtype.value})


def _by_file(corpus: ParquetCorpus) -> list[list[Shard]]:
    found: list[list[Shard]] = [[] for _ in corpus.files]
    for shard in corpus.shards:
        found[shard.file].append(shard)
    return found


def _stored_counts(
    parts: Sequence[CorpusPart], skipped: Mapping[str, int], *, passages: bool
) -> Counts:
    """Return the counts of rows whose embeddings are all in the store."""
    read = sum(part.read for part in parts)
    return Counts(
        read=read,
        reused=read - sum(skipped.values()),
        truncated=sum(part.truncated for part in parts),
        passages=sum(part.rows for part in parts) if passages else 0,
        skipped=Counter(skipped),
    )


def _encoding_executor(config: BuildConfig, work: ShardWork, executor: Executor) -> Executor:
    """Return the executor that encodes: the cluster if there is one, else all devices here."""
    if isinstance(executor, RayExecutor):
        return executor
    if work.corpus.dim is not None:
        tight = config.budget is not None and config.budget < _BYTES_TO_OVERLAP
        return SerialExecutor(one_by_one=tight)
    if config.remote:
        return executor
    devices = chosen_devices(config.encoder_config().device)
    if len(devices) == 1:
        return executor
    return ProcessExecutor(devices, threads=config.threads)


def _window_results(
    work: ShardWork, executor: Executor, windows: Sequence[Window], advance: Callable[[int], None]
) -> Iterator[tuple[Window, EncodedWindow]]:
    """Yield each window and its result; one that failed is retried shard by shard."""
    failed: list[Failure] = []
    for _ in range(2):
        failed = []
        for position, result in executor.map_unordered(work, windows, advance):
            if isinstance(result, Failure):
                failed.append(result)
            else:
                yield windows[position], result
        windows = [(shard,) for failure in failed for shard in failure.item]
    if failed:
        raise _partial_failure(work.corpus, failed)


def _partial_failure(corpus: ParquetCorpus, failed: Sequence[Failure]) -> PartialFailureError:
    items = []
    places = {shard: place for place, shard in enumerate(corpus.shards)}
    for failure in sorted(failed, key=lambda each: places[each.item[0]]):
        (shard,) = failure.item
        first, last = shard.spans[0], shard.spans[-1]
        name = (
            f"{corpus.files[shard.file].path}, row group {first.row_group} row {first.start} to "
            f"row group {last.row_group} row {last.stop - 1}"
        )
        items.append({"name": name, "why": str(failure.error) or type(failure.error).__name__})
    shown = "; ".join(f"{each['name']}: {each['why']}" for each in items[:_NAMED])
    more = f"; and {len(items) - _NAMED} more" if len(items) > _NAMED else ""
    counted = "1 shard" if len(failed) == 1 else f"{len(failed)} shards"
    return PartialFailureError(
        f"{counted} failed ({shown}{more}). All other shards are finished and kept: repair what is "
        "named, and run the same command again",
        items=items,
    )


def _add_seconds(stages: Stages, window: EncodedWindow) -> None:
    """Show the steps of the encode stage too: they overlap, so they sum up to more than it."""
    counts, new = window.counts, window.counts.encoded
    rows = {"read": counts.read, "tokenise": new, "encode": new, "store": new + counts.reused}
    seconds = {f"encode/{name}": each for name, each in window.seconds.items()}
    stages.add(seconds, {f"encode/{name}": each for name, each in rows.items()})


def _record(
    work: ShardWork,
    kept: Mapping[int, KeptFile],
    results: Mapping[Shard, ShardResult],
    counts: Counts,
) -> CorpusRecord:
    corpus, files, parts = work.corpus, list[CorpusFile](), list[CorpusPart]()
    for position, shards in enumerate(_by_file(corpus)):
        if position in kept:
            file, own = kept[position]
        else:
            done, skipped = [results[shard] for shard in shards], Counter[str]()
            for _, left_out in done:
                skipped.update(left_out)
            name, identity = corpus.files[position].name, _fingerprint(work, position)
            file = CorpusFile(name, identity, len(done), dict(skipped))
            own = tuple(part for part, _ in done)
        files.append(file)
        parts += own
    if not any(part.rows for part in parts):
        raise CorpusError(
            f"none of the {counts.read} rows read can be used "
            f"({', '.join(f'{n} {reason}' for reason, n in counts.skipped.items())}); "
            "check the columns named and the row filter"
        )
    source = corpus.config.source_identity()
    return CorpusRecord(source, tuple(parts), dict(counts.skipped), tuple(files))


def _open_store(config: BuildConfig, stages: Stages, executor: Executor) -> EncodeReport:
    options = [each for each in options_of(BuildConfig) if each.name in _READING]
    given = [each.flag for each in options if getattr(config, each.name)]
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
    with stages.stage("verify store", record.rows) as watcher:
        for part in record.parts:
            if part.rows:
                store.embeddings(part)
            watcher.advance(part.rows)
    passages = bool(record.source.get("passages"))
    counts = _stored_counts(record.parts, record.skipped, passages=passages)
    report = EncodeReport(store, record, counts, stages, executor=executor)
    _note_store(report)
    return report


def _note_encoder(config: BuildConfig, report: EncodeReport, work: ShardWork) -> None:
    """Note a model that was trained for another similarity, and a type for this machine."""
    watcher, spec = report.stages.watcher, recorded_spec(report.store.encoder)
    taken = config.settled(report.store.encoder).similarity
    if config.similarity == "auto" and spec is not None and spec.similarity != taken:
        watcher.note(
            f"note: the model was trained for the similarity {spec.similarity}, and an index is "
            f"searched by {taken} here, which ranks otherwise; compare it with --similarity dot by "
            "judged queries first"
        )
    if config.similarity == "dot" != taken:
        watcher.note("note: the dot product of vectors of unit length is the cosine, used here")
    # Of an encoder that other processes loaded, nothing is known here.
    encoder = getattr(work.encoder, "loaded", None)
    if report.counts.encoded and encoder and encoder.note and not config.remote:
        watcher.note(encoder.note)


def _note_store(report: EncodeReport) -> None:
    """Note what was damaged in a store, and embeddings of different libraries or products."""
    if damaged := report.counts.remade_shards:
        report.stages.watcher.note(
            f"note: {damaged} segments of embeddings in {report.store.place} were damaged, and "
            "were written again"
        )
    names = {
        ", ".join(f"{name} {value}" for name, value in each.items())
        for each in report.store.results.runtimes()
    }
    if len(names) > 1:
        report.stages.watcher.note(
            f"note: the embeddings in {report.store.place} were computed by different versions, "
            f"inputs or products ({'; '.join(sorted(names))}), so those of equal texts may differ "
            "slightly; encode into a new --store for one version alone"
        )
