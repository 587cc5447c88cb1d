"""Names of tables and options of their indexes, in PostgreSQL."""

import pyarrow as pa
import pytest

from tests.vectordb.postgres.helpers import Run
from tests.vectordb.pushed_rows import Rows
from whiten_index.errors import ConfigError, DatabaseError
from whiten_index.vectordb.push import pushed_version
from whiten_index.vectordb.registry import open_writer

pytestmark = pytest.mark.service


@pytest.mark.parametrize("name", ["public.docs", ".docs", "docs.", " docs", "docs\n", "a\0b"])
def test_names_that_were_meant_otherwise(address: str, run: Run, name: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot give a table the name .*--option schema=NAME"):
        open_writer(address, name)
    assert run("SELECT relname FROM pg_class WHERE relname ~ 'docs'") == []


def test_percent_signs(address: str, run: Run) -> None:
    """The client takes them for places of values, where there are values."""
    for schema in ("s%s", "e%(x)s"):
        run(f'CREATE SCHEMA "{schema}"')
    run('CREATE EXTENSION vector SCHEMA "e%(x)s"')
    rows = Rows.make(**{"50%": pa.array(range(300)), "%s%%": pa.array(range(300))})
    with open_writer(address, "a%b", options={"schema": "s%s"}) as writer:
        for _ in range(2):
            rows.fill(writer)
        rows.assert_held(writer)
        rows.assert_found(writer)
        rows.assert_found(writer, exact=False, least=0.9)
        rows.change(writer, rows.take([1, 2]), gone=[1, 2])
        rows.assert_held(writer)


def test_a_table_of_the_same_kind_that_users_made(address: str, run: Run) -> None:
    rows = Rows.make(30, n=pa.array(range(30)))
    rows.push_to(address, "mine")
    # With all that the server copies, comments too.
    run("CREATE TABLE other (LIKE mine INCLUDING ALL)")
    for order in (
        "DROP TABLE mine; ALTER TABLE other RENAME TO mine",
        "DROP TABLE mine; CREATE TABLE mine (id int, vector vector(12), n int)",
        "ALTER TABLE mine RENAME TO theirs; CREATE VIEW mine AS SELECT * FROM theirs",
    ):
        run(order)
        run("INSERT INTO mine (id, vector, n) VALUES (1, array_fill(1, '{12}')::vector, 1)")
        for attempt in (pushed_version, rows.push_to):
            with pytest.raises(DatabaseError, match="no push made it"):
                attempt(address, "mine")
        assert run("SELECT DISTINCT id FROM mine") == [(1,)]


def test_the_longest_name(address: str, run: Run) -> None:
    name = "é" * 26
    for seed in (0, 1):
        Rows.make(20, seed=seed).push_to(address, name)
    found = run("SELECT indexname FROM pg_indexes WHERE tablename = %s ORDER BY 1", name)
    assert found == [(f"{name}_pkey",), (f"{name}_vector_idx",)]
    with pytest.raises(ConfigError, match="1 to 52 bytes"):
        open_writer(address, "é" * 26 + "a")


@pytest.mark.parametrize(
    ("dtype", "k", "why"),
    [
        ("float32", 2001, "--dtype float16, --option code=bit or --option index=none"),
        ("float16", 4001, "--k, or give --option index=none"),
    ],
)
def test_vectors_that_are_too_wide(address: str, dtype: str, k: int, why: str) -> None:
    rows = Rows.make(3, k=k, dtype=dtype)
    with open_writer(address, "docs") as writer:
        with pytest.raises(ConfigError, match=why):
            writer.begin(rows.pushed, rows.layout)
        assert writer.pending() is None
    rows.push_to(address, index="none")
    rows.assert_held_at(address, index="none")


def test_the_comment_on_the_primary_key_tells_a_table_of_a_push(address: str, run: Run) -> None:
    """Comments on the table and its columns are the users' own."""
    rows, new = Rows.make(30), Rows.make(20, seed=1)
    rows.push_to(address)
    run("COMMENT ON TABLE docs IS 'ours'")
    run("COMMENT ON COLUMN docs.vector IS 'of the corpus'")
    new.push_to(address)
    new.assert_held_at(address)
    comments = run("SELECT obj_description('docs'::regclass), col_description('docs'::regclass, 2)")
    assert comments == [("ours", "of the corpus")]
    query = "SELECT obj_description(oid, 'pg_constraint')::jsonb->>'version' FROM pg_constraint "
    assert run(query + "WHERE conname = 'docs_pkey'") == [(new.pushed.version,)]
    for comment in ("'x'", "'{}'", """'{"table": "other"}'""", "NULL"):
        run(f"COMMENT ON CONSTRAINT docs_pkey ON docs IS {comment}")
        for attempt in (pushed_version, rows.push_to):
            with pytest.raises(DatabaseError, match="no push made it as it is"):
                attempt(address, "docs")
    assert run("SELECT count(*) FROM docs") == [(20,)]


def test_what_has_the_name_of_a_pending_table_stays(address: str, run: Run) -> None:
    run("CREATE TABLE docs__01234567 (id int, vector int)")
    run("CREATE TABLE docs__0123456x (id int)")
    with open_writer(address, "docs") as writer:
        assert writer.pending() is None
        Rows.make(20).fill(writer)
        writer.discard()
    assert run("SELECT count(*) FROM docs__01234567, docs__0123456x") == [(0,)]


def test_a_published_table_may_have_the_name_of_a_pending_one(address: str) -> None:
    rows = Rows.make(20)
    rows.push_to(address, "docs__20261125")
    for seed in (0, 1):
        with open_writer(address, "docs") as writer:
            assert writer.pending() is None
            Rows.make(20, seed=seed).fill(writer)
            writer.discard()
    rows.assert_held_at(address, "docs__20261125")


def test_a_name_of_an_index_that_is_taken(address: str, run: Run) -> None:
    rows = Rows.make(20)
    run("CREATE TABLE docs_pkey (id int)")
    with open_writer(address, "docs") as writer:
        with pytest.raises(DatabaseError, match=r"docs_pkey.*; choose another --table, or rename"):
            rows.fill(writer)
        run("ALTER TABLE docs_pkey RENAME TO theirs")
        writer.swap()
        rows.assert_held(writer)
