"""SQLite's own: the views that users query, readers beside a push, codes, and other files."""

import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import apsw
import numpy as np
import pyarrow as pa
import pytest

from tests.vectordb.pushed_rows import Rows, append, end, some_changes
from whiten_index.errors import ConfigError, DatabaseError
from whiten_index.vectordb.push import pushed_version
from whiten_index.vectordb.pushed_table import PushedTable
from whiten_index.vectordb.registry import open_writer
from whiten_index.vectordb.sqlite_writer import connect


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "docs.sqlite"


@pytest.fixture
def address(file: Path) -> str:
    return f"sqlite://{file}"


@pytest.fixture
def user(file: Path) -> Iterator[Any]:
    """A connection of the user, with the extension."""
    apsw.Connection(str(file)).close()
    connection = connect(file, make=False)
    yield connection
    connection.close()


def execute(file: Path, *given: Any) -> None:
    """Execute an order as the user of a file does."""
    with closing(apsw.Connection(str(file))) as mine:
        mine.execute(*given)


def kept(**more: Any) -> Rows:
    return Rows.make(k=16, n=pa.array(range(300)), lang=pa.array(["en", "de", "fr"] * 100), **more)


def test_users_query_one_view_and_filter_by_the_other(address: str, user: Any) -> None:
    rows = kept()
    rows.push_to(address)
    query = rows.vectors[4].tobytes()
    near = "SELECT id, lang, distance FROM docs WHERE vector MATCH ? AND k = 3"
    found = user.execute(near, (query,)).fetchall()
    assert len(found) == 3
    assert found[0][:2] == (4, "de")
    # The nearest rows of a language, not those of it among the nearest.
    among = f"{near} AND rowid IN (SELECT rowid FROM docs_rows WHERE lang = 'fr') ORDER BY distance"
    ids = [row[0] for row in user.execute(among, (query,))]
    cosines = np.where(np.arange(300) % 3 == 2, rows.vectors @ rows.vectors[4], -np.inf)
    assert ids == np.argsort(-cosines)[:3].tolist()
    exact = "SELECT id FROM docs WHERE lang = 'fr' ORDER BY vec_distance_cosine(vector, ?) LIMIT 3"
    assert [row[0] for row in user.execute(exact, (query,))] == ids
    plan = [row[3] for row in user.execute(f"EXPLAIN QUERY PLAN {exact}", (query,))]
    assert user.execute("SELECT count(*) FROM docs").get == 300, plan


@pytest.mark.parametrize("code", ["float32", "bit"])
def test_a_code_stays_that_of_the_table(address: str, user: Any, code: str) -> None:
    """Pushes of changes need no option, and searches neither."""
    rows = kept()
    rows.push_to(address, code=code)
    later = replace(kept(seed=1), version="2")
    with open_writer(address, "docs") as writer:
        later.change(writer, later.take(range(300)), gone=range(100))
        later.assert_held(writer)
        later.assert_clean(writer)
        later.assert_found(writer)
        later.assert_found(writer, exact=False, least=0.5 if code == "bit" else 1)
        assert bool(writer.sizes()["index"]) is (code != "float32")
    columns = [row[1] for row in user.execute("PRAGMA table_info(docs)")]
    assert columns == ["rowid", "id", "n", "lang", "vector", "distance", "k"] + ["code"] * (
        code != "float32"
    )


def test_readers_go_on_beside_a_push(address: str, file: Path, user: Any) -> None:
    old, new = kept(), kept(seed=1)
    count, near = "SELECT count(*) FROM docs", "SELECT id FROM docs WHERE vector MATCH ? AND k = 1"
    with open_writer(address, "docs") as writer:
        old.fill(writer)
        assert user.execute(near, (old.vectors[7].tobytes(),)).get == 7
        writer.begin(new.pushed, new.layout)
        for batch in new.batches():
            writer.append(batch)
            assert user.execute(near, (old.vectors[7].tobytes(),)).get == 7
        with open_writer(address, "docs", make=False) as reader:
            old.assert_held(reader)
            writer.finish()
            with user:
                # A transaction of a reader keeps what it saw.
                assert user.execute(count).get == 300
                writer.swap()
                assert user.execute(near, (old.vectors[7].tobytes(),)).get == 7
            assert user.execute(near, (new.vectors[7].tobytes(),)).get == 7
            new.assert_held(reader)
        with (
            user,
            open_writer(address, "docs", make=False) as reader,
            writer.changing(old.pushed, old.layout) as changing,
        ):
            changing.delete([5])
            changing.upsert(old.take([6]))
            assert reader.count() == user.execute(count).get == 300
            changing.upsert(old.take([5]))
    user.close()
    # At rest it is one file, which others can copy.
    with open_writer(address, "docs"):
        pass
    assert [each.name for each in file.parent.iterdir()] == [file.name]


