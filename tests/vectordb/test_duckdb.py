"""DuckDB's own: plain tables, an index that a kill damaged, one process at a time."""

import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb
import duckdb_extension_vss
import numpy as np
import pyarrow as pa
import pytest

from tests.helpers.bad_input import process
from tests.vectordb.pushed_rows import Rows, append, changed_by_child, child_at, end, some_changes
from whiten_index.errors import ConfigError, DatabaseError
from whiten_index.vectordb.database_writer import DatabaseWriter
from whiten_index.vectordb.duckdb_writer import connect
from whiten_index.vectordb.push import pushed_version
from whiten_index.vectordb.pushed_table import PushedTable
from whiten_index.vectordb.registry import open_writer

DOCS = Path(__file__).parents[2] / "docs" / "databases.md"
# A push that stops, for good, after it has committed changes, and before they are in the file.
CHILD = """
import sys, time
from pathlib import Path
from tests.vectordb.pushed_rows import changed_by_child
from whiten_index.vectordb.duckdb_writer import DuckWriter
from whiten_index.vectordb.registry import open_writer
address, marker = sys.argv[1:]
def stop(*_):
    Path(marker).touch()
    time.sleep(600)
DuckWriter.checkpoint = stop
rows = changed_by_child()
with open_writer(address, "docs") as writer:
    rows.change(writer, rows.take(range(2000)), gone=range(100))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "docs.duckdb"


@pytest.fixture
def address(file: Path) -> str:
    return f"duckdb://{file}"


@pytest.fixture
def writer(address: str) -> Iterator[DatabaseWriter]:
    with open_writer(address, "docs") as opened:
        yield opened


def test_the_table_is_a_plain_one(address: str, file: Path) -> None:
    """DuckDB reads it without the extension, among the tables of the user."""
    with duckdb.connect(file) as database:
        database.execute("CREATE TABLE mine AS SELECT 1 AS one")
    rows = Rows.make(20, n=pa.array(range(20)), day=pa.array([3] * 20, pa.date32()))
    rows.push_to(address)
    with duckdb.connect(file, read_only=True) as database:
        kinds = database.execute("SELECT column_name, data_type FROM duckdb_columns() "
                                 "WHERE table_name = 'docs'").fetchall()  # fmt: skip
        assert kinds == [("id", "BIGINT"), ("vector", "FLOAT[12]"), ("n", "BIGINT"),
                         ("day", "DATE")]  # fmt: skip
        near = "SELECT id FROM docs WHERE n % 2 = 1 ORDER BY array_cosine_distance(vector, $1)"
        vector = duckdb.Value(rows.vectors[5].tolist(), duckdb.array_type("FLOAT", 12))
        assert database.execute(near, [vector]).fetchone() == (5,)
        assert database.execute("SELECT one FROM mine").fetchone() == (1,)


def test_killed_after_changes_that_are_in_the_log(address: str, tmp_path: Path, file: Path) -> None:
    """The index finds what was changed, and nothing that was deleted takes its place."""
    rows = changed_by_child()
    Rows.make(2000, seed=8).push_to(address)
    marker = tmp_path / "marker"
    with child_at(marker.exists, "-c", CHILD, address, str(marker)):
        pass
    assert file.with_suffix(".duckdb.wal").stat().st_size
    with pytest.raises(DatabaseError, match="a process was killed while it wrote: run this again"):
        open_writer(address, "docs", make=False)
    with open_writer(address, "docs"):
        pass
    with open_writer(address, "docs", make=False) as writer:
        rows.assert_clean(writer)
        rows.assert_held(writer)
        rows.assert_found(writer, exact=False, least=0.95, queries=200)


def test_a_new_file_is_put_in_its_place_whole(
    address: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DuckDB cannot open one that a process was killed while it made it."""
    seen, real = [], duckdb.connect

    def connecting(place: Any, *given: Any, **options: Any) -> Any:
        seen.append((Path(place).parent.parent, file.exists()))
        return real(place, *given, **options)

    monkeypatch.setattr(duckdb, "connect", connecting)
    Rows.make(300).push_to(address)
    assert seen[0] == (file.parent, False)
    assert all(there for _, there in seen[1:])
    assert [each.name for each in file.parent.iterdir()] == [file.name]


