"""What of a table of PostgreSQL goes over to the one that takes its place."""

import re
import threading
import time

import psycopg
import pyarrow as pa
import pytest

from tests.vectordb.postgres.helpers import Run
from tests.vectordb.pushed_rows import Rows, append, end
from whiten_index.errors import DatabaseError
from whiten_index.vectordb.registry import open_writer

pytestmark = pytest.mark.service


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
