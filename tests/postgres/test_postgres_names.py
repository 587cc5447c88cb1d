"""Names of tables and options of their indexes, in PostgreSQL."""

from __future__ import annotations

import re
from dataclasses import replace

import pyarrow as pa
import pytest

from tests.postgres.helpers import Run, push_all, sql_name
from tests.sink_contract import (
    K,
    Rows,
    assert_finds,
    assert_holds,
    fill,
)
from whiten_index.errors import ConfigError, SinkError
from whiten_index.sinks import VectorDtype, open_sink
from whiten_index.sinks.postgres.options import PostgresOptions

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
        open_sink(address, name)
    assert run("SELECT relname FROM pg_class WHERE relname ~ 'docs'") == []


def test_percent_signs(address: str, run: Run) -> None:
    """The client takes them for places of values, where there are values."""
    for schema in ("s%s", "e%(x)s"):
        run(f'CREATE SCHEMA "{schema}"')
    run('CREATE EXTENSION vector SCHEMA "e%(x)s"')
    rows = Rows.make(**{"50%": pa.array(range(300)), "%s%%": pa.array(range(300))})
    with open_sink(address, "a%b", options={"schema": "s%s"}) as sink:
        for _ in range(2):
            fill(sink, rows)
        assert_holds(sink, rows)
        assert_finds(sink, rows)
        assert_finds(sink, rows, exact=False, least=0.9)
        with sink.changing(rows.generation, rows.layout) as changing:
            changing.delete([1, 2])
            changing.upsert(rows.take([1, 2]))
        assert_holds(sink, rows)


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
        with open_sink(address, "mine") as sink:
            with pytest.raises(SinkError, match="no push made it"):
                sink.published()
            with pytest.raises(SinkError, match="no push made it"):
                fill(sink, rows)
        assert run("SELECT count(*) FROM mine") == [(1,)]


def test_a_database_that_was_restored(address: str, run: Run) -> None:
    """Its tables have other numbers in the catalog; comments on tables are the users' own."""
    rows, new = Rows.make(30), Rows.make(20, seed=1)
    push_all(address, rows)
    run("COMMENT ON TABLE docs IS 'ours'")
    run("UPDATE whiten_index_generations SET generation = jsonb_set(generation, '{oid}', '1')")
    with open_sink(address, "docs") as sink:
        assert_holds(sink, rows)
        with sink.changing(rows.generation, rows.layout) as changing:
            changing.upsert(rows.take([1]))
        fill(sink, new)
        assert_holds(sink, new)
    # The primary key, whose comment tells of it, may be gone where the number is right.
    run("ALTER TABLE docs DROP CONSTRAINT docs_pkey")
    with open_sink(address, "docs") as sink:
        assert_holds(sink, new)
        with (
            pytest.raises(SinkError, match=r"primary key .* dropped; push all rows with --full"),
            sink.changing(new.generation, new.layout) as changing,
        ):
            changing.upsert(new.take([1]))
        fill(sink, rows)


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
    with open_sink(address, "docs") as sink:
        sink.begin(rows.generation, rows.layout)
    run(f"UPDATE whiten_index_generations SET generation = generation || '{told}' "
        f"WHERE pending = {pending}")  # fmt: skip
    with open_sink(address, "docs") as sink:
        attempts = [lambda: sink.begin(rows.generation, rows.layout)]
        attempts += [sink.discard, sink.pending] if pending else [sink.published]
        for attempt in attempts:
            with pytest.raises(SinkError, match=r"cannot be read.*delete that row"):
                attempt()
    assert run("SELECT count(*) FROM precious") == [(0,)]


@pytest.mark.parametrize("pending", [False, True])
def test_an_entry_that_cannot_be_read_is_mended_as_told(
    address: str, run: Run, pending: bool
) -> None:
    name, rows = "o'docs\"%", Rows.make(20)
    push_all(address, rows, "other")
    with open_sink(address, name) as sink:
        fill(sink, rows)
        sink.begin(rows.generation, rows.layout)
    run("UPDATE whiten_index_generations SET generation = generation - 'made' "
        "WHERE name <> 'other' AND pending = %s", pending)  # fmt: skip
    with open_sink(address, name) as sink:
        with pytest.raises(SinkError) as told:
            (sink.pending if pending else sink.published)()
        text = str(told.value)
        assert "cannot be read (it lacks 'made'): another release, earlier or later" in text
        found = re.search(r"delete that row of it: (DELETE FROM .*?pending);", text)
        assert found is not None
        entries = "SELECT name, pending FROM whiten_index_generations ORDER BY 1, 2"
        before = run(entries)
        run(found[1])
        assert [each for each in before if each not in run(entries)] == [(name, pending)]
        if pending:
            assert sink.pending() is None
            fill(sink, rows)
            assert_holds(sink, rows)
        else:
            with pytest.raises(SinkError, match="no push made it as it is"):
                sink.published()


def test_an_entry_of_an_earlier_release(address: str, run: Run) -> None:
    rows = Rows.make(20)
    push_all(address, rows)
    run(
        "UPDATE whiten_index_generations "
        "SET generation = generation - 'query_digest' - 'options' - 'writer' - 'changing'"
    )
    with open_sink(address, "docs") as sink:
        told = sink.published()
        assert told is not None
        assert (told.query_digest, told.options, told.version) == ("", "", rows.version)
        with sink.changing(replace(rows.generation, query_digest="q2"), rows.layout):
            pass
        told = sink.published()
        assert told is not None
        assert told.query_digest == "q2"


