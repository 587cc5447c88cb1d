"""What every writer must do with its real engine; each engine's test file is a subclass."""

from __future__ import annotations

import datetime
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest

from whiten_index.corpus.batches import PASSAGE
from whiten_index.errors import ConfigError, DatabaseError, WhitenIndexError
from whiten_index.vectordb.database_writer import (
    VECTOR,
    DatabaseWriter,
    Layout,
    Metric,
    PushedTable,
    VectorDtype,
)
from whiten_index.vectordb.push_check import differences
from whiten_index.vectordb.registry import open_writer
from whiten_index.vectordb.row_checks import RowsError

K = 12
ODD_NAME = 'a "quoted" 5% %s na\'me; DROP TABLE docs --'
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
    options: str = "o1"

    @classmethod
    def make(
        cls,
        size: int = 300,
        *,
        seed: int = 0,
        k: int = K,
        ids: pa.Array | None = None,
        dtype: VectorDtype = VectorDtype.FLOAT32,
        metric: Metric = Metric.COSINE,
        **columns: pa.Array,
    ) -> Rows:
        vectors = np.random.default_rng(seed).standard_normal((size, k)).astype(np.float32)
        return cls.of(vectors, ids=ids, dtype=dtype, metric=metric, **columns)

    @classmethod
    def of(
        cls,
        vectors: np.ndarray,
        *,
        ids: pa.Array | None = None,
        dtype: VectorDtype = VectorDtype.FLOAT32,
        metric: Metric = Metric.COSINE,
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
        found: list[Any] = self.table["id"].to_pylist()
        return found

    @property
    def pushed(self) -> PushedTable:
        dtype = self.layout.dtype.value
        return PushedTable(
            self.version, self.transform, self.layout.k, dtype, len(self.table),
            options=self.options, query_digest=self.query_digest,
            columns=tuple(self.layout.schema.names),
        )  # fmt: skip

    def batches(self, size: int = 128) -> list[pa.RecordBatch]:
        found: list[pa.RecordBatch] = self.table.combine_chunks().to_batches(max_chunksize=size)
        return found

    def take(self, rows: Sequence[int]) -> pa.RecordBatch:
        return self.table.take(pa.array(rows, pa.int64())).combine_chunks().to_batches()[0]

    def best(self, queries: np.ndarray, top_k: int) -> np.ndarray:
        """Return the cosines (q, top_k) of the nearest rows, by brute force in float64."""
        scores = queries.astype(np.float64) @ self.vectors.T.astype(np.float64)
        found: np.ndarray = -np.sort(-scores, axis=1)[:, :top_k]
        return found


def fill(writer: DatabaseWriter, rows: Rows, *, batch: int = 128) -> None:
    """Push all rows and swap them in."""
    writer.begin(rows.pushed, rows.layout)
    for each in rows.batches(batch):
        writer.append(each)
    writer.finish(rows.layout)
    writer.swap()


def some_changes() -> tuple[Rows, Rows, pa.RecordBatch]:
    """Return rows, those of a later version (7 is gone), and the five that were put."""
    old = Rows.make()
    put = Rows.make(300, seed=1).take(range(5))
    kept = pa.Table.from_batches([old.take([5, 6, *range(8, 300)])])
    now = pa.concat_tables([pa.Table.from_batches([put]), kept])
    return old, replace(Rows(now, old.layout), version="000002-def"), put


def change_and_fail(
    writer: DatabaseWriter, after: Rows, put: pa.RecordBatch, gone: Sequence[int]
) -> None:
    """Put rows and take others away, and raise an error before the end."""
    with writer.changing(after.pushed, after.layout) as changing:
        changing.upsert(put)
        changing.delete(gone)
        raise RuntimeError("on purpose")


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


def assert_asking_makes_nothing(address: str, folder: Path) -> None:
    """Ask what an engine without a server holds: before its folder is there, and afterwards.

    Args:
        address: of the folder.
        folder: that is not there yet, in one of its own.
    """
    for deeper in ("", "/of/deeper"):
        there = re.sub(r"(\.db)?$", rf"{deeper}\1", address, count=1)
        with pytest.raises(DatabaseError, match=r"is not there, or .*; look at the path") as told:
            open_writer(there, "docs", make=False)
        assert str(told.value).startswith(there)
    assert list(folder.parent.iterdir()) == []
    rows = Rows.make(50)
    with open_writer(address, "docs") as writer:
        fill(writer, rows)
    before = contents(folder)
    assert before
    for _ in range(2):
        with open_writer(address, "docs", make=False) as writer:
            published = writer.published()
            assert published is not None
            assert (published.version, published.rows) == (rows.version, 50)
            assert writer.notes() == ()
        with open_writer(address, "others", make=False) as writer:
            assert writer.published() is None
        assert contents(folder) == before


def assert_clean(writer: DatabaseWriter, rows: Rows) -> None:
    """These rows are what the name is told to stand for; nothing is under way."""
    told = writer.published()
    assert told is not None
    done = len(rows.table)
    assert replace(told, name="", lease="") == replace(rows.pushed, done=done)


def assert_holds(writer: DatabaseWriter, rows: Rows, *, pending: bool = False) -> None:
    """The writer has these rows and no others, as they are."""
    assert writer.count(pending=pending) == len(rows.table)
    there = writer.fetch(list(dict.fromkeys(rows.ids)), rows.layout, pending=pending)
    assert there.schema == rows.layout.schema
    assert len(there) == len(rows.table)
    assert differences(rows.table, there, rows.layout) == []


def assert_finds(
    writer: DatabaseWriter, rows: Rows, *, exact: bool = True, least: float = 1.0, queries: int = 20
) -> float:
    """Return recall@10 against brute force, which is ``least`` or more; scores belong to ids."""
    asked = rows.vectors[:queries]
    best = rows.best(asked, 10)
    found = writer.search(asked, 10, exact=exact)
    lost = 3e-3 if rows.layout.dtype is VectorDtype.FLOAT16 else 2e-5
    recall = float(np.mean(found.scores >= best[:, -1:] - lost))
    assert recall >= least
    place = {name: row for row, name in enumerate(rows.ids)}
    for query, ids, scores in zip(asked, found.ids, found.scores, strict=True):
        assert len(set(ids)) == len(ids) == 10
        cosines = rows.vectors[[place[each] for each in ids]] @ query
        assert np.abs(cosines - scores).max() < lost
        assert (np.diff(scores) <= lost).all()
    return recall


DAY = datetime.date(2024, 2, 29)
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
    "timestamp": (
        pa.timestamp("us"),
        datetime.datetime(2024, 2, 29, 1, 2, 3, 4),
        datetime.datetime(1969, 1, 1),
    ),
    "timestamp tz": (
        pa.timestamp("us", "UTC"),
        datetime.datetime(2024, 2, 29, tzinfo=datetime.UTC),
        datetime.datetime(1969, 1, 1, tzinfo=datetime.UTC),
    ),
    "duration": (
        pa.duration("us"),
        datetime.timedelta(days=1),
        datetime.timedelta(microseconds=-1),
    ),
    "list": (pa.list_(pa.string()), ["a", ""], []),
    "list of floats": (pa.list_(pa.float64()), [0.5], [1.0, math.nan]),
    "struct": (
        pa.struct([("a", pa.int32()), ("b", pa.string())]),
        {"a": 1, "b": None},
        {"a": 2, "b": "x"},
    ),
    "struct of floats": (
        pa.struct([("a", pa.list_(pa.float32()))]),
        {"a": [math.nan, None]},
        {"a": None},
    ),
    "map": (pa.map_(pa.string(), pa.int32()), [("a", 1), ("b", 2)], []),
    "weird; \"name'": (pa.string(), "a", "b"),
    "50% %s %(id)s %%": (pa.string(), "a%", "%s"),
}  # fmt: skip


