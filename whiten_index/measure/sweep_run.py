"""Run of a sweep: encode what is missing, measure every point, append it to the results."""

import contextlib
import datetime
import os
import platform
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import whiten_index
from whiten_index.artifacts.atomic import discard, remove_path
from whiten_index.artifacts.cached_storage import place_of
from whiten_index.artifacts.files import writing
from whiten_index.artifacts.lock import only_writer
from whiten_index.artifacts.manifest import fingerprint
from whiten_index.corpus.batches import ID
from whiten_index.encoding.spec import recorded_spec
from whiten_index.errors import ConfigError, CorpusError, DatabaseError, named, require_config
from whiten_index.evaluation.judgements import JudgedQueries, read_judged
from whiten_index.evaluation.metrics import require_evaluator
from whiten_index.index.exact import Rows, Vectors
from whiten_index.index.gpu import gpu_name, require_device
from whiten_index.index.library import describe_faiss, set_threads
from whiten_index.measure.database_sweep import DatabaseSweep
from whiten_index.measure.results import RESULTS, Record, Results, Sweep
from whiten_index.measure.sweep_config import AUTO, SweepConfig, grid
from whiten_index.measure.trial import Dataset, measure_points, skipped_record
from whiten_index.pipeline.encode import EncodeReport, encode_or_open
from whiten_index.pipeline.executor_session import executor_session, with_absolute_paths
from whiten_index.pipeline.plan import plan_build
from whiten_index.progress import Progress, Stages
from whiten_index.search.query_encoder import asked_by, query_embeddings
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.sampling import CorpusEmbeddings
from whiten_index.whitening.moments import Moments
from whiten_index.whitening.spectrum import Spectrum

# A name that no corpus and no store has: its content is removed.
_WORK = ".sweep-work"
# To raise when a figure is measured in another way.
_MEASURES = 1
_LEAST_ROWS = 100


@dataclass(kw_only=True)
class SweepReport:
    """Outcome of a sweep: points that were measured, found in the results, and skipped."""

    results: Path
    runs: list[str] = field(default_factory=list)  # one, or one of each database
    dataset: dict[str, Any]
    measured: int = 0
    found: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {**vars(self), "results": named(self.results)}


def plan_sweep(config: SweepConfig, *, progress: Progress | None = None) -> dict[str, Any]:
    """Estimate a sweep without writing anything; return the plan as JSON values.

    The embeddings may turn out to span fewer directions than dims.
    """
    require_device(config.build.index_device)
    read_queries(config)
    if config.build.corpus:
        build = plan_build(config.build, progress=progress)
        dim, to_encode, seconds = build["dim"], build["to_encode"], build["seconds"]
        rows = build["reused"] + to_encode
    else:
        store = EmbeddingStore.open(config.build.store_place)
        rows, dim, to_encode, seconds = store.corpus().rows, int(store.encoder["dim"]), 0, None
    skipped: dict[str, str] = {}
    if config.databases:
        families = list[str]()
        for address in config.databases:
            settings, lost = DatabaseSweep(config, address).settings(dim=dim, rank=dim, rows=rows)
            families += [point.family for each in settings for point in each.points(rows)]
            skipped |= lost
    else:
        points, lacking = grid(config, dim=dim, rank=dim, rows=rows)
        families = [point.family for point in points]
        skipped = {point.key: why for point, why in lacking.items()}
    return {
        "rows": rows,
        "to_encode": to_encode,
        "encode_seconds": seconds,
        "dim": dim,
        "points": len(families),
        "by_family": dict(Counter(families)),
        "skipped": skipped,
    }


def run_sweep(config: SweepConfig, *, progress: Progress | None = None) -> SweepReport:
    """Measure every point of a sweep that the results do not have yet.

    Args:
        config: corpus, grid of settings, and the folder of the results.
        progress: see ``build_index``.

    Returns:
        Runs, data set, and how many points were measured; the results are lines of
        ``results.jsonl``.

    Raises:
        ConfigError: FAISS has no GPU and one is required; or nothing encodes the queries.
        CorpusError: corpus, queries or judgements cannot be used, or do not fit together.
        WhiteningError: every k is above the rank.
        ArtifactError, StorageError: the results file is damaged, or cannot be written.
        BusyError: another sweep writes to the same folder or URI.
        DatabaseError: a database of ``--in`` cannot be reached, or refuses.

    Examples:
        >>> run_sweep(SweepConfig(store="store", out="swept")).measured  # doctest: +SKIP
        98
    """
    require_config(config, SweepConfig)
    stages = Stages(progress or Progress())
    set_threads(config.search_threads)
    require_device(config.build.index_device)
    judged = read_queries(config)
    folder, mirror = place_of(str(config.out))
    with only_writer(folder, what="sweep"):
        work = folder / _WORK
        remove_path(work)
        results = Results(folder / RESULTS, mirror)
        build = with_absolute_paths(config.build)
        with executor_session(build, stages) as executor:
            encoded = encode_or_open(build, stages, executor).elsewhere()  # the rest is done here
        try:
            with writing(work):
                work.mkdir()
            dataset = prepare_dataset(config, encoded, judged, stages)
            return _measured(config, dataset, results, work, stages)
        finally:
            discard(work)


