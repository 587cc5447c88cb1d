"""Run of a sweep: encode what is missing, measure every point, append it to the results."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import whiten_index
from whiten_index.artifacts.atomic import discard, remove_path
from whiten_index.artifacts.files import exists, writing
from whiten_index.artifacts.lock import only_writer
from whiten_index.artifacts.manifest import fingerprint
from whiten_index.errors import ConfigError, WhiteningError
from whiten_index.index.gpu import gpu_name, require_device
from whiten_index.index.library import describe_faiss, load_faiss, set_threads
from whiten_index.index.sizes import expected_bytes
from whiten_index.measure.grid import FAISS, RAW, Grid, Point, Vectors, grid
from whiten_index.measure.results import RESULTS, Results, mapping
from whiten_index.measure.sweep_config import FP32, SweepConfig
from whiten_index.measure.sweep_data import Dataset, open_space, prepare_dataset, read_queries
from whiten_index.measure.trial import Made, Trial
from whiten_index.pipeline.encode import encode_or_open
from whiten_index.pipeline.plan import plan_build
from whiten_index.progress import Progress, Silent, Stages
from whiten_index.search.query_encoder import asked_by
from whiten_index.store.embedding_store import EmbeddingStore

# A name that no corpus and no store has: its content is removed.
_WORK = ".sweep-work"
# To raise when a figure is measured in another way.
_MEASURES = 1


@dataclass(frozen=True)
class SweepReport:
    """Outcome of a sweep."""

    results: Path
    run: str
    dataset: dict[str, Any]
    measured: int
    found: int
    skipped: dict[str, str]
    seconds: dict[str, float]
    stage_rows: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {**vars(self), "results": str(self.results)}


def plan_sweep(config: SweepConfig, *, progress: Progress | None = None) -> dict[str, Any]:
    """Estimate a sweep without writing anything.

    Returns:
        JSON values: ``rows`` of the corpus, those ``to_encode``, and the ``encode_seconds`` of
        these, None if there are none; the width ``dim``; ``points`` to measure, in all and
        ``by_family``, those ``found`` in the results file, and ``skipped``: key -> reason. The
        embeddings may turn out to span fewer directions than dims. ``work_bytes``: largest total
        of the temporary index files, and ``largest_index_bytes``.

    Raises:
        CorpusError: corpus or judgements cannot be used.
        WhiteningError: every k is above the width of the embeddings.
    """
    require_device(config.build.index_device)
    read_queries(config)
    seconds = None
    if config.build.corpus:
        build = plan_build(config.build, progress=progress)
        rows, dim, to_encode = build.reused + build.to_encode, build.dim, build.to_encode
        seconds = build.seconds
    else:
        store = EmbeddingStore.open(config.build.store_place)
        rows, dim, to_encode = store.corpus().rows, int(store.encoder["dim"]), 0
    points = grid(config, dim=dim, rank=dim, rows=rows)
    found = _measured_before(config, rows)
    sizes = [
        [expected_bytes(point.factory(rows), rows=rows, dim=dim, k=where.k).total for point in some]
        for where, some in points.by_vectors().items()
        if where.family != FAISS
    ]
    return {
        "rows": rows,
        "to_encode": to_encode,
        "encode_seconds": seconds,
        "dim": dim,
        "points": len(points.points),
        "by_family": dict(Counter(point.vectors.family for point in points.points)),
        "found": sum(point.key in found for point in points.points),
        "skipped": {point.key: why for point, why in points.skipped.items()},
        # Indexes over the same vectors exist at the same time, next to the raw embeddings.
        "work_bytes": 4 * rows * dim + max(map(sum, sizes), default=0),
        "largest_index_bytes": max((size for some in sizes for size in some), default=0),
    }


def _measured_before(config: SweepConfig, rows: int) -> set[str]:
    """Return the points of runs that a sweep may resume, as far as a plan knows."""
    path, judged = config.folder / RESULTS, config.qrels is not None
    settings = _settings(config)
    indexed = rows if judged else rows - min(config.sample, rows // 5)
    found = set[str]()
    if exists(path):
        results = Results.read(path)
        for run, header in results.headers.items():
            before = mapping(header, "settings")
            same = {name: before.get(name) for name in settings} == settings
            if same and mapping(header, "dataset").get("rows") == indexed:
                found |= results.points[run].keys()
    return found


def run_sweep(config: SweepConfig, *, progress: Progress | None = None) -> SweepReport:
    """Measure every point of a sweep that the results do not have yet.

    Raises:
        ConfigError: FAISS has no GPU and one is required; or nothing encodes the queries.
        CorpusError: corpus, queries or judgements cannot be used, or do not fit together.
        WhiteningError: every k is above the rank.
        ArtifactError: the results file is damaged.
        BusyError: another sweep writes to the same folder.
        StorageError: the disk is full or cannot be written.
    """
    stages = Stages(progress or Silent())
    load_faiss()
    set_threads(_threads(config))
    require_device(config.build.index_device)
    judged = read_queries(config)
    with only_writer(config.folder, what="sweep"):
        work = config.folder / _WORK
        remove_path(work)
        results = Results.open(config.folder / RESULTS)
        encoded = encode_or_open(config.build, stages)
        try:
            with writing(work):
                work.mkdir()
            dataset = prepare_dataset(config, encoded, judged, stages)
            points = grid(config, dim=dataset.dim, rank=dataset.spectrum.rank, rows=dataset.rows)
            first = _header(config, dataset)
            run = str(first["run"])
            if others := len(results.headers.keys() - {run}):
                stages.watcher.note(
                    f"note: {results.path} holds {others} other {'runs' if others > 1 else 'run'}, "
                    "of other data, settings, releases or machines; their lines stay and are not "
                    "mixed with this one's"
                )
            results.start(first)
            before = set(results.points[run])
            sweep = _Run(config, dataset, results, run, work, stages)
            sweep.measure(points)
        finally:
            discard(work)
    return SweepReport(
        results=results.path,
        run=run,
        dataset=dataset.facts,
        measured=len(results.points[run].keys() - before),
        found=len(before & {point.key for point in points.points}),
        skipped=sweep.skipped,
        seconds=dict(stages.seconds),
        stage_rows=dict(stages.rows),
    )


@dataclass(eq=False)
class _Run:
    config: SweepConfig
    dataset: Dataset
    results: Results
    run: str
    work: Path
    stages: Stages
    skipped: dict[str, str] = field(default_factory=dict)

    def measure(self, points: Grid) -> None:
        """Measure the missing points, those over the same vectors together."""
        for point, why in points.skipped.items():
            self._skip([point], why)
        done = self.results.points[self.run].keys()
        missing = {
            where: [point for point in some if point.key not in done]
            for where, some in points.by_vectors().items()
        }
        if not any(missing.values()):
            return
        where_raw = Vectors(RAW, "none", self.dataset.dim)
        raw = open_space(self.config, self.dataset, where_raw, self.stages)
        trial = Trial(self.config, self.dataset, raw.truth, _threads(self.config), self.work)
        exact = Point(where_raw, FP32, "flat")
        reference: Made | None = None
        with contextlib.suppress(ConfigError, MemoryError):
            # If it cannot be made, its point is skipped below with the reason.
            reference = trial.make(exact, raw) if exact in points.points else None
        for where, some in missing.items():
            if not some:
                continue
            space = raw
            if where.family not in (RAW, FAISS):
                try:
                    space = open_space(self.config, self.dataset, where, self.stages)
                except WhiteningError as error:
                    self._skip(some, str(error))
                    continue
            made = list[Made]()
            with self.stages.stage("make indexes", len(some)) as watcher:
                for point in some:
                    try:
                        known = reference if point == exact else None
                        made.append(known or trial.make(point, space))
                    except (ConfigError, MemoryError) as error:
                        self._skip([point], str(error) or "the memory does not hold it")
                    watcher.advance(1)
            with self.stages.stage("measure", len(made)) as watcher:
                trial.time(made, reference)
                for each in made:
                    self._append(each.point, {"type": "point", **each.record})
                    watcher.advance(1)
            for each in made:
                if each is not reference:
                    discard(each.folder)

    def _skip(self, points: Iterable[Point], why: str) -> None:
        """Record the reason of points that cannot be measured, unless the file says the same."""
        for point in points:
            self.skipped[point.key] = why
            if self.results.skipped[self.run].get(point.key, {}).get("why") != why:
                self._append(point, {"type": "skipped", **point.setting(), "why": why})

    def _append(self, point: Point, record: Mapping[str, Any]) -> None:
        self.results.append({**record, "run": self.run, "key": point.key, "time": _now()})


def _header(config: SweepConfig, dataset: Dataset) -> dict[str, Any]:
    """Return the record that starts a run.

    Its ``run`` is a digest of all that a figure depends on except the point itself, so that later
    points join those measured before, and never figures of something else.
    """
    machine = _machine(config.build.index_device)
    versions = {
        "whiten_index": whiten_index.__version__,
        "faiss": str(describe_faiss()["version"]),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
    settings = _settings(config) | ({"index_device": "gpu"} if "gpu" in machine else {})
    store, judged = dataset.encoded.store, dataset.judged
    queries = None
    if judged is not None:
        qrels = {query: dict(grades) for query, grades in judged.qrels.items()}
        texts = dict(judged.texts)
        queries = fingerprint({"texts": texts, "qrels": qrels, **asked_by(store.encoder)})
    identity = {
        "corpus": dataset.encoded.record.fingerprint,
        "encoder": store.fingerprint,
        "queries": queries,
        "settings": settings,
        "machine": list(machine.values()),
        "versions": versions,
        "measures": _MEASURES,
    }
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
            "codecs": list(config.codecs),
            "indexes": list(config.indexes),
            "baselines": config.baselines,
            "rerank": config.rerank,
        },
        "dataset": dataset.facts,
        "spectrum": {
            "eigenvalues": dataset.spectrum.eigenvalues.tolist(),
            "rank": dataset.spectrum.rank,
        },
    }


def _settings(config: SweepConfig) -> dict[str, Any]:
    """Return the settings of every point of a run."""
    return {
        "target_recall": config.build.target_recall,
        "threads": _threads(config),
        "seed": config.build.seed,
        "sample": config.sample if config.qrels is None else None,
        "choose_sample": config.build.choose_sample,
    }


def _threads(config: SweepConfig) -> int:
    return config.build.threads or os.cpu_count() or 1


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