def test_what_has_the_name_of_a_pending_table(address: str, run: Run) -> None:
    rows = Rows.make(20)
    with open_sink(address, "docs") as sink:
        sink.begin(rows.generation, rows.layout)
    ((name,),) = run("SELECT relname FROM pg_class WHERE relname ~ '^docs__[0-9a-f]{8}$'")
    run(f"DROP TABLE {name}")
    run(f"CREATE TABLE {name} (id int) PARTITION BY RANGE (id)")
    with open_sink(address, "docs") as sink, pytest.raises(SinkError, match="no table of a push"):
        sink.discard()
    assert run(f"SELECT count(*) FROM {name}") == [(0,)]


def test_the_longest_name(address: str, run: Run) -> None:
    name = "é" * 26
    for seed in (0, 1):
        push_all(address, Rows.make(20, seed=seed), name)
    found = run("SELECT indexname FROM pg_indexes WHERE tablename = %s ORDER BY 1", name)
    assert found == [(f"{name}_pkey",), (f"{name}_vector_idx",)]
    with pytest.raises(ConfigError, match="1 to 52 bytes"):
        open_sink(address, "é" * 26 + "a")
    with pytest.raises(ConfigError, match="whiten_index_generations"):
        open_sink(address, "whiten_index_generations")


def test_a_table_that_no_push_made(address: str, run: Run) -> None:
    run("CREATE TABLE docs (id int)")
    run("CREATE VIEW seen AS SELECT * FROM docs")
    for name in ("docs", "seen"):
        with open_sink(address, name) as sink:
            with pytest.raises(SinkError, match="no push made it"):
                sink.published()
            with pytest.raises(SinkError, match="no push made it"):
                sink.begin(Rows.make().generation, Rows.make().layout)
    # Made by a push, and then another by hand.
    push_all(address, Rows.make(3), "mine")
    run("DROP TABLE mine")
    with open_sink(address, "mine") as sink:
        assert sink.published() is None
    run("CREATE TABLE mine (id int, vector vector(3))")
    with open_sink(address, "mine") as sink, pytest.raises(SinkError, match="no push made it"):
        sink.published()


def test_a_name_of_an_index_that_is_taken(address: str, run: Run) -> None:
    run("CREATE TABLE docs_pkey (id int)")
    with open_sink(address, "docs") as sink, pytest.raises(SinkError, match="'docs_pkey', which"):
        sink.begin(Rows.make().generation, Rows.make().layout)


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
    with open_sink(address, "docs", options=options) as sink:
        fill(sink, rows)
        assert_finds(sink, rows, exact=False, least=0.95)
        assert_finds(sink, rows)
    found = run("SELECT indexdef FROM pg_indexes WHERE indexname = 'docs_vector_idx'")
    assert len(found) == (index is not None)
    assert index is None or re.search(index, found[0][0])


@pytest.mark.parametrize("options", [{}, {"index": "ivfflat"}])
def test_a_lost_index_is_told(address: str, run: Run, options: dict[str, str]) -> None:
    with open_sink(address, "docs", options=options) as sink:
        assert sink.notes() == []
        fill(sink, Rows.make())
        assert sink.notes() == []
        run("CREATE INDEX ON docs (id)")
        run("DROP INDEX docs_vector_idx")
        (note,) = sink.notes()
        assert note.startswith("the table has no index of its vectors")
    with open_sink(address, "docs", options={"index": "none"}) as sink:
        assert sink.notes() == []
    run(f"CREATE INDEX ON docs USING hnsw ((vector::halfvec({K})) halfvec_cosine_ops)")
    with open_sink(address, "docs") as sink:
        assert sink.notes() == []


@pytest.mark.parametrize("name", ["Docs", "user", 'a"b'])
def test_a_name_that_needs_quotes_is_told(address: str, name: str) -> None:
    with open_sink(address, name, options={"index": "none"}) as sink:
        assert sink.notes() == [f"in SQL this name needs its quotes: {sql_name(name)}"]


def test_an_index_of_other_settings_is_built_again(address: str, run: Run) -> None:
    rows = Rows.make()
    with open_sink(address, "docs") as sink:
        sink.begin(rows.generation, rows.layout)
        for batch in rows.batches():
            sink.append(batch)
        sink.finish(rows.layout)
    query = "SELECT oid, reloptions FROM pg_class WHERE relname ~ '^docs__[0-9a-f]{8}v$'"
    ((first, settings),) = run(query)
    assert settings == ["m=16", "ef_construction=64"]
    for m in ("16", "8"):
        with open_sink(address, "docs", options={"m": m}) as sink:
            sink.resume(rows.layout)
            sink.finish(rows.layout)
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
    with open_sink(address, "docs") as sink:
        with pytest.raises(ConfigError, match=why):
            sink.begin(rows.generation, rows.layout)
        assert sink.pending() is None
    if k < 16000:
        with open_sink(address, "docs", options={"index": "none"}) as sink:
            fill(sink, rows)
            assert_holds(sink, rows)