def test_one_process_writes_or_many_read(address: str, writer: DatabaseWriter) -> None:
    rows = Rows.make(50)
    rows.fill(writer)
    reading = (
        "from whiten_index.vectordb.registry import open_writer\n"
        f"with open_writer({address!r}, 'docs', make=False) as writer: print(writer.count())\n"
    )
    with process(code=reading) as child:
        assert "one process at a time" in child.communicate(timeout=60)[1]
    writer.close()
    with open_writer(address, "docs", make=False) as reader:
        with process(code=reading) as child:
            assert child.communicate(timeout=60) == ("50\n", "")
        rows.assert_found(reader)
        with pytest.raises(DatabaseError, match="read-only"):
            reader.begin(rows.pushed, rows.layout)


def test_conditions_without_the_index(writer: DatabaseWriter, file: Path) -> None:
    """The SQL of docs/databases.md finds the nearest of the rows that meet a condition."""
    (order,) = re.findall(r"SELECT id, text FROM docs WHERE lang .*;", DOCS.read_text())
    rows = Rows.make(
        300, k=128, lang=pa.array(["en", "de", "fr"] * 100), text=pa.array(["x"] * 300)
    )
    rows.fill(writer)
    writer.close()
    with connect(file, make=False) as reader:
        reader.execute("USE db")
        query = rows.vectors[0]
        found = [row[0] for row in reader.execute(order, {"query": query.tolist()}).fetchall()]
    cosines = np.where(np.arange(300) % 3 == 1, rows.vectors @ query, -np.inf)
    assert found == np.argsort(-cosines)[:10].tolist()


@pytest.mark.parametrize("made", [
    "CREATE TABLE docs AS SELECT 1", "CREATE VIEW docs AS SELECT 1",
    "CREATE TABLE Docs AS SELECT 1", "CREATE VIEW docs__pending AS SELECT 1",
    "CREATE TABLE docs__pending AS SELECT 1",
])  # fmt: skip
def test_what_no_push_made_is_left_alone(address: str, file: Path, made: str) -> None:
    with duckdb.connect(file) as database:
        database.execute(f"{made} AS one")
    rows = Rows.make(20)
    message = "a table or view .* that no push made"
    with open_writer(address, "docs") as writer:
        # As a push does that has nothing to send, or changes.
        writer.discard()
        with pytest.raises(DatabaseError, match=message):
            rows.fill(writer)
    with duckdb.connect(file) as database:
        assert database.execute(f"SELECT one FROM {made.split()[2]}").fetchall() == [(1,)]


def test_what_finds_no_room_in_memory_lies_next_to_the_file(
    address: str, file: Path, tmp_path: Path
) -> None:
    """DuckDB would take ``.tmp`` of the working folder, which may lead elsewhere."""
    spilled = file.with_name(f"{file.name}.tmp")
    left, mine = spilled / "duckdb_temp_storage_DEFAULT-0.tmp", spilled / "notes.txt"
    spilled.mkdir()
    for path in (left, mine):
        path.write_text("x")
    with open_writer(address, "docs"):
        # What a push that was killed left is gone.
        assert (left.exists(), mine.exists()) == (False, True)
        with closing(connect(file, make=True)) as database:
            place = database.execute("SELECT current_setting('temp_directory')").fetchone()
    assert place == (str(spilled),)
    shutil.rmtree(spilled)
    spilled.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="is a link, through which the engine would write"):
        open_writer(address, "docs")


@pytest.mark.parametrize("end", ["", ".wal"])
def test_a_pipe_is_left_as_it_is(address: str, file: Path, end: str) -> None:
    """The engine would wait for it, or remove it or the device that a link leads to."""
    pipe = file.with_name(file.name + end)
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="is a pipe, a socket or a device, and is left as it is"):
        open_writer(address, "docs")
    assert pipe.is_fifo()


