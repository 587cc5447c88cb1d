"""Rows to push, and what a database must hold and find of them, against brute force."""

from __future__ import annotations

import datetime
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from whiten_index.errors import WhitenIndexError
from whiten_index.vectordb.database_writer import DatabaseWriter
from whiten_index.vectordb.push import differences
from whiten_index.vectordb.pushed_table import VECTOR, Layout, Metric, PushedTable, VectorDtype
from whiten_index.vectordb.registry import open_writer

K = 12
HERE = Path(__file__).parent
# What the child of the kill tests counts: its 20 batches, and then what it is about to do or did.
FINISHING, SWAPPING, SWAPPED = 21, 22, 23
DELETING, CHANGED = 21, 22
GONE = range(100)


@dataclass(frozen=True)
class Rows:
    """Rows to push, and what they are called."""

    table: pa.Table
    layout: Layout
    version: str = "000001-abc"
    transform: str = "t1"
    query_digest: str = "q1"

    @classmethod
    def make(cls, size: int = 300, *, seed: int = 0, k: int = K, **more: Any) -> Rows:
        """Rows of random vectors; ``more`` is as in ``of``."""
        vectors = np.random.default_rng(seed).standard_normal((size, k)).astype(np.float32)
        return cls.of(vectors, **more)

    @classmethod
    def of(
        cls,
        vectors: np.ndarray,
        *,
        ids: pa.Array | None = None,
        dtype: VectorDtype = "float32",
        metric: Metric = "cosine",
        **columns: pa.Array,
    ) -> Rows:
        """Rows with vectors scaled to unit length, and kept columns."""
        unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        flat = pa.array(unit.astype(np.float32).ravel())
        names = pa.array(range(len(unit)), pa.int64()) if ids is None else ids
        arrays = [names, pa.FixedSizeListArray.from_arrays(flat, unit.shape[1]), *columns.values()]
        schema = pa.schema(
            [
                pa.field("id", names.type),
                pa.field(VECTOR, pa.list_(pa.float32(), unit.shape[1])),
                *(pa.field(name, array.type) for name, array in columns.items()),
            ]
        )
        return cls(pa.table(arrays, schema=schema), Layout(schema, dtype, metric))

    @property
    def vectors(self) -> np.ndarray:
        flat = self.table[VECTOR].combine_chunks().flatten().to_numpy()
        return flat.reshape(len(self.table), -1)

    @property
    def ids(self) -> list[Any]:
        return self.table["id"].to_pylist()

    @property
    def pushed(self) -> PushedTable:
        dtype = self.layout.dtype
        return PushedTable(
            self.version, self.transform, self.layout.k, dtype, len(self.table),
            query_digest=self.query_digest,
            columns=tuple(self.layout.schema.names), metric=self.layout.metric,
        )  # fmt: skip

    def batches(self, size: int = 128) -> list[pa.RecordBatch]:
        return self.table.combine_chunks().to_batches(max_chunksize=size)

    def take(self, rows: Sequence[int]) -> pa.RecordBatch:
        return self.table.take(pa.array(rows, pa.int64())).combine_chunks().to_batches()[0]

    def best(self, queries: np.ndarray, top_k: int) -> np.ndarray:
        """Return the cosines (q, top_k) of the nearest rows, by brute force in float64."""
        scores = queries.astype(np.float64) @ self.vectors.T.astype(np.float64)
        return -np.sort(-scores, axis=1)[:, :top_k]

    def with_zeros(self, *places: int) -> Rows:
        """Return these rows, of which those at some places have vectors of zeros."""
        vectors = self.vectors.copy()
        vectors[list(places)] = 0
        column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])
        return replace(self, table=self.table.set_column(1, self.layout.schema.field(1), column))

    def fill(self, writer: DatabaseWriter, *, batch: int = 128) -> None:
        """Push all rows and swap them in."""
        writer.begin(self.pushed, self.layout)
        end(writer, self.batches(batch))

    def push_to(self, address: str, name: str = "docs", **options: str) -> None:
        """Fill a table of a database."""
        with open_writer(address, name, options=options) as writer:
            self.fill(writer)

    def assert_held_at(self, address: str, name: str = "docs", **options: str) -> None:
        with open_writer(address, name, options=options) as writer:
            self.assert_held(writer)

    def change(
        self, writer: DatabaseWriter, *put: pa.RecordBatch, gone: Iterable[Any] = ()
    ) -> None:
        """Change a pushed table into these rows: some are gone, and some are put."""
        with writer.changing(self.pushed, self.layout) as changing:
            changing.delete(list(gone))
            for batch in put:
                changing.upsert(batch)

    def assert_clean(self, writer: DatabaseWriter) -> None:
        """The published table is described as these rows; nothing is under way."""
        found = replace(writer.published(), name="", lease="")
        assert found == replace(self.pushed, done=len(self.table))

    def assert_held(self, writer: DatabaseWriter, *, pending: bool = False) -> None:
        """The writer has these rows and no others, as they are."""
        assert writer.count(pending=pending) == len(self.table)
        there = writer.fetch(list(dict.fromkeys(self.ids)), self.layout, pending=pending)
        assert there.schema == self.layout.schema
        assert len(there) == len(self.table)
        assert differences(self.table, there, self.layout) == []

    def assert_found(
        self, writer: DatabaseWriter, *, exact: bool = True, least: float = 1.0, queries: int = 20
    ) -> None:
        """Recall@10 against brute force is ``least`` or more, and no score is too high."""
        asked = self.vectors[:queries]
        best = self.best(asked, 10)
        found = writer.search(asked, 10, exact=exact)
        lost = 3e-3 if self.layout.dtype == "float16" else 2e-5
        # Ids and scores belong together.
        known = dict(zip(self.ids, self.vectors, strict=True))
        with writer.searching(exact=exact) as find:
            for query, hits in zip(asked, find(asked, 10), strict=True):
                assert all(abs(query @ known[hit.id] - hit.score) <= lost for hit in hits)
        assert np.mean(found >= best[:, -1:] - lost) >= least
        assert (found <= best + lost).all()
        assert (np.diff(found) <= lost).all()

    def recall(self, writer: DatabaseWriter) -> float:
        """Return the recall@10 of the index, whose scores may be those of codes."""
        asked = self.vectors[:20]
        best = np.argsort(-(asked @ self.vectors.T), axis=1)[:, :10]
        with writer.searching() as find:
            found = [{hit.id for hit in hits} for hits in find(asked, 10)]
        both = [len(one & set(two)) for one, two in zip(found, best, strict=True)]
        return float(np.mean(both)) / 10


