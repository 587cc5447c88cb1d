"""The sweep: encode what is missing, then every point in turn; what was measured is kept."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whiten_index.artifacts.atomic import discard, remove_path
from whiten_index.artifacts.files import writing
from whiten_index.artifacts.lock import only_writer
from whiten_index.errors import ConfigError, WhiteningError
from whiten_index.index import load_faiss, require_device, set_threads
from whiten_index.pipeline.build import embeddings
from whiten_index.progress import Progress, Silent, Stages
from whiten_index.sweep.codecs import FP32
from whiten_index.sweep.config import SweepConfig
from whiten_index.sweep.dataset import Dataset
from whiten_index.sweep.grid import FAISS, RAW, Grid, Point, Vectors, grid
from whiten_index.sweep.header import header
from whiten_index.sweep.judged import Judged, require_query_encoder
from whiten_index.sweep.results import RESULTS, Results
from whiten_index.sweep.spaces import Spaces
from whiten_index.sweep.trial import Made, Trial

# A name that no corpus and no store has: what is in it is removed.
_WORK = ".sweep-work"


@dataclass(frozen=True)
class SweepReport:
    """What a sweep did.

    Attributes:
        results: the file of results.
        run: identity of corpus, queries, settings and machine; names the lines in it.
        dataset: facts of the dataset.
        measured: points measured now.
        found: points that were there already.
        skipped: key -> why a point cannot be measured.
        seconds: by stage.
        stage_rows: rows or points handled, by stage.
    """

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


def run_sweep(config: SweepConfig, *, progress: Progress | None = None) -> SweepReport:
    """Measure every point of a sweep that the results do not have yet.

    Args:
        config: what to measure.
        progress: who is told of the stages.

    Raises:
        ConfigError: a GPU was asked for and FAISS has none; or nothing encodes the queries.
        CorpusError: corpus, queries or judgements cannot be used, or do not fit together.
        WhiteningError: no k that was asked for is within the rank.
        ArtifactError: the results file is damaged.
        BusyError: another sweep writes to the same folder.
        StorageError: the disk is full or cannot be written.
    """
    stages = Stages(progress or Silent())
    load_faiss()
    threads = config.build.threads or os.cpu_count() or 1
    set_threads(threads)
    require_device(config.build.index_device)
    judged = Judged.read(config)
    require_query_encoder(config, judged)
    with only_writer(config.folder, what="sweep"):
        work = config.folder / _WORK
        remove_path(work)
        results = Results.open(config.folder / RESULTS)
        encoded = embeddings(config.build, None, stages)
        try:
            with writing(work):
                work.mkdir()
            dataset = Dataset.prepare(config, encoded, judged, stages)
            return _Sweep(config, dataset, results, threads, work, stages).run()
        finally:
            discard(work)


@dataclass(eq=False)
class _Sweep:
    config: SweepConfig
    dataset: Dataset
    results: Results
    threads: int
    work: Path
    stages: Stages

    def run(self) -> SweepReport:
        dataset = self.dataset
        rank, rows = dataset.spectrum.rank, dataset.rows
        points = grid(self.config, dim=dataset.dim, rank=rank, rows=rows)
        first = header(self.config, dataset, self.threads)
        run = str(first["run"])
        self._note_others(run)
        self.results.start(first)
        before = set(self.results.done[run])
        skipped = self._skip(run, points)
        skipped |= self._measure(run, points)
        done = self.results.done[run]
        return SweepReport(
            self.results.path,
            run,
            dataset.facts,
            len(done - before),
            len(before & {point.key for point in points.points}),
            skipped,
            dict(self.stages.seconds),
            dict(self.stages.rows),
        )

    def _note_others(self, run: str) -> None:
        others = [name for name in self.results.headers if name != run]
        if others:
            self.stages.watcher.note(
                f"note: {self.results.path} holds {len(others)} other "
                f"{'runs' if len(others) > 1 else 'run'}, of other data, settings, releases or "
                "machines; their lines stay and are not mixed with this one's"
            )

    def _skip(self, run: str, points: Grid) -> dict[str, str]:
        for point, why in points.skipped:
            self._skipped(run, point, why)
        return {point.key: why for point, why in points.skipped}

    def _skipped(self, run: str, point: Point, why: str) -> None:
        """Keep why a point is not measured, unless that is the last thing known of it."""
        if self.results.skipped[run].get(point.key) != why:
            self._append(run, point, {"type": "skipped", **point.setting(), "why": why})

    def _measure(self, run: str, points: Grid) -> dict[str, str]:
        """Measure what is missing; return the points that turned out impossible, and why."""
        left = {
            where: [point for point in some if point.key not in self.results.done[run]]
            for where, some in points.by_vectors().items()
        }
        left = {where: some for where, some in left.items() if some}
        if not left:
            return {}
        spaces = Spaces(self.config, self.dataset, self.stages)
        where_raw = Vectors(RAW, "none", self.dataset.dim)
        raw = spaces.open(where_raw)
        trial = Trial(self.config, self.dataset, raw.truth, self.threads, self.work)
        exact = Point(where_raw, FP32, "flat")
        reference: Made | None = None
        with contextlib.suppress(ConfigError, MemoryError):
            # Where it cannot be made, its point is skipped below and says why.
            reference = trial.make(exact, raw) if exact in points.points else None
        skipped: dict[str, str] = {}
        for where, some in left.items():
            try:
                space = raw if where.family in (RAW, FAISS) else spaces.open(where)
            except WhiteningError as error:
                skipped |= self._skip_all(run, some, str(error))
                continue
            made = list[Made]()
            with self.stages.stage("make indexes", len(some)) as watcher:
                for point in some:
                    try:
                        known = reference if point == exact else None
                        made.append(known or trial.make(point, space))
                    except (ConfigError, MemoryError) as error:
                        why = str(error) or "the memory does not hold it"
                        skipped |= self._skip_all(run, [point], why)
                    watcher.advance(1)
            with self.stages.stage("measure", len(made)) as watcher:
                trial.time(made, reference)
                for each in made:
                    self._append(run, each.point, {"type": "point", **each.record})
                    watcher.advance(1)
            for each in made:
                if each is not reference:
                    discard(each.folder)
        return skipped

    def _skip_all(self, run: str, points: Sequence[Point], why: str) -> dict[str, str]:
        for point in points:
            self._skipped(run, point, why)
        return {point.key: why for point in points}

    def _append(self, run: str, point: Point, record: dict[str, Any]) -> None:
        self.results.append({**record, "run": run, "key": point.key, "time": _now()})


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
