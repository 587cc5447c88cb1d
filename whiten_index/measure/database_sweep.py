"""Sweep inside a database: a table of each setting, measured through the engine's own client.

A table is filled and indexed as a push does, under a name that no push gives, and removed.
"""

import hashlib
import os
import platform
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from whiten_index.artifacts.prefetch import blocks
from whiten_index.corpus.batches import ID
from whiten_index.errors import ConfigError, DatabaseError, WhiteningError
from whiten_index.index.exact import Rows, Scores, exact_neighbours
from whiten_index.measure.results import Record
from whiten_index.measure.sweep_config import FP32, NONE, OURS, RAW, TRUNCATE, Point, SweepConfig
from whiten_index.measure.trial import (
    TOP_K,
    Dataset,
    Space,
    Truth,
    judge,
    latency,
    open_space,
    skipped_record,
)
from whiten_index.paths import absolute
from whiten_index.progress import Stages
from whiten_index.vectordb.database_writer import DatabaseWriter
from whiten_index.vectordb.engine_options import Code, Effort, EngineOptions
from whiten_index.vectordb.pushed_table import (
    VECTOR,
    Layout,
    Metric,
    PushedTable,
    RowsError,
    require_fitting,
    vectors_array,
)
from whiten_index.vectordb.registry import open_writer, require_database

_EXACT = "flat"  # search that reads all vectors
_METRICS = {TOP_K: ("ndcg@10", "mrr@10")}
_CLIENTS = (1, 8)
# Queries of all clients until a number or a time, but of each never fewer than the least.
_QUERIES, _SECONDS, _LEAST, _WARM = 300, 1.0, 10, 3
_ROWS_AT_ONCE = 8192
_PAUSE = 0.005  # seconds between two looks at the memory of a process


@dataclass(frozen=True, eq=False)
class Setting:
    """A table to fill: vectors of one transform, in one form of the engine."""

    space: tuple[str, str, int]  # family, transform and k: the vectors
    name: str  # of the form
    code: Code
    options: EngineOptions

    def points(self, rows: int) -> dict[Point, Effort | None]:
        """Return the searches to measure, and the settings of each, None for an exact one."""
        if self.name == FP32:
            return {Point(*self.space, FP32, _EXACT): None}
        found: dict[Point, Effort | None] = {}
        for effort in self.options.efforts(rows):
            words = (f"{name.rpartition('.')[2]} {value}" for name, value in effort.items())
            found[Point(*self.space, self.name, ", ".join(words) or _EXACT)] = effort
        return found


