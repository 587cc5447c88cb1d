"""Names of tables and options of their indexes, in PostgreSQL."""

from __future__ import annotations

import re
from dataclasses import replace

import pyarrow as pa
import pytest

from tests.vectordb.postgres.helpers import Run, push_all, sql_name
from tests.vectordb.writer_contract import (
    K,
    Rows,
    assert_finds,
    assert_holds,
    fill,
)
from whiten_index.errors import ConfigError, DatabaseError
from whiten_index.vectordb.database_writer import VectorDtype
from whiten_index.vectordb.postgres.options import PostgresOptions
from whiten_index.vectordb.registry import open_writer

pytestmark = pytest.mark.service


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("public.docs", "has a dot: give --option schema=public --table docs, or choose one"),
        ("my.old.docs", "give --option schema=my --table old.docs"),
        (".docs", "'.docs' has a dot: choose one without"),
        ("docs.", "'docs.' has a dot: choose one without"),
        (" docs", "begins or ends with a blank"),
        ("docs\n", "begins or ends with a blank"),
    ],
)
def test_names_that_were_meant_otherwise(address: str, run: Run, name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
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
            fill(writer, rows)
        assert_holds(writer, rows)
        assert_finds(writer, rows)
        assert_finds(writer, rows, exact=False, least=0.9)
        with writer.changing(rows.pushed, rows.layout) as changing:
            changing.delete([1, 2])
            changing.upsert(rows.take([1, 2]))
        assert_holds(writer, rows)


def test_a_table_of_the_same_kind_that_users_made(address: str, run: Run) -> None:
    rows = Rows.make(30, n=pa.array(range(30)))
    push_all(address, rows, "mine")
    # With all that the server copies, comments too.
    run("CREATE TABLE other (LIKE mine INCLUDING ALL)")
    for order in (
        "ALTER TABLE other RENAME TO mine",
        "CREATE TABLE mine (id int, vector vector(12), n int)",
    ):
        run("DROP TABLE mine")
        run(order)
        run("INSERT INTO mine (id, vector, n) VALUES (1, array_fill(1, '{12}')::vector, 1)")
        with open_writer(address, "mine") as writer:
            with pytest.raises(DatabaseError, match="no push made it"):
                writer.published()
            with pytest.raises(DatabaseError, match="no push made it"):
                fill(writer, rows)
        assert run("SELECT count(*) FROM mine") == [(1,)]


def test_a_database_that_was_restored(address: str, run: Run) -> None:
    """Its tables have other numbers in the catalog; comments on tables are the users' own."""
    rows, new = Rows.make(30), Rows.make(20, seed=1)
    push_all(address, rows)
    run("COMMENT ON TABLE docs IS 'ours'")
    run("UPDATE whiten_index_tables SET pushed = jsonb_set(pushed, '{oid}', '1')")
    with open_writer(address, "docs") as writer:
        assert_holds(writer, rows)
        with writer.changing(rows.pushed, rows.layout) as changing:
            changing.upsert(rows.take([1]))
        fill(writer, new)
        assert_holds(writer, new)
    # The primary key, whose comment tells of it, may be gone where the number is right.
    run("ALTER TABLE docs DROP CONSTRAINT docs_pkey")
    with open_writer(address, "docs") as writer:
        assert_holds(writer, new)
        with (
            pytest.raises(
                DatabaseError, match=r"primary key .* dropped; push all rows with --full"
            ),
            writer.changing(new.pushed, new.layout) as changing,
        ):
            changing.upsert(new.take([1]))
        fill(writer, rows)


@pytest.mark.parametrize(
    "told", ['{"name": "precious"}', '{"name": "precious", "made": "precious"}',
             '{"name": "docs__1234567g", "made": "docs__1234567g"}', '{"dtype": "float8"}'],
)  # fmt: skip
@pytest.mark.parametrize("pending", [False, True])
def test_a_register_that_names_another_table(
    address: str, run: Run, told: str, pending: bool
) -> None:
    rows = Rows.make(20)
    run("CREATE TABLE precious (id int)")
    push_all(address, rows)
    with open_writer(address, "docs") as writer:
        writer.begin(rows.pushed, rows.layout)
    run(f"UPDATE whiten_index_tables SET pushed = pushed || '{told}' "
        f"WHERE pending = {pending}")  # fmt: skip
    with open_writer(address, "docs") as writer:
        attempts = [lambda: writer.begin(rows.pushed, rows.layout)]
        attempts += [writer.discard, writer.pending] if pending else [writer.published]
        for attempt in attempts:
            with pytest.raises(DatabaseError, match=r"cannot be read.*delete that row"):
                attempt()
    assert run("SELECT count(*) FROM precious") == [(0,)]


@pytest.mark.parametrize("pending", [False, True])
def test_an_entry_that_cannot_be_read_is_mended_as_told(
    address: str, run: Run, pending: bool
) -> None:
    name, rows = "o'docs\"%", Rows.make(20)
    push_all(address, rows, "other")
    with open_writer(address, name) as writer:
        fill(writer, rows)
        writer.begin(rows.pushed, rows.layout)
    run("UPDATE whiten_index_tables SET pushed = pushed - 'made' "
        "WHERE name <> 'other' AND pending = %s", pending)  # fmt: skip
    with open_writer(address, name) as writer:
        with pytest.raises(DatabaseError) as told:
            (writer.pending if pending else writer.published)()
        text = str(told.value)
        assert "cannot be read (it lacks 'made'): another release, earlier or later" in text
        found = re.search(r"delete that row of it: (DELETE FROM .*?pending);", text)
        assert found is not None
        entries = "SELECT name, pending FROM whiten_index_tables ORDER BY 1, 2"
        before = run(entries)
        run(found[1])
        assert [each for each in before if each not in run(entries)] == [(name, pending)]
        if pending:
            assert writer.pending() is None
            fill(writer, rows)
            assert_holds(writer, rows)
        else:
            with pytest.raises(DatabaseError, match="no push made it as it is"):
                writer.published()


def test_an_entry_of_an_earlier_release(address: str, run: Run) -> None:
    rows = Rows.make(20)
    push_all(address, rows)
    run(
        "UPDATE whiten_index_tables "
        "SET pushed = pushed - 'query_digest' - 'options' - 'lease' - 'changing'"
    )
    with open_writer(address, "docs") as writer:
        told = writer.published()
        assert told is not None
        assert (told.query_digest, told.options, told.version) == ("", "", rows.version)
        with writer.changing(replace(rows.pushed, query_digest="q2"), rows.layout):
            pass
        told = writer.published()
        assert told is not None
        assert told.query_digest == "q2"


def test_what_has_the_name_of_a_pending_table(address: str, run: Run) -> None:
    rows = Rows.make(20)
    with open_writer(address, "docs") as writer:
        writer.begin(rows.pushed, rows.layout)
    ((name,),) = run("SELECT relname FROM pg_class WHERE relname ~ '^docs__[0-9a-f]{8}$'")
    run(f"DROP TABLE {name}")
    run(f"CREATE TABLE {name} (id int) PARTITION BY RANGE (id)")
    with (
        open_writer(address, "docs") as writer,
        pytest.raises(DatabaseError, match="no table of a push"),
    ):
        writer.discard()
    assert run(f"SELECT count(*) FROM {name}") == [(0,)]


def test_the_longest_name(address: str, run: Run) -> None:
    name = "é" * 26
    for seed in (0, 1):
        push_all(address, Rows.make(20, seed=seed), name)
    found = run("SELECT indexname FROM pg_indexes WHERE tablename = %s ORDER BY 1", name)
    assert found == [(f"{name}_pkey",), (f"{name}_vector_idx",)]
    with pytest.raises(ConfigError, match="1 to 52 bytes"):
        open_writer(address, "é" * 26 + "a")
    with pytest.raises(ConfigError, match="whiten_index_tables"):
        open_writer(address, "whiten_index_tables")


def test_a_table_that_no_push_made(address: str, run: Run) -> None:
    run("CREATE TABLE docs (id int)")
    run("CREATE VIEW seen AS SELECT * FROM docs")
    for name in ("docs", "seen"):
        with open_writer(address, name) as writer:
            with pytest.raises(DatabaseError, match="no push made it"):
                writer.published()
            with pytest.raises(DatabaseError, match="no push made it"):
                writer.begin(Rows.make().pushed, Rows.make().layout)
    # Made by a push, and then another by hand.
    push_all(address, Rows.make(3), "mine")
    run("DROP TABLE mine")
    with open_writer(address, "mine") as writer:
        assert writer.published() is None
    run("CREATE TABLE mine (id int, vector vector(3))")
    with (
        open_writer(address, "mine") as writer,
        pytest.raises(DatabaseError, match="no push made it"),
    ):
        writer.published()


def test_a_name_of_an_index_that_is_taken(address: str, run: Run) -> None:
    run("CREATE TABLE docs_pkey (id int)")
    with (
        open_writer(address, "docs") as writer,
        pytest.raises(DatabaseError, match="'docs_pkey', which"),
    ):
        writer.begin(Rows.make().pushed, Rows.make().layout)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"m": "1"}, "m takes a whole number from 2 to 100; '1' was given"),
        ({"m": "x"}, "m takes a whole number"),
        ({"m": "40"}, "ef_construction takes twice m or more"),
        ({"lists": "10"}, "lists is of index=ivfflat and the index is hnsw"),
        ({"index": "flat"}, "use one of hnsw, ivfflat, none"),
        ({"maintenance_work_mem": "1GB; DROP TABLE docs"}, "such as 2GB"),
        ({"lock_timeout": "-1"}, "lock_timeout takes"),
    ],
)
def test_options_that_cannot_be_used(options: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        PostgresOptions.parse(options)


@pytest.mark.parametrize(
    ("options", "index"),
    [
        ({"m": "8", "ef_construction": "32", "ef_search": "200", "maintenance_work_mem": "32MB",
          "max_parallel_maintenance_workers": "0"}, "hnsw.*m='8', ef_construction='32'"),
        ({"index": "ivfflat", "lists": "5", "probes": "5"}, "ivfflat.*lists='5'"),
        ({"index": "none"}, None),
    ],
)  # fmt: skip
def test_indexes(address: str, run: Run, options: dict[str, str], index: str | None) -> None:
    rows = Rows.make(1000)
    with open_writer(address, "docs", options=options) as writer:
        fill(writer, rows)
        assert_finds(writer, rows, exact=False, least=0.95)
        assert_finds(writer, rows)
    found = run("SELECT indexdef FROM pg_indexes WHERE indexname = 'docs_vector_idx'")
    assert len(found) == (index is not None)
    assert index is None or re.search(index, found[0][0])


@pytest.mark.parametrize("options", [{}, {"index": "ivfflat"}])
def test_a_lost_index_is_told(address: str, run: Run, options: dict[str, str]) -> None:
    with open_writer(address, "docs", options=options) as writer:
        assert writer.notes() == []
        fill(writer, Rows.make())
        assert writer.notes() == []
        run("CREATE INDEX ON docs (id)")
        run("DROP INDEX docs_vector_idx")
        (note,) = writer.notes()
        assert note.startswith("the table has no index of its vectors")
    with open_writer(address, "docs", options={"index": "none"}) as writer:
        assert writer.notes() == []
    run(f"CREATE INDEX ON docs USING hnsw ((vector::halfvec({K})) halfvec_cosine_ops)")
    with open_writer(address, "docs") as writer:
        assert writer.notes() == []


@pytest.mark.parametrize("name", ["Docs", "user", 'a"b'])
def test_a_name_that_needs_quotes_is_told(address: str, name: str) -> None:
    with open_writer(address, name, options={"index": "none"}) as writer:
        assert writer.notes() == [f"in SQL this name needs its quotes: {sql_name(name)}"]


def test_an_index_of_other_settings_is_built_again(address: str, run: Run) -> None:
    rows = Rows.make()
    with open_writer(address, "docs") as writer:
        writer.begin(rows.pushed, rows.layout)
        for batch in rows.batches():
            writer.append(batch)
        writer.finish(rows.layout)
    query = "SELECT oid, reloptions FROM pg_class WHERE relname ~ '^docs__[0-9a-f]{8}v$'"
    ((first, settings),) = run(query)
    assert settings == ["m=16", "ef_construction=64"]
    for m in ("16", "8"):
        with open_writer(address, "docs", options={"m": m}) as writer:
            writer.resume(rows.layout)
            writer.finish(rows.layout)
        ((oid, settings),) = run(query)
        assert (oid == first) == (m == "16")
        assert settings[0] == f"m={m}"


@pytest.mark.parametrize(
    ("dtype", "k", "why"),
    [
        (VectorDtype.FLOAT32, 2001, "--dtype float16 or --option index=none"),
        (VectorDtype.FLOAT16, 4001, "--k, or give --option index=none"),
        (VectorDtype.FLOAT32, 16001, "keeps vectors of 16,000"),
    ],
)
def test_vectors_that_are_too_wide(address: str, dtype: VectorDtype, k: int, why: str) -> None:
    rows = Rows.make(3, k=k, dtype=dtype)
    with open_writer(address, "docs") as writer:
        with pytest.raises(ConfigError, match=why):
            writer.begin(rows.pushed, rows.layout)
        assert writer.pending() is None
    if k < 16000:
        with open_writer(address, "docs", options={"index": "none"}) as writer:
            fill(writer, rows)
            assert_holds(writer, rows)