def test_a_file_that_is_damaged(address: str, file: Path) -> None:
    Rows.make(20).push_to(address)
    whole = file.read_bytes()
    file.write_bytes(whole[:20_000])
    with (
        pytest.raises(DatabaseError, match=r"docs.duckdb, table docs: .* could not be"),
        open_writer(address, "docs", make=False) as writer,
    ):
        writer.fetch([1], Rows.make(20).layout)
    assert file.read_bytes() == whole[:20_000]


@pytest.mark.parametrize(("place", "message"), [
    ("duckdb://host/f.duckdb", "three slashes"), ("duckdb:///", "is a folder"),
    ("duckdb:///nowhere/f.duckdb", "is in a folder that does not exist"),
])  # fmt: skip
def test_addresses(place: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_writer(place, "docs")


def test_a_missing_extension(address: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duckdb_extension_vss, "__path__", ["/nowhere"])
    lacks = r"extension vss of DuckDB .* is not installed; run pip install 'whiten-index\[duckdb\]'"
    with pytest.raises(ConfigError, match=lacks):
        open_writer(address, "docs")
    assert not file.exists()


def test_a_comment_of_the_user(address: str, file: Path) -> None:
    """A description may be anybody's."""
    huge = PushedTable("v", "t", 12, "float32", rows=10**400).text
    with duckdb.connect(file) as database:
        database.execute(f"CREATE TABLE docs AS SELECT 1; COMMENT ON TABLE docs IS '{huge}'")
    with pytest.raises(DatabaseError, match="that no push made"):
        pushed_version(address, "docs")


@pytest.mark.parametrize(
    ("order", "added"),
    [
        ("CREATE INDEX mine ON db.main.docs (n)", "index mine"),
        (
            "DROP INDEX db.main.docs_vector_idx; CREATE INDEX docs_vector_idx ON db.main.docs (n)",
            "index docs_vector_idx",
        ),
        ("ALTER TABLE db.main.docs ADD COLUMN mine INT", "column mine"),
        ("COMMENT ON COLUMN db.main.docs.n IS 'mine'", "comment on column n"),
        ("ALTER TABLE db.main.docs ADD PRIMARY KEY (id)", "constraint PRIMARY KEY.*"),
    ],
)
def test_what_users_added_is_not_lost(address: str, file: Path, order: str, added: str) -> None:
    rows = Rows.make(300, n=pa.array(range(300)))
    rows.push_to(address)
    with connect(file, make=True) as mine:
        if order.startswith("ALTER"):
            mine.execute("DROP INDEX db.main.docs_vector_idx")  # DuckDB alters no indexed table
        mine.execute(order)
    message = f"what its users added, .* would lack: {added}; drop that"
    with open_writer(address, "docs") as writer:
        with pytest.raises(DatabaseError, match=message):
            rows.fill(writer)
        with pytest.raises(DatabaseError, match=message):
            rows.change(writer)
        assert writer.count() == 300


def test_an_index_of_another_table_has_the_name(address: str) -> None:
    """The push is refused before rows are sent, in full or as changes."""
    rows = Rows.make()
    with open_writer(address, "docs", options={"index": "none"}) as writer:
        writer._run("CREATE TABLE db.main.Other AS SELECT 1 AS n")
        writer._run("CREATE INDEX Docs_vector_idx ON db.main.other (n)")
        rows.fill(writer)
    message = "index docs_vector_idx of table Other, whose name its own would have"
    with open_writer(address, "docs") as writer:
        with pytest.raises(DatabaseError, match=message):
            writer.begin(rows.pushed, rows.layout)
        with pytest.raises(DatabaseError, match=message):
            rows.change(writer)
        assert writer.pending() is None
        rows.assert_held(writer)


def test_changes_leave_a_column_and_an_index_of_users(address: str, file: Path) -> None:
    old, after, put = some_changes()
    with open_writer(address, "docs", options={"index": "none"}) as writer:
        old.fill(writer)
        writer._run("ALTER TABLE db.main.docs ADD COLUMN mine INT")
        writer._run("UPDATE db.main.docs SET mine = 1")
        writer._run("CREATE TABLE db.main.other AS SELECT 1 AS n")
        writer._run("CREATE INDEX docs_vector_idx ON db.main.other (n)")
        after.change(writer, put, gone=[7])
        after.assert_held(writer)
        kept = writer._run("SELECT count(mine) FROM db.main.docs").fetchone()
        assert writer._run("SELECT table_name FROM duckdb_indexes()").fetchall() == [("other",)]
    assert kept == (len(after.table) - len(put),)


def test_macros_of_a_file_are_not_called(address: str, file: Path) -> None:
    """They may have the names of functions, read other files and have no end."""
    rows = Rows.make()
    rows.push_to(address)
    with duckdb.connect(file) as database:
        for name in ("duckdb_tables", "duckdb_views", "pragma_storage_info", "unnest", "lower",
                     "list_sum", "array_cosine_distance", "array_cosine_similarity"):  # fmt: skip
            given = "" if name.startswith("duckdb") else "one, two := 2"
            kind = "TABLE SELECT error('called')" if "_" in name[:7] else "error('called')"
            database.execute(f"CREATE MACRO {name}({given}) AS {kind}")
    with open_writer(address, "docs") as writer:
        rows.assert_held(writer)
        rows.assert_found(writer)
        rows.change(writer, rows.take(range(5)))
        writer.remove()


@pytest.mark.parametrize("computed", [
    "x INTEGER GENERATED ALWAYS AS (range(9)[1])", "x INTEGER DEFAULT nextval('n')",
    "x INTEGER, CHECK (x > 3)",
])  # fmt: skip
def test_a_table_that_computes_is_not_read(address: str, file: Path, computed: str) -> None:
    rows = Rows.make()
    rows.push_to(address)
    with duckdb.connect(file) as database:
        (text,) = database.execute("SELECT comment FROM duckdb_tables()").fetchone()
        database.execute("CREATE SEQUENCE n; DROP TABLE docs")
        database.execute(f"CREATE TABLE docs (id BIGINT, vector FLOAT[12], {computed})")
        database.execute(f"COMMENT ON TABLE docs IS '{text}'")
    with pytest.raises(DatabaseError, match="that no push made"):
        pushed_version(address, "docs")


def test_columns_may_have_the_names_of_what_computes(address: str) -> None:
    kept = {"generated": ["DEFAULT(1)"] * 50, "checks": ["it's"] * 50, 'a "check(" of': [1] * 50}
    rows = Rows.make(50, **{name: pa.array(values) for name, values in kept.items()})
    rows.push_to(address)
    rows.assert_held_at(address)


def test_no_other_file_is_opened(file: Path, tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("1")
    with connect(file, make=True) as database, pytest.raises(duckdb.PermissionException):
        database.execute(f"FROM '{tmp_path}/other.csv'")


def test_ctrl_c_in_a_query_is_no_error_of_the_database(writer: DatabaseWriter) -> None:
    def ask() -> None:
        with writer._reporting("the rows could not be read"):
            writer._database.execute(
                "SELECT sum(a.i * b.i) FROM range(10000000) a(i), range(99) b(i)"
            )

    # Without the handler of the command line, which would stop the commands of later tests.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            ask()
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)


def test_an_interrupted_push_leaves_the_file_to_others(address: str, file: Path) -> None:
    """Between two pushes, DuckDB alone opens a file with a table that waits."""
    rows = Rows.make()
    with open_writer(address, "docs") as writer:
        writer.begin(rows.pushed, rows.layout)
        append(writer, rows.batches()[:1])
    with duckdb.connect(file) as database:
        assert database.execute("SELECT count(*) FROM docs__pending").fetchone() == (128,)
    with open_writer(address, "docs") as writer:
        writer.resume(rows.layout)
        end(writer, rows.batches()[1:])
        rows.assert_held(writer)