def _measured(
    config: SweepConfig, dataset: Dataset, results: Results, work: Path, stages: Stages
) -> SweepReport:
    """Measure what the results lack, in FAISS or inside each database, and write it to them."""
    shape = {"dim": dataset.dim, "rank": dataset.spectrum.rank, "rows": dataset.rows}
    report = SweepReport(results=results.path, dataset=dataset.facts, seconds=stages.seconds)

    def take(run: Sweep, records: Iterable[Record], wanted: Set[str]) -> None:
        report.runs.append(run.run)
        report.found += len(run.by_key.keys() & wanted)
        for record in records:
            key, why = record["key"], record.get("why")
            report.measured += why is None
            if why is not None:
                report.skipped[key] = why
            # A reason that the file has already is not written again.
            if why is None or run.skipped.get(key) != why:
                results.append({**record, "run": run.run, "time": _now()})

    failed = list[DatabaseError]()
    for address in config.databases:
        inside = DatabaseSweep(config, address)
        settings, _ = inside.settings(**shape)
        wanted = {point.key for each in settings for point in each.points(dataset.rows)}
        try:
            release = inside.engine_release()
            run = results.start(_header(config, dataset, (address, release)))
            take(run, inside.measure(dataset, set(run.by_key), stages, failed), wanted)
        except DatabaseError as error:
            # The other databases are measured first; this says more than a refusal of one point.
            failed.insert(0, error)
    if failed:
        raise failed[0]
    if not config.databases:
        points, lacking = grid(config, **shape)
        first = _header(config, dataset)
        if others := len(results.runs.keys() - {first["run"]}):
            stages.watcher.note(
                f"note: {RESULTS} holds {others} other {'runs' if others > 1 else 'run'}, of other "
                "data, settings, releases or machines; their lines stay and are not mixed with "
                "this one's"
            )
        run = results.start(first)
        done = set(run.by_key)
        skipped = [skipped_record(point, why) for point, why in lacking.items()]
        records = measure_points(config, dataset, points, done, work, stages)
        take(run, chain(skipped, records), {point.key for point in points})
    return report


def read_queries(config: SweepConfig) -> JudgedQueries | None:
    """Read the judged queries of a sweep, None if it has none."""
    if config.queries is None or config.qrels is None:
        return None
    require_evaluator()
    judged = read_judged(config.queries, config.qrels, split=config.qrels_split)
    if config.build.embedding_column is not None and config.build.model is None:
        raise ConfigError(
            f"{judged.source} judges texts, which are to be encoded; name the model of the "
            "embedding column with --model, or leave --queries and --qrels out"
        )
    return judged