@dataclass(frozen=True, eq=False)
class DatabaseSweep:
    """Sweep of one database."""

    config: SweepConfig
    address: str

    @cached_property
    def engine(self) -> type[EngineOptions]:
        """Options of the engine."""
        return type(require_database(self.address, {}))

    @property
    def table(self) -> str:
        """Name of the table, the same for each run of a sweep, which removes an earlier one's."""
        place = absolute(str(self.config.out))
        # A folder of the same path on another machine is that of another sweep.
        machine = platform.node() if isinstance(place, Path) else ""
        return f"whiten_sweep_{hashlib.sha256(f'{machine} {place}'.encode()).hexdigest()[:10]}"

    def settings(self, *, dim: int, rank: int, rows: int) -> tuple[list[Setting], dict[str, str]]:
        """Return the tables to fill, and the reasons why some cannot be."""
        spaces = [(RAW, NONE, dim)] if self.config.baselines else []
        for k, transform in product(self.config.ks, self.config.transforms):
            spaces.append((TRUNCATE if transform == TRUNCATE else OURS, transform, k))
        found, skipped = list[Setting](), dict[str, str]()
        engines = {type(require_database(address, {})) for address in self.config.databases}
        known = {name for engine in engines for _, _, k in spaces for name in engine.codes(k)}
        for family, transform, k in spaces:
            most = dim if family in (RAW, TRUNCATE) else rank
            if k > most:
                skipped[f"{family}/{transform}/k{k}"] = f"k = {k} is above the {most} directions"
                continue
            codes = self.engine.codes(k)
            if family == RAW:
                # Exact search has its own table, without an index and with all bits.
                exact = Code(self.engine.no_index)
                codes = {FP32: exact} | {n: code for n, code in codes.items() if code != exact}
            for name, code in codes.items():
                if name == FP32 or self.config.codecs is None or name in self.config.codecs:
                    options = self.engine.parse(code.options)
                    needed = options.settings_for(rows, k, code.dtype)
                    code = Code({**code.options, **needed}, code.dtype)
                    found.append(Setting((family, transform, k), name, code, options))
        if unknown := set(self.config.codecs or ()) - known:
            raise ConfigError(
                f"--codecs {min(unknown)!r} is no form of vectors in the databases of --in; use "
                f"{', '.join(sorted(known))}"
            )
        if skipped and not found:
            raise WhiteningError(f"no --k can be measured: {'; '.join(skipped.values())}")
        return found, skipped

    def open(self, code: Code | None = None, *, make: bool = True) -> DatabaseWriter:
        """Connect to the table."""
        options = {} if code is None else code.options
        return open_writer(self.address, self.table, options=options, make=make)

    def engine_release(self) -> str:
        """Return engine and release, and remove the table of a sweep that was killed."""
        with self.open() as writer:
            if writer.exact_only:
                raise ConfigError(
                    f"{writer.engine} keeps no codes and has no index, so there is nothing to "
                    "sweep; give --in the address of a server"
                )
            writer.discard()
            writer.remove()
            return writer.engine

    def measure(
        self, dataset: Dataset, done: Collection[str], stages: Stages, failed: list[DatabaseError]
    ) -> Iterator[Record]:
        """Yield the record of each point that is not done; one that cannot be measured says why.

        Errors of the engine, which it need not give again, are also added to ``failed``.
        """
        rows, exact = dataset.rows, Point(RAW, NONE, dataset.dim, FP32, _EXACT)
        settings, skipped = self.settings(dim=dataset.dim, rank=dataset.spectrum.rank, rows=rows)
        for key, why in skipped.items():
            yield {"type": "skipped", "key": key, "why": why}
        wanted = [
            (each, missing)
            for each in settings
            if (missing := {p: e for p, e in each.points(rows).items() if p.key not in done})
        ]
        if not wanted:
            return
        raw = open_space(self.config, dataset, exact, stages)

        def search_exactly(queries: NDArray[Any], top_k: int) -> tuple[Scores, Rows]:
            vectors = map(raw.truth.vectors, dataset.embeddings.blocks())
            return exact_neighbours(vectors, raw.truth.vectors(queries), top_k)

        _, reference = judge(
            dataset, search_exactly, truth=raw.truth, raw_truth=raw.truth, reference=None,
            metrics=_METRICS,
        )  # fmt: skip
        space, last = raw, exact.space
        for number, (setting, points) in enumerate(wanted, 1):
            part = f"{number} of {len(wanted)}"
            try:
                if setting.space != last:
                    space = open_space(self.config, dataset, next(iter(points)), stages)
                    last = setting.space
                table = Table(self, dataset, setting, space, raw.truth, reference)
                for record in table.records(dict(points), stages, part):
                    yield record
                    points.pop(next(iter(points)))
            except (ConfigError, WhiteningError, DatabaseError) as error:
                # A database that cannot be reached any more raises here, and ends the sweep.
                self.engine_release()
                if isinstance(error, DatabaseError) and not isinstance(error, RowsError):
                    what = "some points were not measured; run this again, or leave them out with"
                    failed.append(DatabaseError(f"{what} --codecs ({error})"))
                yield from (skipped_record(point, str(error)) for point in points)