def test_a_file_of_the_user_keeps_its_mode_and_tables(address: str, file: Path) -> None:
    execute(file, "PRAGMA journal_mode = WAL")
    execute(file, "CREATE TABLE mine AS SELECT 1 AS one")
    with open_writer(address, "docs") as writer:
        kept().fill(writer)
        writer.remove()
    mine = apsw.Connection(str(file))
    assert mine.execute("PRAGMA journal_mode").get == "wal"
    # What remains of pushes is the table of descriptions, which is empty.
    names = [name for (name,) in mine.execute("SELECT name FROM sqlite_schema WHERE type = 'table' "
                                              "AND name NOT LIKE 'sqlite_%'")]  # fmt: skip
    assert names == ["mine", "whiten_index_tables"]
    assert mine.execute("SELECT count(*) FROM whiten_index_tables").get == 0
    mine.close()


@pytest.mark.parametrize("what", ["push", "changes", "committed"])
def test_the_mode_comes_back_after_a_killed_push(
    address: str, file: Path, tmp_path: Path, what: str
) -> None:
    rows, left = kept(), tmp_path / "left"
    with open_writer(address, "docs") as writer:
        if what != "push":
            rows.fill(writer)
    with open_writer(address, "docs") as writer:
        if what == "push":
            writer.begin(rows.pushed, rows.layout)
            append(writer, rows.batches()[:1])
        else:
            assert writer.published()
            rows.change(writer, gone=[5])
        # As a killed process leaves it.
        shutil.copytree(tmp_path, left, ignore=lambda _, names: {"left"} & {*names})
    file = left / file.name
    user = apsw.Connection(str(file))
    assert user.execute("PRAGMA journal_mode").get == "wal"
    user.close()
    with open_writer(f"sqlite://{file}", "docs") as writer:
        if what == "committed":
            # A push of the same version has nothing to send.
            assert writer.published()
        else:
            rows.fill(writer)
    assert [each.name for each in left.iterdir()] == [file.name]
    user = apsw.Connection(str(file))
    assert user.execute("PRAGMA journal_mode").get == "delete"
    assert user.execute("SELECT name FROM whiten_index_tables").fetchall() == [("docs",)]
    user.close()


def test_a_file_that_was_vacuumed(address: str, file: Path) -> None:
    rows = kept()
    with open_writer(address, "docs") as writer:
        rows.fill(writer)
        rows.change(writer, rows.take(range(50, 100)), rows.take(range(50)), gone=range(100))
    execute(file, "VACUUM")
    with open_writer(address, "docs") as writer:
        rows.assert_held(writer)
        rows.assert_found(writer)


def test_vectors_of_zeros_are_in_the_view_of_rows_alone(address: str, user: Any) -> None:
    kept().with_zeros(0, 7, 299).push_to(address)
    assert user.execute("SELECT count(*) FROM docs").get == 297
    assert user.execute("SELECT count(*) FROM docs_rows").get == 300


@pytest.mark.parametrize("made", [
    "CREATE TABLE docs AS SELECT 1", "CREATE VIEW docs AS SELECT 1",
    "CREATE TABLE Docs AS SELECT 1", "CREATE TABLE docs_rows AS SELECT 1",
])  # fmt: skip
def test_what_no_push_made_is_left_alone(address: str, file: Path, made: str) -> None:
    mine = apsw.Connection(str(file))
    mine.execute(f"{made} AS one")
    rows = kept()
    with open_writer(address, "docs") as writer:
        with pytest.raises(DatabaseError, match="that no push made"):
            rows.fill(writer)
        with pytest.raises(DatabaseError, match="that no push made"):
            writer.remove()
    assert mine.execute(f"SELECT one FROM {made.split()[2]}").get == 1
    mine.close()