def append(writer: DatabaseWriter, batches: Iterable[pa.RecordBatch]) -> None:
    for batch in batches:
        writer.append(batch)


def end(writer: DatabaseWriter, batches: Iterable[pa.RecordBatch] = ()) -> None:
    """Push what is left of a begun table and swap it in."""
    append(writer, batches)
    writer.finish()
    writer.swap()


def kill_after(event: int, does: str, address: str, marker: Path) -> None:
    """Let the child of the kill tests push or change rows until it counts an event."""
    marker.write_text("0")
    script = (str(HERE / "writer_child.py"), does, address, "docs", str(marker))
    with child_at(lambda: int(marker.read_text() or 0) >= event, *script):
        pass


@contextmanager
def child_at(has_come: Callable[[], bool], *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Yield a Python process when it has come to some point, and kill it afterwards."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as child:
        try:
            deadline = time.monotonic() + 120
            while not has_come():
                assert child.poll() is None, child.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.002)
            yield child
        finally:
            child.kill()


def some_changes() -> tuple[Rows, Rows, pa.RecordBatch]:
    """Return rows, those of a later version (7 is gone), and the five that were put."""
    old = Rows.make()
    put = Rows.make(300, seed=1).take(range(5))
    kept = pa.Table.from_batches([old.take([5, 6, *range(8, 300)])])
    now = pa.concat_tables([pa.Table.from_batches([put]), kept])
    return old, replace(Rows(now, old.layout), version="000002-def"), put


def pushed_by_child() -> Rows:
    """Return what the child of the kill tests pushes."""
    return replace(Rows.make(2000, seed=9), version="000002-def")


def changed_by_child() -> Rows:
    """Return what it ends with where it changes rows: others, of which 100 ids are new."""
    rows = Rows.make(2000, seed=10, ids=pa.array(range(100, 2100)))
    return replace(rows, version="000002-def")


def contents(folder: Path) -> dict[str, object]:
    """Return what is in a folder: name -> when it was changed, and the bytes of a file."""
    return {
        str(each.relative_to(folder)): (
            each.stat().st_mtime_ns,
            each.read_bytes() if each.is_file() else None,
        )
        for each in folder.rglob("*")
    }


DAY, LEAP = datetime.date(2024, 2, 29), datetime.datetime(2024, 2, 29, 1, 2, 3, 4)
# Name -> type, and two values; a writer gives each back as it was, null too.
COLUMNS: dict[str, tuple[pa.DataType, Any, Any]] = {
    "bool": (pa.bool_(), True, False),
    "int8": (pa.int8(), -128, 127),
    "int64": (pa.int64(), -(2**63), 2**63 - 1),
    "uint32": (pa.uint32(), 0, 2**32 - 1),
    "uint64": (pa.uint64(), 0, 2**64 - 1),
    "float32": (pa.float32(), 1.5, -2.25),
    "float64": (pa.float64(), 0.1, 1e300),
    "no number": (pa.float32(), math.nan, -0.0),
    "string": (pa.string(), "", "é\u0301 \U0001f600 \\ ' \" \n\t"),
    "large string": (pa.large_string(), "null", "x" * 5000),
    "binary": (pa.binary(), b"", b"\x00\xff"),
    "decimal": (pa.decimal128(20, 2), Decimal("1.10"), Decimal("-99.99")),
    "date32": (pa.date32(), DAY, datetime.date(1900, 1, 1)),
    "time64": (pa.time64("us"), datetime.time(23, 59, 59, 999999), datetime.time(0)),
    "timestamp": (pa.timestamp("us"), LEAP, datetime.datetime(1969, 1, 1)),
    "timestamp tz": (
        pa.timestamp("us", "UTC"), LEAP.replace(tzinfo=datetime.UTC),
        datetime.datetime(1969, 1, 1, tzinfo=datetime.UTC),
    ),
    "duration": (
        pa.duration("us"), datetime.timedelta(days=1), datetime.timedelta(microseconds=-1),
    ),
    "list": (pa.list_(pa.string()), ["a", ""], []),
    "embedding, a list of floats": (pa.list_(pa.float64()), [0.5], [1.0, math.nan]),
    "struct": (
        pa.struct([("a", pa.int32()), ("b", pa.string())]), {"a": 1, "b": None}, {"a": 2, "b": "x"},
    ),
    "struct of floats": (
        pa.struct([("a", pa.list_(pa.float32()))]), {"a": [math.nan, None]}, {"a": None},
    ),
    "map": (pa.map_(pa.string(), pa.int32()), [("a", 1), ("b", 2)], []),
    "weird; \"name'": (pa.string(), "a", "b"),
    "50% %s %(id)s %%": (pa.string(), "a%", "%s"),
}  # fmt: skip


def assert_no_secret(error: WhitenIndexError | str, *secrets: str) -> None:
    """No message shows a password or a token."""
    for secret in secrets:
        assert secret not in str(error)
