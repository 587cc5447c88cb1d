"""Behaviour of every database writer, on the real engine, against brute force."""

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.bad_input import process, succeed
from tests.vectordb.memory_writer import MemoryWriter, Server
from tests.vectordb.pushed_rows import (
    CHANGED,
    COLUMNS,
    DELETING,
    FINISHING,
    GONE,
    HERE,
    SWAPPED,
    SWAPPING,
    Rows,
    append,
    assert_clean,
    assert_finds,
    assert_holds,
    changed_by_child,
    child_at,
    contents,
    end,
    fill,
    pushed_by_child,
    some_changes,
    told_of,
    zeros_among,
)
from whiten_index import (
    BuildConfig,
    PushConfig,
    QueryTransform,
    build_index,
    push_index,
    pushed_version,
)
from whiten_index.corpus.batches import PASSAGE
from whiten_index.errors import ConfigError, DatabaseError
from whiten_index.pipeline.update import update_index
from whiten_index.pipeline.update_config import UpdateConfig
from whiten_index.vectordb.database_writer import DatabaseWriter
from whiten_index.vectordb.push import differences
from whiten_index.vectordb.pushed_table import Metric, VectorDtype
from whiten_index.vectordb.registry import open_writer

ODD_NAME = 'a "quoted" 5% %s na\'me; DROP TABLE docs --'
ODD_IDS = ["", " ", "'", '"', "\\", "\\'", "a;b", "x" * 1000, "é", "e\u0301", "\U0001f600", "0",
           "00", "file.parquet#0:12", "null", "NaN", "%s", "{}", "\n", "A", "a", "--"]  # fmt: skip


@dataclass(frozen=True)
class Backend:
    """An engine with nothing in it.

    Attributes:
        address: of the database.
        folder: of an engine without a server.
        options: of an approximate index.
        halves: whether it keeps float16.
        metrics: that it ranks by.
        shared: whether it takes several connections at once.
        transactions: whether changes that fail leave nothing behind.
        any_name: whether a table may have any name.
        impatient: options to give up soon if there is a lock.
    """

    address: str
    folder: Path | None = None
    options: dict[str, str] = field(default_factory=dict)
    halves: bool = True
    metrics: tuple[str, ...] = ("cosine", "ip")
    shared: bool = True
    transactions: bool = True
    any_name: bool = False
    impatient: dict[str, str] = field(default_factory=dict)

    def open(self, name: str = "docs", **options: str) -> DatabaseWriter:
        return open_writer(self.address, name, options=options)


BACKENDS: dict[str, Callable[[Path, pytest.FixtureRequest], Backend]] = {
    "postgresql": lambda _, request: Backend(
        request.getfixturevalue("address"), any_name=True, impatient={"lock_timeout": "1"}
    ),
    "qdrant": lambda folder, _: Backend(
        f"qdrant://{folder}/q", folder / "q", shared=False, transactions=False
    ),
    "lancedb": lambda folder, _: Backend(
        f"lancedb://{folder}/a folder", folder / "a folder",
        {"index": "ivf_sq", "num_partitions": "60"},
    ),
    "milvus": lambda folder, _: Backend(
        f"milvus://{folder}/docs.db", folder / "docs.db", halves=False, transactions=False,
    ),
    "duckdb": lambda folder, _: Backend(
        f"duckdb://{folder}/docs.duckdb", folder, halves=False, shared=False,
    ),
    "sqlite": lambda folder, _: Backend(
        f"sqlite://{folder}/docs.sqlite", folder, halves=False, metrics=("cosine",),
        impatient={"lock_timeout": "1"},
    ),
}  # fmt: skip
# Without a server, and small enough for the default suite.
FILES = ("duckdb", "sqlite")


@dataclass(frozen=True)
class Memory(Backend):
    """The stand-in that pushes are tested with where no database is installed."""

    server: Server = field(default_factory=Server)

    def open(self, name: str = "docs", **options: str) -> DatabaseWriter:
        return MemoryWriter(self.server)


REAL = [pytest.param(name, marks=() if name in FILES else pytest.mark.service) for name in BACKENDS]


@pytest.fixture(params=["memory", "memory without transactions", *REAL])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    if request.param in BACKENDS:
        return BACKENDS[request.param](tmp_path, request)
    transactions = request.param == "memory"
    return Memory("", transactions=transactions, server=Server(transactions=transactions))


