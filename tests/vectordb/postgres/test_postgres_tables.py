"""Names of tables in PostgreSQL, and what goes over to the one that takes a table's place."""

import re
import threading
import time

import psycopg
import pyarrow as pa
import pytest

from tests.vectordb.postgres.helpers import Run
from tests.vectordb.pushed_rows import Rows, append, end
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


def test_owner_rights_and_comments_go_over(address: str, run: Run, role: str) -> None:
    old, new = (Rows.make(50, seed=s, k=4 + s, n=pa.array(range(50))) for s in (0, 1))
    old.push_to(address)
    run(f"GRANT SELECT ON docs TO {role} WITH GRANT OPTION")
    run(f'GRANT UPDATE (n, "vector") ON docs TO {role}')
    run("GRANT SELECT ON docs TO PUBLIC")
    run("COMMENT ON TABLE docs IS 'it''s {ours}'")
    run("COMMENT ON COLUMN docs.n IS '100 %s'")
    query = (
        "SELECT relacl, obj_description(oid), col_description(oid, 3), "
        "(SELECT array_agg(attacl::text ORDER BY attnum) FROM pg_attribute "
        "WHERE attrelid = pg_class.oid AND attnum > 0) "
        "FROM pg_class WHERE oid = 'docs'::regclass"
    )
    before = run(query)
    assert before[0][1:3] == ("it's {ours}", "100 %s")
    # A right that a new table has by default, and the old one has not.
    run(f"ALTER DEFAULT PRIVILEGES GRANT DELETE ON TABLES TO {role}")
    for _ in range(2):
        new.push_to(address)
        assert run(query) == before
    run(f"ALTER TABLE docs OWNER TO {role}")
    run(f"GRANT CREATE ON SCHEMA public TO {role}")
    old.push_to(address)
    owner = run("SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = 'docs'::regclass")
    assert owner == [(role,)]


# What users may add, how it is taken back, and its name in the error.
ADDED = [
    ("ALTER TABLE docs ADD COLUMN words text", "ALTER TABLE docs DROP words", "column words"),
    ("CREATE INDEX mine ON docs ((id % 2))", "DROP INDEX mine", "index public.mine"),
    ("ALTER TABLE docs ENABLE ROW LEVEL SECURITY", "ALTER TABLE docs DISABLE ROW LEVEL SECURITY",
     "row level security"),
    ("CREATE POLICY own ON docs USING (id > 3)", "DROP POLICY own ON docs", "policy own"),
    ("ALTER TABLE docs ADD CONSTRAINT small CHECK (id < 1000)",
     "ALTER TABLE docs DROP CONSTRAINT small", "constraint small"),
    ("CREATE RULE quiet AS ON DELETE TO docs DO INSTEAD NOTHING", "DROP RULE quiet ON docs",
     "rule quiet"),
    ("CREATE PUBLICATION pub FOR TABLE docs", "DROP PUBLICATION pub", "publication pub"),
    ("CREATE STATISTICS stat ON id, (id % 2) FROM docs", "DROP STATISTICS stat", "public.stat"),
    ("CREATE TABLE more () INHERITS (docs)", "DROP TABLE more", "table public.more"),
    ("CREATE SEQUENCE numbers OWNED BY docs.id", "DROP SEQUENCE numbers",
     "sequence public.numbers"),
    ("CREATE VIEW seen AS SELECT id FROM docs", "DROP VIEW seen", "view public.seen"),
    ("CREATE TABLE likes (doc bigint REFERENCES docs (id))", "DROP TABLE likes",
     "constraint likes_doc_fkey on table public.likes"),
    ("CREATE FUNCTION f(docs) RETURNS text LANGUAGE sql AS 'SELECT $1.id::text'",
     "DROP FUNCTION f", "function public.f"),
    ("CREATE TABLE whole (one docs, many docs[])", "DROP TABLE whole",
     "column many of table public.whole, column one of table public.whole"),
]  # fmt: skip


@pytest.mark.parametrize(("order", "back", "named"), ADDED)
def test_what_users_added_or_made_to_depend_on_the_table_is_not_lost(
    address: str, run: Run, order: str, back: str, named: str
) -> None:
    """It is named before a row is sent, and again if it came in the meantime."""
    old, new = Rows.make(50), Rows.make(40, seed=1)
    old.push_to(address)
    run(order)
    message = f"users added, or what depends on it.*{re.escape(named)}.*; drop that, push"
    with open_writer(address, "docs") as writer:
        with psycopg.connect(address) as reader:
            # Nobody who reads or changes the table is waited for.
            reader.execute("LOCK TABLE docs IN ROW EXCLUSIVE MODE")
            with pytest.raises(DatabaseError, match=message):
                writer.begin(new.pushed, new.layout)
        assert writer.pending() is None
        run(back)
        writer.begin(new.pushed, new.layout)
        writer.append(new.batches()[0])
        run(order)
        for attempt in (lambda: writer.resume(new.layout), writer.swap):
            with pytest.raises(DatabaseError, match=message):
                attempt()
        old.assert_held(writer)
        run(back)
        end(writer)
        new.assert_held(writer)


def test_readers_finish_and_a_swap_waits_for_them(address: str) -> None:
    old, new = Rows.make(), Rows.make(200, seed=1)
    old.push_to(address)
    with (
        psycopg.connect(address) as reader,
        open_writer(address, "docs", options={"lock_timeout": "1"}) as writer,
    ):
        assert reader.execute("SELECT count(*) FROM docs").fetchone() == (300,)
        with pytest.raises(
            DatabaseError, match=r"others hold a lock.*--option lock_timeout=SECONDS"
        ):
            new.fill(writer)
        old.assert_held(writer)
        assert reader.execute("SELECT count(*) FROM docs").fetchone() == (300,)
        reader.commit()
        writer.swap()
        assert reader.execute("SELECT count(*) FROM docs").fetchone() == (200,)


def test_new_readers_do_not_wait_behind_a_swap_that_waits(address: str) -> None:
    old, new = Rows.make(), Rows.make(200, seed=1)
    old.push_to(address)
    waits: list[float] = []
    ended: list[float] = []
    with psycopg.connect(address) as holder, open_writer(address, "docs") as writer:
        writer.begin(new.pushed, new.layout)
        append(writer, new.batches())
        writer.finish()
        holder.execute("SELECT count(*) FROM docs").fetchone()

        def swap() -> None:
            writer.swap()
            ended.append(time.monotonic())

        thread = threading.Thread(target=swap)
        thread.start()
        with psycopg.connect(address, autocommit=True) as reader:
            end = time.monotonic() + 2
            while time.monotonic() < end:
                begun = time.monotonic()
                reader.execute("SELECT count(*) FROM docs").fetchone()
                waits.append(time.monotonic() - begun)
                time.sleep(0.05)
        assert not ended
        holder.commit()
        thread.join()
        # It tried, and did not keep them long.
        assert 0.05 < max(waits) < 1
        assert ended
        new.assert_held(writer)