@pytest.mark.parametrize("text", [
    "[]", "{}", PushedTable("v", "t", 16, "float32", 300, name='x" --').text,
    PushedTable("v", "t", 16, "float32", rows=10**400, name="docs__01234567").text, 5, b"{}",
])  # fmt: skip
def test_descriptions_of_others(address: str, file: Path, text: str | int | bytes) -> None:
    rows = kept()
    rows.push_to(address)
    execute(file, "UPDATE whiten_index_tables SET description = ?", (text,))
    with pytest.raises(DatabaseError, match="that no push made"):
        rows.push_to(address)


ENDLESS = "WITH RECURSIVE x(a) AS (SELECT 1 UNION ALL SELECT a + 1 FROM x)"


@pytest.mark.parametrize("order", [
    "DROP TABLE whiten_index_tables; CREATE VIEW whiten_index_tables AS {0} "
    "SELECT 'docs' AS name, 0 AS pending, '{{}}' AS description FROM x",
    "DROP TABLE {1}_rows; CREATE VIEW {1}_rows AS {0} SELECT a AS id FROM x",
    "DROP VIEW {1}; CREATE VIEW {1} AS {0} SELECT a AS id FROM x",
    "DROP VIEW {1}; CREATE VIEW {1} AS SELECT 1 FROM {1}_rows, {1}_rows UNION SELECT 1 "
    "FROM {1}_vector AS v JOIN {1}_rows AS r ON r.rowid = v.rowid",
    "DROP VIEW {1}; CREATE VIEW {1} AS SELECT '\"', ({0} SELECT max(a) FROM x) AS id, '\"', "
    "v.vector FROM {1}_vector AS v JOIN {1}_rows AS r ON r.rowid = v.rowid",
    "ALTER TABLE {1}_rows ADD COLUMN long AS (zeroblob(999999999))",
])  # fmt: skip
def test_views_and_columns_of_others_are_not_read(address: str, file: Path, order: str) -> None:
    kept().push_to(address)
    name = pushed_version(address, "docs").name
    execute(file, order.format(ENDLESS, name))
    with pytest.raises(DatabaseError, match="that no push made"):
        pushed_version(address, "docs")


def test_a_column_of_others_that_has_any_length_is_not_read(address: str, file: Path) -> None:
    column = "description AS (hex(zeroblob(99999999)))"
    execute(file, f"CREATE TABLE whiten_index_tables (name, pending, {column})")
    execute(file, "INSERT INTO whiten_index_tables VALUES ('docs', 0)")
    with pytest.raises(DatabaseError, match="table or view whiten_index_tables that no push made"):
        pushed_version(address, "docs")


@pytest.mark.parametrize(
    ("order", "added"),
    [
        ("CREATE INDEX mine ON {}_rows (n)", "index mine"),
        ("ALTER TABLE {}_rows ADD COLUMN mine", "column mine"),
        ("CREATE TRIGGER mine INSTEAD OF DELETE ON docs BEGIN SELECT 1; END", "trigger mine"),
        ("DROP VIEW docs; CREATE VIEW docs AS SELECT 1 AS one FROM {}_rows", "view docs"),
        ("DROP VIEW docs_rows; CREATE TABLE Docs_rows (id)", "table Docs_rows"),
    ],
)
def test_what_users_added_is_not_lost(address: str, file: Path, order: str, added: str) -> None:
    kept().push_to(address)
    name = pushed_version(address, "docs").name
    execute(file, order.format(name))
    message = f"what its users added, .* would lack: {added}; drop that"
    with open_writer(address, "docs") as writer:
        with pytest.raises(DatabaseError, match=message):
            kept(seed=2).fill(writer)
        assert writer.published().name == name
        assert writer.count() == 300