@dataclass(frozen=True, eq=False)
class Table:
    """A table: filled, measured, removed."""

    sweep: DatabaseSweep
    dataset: Dataset
    setting: Setting
    space: Space
    raw_truth: Truth
    reference: NDArray[np.float64] | None

    def records(
        self, points: Mapping[Point, Effort | None], stages: Stages, part: str
    ) -> Iterator[dict[str, Any]]:
        """Yield the record of each point of the table."""
        code, rows = self.setting.code, self.dataset.rows
        try:
            with (
                self.sweep.open(code) as writer,
                stages.stage("fill tables", rows, part=part) as watcher,
            ):
                made = self._fill(writer, watcher.advance)
            with (
                self.sweep.open(code, make=False) as reader,
                stages.stage("measure", len(points), part=part) as watcher,
            ):
                for point, effort in points.items():
                    found = self._measure(reader, effort)
                    setting = {**point.setting(), "parameters": dict(effort or {})}
                    yield {"type": "point", "key": point.key, **setting, **made, **found}
                    watcher.advance(1)
        finally:
            # An error that is being raised says more than that this failed too.
            with suppress(DatabaseError), self.sweep.open(code) as writer:
                writer.discard()
                writer.remove()

    def _fill(self, writer: DatabaseWriter, advance: Any) -> dict[str, Any]:
        """Fill and index the table; return what it takes."""
        setting, whitening, rows = self.setting, self.space.whitening, self.dataset.rows
        k = whitening.k
        metric: Metric = "ip" if self.dataset.similarity == "dot" else "cosine"
        kinds = [(ID, pa.int64()), (VECTOR, pa.list_(pa.float32(), k))]
        schema, dtype = pa.schema(kinds), setting.code.dtype
        layout = Layout(schema, "float16" if dtype == "float16" else "float32", metric)
        pushed = PushedTable("sweep", "sweep", k, dtype, rows, metric=metric)
        writer.discard()
        writer.begin(pushed, layout)
        load, first = 0.0, 0
        for raw in self.dataset.embeddings.blocks():
            vectors = self.space.truth.vectors(raw)
            require_fitting(vectors, layout.dtype)
            for some in blocks(range(len(raw)), _ROWS_AT_ONCE):
                part = vectors[some.start : some.stop]
                ids = pa.array(range(first, first + len(part)), pa.int64())
                columns = [ids, vectors_array(part, k)]
                started = time.perf_counter()
                writer.append(pa.RecordBatch.from_arrays(columns, schema=schema))
                load += time.perf_counter() - started
                first += len(part)
                advance(len(part))
        started = time.perf_counter()
        with _peak_memory(writer.process) as memory:
            writer.finish()
        index = time.perf_counter() - started
        writer.swap()
        code_bytes = setting.options.code_bytes(rows, k, dtype)
        each = {name: size / rows for name, size in writer.sizes().items()}
        return {
            "exponent": whitening.exponent,
            "center": whitening.center,
            "coded": code_bytes < 2 * k,
            "push": str(setting.code),
            "bytes": {"per_row": code_bytes, **each},
            "seconds": {"load": load, "index": index, "total": load + index},
            "memory": {"build": max(memory) - memory[0] if memory else None},
        }

    def _measure(self, writer: DatabaseWriter, effort: Effort | None) -> dict[str, Any]:
        with writer.searching(exact=effort is None, effort=effort) as find:

            def search(queries: NDArray[Any], top_k: int) -> tuple[Scores, Rows]:
                scores = np.full((len(queries), top_k), -np.inf, np.float32)
                rows = np.full((len(queries), top_k), -1, np.int64)
                for place, hits in enumerate(find(self.space.truth.vectors(queries), top_k)):
                    rows[place, : len(hits)] = [hit.id for hit in hits]
                    scores[place, : len(hits)] = [hit.score for hit in hits]
                return scores, rows

            found, _ = judge(
                self.dataset, search, truth=self.space.truth, raw_truth=self.raw_truth,
                reference=self.reference, metrics=_METRICS,
            )  # fmt: skip
        one, many = (self._latencies(effort, clients) for clients in _CLIENTS)
        return {
            **found,
            "latency_ms": {**latency(np.array_split(one, 2)), "clients": _CLIENTS[0]},
            "latency_ms_many": {**latency([many]), "clients": _CLIENTS[1]},
        }

    def _latencies(self, effort: Effort | None, clients: int) -> NDArray[np.float64]:
        """Return the milliseconds of single queries of clients that search at the same time."""
        vectors = self.space.truth.queries
        ready = threading.Barrier(clients)

        def ask(number: int) -> list[float]:
            mine, taken = np.roll(vectors, -number * len(vectors) // clients, axis=0), list[float]()
            try:
                with (
                    self.sweep.open(self.setting.code, make=False) as writer,
                    writer.searching(exact=effort is None, effort=effort) as find,
                ):
                    for row in range(_WARM):
                        find(mine[row : row + 1], TOP_K)
                    ready.wait()
                    end = time.perf_counter() + _SECONDS
                    for row in range(max(_LEAST, _QUERIES // clients)):
                        place, started = row % len(mine), time.perf_counter()
                        find(mine[place : place + 1], TOP_K)
                        taken.append(1000 * (time.perf_counter() - started))
                        if started > end and row >= _LEAST:
                            break
            except BaseException:
                # The others wait for this one.
                ready.abort()
                raise
            return taken

        with ThreadPoolExecutor(clients) as pool:
            asked = [pool.submit(ask, number) for number in range(clients)]
            errors = [error for each in asked if (error := each.exception()) is not None]
            for error in errors:
                if not isinstance(error, threading.BrokenBarrierError):
                    raise error
            return np.concatenate([each.result() for each in asked])


@contextmanager
def _peak_memory(process: int | None) -> Iterator[list[int]]:
    """Yield a list of the resident bytes of a process, the first one those before the block."""
    found, ended = list[int](), threading.Event()
    page = os.sysconf("SC_PAGE_SIZE")

    def look() -> None:
        with suppress(OSError, ValueError, IndexError):
            found.append(page * int(Path(f"/proc/{process}/statm").read_text().split()[1]))

    def watch() -> None:
        while not ended.wait(_PAUSE):
            look()

    if process is None:
        yield found
        return
    look()
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield found
    finally:
        ended.set()
        watcher.join()
        look()