class WriterContract:
    """Subclass it, with a fixture ``writer`` that has nothing in it yet, and set what differs.

    Attributes:
        takes_any_name: whether a table may be called anything; else such names are refused.
        halves: whether it keeps float16.
        transactions: whether changes that fail leave nothing behind.
        recall: least recall@10 of its approximate index with ``options``; None where it has none.
        options: of its index, for the approximate search.
        big: rows of the large test.
    """

    takes_any_name: ClassVar[bool] = True
    halves: ClassVar[bool] = True
    transactions: ClassVar[bool] = True
    recall: ClassVar[float | None] = 0.95
    options: ClassVar[dict[str, str]] = {}
    big: ClassVar[int] = 50_000

    def test_at_first_there_is_nothing(self, writer: DatabaseWriter) -> None:
        assert writer.published() is None
        assert writer.pending() is None
        writer.discard()
        assert writer.engine
        assert "docs" in writer.target

    @pytest.mark.parametrize("kind", [pa.int64(), pa.large_string()])
    def test_rows_come_back_as_they_were_sent(
        self, writer: DatabaseWriter, kind: pa.DataType
    ) -> None:
        ids = pa.array([f"{7 * i}" for i in range(300)]).cast(kind)
        rows = Rows.make(ids=ids, n=pa.array(range(300)))
        fill(writer, rows)
        assert_holds(writer, rows)
        assert_finds(writer, rows)
        told = writer.published()
        assert told is not None
        assert replace(told, name="", lease="") == replace(rows.pushed, done=len(rows.table))
        assert writer.pending() is None
        assert len(writer.fetch([rows.ids[0]], rows.layout)) == 1
        assert len(writer.fetch([], rows.layout)) == 0

    def test_ids_may_be_any_text(self, writer: DatabaseWriter) -> None:
        odd = ["", " ", "'", '"', "\\", "a;b", "x" * 1000, "é", "e\u0301", "\U0001f600", "0", "00",
               "file.parquet#0:12", "null", "NaN", "%s", "{}", "\n", "A", "a"]  # fmt: skip
        rows = Rows.make(len(odd), ids=pa.array(odd, pa.large_string()))
        fill(writer, rows)
        assert_holds(writer, rows)
        for name in odd:
            assert writer.fetch([name], rows.layout)["id"].to_pylist() == [name]
        with writer.changing(rows.pushed, rows.layout) as changing:
            changing.delete([odd[4]])
        assert writer.count() == len(odd) - 1

    def test_kept_columns_of_every_type(self, writer: DatabaseWriter) -> None:
        columns = {
            name: pa.array([one, two, None], kind) for name, (kind, one, two) in COLUMNS.items()
        }
        rows = Rows.make(3, **columns)
        fill(writer, rows)
        assert_holds(writer, rows)

    def test_a_new_generation_takes_the_place_of_the_old_one(self, writer: DatabaseWriter) -> None:
        old, new = Rows.make(), replace(Rows.make(200, seed=1, k=5), transform="t2")
        fill(writer, old)
        writer.begin(new.pushed, new.layout)
        for batch in new.batches():
            writer.append(batch)
            assert_holds(writer, old)
        writer.finish(new.layout)
        assert_holds(writer, old)
        assert_holds(writer, new, pending=True)
        found = writer.search(new.vectors[:2], 3, exact=True, pending=True)
        assert [ids[0] for ids in found.ids] == new.ids[:2]
        writer.swap()
        assert_holds(writer, new)
        assert_finds(writer, new)
        told = writer.published()
        assert told is not None
        assert (told.transform, told.k, told.rows) == ("t2", 5, 200)

    def test_what_is_told_of_a_generation(self, writer: DatabaseWriter) -> None:
        """All of it comes back from the rows that wait, are published, and are changed."""

        def told(found: PushedTable | None) -> tuple[str, str, str, str]:
            assert found is not None
            return found.version, found.transform, found.options, found.query_digest

        old, after, put = some_changes()
        fill(writer, old)
        assert told(writer.published()) == ("000001-abc", "t1", "o1", "q1")
        new = replace(old, transform="t2", options="", query_digest="q2")
        writer.begin(new.pushed, new.layout)
        for batch in new.batches():
            writer.append(batch)
        assert told(writer.pending()) == ("000001-abc", "t2", "", "q2")
        assert told(writer.published()) == ("000001-abc", "t1", "o1", "q1")
        writer.resume(new.layout)
        writer.finish(new.layout)
        assert told(writer.pending()) == ("000001-abc", "t2", "", "q2")
        writer.swap()
        assert told(writer.published()) == ("000001-abc", "t2", "", "q2")
        after = replace(after, transform="t2", options="o3", query_digest="q3")
        with writer.changing(after.pushed, new.layout) as changing:
            changing.upsert(put)
            changing.delete([7])
        assert told(writer.published()) == ("000002-def", "t2", "o3", "q3")
        assert_clean(writer, after)

    def test_what_is_discarded_leaves_what_users_see(self, writer: DatabaseWriter) -> None:
        old, new = Rows.make(), Rows.make(200, seed=1)
        fill(writer, old)
        writer.begin(new.pushed, new.layout)
        writer.append(new.batches()[0])
        writer.discard()
        assert writer.pending() is None
        assert_holds(writer, old)
        # What was begun is replaced by what is begun next.
        writer.begin(new.pushed, new.layout)
        writer.append(new.batches()[0])
        fill(writer, new)
        assert_holds(writer, new)

    def test_changed_rows(self, writer: DatabaseWriter) -> None:
        old = Rows.make(n=pa.array(range(300)))
        fill(writer, old)
        other = Rows.make(seed=1, n=pa.array(range(1000, 1300)))
        names = list(range(10)) + list(range(500, 510))
        changed = Rows.of(
            other.vectors[:20], ids=pa.array(names), n=other.table["n"].combine_chunks()[:20]
        )
        kept = old.take(range(25, 300))
        now = pa.concat_tables([changed.table, pa.Table.from_batches([kept])])
        after = replace(Rows(now, old.layout), version="000002-def")
        for _ in range(2):
            # Twice is once.
            with writer.changing(after.pushed, old.layout) as changing:
                changing.delete([*range(10, 25), 12345])
                changing.upsert(changed.take(range(20)))
            assert_holds(writer, after)
        assert_finds(writer, after)
        told = writer.published()
        assert told is not None
        assert (told.version, told.rows, told.done) == ("000002-def", 295, 295)
        assert writer.pending() is None

    def test_changes_that_fail(self, writer: DatabaseWriter) -> None:
        old, after, put = some_changes()
        fill(writer, old)
        self._fail(writer, old, after, put)
        if self.transactions:
            assert_holds(writer, old)
        # Doing all of it again ends as if it had not failed.
        with writer.changing(after.pushed, old.layout) as changing:
            changing.delete([7])
            changing.upsert(put)
        assert_holds(writer, after)
        assert_finds(writer, after)
        assert_clean(writer, after)

    def test_changes_that_fail_and_are_taken_back(self, writer: DatabaseWriter) -> None:
        """After a rollback of the index: what failed is remembered until all rows are of one."""
        old, after, put = some_changes()
        fill(writer, old)
        self._fail(writer, old, after, put)
        with pytest.raises(RuntimeError, match="on purpose"):
            change_and_fail(writer, old, old.take([0]), [])
        told = writer.published()
        assert told is not None
        if not self.transactions:
            assert after.version in told.changing.split()
        with writer.changing(old.pushed, old.layout) as changing:
            changing.upsert(old.take([*range(5), 7]))
        assert_holds(writer, old)
        assert_clean(writer, old)

    def _fail(self, writer: DatabaseWriter, old: Rows, after: Rows, put: pa.RecordBatch) -> None:
        with pytest.raises(RuntimeError, match="on purpose"):
            change_and_fail(writer, after, put, [7])
        told = writer.published()
        assert told is not None
        assert told.version == old.version
        assert told.changing == ("" if self.transactions else after.version)

    def test_passages_have_keys_of_two_columns(self, writer: DatabaseWriter) -> None:
        ids = pa.array(["a", "a", "a", "b", "c", "c"], pa.large_string())
        numbers = pa.array([0, 1, 2, 0, 0, 1], pa.int32())
        rows = Rows.make(6, ids=ids, **{PASSAGE: numbers})
        fill(writer, rows)
        assert_holds(writer, rows)
        assert len(writer.fetch(["a"], rows.layout)) == 3
        changed = Rows.make(2, seed=1, ids=ids[:2], **{PASSAGE: numbers[:2]})
        now = pa.concat_tables([changed.table, rows.table.slice(3, 1)])
        with writer.changing(replace(rows.pushed, rows=3), rows.layout) as changing:
            changing.delete(["a", "c"])
            changing.upsert(changed.take([0, 1]))
        assert_holds(writer, Rows(now, rows.layout))

    @pytest.mark.parametrize("bad", ["nan", "infinity", "width", "columns", "twice", "null"])
    def test_rows_that_no_database_is_to_see(self, writer: DatabaseWriter, bad: str) -> None:
        rows = Rows.make()
        writer.begin(rows.pushed, rows.layout)
        writer.append(rows.batches(100)[0])
        batch = rows.batches(100)[1]
        if bad in ("nan", "infinity"):
            spoiled = rows.vectors[100:200].copy()
            spoiled[3, 4] = np.nan if bad == "nan" else np.inf
            column = pa.FixedSizeListArray.from_arrays(pa.array(spoiled.ravel()), K)
            batch = batch.set_column(1, rows.layout.schema.field(1), column)
        elif bad == "width":
            batch = Rows.make(100, k=K + 1).batches()[0]
        elif bad == "columns":
            batch = Rows.make(100, n=pa.array(range(100))).batches()[0]
        else:
            names = [*range(100, 199), 100 if bad == "twice" else None]
            batch = batch.set_column(0, rows.layout.schema.field(0), pa.array(names, pa.int64()))
        with pytest.raises(DatabaseError):
            writer.append(batch)
        # Nothing of it is there, and the push goes on.
        assert writer.count(pending=True) == 100
        for each in rows.batches(100)[1:]:
            writer.append(each)
        writer.finish(rows.layout)
        writer.swap()
        assert_holds(writer, rows)

    def test_an_id_that_comes_twice_is_found_out(self, writer: DatabaseWriter) -> None:
        """In two batches: an engine refuses it, or there are fewer rows than were sent."""
        rows = Rows.make(200, ids=pa.array([*range(198), 987_654, 987_654]).take(
            pa.array([*range(50), 198, *range(50, 198), 199])
        ))  # fmt: skip
        writer.begin(rows.pushed, rows.layout)
        try:
            for batch in rows.batches(100):
                writer.append(batch)
            writer.finish(rows.layout)
        except DatabaseError as error:
            told = str(error)
            assert re.search(r"987_?,?654", told)
            assert "id of its own" in told
            # A push gives such rows up; others it goes on with.
            assert isinstance(error, RowsError)  # noqa: PT017
        else:
            assert writer.count(pending=True) == 199
        assert writer.published() is None

    def test_halves(self, writer: DatabaseWriter) -> None:
        rows = Rows.make(dtype=VectorDtype.FLOAT16)
        if not self.halves:
            with pytest.raises(ConfigError, match="float16"):
                writer.begin(rows.pushed, rows.layout)
            return
        fill(writer, rows)
        assert_holds(writer, rows)
        assert_finds(writer, rows)

    def test_inner_products_rank_unit_vectors_as_cosines_do(self, writer: DatabaseWriter) -> None:
        rows = Rows.make(metric=Metric.INNER_PRODUCT)
        fill(writer, rows)
        assert_holds(writer, rows)
        assert_finds(writer, rows)
        assert_finds(writer, rows, exact=False, least=0.9)

    def test_few_rows_and_none(self, writer: DatabaseWriter) -> None:
        for size in (1, 0):
            rows = Rows.make(size)
            fill(writer, rows)
            assert writer.count() == size
            found = writer.search(Rows.make(2, seed=3).vectors, 10, exact=True)
            assert [len(ids) for ids in found.ids] == [size, size]
            assert np.isnan(found.scores[:, size:]).all()