@pytest.mark.parametrize("full", [False, True])
def test_views_that_users_dropped_are_made_again(address: str, file: Path, full: bool) -> None:
    rows = kept()
    rows.push_to(address)
    execute(file, "DROP VIEW docs; DROP VIEW docs_rows")
    with open_writer(address, "docs") as writer:
        if full:
            rows.fill(writer)
        else:
            # As a push does that has nothing to send, or changes.
            writer.discard()
        assert writer._run("SELECT count(*) FROM docs").get == 300
        assert writer._run("SELECT count(*) FROM docs_rows").get == 300


@pytest.mark.parametrize("pending", [False, True])
def test_a_table_that_users_dropped_is_not_there(address: str, file: Path, pending: bool) -> None:
    rows = kept()
    with open_writer(address, "docs") as writer:
        writer.begin(rows.pushed, rows.layout)
        if not pending:
            end(writer, rows.batches())
        name = (writer.pending() if pending else writer.published()).name
    with closing(connect(file, make=True)) as mine:
        for view in ("docs", "docs_rows", name):
            mine.execute(f"DROP VIEW IF EXISTS {view}")
        mine.execute(f"DROP TABLE {name}_rows; DROP TABLE {name}_vector")
    with open_writer(address, "docs") as writer:
        assert writer.published() is writer.pending() is None
        writer.discard()
        rows.fill(writer)
        rows.assert_held(writer)
        assert writer._run("SELECT count(*) FROM whiten_index_tables WHERE name = 'docs'").get == 1


def test_changes_leave_a_column_of_users(address: str, file: Path) -> None:
    old, after, put = some_changes()
    with open_writer(address, "docs") as writer:
        old.fill(writer)
        name = writer.published().name
        execute(file, f"ALTER TABLE {name}_rows ADD COLUMN mine")
        execute(file, f"UPDATE {name}_rows SET mine = 1")
        after.change(writer, put, gone=[7])
        after.assert_held(writer)
    with closing(apsw.Connection(str(file))) as mine:
        kept = mine.execute(f"SELECT count(mine) FROM {name}_rows").get
    assert kept == len(after.table) - len(put)


def test_triggers_of_others_do_not_run(address: str, file: Path) -> None:
    kept().push_to(address)
    for event in ("INSERT", "DELETE"):
        execute(
            file,
            f"CREATE TRIGGER t{event} AFTER {event} ON whiten_index_tables BEGIN "
            f"SELECT count(*) FROM ({ENDLESS} SELECT a FROM x); END",
        )
    kept(seed=2).push_to(address)
    kept(seed=2).assert_held_at(address)


def test_a_file_that_others_write(address: str, file: Path) -> None:
    rows = kept()
    rows.push_to(address)
    mine = apsw.Connection(str(file))
    with open_writer(address, "docs", options={"lock_timeout": "1"}) as writer:
        mine.execute("BEGIN IMMEDIATE")
        message = "a new table could not be made .*another program writes to the file.*lock_timeout"
        with pytest.raises(DatabaseError, match=message):
            writer.begin(rows.pushed, rows.layout)
        mine.execute("ROLLBACK")
        kept(seed=1).fill(writer)
    mine.close()


def test_two_rows_of_one_id(address: str) -> None:
    rows = kept()
    with open_writer(address, "docs") as writer:
        writer.begin(rows.pushed, rows.layout)
        append(writer, [rows.take(range(300)), rows.take([7])])
        with pytest.raises(DatabaseError, match=r"rows are refused .*UNIQUE"):
            end(writer)
        writer.discard()
        rows.fill(writer)


@pytest.mark.parametrize("name", ["distance", "K", "rowid", "code"])
def test_columns_that_have_names_of_the_engine(address: str, name: str) -> None:
    rows = Rows.make(3, **{name: pa.array([1, 2, 3])})
    with pytest.raises(ConfigError, match=f"SQLite .* cannot give a column the name '{name}'"):
        rows.push_to(address)


def test_bits_fill_bytes(address: str) -> None:
    with pytest.raises(ConfigError, match="code=bit needs vectors of 8, 16, 24, … numbers, and"):
        Rows.make(3).push_to(address, code="bit")