@pytest.fixture(params=REAL)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    """An engine that outlives a process, and has names and options."""
    return BACKENDS[request.param](tmp_path, request)


@pytest.fixture
def shared(backend: Backend) -> Backend:
    if not backend.shared:
        pytest.skip("it takes one connection at a time")
    return backend


@pytest.fixture
def writer(backend: Backend) -> Iterator[DatabaseWriter]:
    with backend.open(**backend.options) as opened:
        yield opened


def test_an_empty_database(writer: DatabaseWriter) -> None:
    assert writer.published() is None
    assert writer.pending() is None
    writer.discard()
    assert writer.engine
    assert "docs" in writer.target


@pytest.mark.parametrize("kind", [pa.int64(), pa.large_string()])
@pytest.mark.parametrize("metric", ["cosine", "ip"])
def test_rows_come_back_and_are_found(
    writer: DatabaseWriter, backend: Backend, kind: pa.DataType, metric: str
) -> None:
    ids = pa.array([f"{7 * at}" for at in range(300)]).cast(kind)
    rows = Rows.make(ids=ids, metric=metric, n=pa.array(range(300)))
    if metric not in backend.metrics:
        with pytest.raises(ConfigError, match="no dot product; leave --metric out"):
            writer.begin(rows.pushed, rows.layout)
        return
    fill(writer, rows)
    assert_holds(writer, rows)
    assert_finds(writer, rows)
    assert_finds(writer, rows, exact=False, least=0.9)
    assert_clean(writer, rows)
    assert writer.pending() is None
    assert len(writer.fetch([rows.ids[0]], rows.layout)) == 1
    assert len(writer.fetch([], rows.layout)) == 0


def test_ids_may_be_any_text(writer: DatabaseWriter) -> None:
    odd = [*ODD_IDS, *(f"{each}#{at}" for at in range(50) for each in ODD_IDS)]
    rows = Rows.make(len(odd), ids=pa.array(odd, pa.large_string()))
    fill(writer, rows, batch=1000)
    assert_holds(writer, rows)
    for name in ODD_IDS:
        assert writer.fetch([name], rows.layout)["id"].to_pylist() == [name]
    with writer.changing(replace(rows.pushed, rows=5), rows.layout) as changing:
        changing.delete(odd[5:])
    assert_holds(writer, Rows(rows.table.slice(0, 5), rows.layout))


def test_ids_at_the_edges_of_64_bits(writer: DatabaseWriter) -> None:
    rows = Rows.make(5, ids=pa.array([-(2**63), -1, 0, 2**53 + 1, 2**63 - 1]))
    fill(writer, rows)
    assert_holds(writer, rows)
    with writer.changing(replace(rows.pushed, rows=3), rows.layout) as changing:
        changing.delete([rows.ids[0], rows.ids[-1]])
    assert_holds(writer, Rows(rows.table.slice(1, 3), rows.layout))


def test_kept_columns_of_every_type(writer: DatabaseWriter) -> None:
    columns = {name: pa.array([one, two, None], kind) for name, (kind, one, two) in COLUMNS.items()}
    rows = Rows.make(3, **columns)
    fill(writer, rows)
    assert_holds(writer, rows)