class SharedContract(WriterContract):
    """Of an engine that several connections share.

    Attributes:
        impatient: options with which a connection soon gives up waiting for a lock.
    """

    impatient: ClassVar[dict[str, str]] = {}

    @pytest.fixture
    def address(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    def writer(self, address: str) -> Iterator[DatabaseWriter]:
        with self.connect(address, self.options) as opened:
            yield opened

    def connect(self, address: str, options: dict[str, str] | None = None) -> DatabaseWriter:
        """Open the table ``docs``."""
        return open_writer(address, "docs", options=options)

    def test_a_second_connection_sees_the_same(self, address: str) -> None:
        rows = Rows.make()
        with self.connect(address) as one:
            fill(one, rows)
        with self.connect(address) as two:
            assert_holds(two, rows)
            assert two.published() is not None

    def test_a_push_goes_on_where_it_was_cut_off(self, address: str) -> None:
        rows = Rows.make()
        first, second, third = rows.batches(100)
        with self.connect(address) as writer:
            writer.begin(rows.pushed, rows.layout)
            writer.append(first)
            writer.append(second)
        with self.connect(address) as writer:
            assert writer.published() is None
            pending = writer.pending()
            assert pending is not None
            assert pending.done == 200
            assert replace(pending, done=0, name="", lease="") == rows.pushed
            writer.resume(rows.layout)
            writer.append(third)
            writer.finish(rows.layout)
        with self.connect(address) as writer:
            # Cut off before the swap: the index may be built again, and nothing is pushed.
            pending = writer.pending()
            assert pending is not None
            assert pending.done == 300
            writer.resume(rows.layout)
            writer.finish(rows.layout)
            writer.swap()
            assert_holds(writer, rows)
            assert_finds(writer, rows)

    @pytest.mark.parametrize("step", ["resume", "begin", "discard", "fill"])
    def test_of_two_pushes_one_alone_goes_on(self, address: str, step: str) -> None:
        """The one before is told, or where there are locks the one that comes later."""
        old, mine = Rows.make(200, seed=2), replace(Rows.make(), version="000002-def")
        theirs = mine if step == "resume" else replace(Rows.make(seed=1), version="000003-fed")
        first, *rest = mine.batches(100)
        with self.connect(address) as one, self.connect(address, self.impatient) as two:
            fill(one, old)
            one.begin(mine.pushed, mine.layout)
            one.append(first)
            try:
                self._take_over(two, step, theirs)
            except DatabaseError:
                for each in rest:
                    one.append(each)
                one.finish(mine.layout)
                one.swap()
                assert_holds(two, mine)
                return
            self._assert_shut_out(one, rest[0], mine.layout)
            if step in ("resume", "begin"):
                for each in rest if step == "resume" else theirs.batches(100):
                    two.append(each)
                self._assert_shut_out(one, rest[0], mine.layout)
                two.finish(theirs.layout)
                two.swap()
                self._assert_shut_out(one, rest[0], mine.layout)
            now = old if step == "discard" else theirs
            assert_holds(two, now)
            assert_clean(two, now)
            # The first one comes again when the other has ended.
            fill(one, mine)
            assert_holds(two, mine)

    def _take_over(self, writer: DatabaseWriter, step: str, rows: Rows) -> None:
        if step == "resume":
            assert writer.pending() is not None
            writer.resume(rows.layout)
        elif step == "begin":
            writer.begin(rows.pushed, rows.layout)
        elif step == "discard":
            writer.discard()
            # Where there are locks it is left alone, and who wants to go on with it is told.
            assert writer.pending() is None
        else:
            fill(writer, rows)

    def _assert_shut_out(
        self, writer: DatabaseWriter, rows: pa.RecordBatch, layout: Layout
    ) -> None:
        with pytest.raises(DatabaseError):
            writer.append(rows)
        with pytest.raises(DatabaseError):
            writer.finish(layout)
        with pytest.raises(DatabaseError):
            writer.swap()

    def test_of_two_changes_one_alone_ends(self, address: str) -> None:
        old, after, put = some_changes()
        other = replace(after, version="000003-fed")
        with self.connect(address) as one, self.connect(address, self.impatient) as two:
            fill(one, old)
            assert one.published() == two.published()
            with (  # noqa: PT012 - which of them is refused, and when, depends on the engine
                pytest.raises(DatabaseError),
                one.changing(after.pushed, old.layout) as mine,
            ):
                mine.upsert(put)
                two.published()
                with two.changing(other.pushed, old.layout) as theirs:
                    theirs.upsert(put)
                    theirs.delete([7])
                mine.upsert(Rows.make(seed=5).take([100]))
            told = two.published()
            assert told is not None
            ended = {each.version: each for each in (old, other)}[told.version]
            assert_holds(two, ended)
            assert_clean(two, ended)

    def test_what_another_push_replaced_is_not_changed(self, address: str) -> None:
        old, after, put = some_changes()
        other = replace(Rows.make(200, seed=3), version="000003-fed")
        with self.connect(address) as one, self.connect(address) as two:
            fill(one, old)
            assert one.published() is not None
            fill(two, other)
            with (
                pytest.raises(DatabaseError, match="another push"),
                one.changing(after.pushed, old.layout) as changing,
            ):
                changing.upsert(put)
            assert_holds(two, other)
            assert_clean(two, other)


class EngineContract(SharedContract):
    """Of an engine that outlives a process: subclass it with ``address``, of an empty one."""

    @pytest.mark.parametrize(
        "values",
        [
            pa.array([3_000_000, None, -3_000_000], pa.date32()),
            pa.array([253_402_300_800, None, -253_402_300_800], pa.timestamp("s")),
            pa.array([2**62, None, -(2**62)], pa.timestamp("ms", "UTC")),
        ],
    )
    def test_far_dates_come_back_or_are_refused(
        self, writer: DatabaseWriter, values: pa.Array
    ) -> None:
        rows = Rows.make(3, day=values)
        try:
            writer.begin(rows.pushed, rows.layout)
            writer.append(rows.batches()[0])
        except DatabaseError as error:
            assert "day" in str(error) or "range" in str(error)  # noqa: PT017
            assert writer.count(pending=True) == 0
            return
        writer.finish(rows.layout)
        writer.swap()
        assert_holds(writer, rows)

    def test_a_name_that_needs_quotes(self, address: str) -> None:
        rows = Rows.make()
        if not self.takes_any_name:
            with pytest.raises(ConfigError, match="name"), open_writer(address, ODD_NAME) as writer:
                fill(writer, rows)
            return
        with open_writer(address, "docs") as other, open_writer(address, ODD_NAME) as writer:
            fill(other, rows)
            fill(writer, Rows.make(50, seed=1))
            last = Rows.make(40, seed=2)
            fill(writer, last)
            assert_holds(writer, last)
            assert_finds(writer, last)
            with writer.changing(last.pushed, last.layout) as changing:
                changing.delete(last.ids[:3])
                changing.upsert(last.take([0, 1, 2]))
            assert_holds(writer, last)
            assert_holds(other, rows)

    @pytest.mark.parametrize("name", ["", "a" * 300])
    def test_a_name_that_no_engine_takes(self, address: str, name: str) -> None:
        with pytest.raises(ConfigError), open_writer(address, name) as writer:
            fill(writer, Rows.make())

    def test_options_that_no_engine_knows(self, address: str) -> None:
        with pytest.raises(ConfigError, match="no_such_option"):
            open_writer(address, "docs", options={"no_such_option": "1"})

    @pytest.mark.parametrize("wanted", [1, 9, FINISHING, SWAPPING, SWAPPED])
    def test_the_pushing_process_is_killed(self, address: str, tmp_path: Path, wanted: int) -> None:
        """Wherever it dies, users see all old rows or all new ones, and the next push ends."""
        old, rows = Rows.make(seed=3), pushed_by_child()
        with open_writer(address, "docs") as writer:
            fill(writer, old)
        self._kill_after(wanted, "push", address, tmp_path / "marker")
        with open_writer(address, "docs") as writer:
            told = writer.published()
            assert told is not None
            assert told.changing == ""
            if told.version == rows.version:
                # It may have gone on for a while before it was hit.
                assert_holds(writer, rows)
                writer.discard()
                assert writer.pending() is None
                return
            assert wanted < SWAPPED
            assert_holds(writer, old)
            pending = writer.pending()
            assert pending is not None
            assert min(wanted * 100, 2000) <= pending.done <= 2000
            assert writer.count(pending=True) >= pending.done
            writer.resume(rows.layout)
            for batch in rows.batches(100)[pending.done // 100 :]:
                writer.append(batch)
            writer.finish(rows.layout)
            assert writer.count(pending=True) == 2000
            writer.swap()
            assert_holds(writer, rows)
            assert_clean(writer, rows)

    @pytest.mark.parametrize("wanted", [1, 9, DELETING, CHANGED])
    def test_the_changing_process_is_killed(
        self, address: str, tmp_path: Path, wanted: int
    ) -> None:
        """Wherever it dies, the rows are those told, or told to be of either version."""
        old, rows = Rows.make(2000, seed=8), changed_by_child()
        with open_writer(address, "docs") as writer:
            fill(writer, old)
        self._kill_after(wanted, "change", address, tmp_path / "marker")
        with open_writer(address, "docs") as writer:
            told = writer.published()
            assert told is not None
            if told.changing:
                assert wanted < CHANGED
                assert (told.version, told.changing) == (old.version, rows.version)
            else:
                assert_holds(writer, {each.version: each for each in (old, rows)}[told.version])
            with writer.changing(rows.pushed, rows.layout) as changing:
                for batch in rows.batches(100):
                    changing.upsert(batch)
                changing.delete(GONE)
            assert_holds(writer, rows)
            assert_clean(writer, rows)

    def _kill_after(self, event: int, does: str, address: str, marker: Path) -> None:
        marker.write_text("0")
        child = subprocess.Popen(
            [sys.executable, str(HERE / "writer_child.py"), does, address, "docs", str(marker)],
            env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
        )
        try:
            deadline = time.monotonic() + 120
            while int(marker.read_text() or 0) < event:
                assert child.poll() is None, "it ended by itself"
                assert time.monotonic() < deadline
                time.sleep(0.002)
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()

    @pytest.mark.service
    def test_many_real_vectors(self, writer: DatabaseWriter, wikinews: Rows) -> None:
        """Exact search equals brute force, the index finds enough, counts and columns are right."""
        rows = Rows(wikinews.table.slice(0, self.big), wikinews.layout)
        fill(writer, rows, batch=8192)
        assert writer.count() == self.big
        some = np.random.default_rng(0).choice(self.big, 500, replace=False)
        sample = Rows(rows.table.take(pa.array(some)), rows.layout)
        there = writer.fetch(sample.ids, rows.layout)
        assert differences(sample.table, there, rows.layout) == []
        assert_finds(writer, rows, queries=50)
        if self.recall is not None:
            recall = assert_finds(writer, rows, exact=False, least=self.recall, queries=200)
            print(f"recall@10 {recall:.4f}")


def assert_no_secret(error: WhitenIndexError | str, *secrets: str) -> None:
    """No message shows a password or a token."""
    for secret in secrets:
        assert secret not in str(error)
