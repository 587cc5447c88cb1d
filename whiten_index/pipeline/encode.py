"""Corpus to store: every shard that is not there yet is encoded, and the corpus remembered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from whiten_index.artifacts.cached_storage import naming
from whiten_index.artifacts.lock import only_writer
from whiten_index.corpus.parquet_corpus import ParquetCorpus
from whiten_index.corpus.sharding import SHARD_BYTES, Shard, plan_windows
from whiten_index.distributed.executors import Executor, Failure, SerialExecutor
from whiten_index.distributed.process_executor import ProcessExecutor
from whiten_index.distributed.ray_executor import RayExecutor
from whiten_index.encoding.devices import chosen_devices, window_factor
from whiten_index.encoding.spec import resolve_encoder
from whiten_index.errors import ConfigError, CorpusError, PartialFailureError
from whiten_index.pipeline.build_config import BuildConfig
from whiten_index.pipeline.early_checks import check_early, check_labels
from whiten_index.pipeline.executor_session import executor_session
from whiten_index.pipeline.shard_encoding import (
    ShardResult,
    ShardWork,
    Window,
    WindowResult,
    shard_work,
)
from whiten_index.progress import Progress, Silent, Stages
from whiten_index.store.dedup import RowFinder
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.records import CorpusFile, CorpusPart, CorpusRecord

if TYPE_CHECKING:
    from whiten_index.pipeline.select_labelled import Labels

KeptFile = tuple[CorpusFile, tuple[CorpusPart, ...]]


@dataclass
class Counts:
    """What became of the rows: ``read`` is the sum of the others but ``truncated``.

    Attributes:
        read: rows read from the corpus.
        encoded: rows encoded in this run.
        reused: rows whose embeddings were in the store.
        truncated: texts cut to the encoder's limit, encoded and reused alike.
        passages: embeddings of the rows, where texts were cut into passages; else 0.
        skipped: reason -> rows left out.
        duplicates: rows among the encoded that took the embedding of an identical text.
        tokens: tokens encoded in this run.
        padded_tokens: likewise, padding counted.
        out_of_memory: batches that did not fit into the memory and were tried again by halves.
        remade_shards: shards found damaged and encoded again.
        float32_shards: shards kept in float32 because float16 could not hold them.
        kept_files: files that were not read, since they are as they were before.
    """

    read: int = 0
    encoded: int = 0
    reused: int = 0
    truncated: int = 0
    passages: int = 0
    duplicates: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    out_of_memory: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    remade_shards: int = 0
    float32_shards: int = 0
    kept_files: int = 0

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
        work: what read and encoded the corpus, None where a store alone was opened.
        executor: runs the work.
    """

    store: EmbeddingStore
    record: CorpusRecord
    counts: Counts
    stages: Stages
    work: ShardWork | None = field(default=None, repr=False)
    executor: Executor = field(default_factory=SerialExecutor, repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "store": str(self.store.place),
            "encoder": self.store.encoder,
            "counts": self.counts.to_json(),
            "rows": self.record.rows,
            "bytes": {"raw": self.raw_bytes},
            "runner": self.runner,
            "seconds": self.stages.seconds,
            "stage_rows": self.stages.rows,
        }

    @property
    def runner(self) -> dict[str, Any] | None:
        """Return what happened on the cluster beside the plain course, None without one."""
        return self.executor.to_json()

    @property
    def raw_bytes(self) -> int:
        """Bytes of the corpus's raw embeddings in the store."""
        shards = {part.shard for part in self.record.parts if part.rows}
        found = (self.store.find(shard, verify=False) for shard in shards)
        return sum(shard.bytes for shard in found if shard is not None)

    def elsewhere(self) -> EncodeReport:
        """Return the report as another machine can take it."""
        return replace(self, stages=Stages(Silent()), executor=SerialExecutor())


def encode_corpus(config: BuildConfig, *, progress: Progress | None = None) -> EncodeReport:
    """Encode a corpus into a store, shard by shard, leaving out what is done.

    Args:
        config: ``corpus`` and ``store`` (or ``out``) must be there.
        progress: who is told of the stages.

    Raises:
        CorpusError: the corpus or a row of it cannot be used.
        EncoderError: the model cannot be found or loaded.
        BusyError: another process is filling the same store.
        StorageError: the store cannot be written.
        ClusterError: the cluster cannot be reached, or has no worker left.
        PartialFailureError: some shards failed on every machine; the others are in the store.

    Example:
        >>> config = BuildConfig(corpus="docs.parquet", text_columns="text", store="store")
        >>> encode_corpus(config).record.rows
        60
    """
    stages = Stages(progress or Silent())
    with naming(), executor_session(config, stages) as (config, executor):
        corpus = open_corpus(config, stages)
        return encode_shards(config, corpus, stages, executor=executor)


def open_corpus(config: BuildConfig, stages: Stages, *, dim: int | None = None) -> ParquetCorpus:
    """Open the corpus and make sure its ids are unique, before any work is done."""
    corpus = ParquetCorpus.open(config.corpus_config(), dim=dim)
    if config.id_column is not None:
        with stages.stage("check ids", corpus.rows) as watcher:
            corpus.check_ids()
            watcher.advance(corpus.rows)
    return corpus