FURTHER = {
    "half": pa.array([1.5, None, -2], pa.float16()), "null": pa.nulls(3),
    "bytes": pa.array([b"ab", b"cd", None], pa.binary(2)),
    "words": pa.array(["a", "b", None]).dictionary_encode(),
    "numbers": pa.array([1, 2, None]).dictionary_encode(),
    "durations": pa.array([[1], [-2], None], pa.list_(pa.duration("ns"))),
    "seconds": pa.array([1, 2, None], pa.time32("s")),
    "zone": pa.array([1, 2, None], pa.timestamp("ms", "Europe/Rome")),
    "fine": pa.array([1_000, -2_000, None], pa.timestamp("ns", "UTC")),
    "lists of bytes": pa.array([[b"a"], [None], None], pa.list_(pa.binary())),
    "date64": pa.array([86_400_000, 0, None], pa.date64()),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_files_keep_columns_of_further_types(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    rows = Rows.make(3, **FURTHER)
    with BACKENDS[name](tmp_path, request).open() as writer:
        fill(writer, rows)
        assert_holds(writer, rows)


@pytest.mark.parametrize(
    "values",
    [
        pa.array([3_000_000, None, -3_000_000], pa.date32()),
        pa.array([253_402_300_800, None, -253_402_300_800], pa.timestamp("s")),
        pa.array([2**62, None, -(2**62)], pa.timestamp("ms", "UTC")),
        pa.array([1_001, None, -1], pa.timestamp("ns")),
        pa.array([1_001, None, -1], pa.timestamp("ns", "UTC")),
        pa.array([[1_000], None, [-1]], pa.list_(pa.timestamp("ns", "UTC"))),
        pa.array([1_001, None, 1], pa.time64("ns")),
        pa.array([1_001, None, -1], pa.duration("ns")),
    ],
)
def test_far_and_fine_times_come_back_or_are_refused(engine: Backend, values: pa.Array) -> None:
    rows = Rows.make(3, day=values)
    with engine.open() as writer:
        try:
            fill(writer, rows)
        except DatabaseError as error:
            assert re.search("day|range|rows are refused|microseconds", str(error))  # noqa: PT017
            assert writer.published() is None
        else:
            assert_holds(writer, rows)


def test_passages_have_keys_of_two_columns(writer: DatabaseWriter) -> None:
    """Documents, each of which loses another number of passages."""
    names = [f"d{number}" for number in range(200) for _ in range(5)]
    numbers = pa.array([passage for _ in range(200) for passage in range(5)], pa.int32())
    rows = Rows.make(1000, ids=pa.array(names, pa.large_string()), **{PASSAGE: numbers})
    fill(writer, rows)
    assert_holds(writer, rows)
    assert len(writer.fetch(["d7"], rows.layout)) == 5
    stays = [row for row in range(1000) if row % 5 < row // 5 % 6]
    now = Rows(pa.Table.from_batches([rows.take(stays)]), rows.layout)
    with writer.changing(now.pushed, rows.layout) as changing:
        changing.delete(sorted(set(names)))
        changing.upsert(rows.take(stays))
    assert_holds(writer, now)


def test_halves(writer: DatabaseWriter, backend: Backend) -> None:
    rows = Rows.make(dtype="float16")
    if not backend.halves:
        with pytest.raises(ConfigError, match="keeps no float16"):
            writer.begin(rows.pushed, rows.layout)
        return
    fill(writer, rows)
    assert_holds(writer, rows)
    assert_finds(writer, rows)


def test_few_rows_and_none(writer: DatabaseWriter) -> None:
    for size in (1, 0):
        fill(writer, Rows.make(size))
        assert writer.count() == size
        found = writer.search(Rows.make(2, seed=3).vectors, 10, exact=True)
        assert np.isfinite(found[:, :size]).all()
        assert np.isnan(found[:, size:]).all()


def test_vectors_of_zeros(engine: Backend) -> None:
    """They come back, and a search finds the others as it would without them."""
    forms: list[tuple[VectorDtype, Metric]] = [("float32", metric) for metric in engine.metrics]
    forms += [("float16", "cosine")] * engine.halves
    for dtype, metric in forms:
        rows = zeros_among(Rows.make(50, dtype=dtype, metric=metric), 7, 49)
        with engine.open() as writer:
            fill(writer, rows)
            assert_holds(writer, rows)
            for exact in (True, False):
                with writer.searching(exact=exact) as find:
                    *hits, none = find(rows.vectors[:8], 50)
                for query, each in zip(rows.vectors, hits, strict=False):
                    found = {hit.id: hit.score for hit in each if hit.id not in (7, 49)}
                    assert len(found) == 48
                    scores = rows.vectors[list(found)] @ query
                    lost = 3e-3 if dtype == "float16" else 2e-5
                    assert np.abs(scores - list(found.values())).max() < lost
                # By a query of zeros nothing is near.
                assert all(not hit.score > 0 for hit in none)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("columns", [("Lang", "lang"), ("ID",), ("a", "Vector")])
def test_names_of_columns_that_differ_by_case_alone(
    tmp_path: Path, request: pytest.FixtureRequest, name: str, columns: tuple[str, ...]
) -> None:
    """DuckDB renames one of them."""
    one = Rows.make(2, **dict.fromkeys(columns, pa.array(["a", "b"])))
    kept = Rows.make(2, **dict.fromkeys("\xc4\xe4", pa.array(["a", "b"])))
    told = f"column '{columns[-1]}' differs from another by case alone"
    with BACKENDS[name](tmp_path, request).open() as writer:
        with pytest.raises(ConfigError, match=told):
            writer.begin(one.pushed, one.layout)
        assert writer.pending() is None
        fill(writer, kept)
        assert_holds(writer, kept)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("text", [b"mine" * 300, b"PAR1" * 300, b"SQLite format 3\0" * 9])
def test_a_file_of_another_format(tmp_path: Path, name: str, text: bytes) -> None:
    file = tmp_path / "docs.db"
    file.write_bytes(text)
    for make in (True, False):
        with pytest.raises(DatabaseError, match="name another file: this one has another format"):
            open_writer(f"{name}://{file}", "docs", make=make)
    assert file.read_bytes() == text


@pytest.mark.parametrize(("name", "end"), [
    ("duckdb", ".wal"), ("duckdb", ".wal.checkpoint"), ("duckdb", ".wal.recovery"),
    ("sqlite", "-wal"), ("sqlite", "-shm"), ("sqlite", "-journal"),
])  # fmt: skip
@pytest.mark.parametrize("linked", [False, True])
def test_nothing_is_written_where_a_link_leads(
    tmp_path: Path, name: str, end: str, linked: bool
) -> None:
    """The engine has its log beside the file to which a link of its name leads."""
    mine, real = tmp_path / "mine", tmp_path / "folder" / "docs.db"
    file, log = (tmp_path / "docs.db" if linked else real), real.with_name(real.name + end)
    mine.write_text("mine")
    real.parent.mkdir()
    with open_writer(f"{name}://{real}", "docs") as writer:
        fill(writer, Rows.make(20))
    if linked:
        file.symlink_to(real)
    log.symlink_to(mine)
    for make in (True, False):
        with pytest.raises(ConfigError, match=f"docs.db{end} is a link, through which"):
            open_writer(f"{name}://{file}", "docs", make=make)
    assert mine.read_text() == "mine"
    log.unlink()
    with open_writer(f"{name}://{file}", "docs") as writer:
        assert_holds(writer, Rows.make(20))


def test_sizes_and_removal(writer: DatabaseWriter) -> None:
    rows = Rows.make(2000, k=32)
    writer.remove()
    fill(writer, rows, batch=1000)
    sizes = writer.sizes()
    assert "table" not in sizes or 2000 * 32 * 4 < sizes["table"] < 2000 * 32 * 4 * 4
    assert sizes.get("index", 0) < 2000 * 32 * 4 * 6
    writer.remove()
    assert writer.published() is None
    assert writer.pending() is None
    fill(writer, rows, batch=1000)
    assert_holds(writer, rows)


@pytest.mark.service
def test_many_real_vectors(writer: DatabaseWriter, wikinews: Rows) -> None:
    rows = wikinews
    fill(writer, rows, batch=1024)
    assert writer.count() == 2000
    some = np.random.default_rng(0).choice(2000, 500, replace=False)
    sample = Rows(rows.table.take(pa.array(some)), rows.layout)
    assert differences(sample.table, writer.fetch(sample.ids, rows.layout), rows.layout) == []
    assert_finds(writer, rows, queries=50)
    assert_finds(writer, rows, exact=False, least=0.95, queries=200)


def test_users_see_the_old_rows_and_metadata_until_the_swap(writer: DatabaseWriter) -> None:
    old = Rows.make()
    new = replace(Rows.make(200, seed=1, k=5), transform="t2", query_digest="q2")
    fill(writer, old)
    writer.begin(new.pushed, new.layout)
    for batch in new.batches():
        writer.append(batch)
        assert_holds(writer, old)
    writer.resume(new.layout)
    writer.finish()
    assert_holds(writer, old)
    assert_clean(writer, old)
    assert_holds(writer, new, pending=True)
    pending = told_of(writer.pending())
    assert replace(pending, name="", lease="") == replace(new.pushed, done=200)
    for exact in (True, False):
        found = writer.search(new.vectors[:2], 3, exact=exact, pending=True)
        assert np.abs(found[:, 0] - 1).max() < 1e-5
    writer.swap()
    assert_holds(writer, new)
    assert_finds(writer, new)
    assert_clean(writer, new)
    after = replace(Rows(new.table[:199], new.layout), version="000002-def", query_digest="q3")
    with writer.changing(after.pushed, new.layout) as changing:
        changing.upsert(new.take([3]))
        changing.delete([199])
    assert_clean(writer, after)


def test_what_is_discarded_leaves_what_users_see(writer: DatabaseWriter) -> None:
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


def test_an_interrupted_push_is_resumed(backend: Backend) -> None:
    rows = Rows.make()
    first, second, third = rows.batches(100)
    with backend.open() as writer:
        writer.begin(rows.pushed, rows.layout)
        append(writer, [first, second])
    for done, rest in ((200, [third]), (300, [])):
        with backend.open() as writer:
            assert writer.published() is None
            pending = told_of(writer.pending())
            assert replace(pending, name="", lease="") == replace(rows.pushed, done=done)
            writer.resume(rows.layout)
            append(writer, rest)
            writer.finish()
            if not rest:
                writer.swap()
                assert_holds(writer, rows)
                assert_finds(writer, rows)


@pytest.mark.parametrize("name", ["docs", ODD_NAME])
def test_tables_of_several_names(engine: Backend, name: str) -> None:
    rows, last = Rows.make(), Rows.make(40, seed=2)
    with engine.open("other") as other:
        fill(other, rows)
    if name == ODD_NAME and not engine.any_name:
        with pytest.raises(ConfigError, match="name"):
            engine.open(name)
        return
    with engine.open(name) as writer:
        fill(writer, Rows.make(50, seed=1))
        fill(writer, last)
        assert_holds(writer, last)
        assert_finds(writer, last)
        with writer.changing(last.pushed, last.layout) as changing:
            changing.delete(last.ids[:3])
            changing.upsert(last.take([0, 1, 2]))
        assert_holds(writer, last)
    with engine.open("other") as other:
        assert_holds(other, rows)


@pytest.mark.parametrize("name", ["", "a" * 300])
def test_names_that_no_engine_takes(engine: Backend, name: str) -> None:
    with pytest.raises(ConfigError), engine.open(name) as writer:
        fill(writer, Rows.make())


def test_options_that_no_engine_knows(engine: Backend) -> None:
    with pytest.raises(ConfigError, match="no_such_option"):
        engine.open(no_such_option="1")


def test_changed_rows(writer: DatabaseWriter) -> None:
    old = Rows.make(n=pa.array(range(300)))
    fill(writer, old)
    other = Rows.make(seed=1, n=pa.array(range(1000, 1300)))
    names = [*range(10), *range(500, 510)]
    changed = Rows.of(
        other.vectors[:20], ids=pa.array(names), n=other.table["n"].combine_chunks()[:20]
    )
    kept = pa.Table.from_batches([old.take(range(25, 300))])
    after = replace(Rows(pa.concat_tables([changed.table, kept]), old.layout), version="000002-def")
    for _ in range(2):
        # Twice is once.
        with writer.changing(after.pushed, old.layout) as changing:
            changing.delete([*range(10, 25), 12345])
            changing.upsert(changed.take(range(20)))
            # Seen within.
            assert writer.count() == 295
        assert_holds(writer, after)
    assert_finds(writer, after)
    assert_clean(writer, after)
    assert writer.pending() is None


@pytest.mark.parametrize("rolled_back", [False, True])
def test_changes_that_fail(writer: DatabaseWriter, backend: Backend, rolled_back: bool) -> None:
    """Metadata say which versions rows may be of, until changes end; these end the same."""
    old, after, put = some_changes()
    fill(writer, old)

    def fail(to: Rows, rows: pa.RecordBatch) -> list[str]:
        def change() -> None:
            with writer.changing(to.pushed, to.layout) as changing:
                changing.upsert(rows)
                raise RuntimeError("on purpose")

        with pytest.raises(RuntimeError, match="on purpose"):
            change()
        found = told_of(writer.published())
        assert found.version == old.version
        return found.changing.split()

    expected = [] if backend.transactions else [after.version]
    assert fail(after, put) == expected
    if backend.transactions:
        assert_holds(writer, old)
        assert_finds(writer, old, exact=False, least=0.9)
    if rolled_back:
        assert set(fail(old, old.take([0]))) >= set(expected)
    end = old if rolled_back else after
    with writer.changing(end.pushed, old.layout) as changing:
        changing.upsert(old.take([*range(5), 7]) if rolled_back else put)
        changing.delete([] if rolled_back else [7])
    assert_holds(writer, end)
    assert_clean(writer, end)


@pytest.mark.parametrize("step", ["resume", "begin", "discard", "fill"])
def test_of_two_pushes_one_alone_goes_on(shared: Backend, step: str) -> None:
    """The one before is refused, or if there are locks the one that comes later."""
    old, mine = Rows.make(200, seed=2), replace(Rows.make(), version="000002-def")
    theirs = mine if step == "resume" else replace(Rows.make(seed=1), version="000003-fed")
    first, *rest = mine.batches(100)

    def take_over(writer: DatabaseWriter) -> None:
        if step == "resume":
            writer.resume(theirs.layout)
        elif step == "begin":
            writer.begin(theirs.pushed, theirs.layout)
        elif step == "fill":
            fill(writer, theirs)
        else:
            writer.discard()
            # If there are locks it is left alone.
            if writer.pending() is not None:
                raise DatabaseError("left alone")

    def assert_shut_out(writer: DatabaseWriter) -> None:
        for call in (lambda: writer.append(rest[0]), lambda: writer.finish(),
                     writer.swap):  # fmt: skip
            with pytest.raises(DatabaseError):
                call()

    with shared.open() as one, shared.open(**shared.impatient) as two:
        fill(one, old)
        one.begin(mine.pushed, mine.layout)
        one.append(first)
        try:
            take_over(two)
        except DatabaseError:
            end(one, rest)
            assert_holds(two, mine)
            return
        assert_shut_out(one)
        if step in ("resume", "begin"):
            append(two, rest if step == "resume" else theirs.batches(100))
            two.finish()
            assert_shut_out(one)
            two.swap()
        now = old if step == "discard" else theirs
        assert_holds(two, now)
        assert_clean(two, now)
        # The first one comes again when the other has ended.
        fill(one, mine)
        assert_holds(two, mine)


def test_of_two_changes_one_alone_ends(shared: Backend) -> None:
    old, after, put = some_changes()
    other = replace(after, version="000003-fed")
    with shared.open() as one, shared.open(**shared.impatient) as two:
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
        found = told_of(two.published())
        ended = {each.version: each for each in (old, other)}[found.version]
        assert_holds(two, ended)
        assert_clean(two, ended)


def test_what_another_push_replaced_is_not_changed(shared: Backend) -> None:
    old, after, put = some_changes()
    other = replace(Rows.make(200, seed=3), version="000003-fed")
    with shared.open() as one, shared.open() as two:
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


def kill_after(event: int, does: str, backend: Backend, marker: Path) -> None:
    marker.write_text("0")
    arguments = (does, backend.address, "docs", str(marker))
    script = (str(HERE / "writer_child.py"), *arguments)
    with child_at(lambda: int(marker.read_text() or 0) >= event, *script):
        pass


@pytest.mark.parametrize("wanted", [9, FINISHING, SWAPPING, SWAPPED])
def test_the_pushing_process_is_killed(engine: Backend, tmp_path: Path, wanted: int) -> None:
    """Wherever it dies, users see all old rows or all new ones, and the next push ends."""
    old, rows = Rows.make(seed=3), pushed_by_child()
    with engine.open() as writer:
        fill(writer, old)
    kill_after(wanted, "push", engine, tmp_path / "marker")
    with engine.open() as writer:
        found = told_of(writer.published())
        assert found.changing == ""
        if found.version == rows.version:
            # It may have gone on for a while before it was hit.
            assert_holds(writer, rows)
            writer.discard()
            assert writer.pending() is None
            return
        assert wanted < SWAPPED
        assert_holds(writer, old)
        pending = told_of(writer.pending())
        assert min(wanted * 100, 2000) <= pending.done <= 2000
        writer.resume(rows.layout)
        end(writer, rows.batches(100)[pending.done // 100 :])
        assert_holds(writer, rows)
        assert_clean(writer, rows)


@pytest.mark.parametrize(("wanted", "back"), [(9, 0), (DELETING, 1), (CHANGED, 0)])
def test_the_changing_process_is_killed(
    engine: Backend, tmp_path: Path, wanted: int, back: bool
) -> None:
    """Wherever it dies, the rows are of the version that metadata say, or of either."""
    old, rows = Rows.make(2000, seed=8), changed_by_child()
    with engine.open() as writer:
        fill(writer, old)
    kill_after(wanted, "change", engine, tmp_path / "marker")
    with engine.open() as writer:
        found = told_of(writer.published())
        if found.changing:
            assert wanted < CHANGED
            assert (found.version, found.changing) == (old.version, rows.version)
        else:
            assert_holds(writer, {each.version: each for each in (old, rows)}[found.version])
        rows = old if back else rows
        with writer.changing(rows.pushed, rows.layout) as changing:
            for batch in rows.batches(1000):
                changing.upsert(batch)
            changing.delete(range(2000, 2100) if back else GONE)
        assert_holds(writer, rows)
        assert_clean(writer, rows)


@pytest.fixture(params=[each for each in REAL if each.values != ("postgresql",)])
def embedded(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    folder = tmp_path / "embedded"
    folder.mkdir()
    return BACKENDS[request.param](folder, request)


@pytest.mark.parametrize(
    ("embedded", "nights", "options"),
    [
        *((name, 8, {}) for name in FILES),
        # It removes what is old after some nights.
        pytest.param(
            "lancedb", 12, {"keep_days": "0", "index": "ivf_flat"}, marks=pytest.mark.service
        ),
    ],
    indirect=["embedded"],
)
def test_nightly_changes_do_not_grow_it_for_ever(
    embedded: Backend, nights: int, options: dict[str, str]
) -> None:
    assert embedded.folder is not None
    rows, sizes, indexes = Rows.make(2000, k=32), list[int](), list[int]()
    for night in range(1 + nights):
        with embedded.open(**options) as writer:
            if night == 0:
                fill(writer, rows, batch=2000)
            else:
                picked = np.random.default_rng(night).choice(2000, 1000, replace=False)
                vectors = rows.vectors.copy()
                vectors[picked] = Rows.make(1000, k=32, seed=night).vectors
                rows = replace(Rows.of(vectors), version=str(night))
                with writer.changing(rows.pushed, rows.layout) as changing:
                    changing.upsert(rows.take(picked))
            indexes.append(writer.sizes()["index"])
        files = [path for path in embedded.folder.rglob("*") if path.is_file()]
        sizes.append(sum(path.stat().st_size for path in files))
    # If all that was changed were kept, it would be five times as much.
    assert max(sizes) < 4 * sizes[0]
    assert sizes[-1] < 1.1 * max(sizes[:4])
    assert indexes[-1] <= 1.1 * indexes[0]
    with embedded.open() as writer:
        assert_holds(writer, rows)
        assert_finds(writer, rows)


@pytest.fixture
def own_folder(embedded: Backend) -> Path:
    """The folder of an engine that fills it; it is not there yet."""
    assert embedded.folder is not None
    if embedded.folder.exists():
        pytest.skip("it has a file")
    embedded.folder.mkdir()
    return embedded.folder


def test_reading_makes_nothing(embedded: Backend, tmp_path: Path) -> None:
    assert embedded.folder is not None
    with pytest.raises(DatabaseError, match=r"is not there, or .*; look at the path"):
        open_writer(embedded.address, "docs", make=False)
    assert [each.name for each in tmp_path.rglob("*")] == ["embedded"]
    rows = Rows.make(50)
    with embedded.open() as writer:
        fill(writer, rows)
    before = contents(embedded.folder)
    assert before
    with open_writer(embedded.address, "docs", make=False) as writer:
        assert_clean(writer, rows)
    with open_writer(embedded.address, "others", make=False) as writer:
        assert writer.published() is None
    assert contents(embedded.folder) == before


@pytest.mark.parametrize("there", ["corpus.parquet", "meta.txt"])
def test_a_folder_of_other_files_is_left_alone(
    embedded: Backend, own_folder: Path, there: str
) -> None:
    (own_folder / there).write_text("mine")
    with pytest.raises(ConfigError, match=f"other files than those of .*, such as '{there}'"):
        embedded.open()
    assert [each.name for each in own_folder.iterdir()] == [there]


def test_a_folder_with_a_link_is_refused(
    embedded: Backend, own_folder: Path, tmp_path: Path
) -> None:
    """LanceDB fills and drops a table wherever a link of its name leads, others files."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "photo").write_text("mine")
    rows = Rows.make(20)
    with embedded.open() as writer:
        fill(writer, rows)
    there = next(filter(Path.is_dir, own_folder.iterdir()))
    for link, target in (
        (own_folder / "docs__pending.lance", mine), (there / "data2", mine),
        (there / "manifest.json.prev", mine / "photo"), (own_folder / "lock", mine / "missing"),
    ):  # fmt: skip
        link.symlink_to(target)
        for make in (True, False):
            with pytest.raises(ConfigError, match=f"{link.name} is a link, through which the eng"):
                open_writer(embedded.address, "docs", make=make)
        link.unlink()
    assert [each.name for each in mine.iterdir()] == ["photo"]
    with embedded.open() as writer:
        assert_holds(writer, rows)


def test_hidden_files_and_ones_of_the_system_do_not_matter(
    embedded: Backend, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as ``lost+found``, which the system lets nobody else read."""
    for name in (".DS_Store", "lost+found"):
        (own_folder / name).mkdir()
    listed = os.scandir

    def scandir(folder: Path) -> object:
        if Path(folder).name == "lost+found":
            raise PermissionError(13, "Permission denied")
        return listed(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    rows = Rows.make(20)
    with embedded.open() as writer:
        fill(writer, rows)
        assert_holds(writer, rows)


def test_a_second_process_is_refused_or_sees_the_same(embedded: Backend) -> None:
    """The engine is free again once the writer is closed, and nothing is written to stderr."""
    code = (
        "from whiten_index.vectordb.registry import open_writer\n"
        f"with open_writer({embedded.address!r}, 'docs') as writer: print(writer.count())\n"
    )
    with embedded.open() as writer:
        fill(writer, Rows.make(50))
        with process(code=code) as child:
            out, err = child.communicate(timeout=60)
    if child.returncode:
        assert re.search("(one process|takes one) at a time", err)
    else:
        assert out.split() == ["50"]
    with process(code=code) as child:
        out, err = child.communicate(timeout=60)
    assert (out.split(), err) == (["50"], "")


def test_nights_of_an_index_and_queries_that_fit(engine: Backend, tmp_path: Path) -> None:
    corpus, index = tmp_path / "c.parquet", tmp_path / "index"
    config = PushConfig(index=str(index), to=engine.address, table="docs")

    def write(raw: np.ndarray) -> None:
        pq.write_table(pa.table({"id": range(len(raw)), "e": list(raw)}), corpus)

    def push(raw: np.ndarray) -> tuple[str, int, int]:
        report = push_index(config)
        with engine.open() as writer:
            assert_holds(writer, Rows.of(QueryTransform.of(index).reduce(raw)))
        return report.mode, report.pushed, report.deleted

    def fits() -> bool:
        told = succeed(
            "push", index, "--to", engine.address, "--table", "docs", "--status", "--json"
        )
        return bool(json.loads(told)["fits"])

    raw = np.random.default_rng(0).standard_normal((150, 10)).astype("f4")
    write(raw)
    options = {"embedding_column": "e", "id_column": "id", "k": 4}
    build_index(BuildConfig(corpus=(str(corpus),), out=str(index), **options))
    assert push(raw) == ("all", 150, 0)
    raw = raw[:-1]
    raw[3] += 1
    write(raw)
    update_index(UpdateConfig(index=str(index), refit="never"))
    assert push(raw) == ("changes", 1, 1)
    assert push(raw) == ("nothing", 0, 0)
    before = QueryTransform.of(index)
    before.require(pushed_version(engine.address, "docs"))
    assert fits()
    raw *= np.float32(0.5) ** np.arange(10)
    write(raw)
    update_index(UpdateConfig(index=str(index), refit="always"))
    with pytest.raises(ConfigError, match="their scores mean nothing"):
        QueryTransform.of(index).require(pushed_version(engine.address, "docs"))
    assert not fits()
    assert push(raw) == ("all", 149, 0)
    assert fits()
    with pytest.raises(ConfigError, match="their scores mean nothing"):
        before.require(pushed_version(engine.address, "docs"))