def prepare_dataset(
    config: SweepConfig, encoded: EncodeReport, judged: JudgedQueries | None, stages: Stages
) -> Dataset:
    """Encode the queries, or hold out rows that serve as queries."""
    store, record = encoded.store, encoded.record
    if record.rows < _LEAST_ROWS:
        raise CorpusError(
            f"{record.rows} rows are too few to compare indexes on; sweep a corpus of "
            f"{_LEAST_ROWS} or more"
        )
    dim, parts = store.dim, [part for part in record.parts if part.rows]
    moments = store.total_moments(parts)
    documents = subset = None
    missing = 0
    if judged is None:
        held, subset = _held_out(config, record.rows, stages)
        queries = CorpusEmbeddings(store, record).at(held).astype(np.float32)
        moments = moments - Moments.of(queries)
    else:
        names = [str(name) for p in parts for name in store.documents(p)[ID].to_pylist()]
        missing = judged.missing(names)
        documents = np.array(names, dtype=object)
        queries = _encode_queries(encoded, judged, stages)
    facts = {
        "name": config.dataset_name,
        "rows": record.rows if subset is None else len(subset),
        "dim": dim,
        "encoder": store.encoder.get("model") or store.encoder.get("column"),
        "queries": len(queries),
        "judged": judged is not None,
        "similarity": config.build.settled(store.encoder).similarity,
        "raw_bytes_per_row": 4 * dim,
        "stored_bytes_per_row": max(-(-part.bytes // part.rows) for part in parts),
        "held_out": 0 if subset is None else record.rows - len(subset),
        "relevant_documents_missing": missing,
        "judged_queries_without_text": 0 if judged is None else judged.left_out,
        "fingerprint": record.fingerprint,
    }
    spectrum = Spectrum.of(moments.covariance())
    rows = CorpusEmbeddings(store, record, subset)
    return Dataset(encoded, rows, moments, spectrum, queries, subset, judged, documents, facts)


def _held_out(config: SweepConfig, rows: int, stages: Stages) -> tuple[Rows, Rows]:
    """Return the row numbers held out as queries, and the others, both in rising order."""
    count = min(config.sample, rows // 5)
    if count < config.sample:
        stages.watcher.note(
            f"note: {count} rows are held out as queries, a fifth of all, and not the "
            f"--sample of {config.sample}"
        )
    held = np.random.default_rng(config.build.seed).choice(rows, count, replace=False)
    return np.sort(held), np.setdiff1d(np.arange(rows), held)


def _encode_queries(encoded: EncodeReport, judged: JudgedQueries, stages: Stages) -> Vectors:
    """Return the raw embeddings (q, d) of queries, from the store if it has them."""

    def encode(texts: Sequence[str]) -> NDArray[np.floating]:
        if encoded.work is None:
            raise ConfigError(
                f"{judged.source} judges texts, which are to be encoded; name the corpus too, as "
                "when it was encoded, or leave --queries and --qrels out"
            )
        return encoded.work.encoder().encode_queries(texts)

    return query_embeddings(encoded.store, list(judged.texts.values()), encode, stages)


def _header(
    config: SweepConfig, dataset: Dataset, database: tuple[str, str] | None = None
) -> dict[str, Any]:
    """Return the record that starts a run, in FAISS or in a database: address and release."""
    machine, judged, encoded = _machine(config.build.index_device), dataset.judged, dataset.encoded
    versions = {
        "whiten_index": whiten_index.__version__,
        "faiss": str(describe_faiss()["version"]),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
    settings = _settings(config, dataset, gpu="gpu" in machine)
    # Its run is a digest of all that a figure depends on except the point: others never mix.
    identity = {
        "corpus": encoded.record.fingerprint,
        "encoder": encoded.store.fingerprint,
        "queries": None if judged is None else [judged.digest, asked_by(encoded.store.encoder)],
        "settings": settings,
        "machine": list(machine.values()),
        "versions": versions, "measures": _MEASURES,
        **({"database": list(database)} if database else {}),
    }  # fmt: skip
    facts, inside = dataset.facts, dict[str, Any]()
    if database is not None:
        address, release = database
        facts = {**facts, "name": f"{facts['name']} in {release}"}
        prices = {name: getattr(config, name) for name in ("memory_price", "disk_price")}
        inside = {"database": {"address": address, "release": release, **prices}}
    return {
        "type": "sweep",
        "run": fingerprint(identity)[:12],
        "time": _now(),
        "machine": machine,
        "versions": versions,
        "settings": {
            **settings,
            "k": list(config.ks),
            "transforms": list(config.transforms),
            "codecs": list(config.codecs or ()),
            "indexes": list(config.indexes),
            "baselines": config.baselines,
            "rerank": config.rerank,
        },
        "dataset": facts,
        **inside,
        "build": config.build.command(),
        "texts": recorded_spec(encoded.store.encoder) is not None,
        "spectrum": {
            "eigenvalues": dataset.spectrum.eigenvalues.tolist(),
            "rank": dataset.spectrum.rank,
        },
    }


def _settings(config: SweepConfig, dataset: Dataset, *, gpu: bool) -> dict[str, Any]:
    """Return the options that every figure of a run depends on."""
    return {
        "target_recall": config.build.target_recall,
        "threads": config.search_threads,
        "seed": config.build.seed,
        "sample": config.sample if config.qrels is None else None,
        "choose_sample": config.build.choose_sample,
        **({"index_device": "gpu"} if gpu else {}),
        # Points with a score by pieces and points without are not to be compared.
        **({} if AUTO in config.transforms or dataset.judged else {"pieces": False}),
        **({"similarity": "dot"} if dataset.similarity == "dot" else {}),
    }


def _machine(index_device: str) -> dict[str, Any]:
    found: dict[str, Any] = {"processor": platform.processor() or platform.machine()}
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        found["processor"] = names[0] if names else found["processor"]
    found["cores"] = os.cpu_count()
    if index_device != "cpu" and (gpu := gpu_name()) is not None:
        found["gpu"] = gpu
    return found


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