def encode_shards(
    config: BuildConfig,
    corpus: ParquetCorpus,
    stages: Stages,
    *,
    before: CorpusRecord | None = None,
    known: Sequence[CorpusRecord] = (),
    remember: bool = True,
    executor: Executor | None = None,
) -> EncodeReport:
    """Encode the rows that the store does not have, and remember the corpus in it.

    Files that are as they were in ``before`` are not read. ``known`` are records whose rows are in
    the store, beside those that the store itself remembers. Unless ``remember``, the caller saves
    the record in the store.
    """
    work = shard_work(config, corpus)
    with only_writer(work.store.folder, what="store"):
        work.store.tidy()
        work.store.fetch_corpus(work.corpus.config.source_identity())
        named = (shard for record in known for shard in record.shards)
        shards = dict.fromkeys((*named, *work.store.corpus_shards()))
        work = replace(work, rows=RowFinder(work.store, tuple(shards)))
        report = _encode(
            config, work, kept_parts(work, before), stages, executor or SerialExecutor()
        )
        if remember:
            index = None if config.out is None else config.out_place
            work.store.save_corpus(report.record, index=index)
        return report


def encode_or_open(
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


def kept_parts(work: ShardWork, before: CorpusRecord | None) -> dict[int, KeptFile]:
    """Return position -> file and parts, of the files that are as they were and need no reading."""
    if before is None:
        return {}
    known, found = before.parts_by_file(), dict[int, KeptFile]()
    planned = Counter(shard.file for shard in work.corpus.shards)
    rows: Counter[int] = Counter()
    for shard in work.corpus.shards:
        rows[shard.file] += shard.rows
    for position, file in enumerate(work.corpus.files):
        record, parts = known.get(file.name, (CorpusFile("", "", 0), ()))
        same = record.fingerprint and record.fingerprint == work.corpus.fingerprints[position]
        whole = len(parts) == planned[position] and sum(p.read for p in parts) == rows[position]
        if same and whole and all(work.store.has(part) for part in parts):
            found[position] = record, parts
    return found


def _encode(
    config: BuildConfig,
    work: ShardWork,
    kept: Mapping[int, KeptFile],
    stages: Stages,
    executor: Executor,
) -> EncodeReport:
    counts, corpus = Counts(kept_files=len(kept)), work.corpus
    runner, factor = _encoding_executor(config, work, executor)
    rows = corpus.config.shard_rows * factor
    results = dict[Shard, ShardResult]()
    shards = [shard for shard in corpus.shards if shard.file not in kept]
    windows = list(plan_windows(shards, rows=rows, size=SHARD_BYTES * factor))
    with stages.stage("encode", corpus.rows) as watcher:
        for file, parts in kept.values():
            _count_kept(counts, file, parts, passages=work.splitter is not None)
            watcher.advance(sum(part.read for part in parts))
        for planned, window in _window_results(work, runner, windows, watcher.advance):
            for shard, result in zip(planned, window.shards, strict=True):
                results[shard] = result
                _count(counts, result, wanted=work.dtype.value)
                counts.passages += result.part.rows if work.splitter is not None else 0
            for name, count in window.counts.items():
                setattr(counts, name, getattr(counts, name) + count)
            _add_seconds(stages, window)
    corpus.require_unchanged()
    # Other processes and machines may have kept shards.
    work.store.mirror.look_again()
    record = _record(corpus, kept, [results[shard] for shard in shards], counts)
    if not record.rows:
        raise CorpusError(
            f"none of the {counts.read} rows read can be used "
            f"({', '.join(f'{n} {reason}' for reason, n in counts.skipped.items())}); "
            "check the columns named and the row filter"
        )
    report = EncodeReport(work.store, record, counts, stages, work, executor)
    note_runtimes(report)
    return report


def note_runtimes(report: EncodeReport) -> None:
    """Report embeddings in one store that were computed by different versions of the libraries."""
    runtimes = report.store.results.runtimes()
    names = {
        ", ".join(f"{name} {each[name]}" for name in ("torch", "transformers", "tokenizers"))
        for each in runtimes
    }
    if len(names) > 1:
        report.stages.watcher.note(
            f"note: the embeddings in {report.store.place} were computed by different versions "
            f"({'; '.join(sorted(names))}), so those of equal texts may differ slightly; encode "
            "into a new --store for one version alone"
        )


def _record(
    corpus: ParquetCorpus,
    kept: Mapping[int, KeptFile],
    results: Sequence[ShardResult],
    counts: Counts,
) -> CorpusRecord:
    """Return the corpus file by file, in its order; results are of the shards of files not kept."""
    done: dict[int, list[ShardResult]] = {position: [] for position in range(len(corpus.files))}
    shards = (shard for shard in corpus.shards if shard.file not in kept)
    for shard, result in zip(shards, results, strict=True):
        done[shard.file].append(result)
    files, parts = list[CorpusFile](), list[CorpusPart]()
    for position, file in enumerate(corpus.files):
        if position in kept:
            files.append(kept[position][0])
            parts += kept[position][1]
            continue
        own = done[position]
        skipped: Counter[str] = Counter()
        for result in own:
            skipped.update(result.skipped)
        identity = corpus.fingerprints[position]
        files.append(CorpusFile(file.name, identity, len(own), dict(skipped)))
        parts += [result.part for result in own]
    source = corpus.config.source_identity()
    return CorpusRecord(source, tuple(parts), dict(counts.skipped), tuple(files))


def _count_kept(
    counts: Counts, file: CorpusFile, parts: Sequence[CorpusPart], *, passages: bool
) -> None:
    """Count the rows of a file that was not read."""
    counts.skipped.update(file.skipped)
    read = sum(part.read for part in parts)
    counts.read += read
    counts.reused += read - sum(file.skipped.values())
    counts.truncated += sum(part.truncated for part in parts)
    counts.passages += sum(part.rows for part in parts) if passages else 0


def _count(counts: Counts, result: ShardResult, *, wanted: str) -> None:
    counts.read += result.part.read
    counts.truncated += result.part.truncated
    counts.skipped.update(result.skipped)
    counts.encoded += result.encoded
    counts.reused += _rows_of(result) - result.encoded
    counts.remade_shards += result.remade
    if result.stored is not None and wanted == "float16":
        counts.float32_shards += result.stored.dtype == "float32"


def _rows_of(result: ShardResult) -> int:
    """Return the rows of the corpus in a shard, however many passages they were cut into."""
    return result.part.read - sum(result.skipped.values())


def _add_seconds(stages: Stages, window: WindowResult) -> None:
    """Show the steps of the encode stage too: they overlap, so they sum up to more than it."""
    read = sum(shard.part.read for shard in window.shards)
    rows = sum(map(_rows_of, window.shards))
    encoded = sum(shard.encoded for shard in window.shards)
    handled = {"read": read, "tokenise": encoded, "encode": encoded, "store": rows}
    for name, seconds in window.seconds.items():
        key = f"encode/{name}"
        stages.seconds[key] = stages.seconds.get(key, 0.0) + seconds
        stages.rows[key] = stages.rows.get(key, 0) + handled.get(name, 0)


# Five shards of given embeddings at a time, each as read and as kept.
_BYTES_TO_OVERLAP = 10 * SHARD_BYTES
_NAMED = 5


def _encoding_executor(
    config: BuildConfig, work: ShardWork, executor: Executor
) -> tuple[Executor, int]:
    """Return the executor that encodes, and the number of full shards in its windows.

    Workers of a cluster encode where there are any, else every device of this machine.
    """
    if isinstance(executor, RayExecutor):
        return executor, window_factor(executor.device)
    if work.corpus.dim is not None:
        tight = config.budget is not None and config.budget < _BYTES_TO_OVERLAP
        return SerialExecutor(one_by_one=tight), 1
    devices = chosen_devices(config.encoder_config().device)
    if len(devices) == 1:
        return executor, window_factor(devices[0])
    return ProcessExecutor(devices, threads=config.threads), window_factor(devices[0])


def _window_results(
    work: ShardWork,
    executor: Executor,
    windows: Sequence[Window],
    advance: Callable[[int], None],
) -> Iterator[tuple[Window, WindowResult]]:
    """Yield each window and its result; one that failed is retried shard by shard.

    Raises:
        PartialFailureError: at the end, if shards failed again.
    """
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
    """Return the error that names all failed shards; neighbours with one reason are one item."""
    places = {shard: place for place, shard in enumerate(corpus.shards)}
    groups = list[tuple[list[Shard], str]]()
    for failure in sorted(failed, key=lambda each: places[each.item[0]]):
        (shard,) = failure.item
        before, why = groups[-1] if groups else ([], "")
        follows = bool(before) and places[before[-1]] + 1 == places[shard]
        if follows and before[-1].file == shard.file and why == failure.reason:
            before.append(shard)
        else:
            groups.append(([shard], failure.reason))
    items = [
        {"name": _name(corpus, shards), "shards": len(shards), "why": why} for shards, why in groups
    ]
    shown = "; ".join(f"{each['name']}: {each['why']}" for each in items[:_NAMED])
    more = f"; and {len(items) - _NAMED} more places" if len(items) > _NAMED else ""
    counted = "1 shard" if len(failed) == 1 else f"{len(failed)} shards"
    return PartialFailureError(
        f"{counted} failed ({shown}{more}). All other shards are finished and kept: repair what is "
        "named, and run the same command again",
        items=items,
    )


def _name(corpus: ParquetCorpus, shards: Sequence[Shard]) -> str:
    """Return the name of neighbouring shards in an error."""
    shard, first, last = shards[0], shards[0].spans[0], shards[-1].spans[-1]
    return (
        f"{corpus.files[shard.file].path}, row group {first.row_group} row {first.start} to row "
        f"group {last.row_group} row {last.stop - 1}"
    )
