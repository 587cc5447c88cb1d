"""What of a table of PostgreSQL goes over to the one that takes its place."""

from __future__ import annotations

import re
import threading
import time

import psycopg
import pyarrow as pa
import pytest

from tests.vectordb.postgres.helpers import Run, push_all
from tests.vectordb.writer_contract import (
    Rows,
    assert_holds,
    fill,
)
from whiten_index.errors import DatabaseError
from whiten_index.vectordb.postgres import catalog
from whiten_index.vectordb.registry import open_writer

pytestmark = pytest.mark.service


def test_rights_comments_and_indexes_go_over(address: str, run: Run, role: str) -> None:
    old, new = (Rows.make(50, seed=s, k=4 + s, n=pa.array(range(50))) for s in (0, 1))
    push_all(address, old)
    run(f"GRANT SELECT ON docs TO {role} WITH GRANT OPTION")
    run(f'GRANT UPDATE (n, "vector") ON docs TO {role}')
    run("GRANT SELECT ON docs TO PUBLIC")
    run("COMMENT ON TABLE docs IS 'it''s {ours}'")
    run("COMMENT ON COLUMN docs.n IS '100 %s'")
    run('CREATE INDEX "my ""index" ON docs (n DESC) WHERE n > 3')
    run("CREATE UNIQUE INDEX once ON docs (n, abs(n))")
    told = (
        "SELECT relacl, obj_description(oid), col_description(oid, 3), "
        "(SELECT array_agg(attacl::text ORDER BY attnum) FROM pg_attribute "
        "WHERE attrelid = pg_class.oid AND attnum > 0) "
        "FROM pg_class WHERE oid = 'docs'::regclass"
    )
    made = "SELECT indexdef FROM pg_indexes WHERE tablename = 'docs' ORDER BY 1"
    before = run(told), run(made)
    assert before[0][0][1:3] == ("it's {ours}", "100 %s")
    # What a new table would give by itself, and the old one does not.
    run(f"ALTER DEFAULT PRIVILEGES GRANT DELETE ON TABLES TO {role}")
    for _ in range(2):
        push_all(address, new)
        assert (run(told), run(made)) == before
    run(f"ALTER TABLE docs OWNER TO {role}")
    run(f"GRANT CREATE ON SCHEMA public TO {role}")
    push_all(address, old)
    owner = run("SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = 'docs'::regclass")
    assert owner == [(role,)]


def test_an_index_that_cannot_go_over(address: str, run: Run) -> None:
    old, new = Rows.make(50, n=pa.array(range(50))), Rows.make(40)
    push_all(address, old)
    run("CREATE INDEX mine ON docs (n)")
    with open_writer(address, "docs") as writer:
        with pytest.raises(DatabaseError, match=r"index 'mine'.*n\W does not exist.*drop it"):
            fill(writer, new)
        assert_holds(writer, old)
        run("DROP INDEX mine")
        writer.finish(new.layout)
        # Made after the others were.
        run("CREATE INDEX late ON docs (n)")
        with pytest.raises(DatabaseError, match="index 'late' was made on the table while"):
            writer.swap()
        assert_holds(writer, old)


@pytest.mark.parametrize(
    ("order", "why"),
    [
        ("ALTER TABLE docs ADD COLUMN words text", "column words"),
        ("ALTER TABLE docs ENABLE ROW LEVEL SECURITY", "row level security"),
        ("CREATE POLICY own ON docs USING (id > 3)", "policy own"),
        ("ALTER TABLE docs ADD CONSTRAINT small CHECK (id < 1000)", "constraint small"),
        ("CREATE RULE quiet AS ON DELETE TO docs DO INSTEAD NOTHING", "rule quiet"),
        ("CREATE PUBLICATION pub FOR TABLE docs", "publication pub"),
        ("CREATE STATISTICS stat ON id, (id % 2) FROM docs", "statistics stat"),
        ("ALTER TABLE docs CLUSTER ON docs_pkey", "CLUSTER ON docs_pkey"),
        (
            "ALTER TABLE docs REPLICA IDENTITY USING INDEX docs_pkey",
            "REPLICA IDENTITY USING INDEX docs_pkey",
        ),
        ("ALTER TABLE docs FORCE ROW LEVEL SECURITY", "row level security of the owner"),
        ("ALTER TABLE docs SET UNLOGGED", "UNLOGGED"),
        ("CREATE TABLE more () INHERITS (docs)", "inheritance more"),
        ("ALTER TABLE docs ALTER id ADD GENERATED ALWAYS AS IDENTITY", "identity of column id"),
        ("CREATE SEQUENCE numbers OWNED BY docs.id", "sequence numbers that it owns"),
    ],
)
def test_what_users_added_is_not_lost(address: str, run: Run, order: str, why: str) -> None:
    old, new = Rows.make(50), Rows.make(40, seed=1)
    push_all(address, old)
    with open_writer(address, "docs") as writer:
        writer.begin(new.pushed, new.layout)
        writer.append(new.batches()[0])
        writer.finish(new.layout)
        run(order)
        with pytest.raises(DatabaseError, match=f"its users added.*: {why}; drop that"):
            writer.swap()
        assert_holds(writer, old)
    with open_writer(address, "docs") as writer, pytest.raises(DatabaseError, match=why):
        writer.begin(new.pushed, new.layout)


def test_a_tablespace_of_an_index_is_not_lost(address: str, run: Run, tablespace: str) -> None:
    push_all(address, Rows.make(50))
    run(f"ALTER INDEX docs_pkey SET TABLESPACE {tablespace}")
    with pytest.raises(DatabaseError, match="tablespace of index docs_pkey"):
        push_all(address, Rows.make(50))


DEPENDENTS = [
    ("VIEW seen AS SELECT id FROM docs", "VIEW seen", ["view public.seen"]),
    (
        "MATERIALIZED VIEW kept AS SELECT id FROM docs",
        "MATERIALIZED VIEW kept",
        ["materialized view public.kept"],
    ),
    (
        "TABLE likes (doc bigint REFERENCES docs (id))",
        "TABLE likes",
        ["table constraint likes_doc_fkey on public.likes"],
    ),
    (
        "FUNCTION as_text(docs) RETURNS text LANGUAGE sql AS 'SELECT $1.id::text'",
        "FUNCTION as_text",
        ["function public.as_text(public.docs)"],
    ),
    (
        "FUNCTION many() RETURNS bigint LANGUAGE sql BEGIN ATOMIC SELECT count(*) FROM docs; END",
        "FUNCTION many",
        ["function public.many()"],
    ),
    (
        'TABLE whole (one docs, "more ""of" docs[])',
        "TABLE whole",
        ['table column public.whole."more ""of"', "table column public.whole.one"],
    ),
    (
        "RULE also AS ON INSERT TO others DO ALSO DELETE FROM docs WHERE id = NEW.id",
        "RULE also ON others",
        ["rule also on public.others"],
    ),
    (
        "POLICY known ON others USING (id IN (SELECT id FROM docs))",
        "POLICY known ON others",
        ["policy known on public.others"],
    ),
]


@pytest.mark.parametrize(("made", "dropped", "named"), DEPENDENTS)
def test_what_depends_on_the_table(
    address: str, run: Run, made: str, dropped: str, named: list[str]
) -> None:
    """It is told before a row is sent, and again where it came in the meantime."""
    old, new = Rows.make(50), Rows.make(40, seed=1)
    push_all(address, old)
    run("CREATE TABLE others (id bigint)")
    run(f"CREATE {made}")
    it = "it" if len(named) == 1 else "them"
    told = f"drop the {' and the '.join(map(re.escape, named))}, push, and create {it} again$"
    with open_writer(address, "docs") as writer:
        with psycopg.connect(address) as reader:
            # Nobody who reads or changes the table is waited for.
            reader.execute("LOCK TABLE docs IN ROW EXCLUSIVE MODE")
            with pytest.raises(DatabaseError, match=told):
                writer.begin(new.pushed, new.layout)
        assert writer.pending() is None
        assert run("SELECT relname FROM pg_class WHERE relname ~ '^docs__'") == []
        assert_holds(writer, old)
        run(f"DROP {dropped}")
        writer.begin(new.pushed, new.layout)
        writer.append(new.batches()[0])
        run(f"CREATE {made}")
        with pytest.raises(DatabaseError, match=told):
            writer.resume(new.layout)
        writer.finish(new.layout)
        with pytest.raises(DatabaseError, match=told):
            writer.swap()
        assert_holds(writer, old)
        assert_holds(writer, new, pending=True)
        run(f"DROP {dropped}")
        writer.swap()
        assert_holds(writer, new)


def test_what_the_server_drops_the_table_with(address: str, run: Run) -> None:
    """Nothing depends on it where the server itself drops it."""
    push_all(address, Rows.make(50))
    for order in (
        "ALTER TABLE docs ADD CHECK (id > -1 AND vector IS NOT NULL)",
        "ALTER TABLE docs ADD COLUMN twin bigint REFERENCES docs (id)",
        "ALTER TABLE docs ADD COLUMN twice bigint GENERATED ALWAYS AS (id * 2) STORED",
        "ALTER TABLE docs ADD COLUMN number serial",
        "CREATE POLICY own ON docs USING (id IN (SELECT d.id FROM docs d))",
        "CREATE RULE quiet AS ON DELETE TO docs WHERE OLD.id > 3 DO INSTEAD NOTHING",
        "CREATE STATISTICS stat ON id, (id % 2) FROM docs",
        "CREATE PUBLICATION pub FOR TABLE docs",
        "CREATE INDEX mine ON docs ((id % 2)) WHERE id > 3",
    ):
        run(order)
    with psycopg.connect(address) as connection:
        ((oid,),) = run("SELECT 'docs'::regclass::oid")
        assert catalog.dependents(connection, oid) == []
    run("DROP TABLE docs")


def test_what_the_table_has_of_its_own_does_not_depend_on_it(address: str, run: Run) -> None:
    """Such as its indexes, its row type, and functions that name it in their text alone."""
    for order in (
        "CREATE INDEX mine ON docs ((id % 2)) WHERE id > 3",
        "CREATE FUNCTION named() RETURNS bigint LANGUAGE sql AS 'SELECT count(*) FROM docs'",
        "GRANT SELECT ON docs TO public",
        "COMMENT ON COLUMN docs.id IS 'of the corpus'",
    ):
        push_all(address, Rows.make(50))
        run(order)
    push_all(address, Rows.make(40, seed=1))
    assert run("SELECT named()") == [(40,)]


def test_readers_finish_and_a_swap_waits_for_them(address: str) -> None:
    old, new = Rows.make(), Rows.make(200, seed=1)
    push_all(address, old)
    with (
        psycopg.connect(address) as reader,
        open_writer(address, "docs", options={"lock_timeout": "1"}) as writer,
    ):
        assert reader.execute("SELECT count(*) FROM docs").fetchone() == (300,)
        with pytest.raises(
            DatabaseError, match=r"others hold a lock.*--option lock_timeout=SECONDS"
        ):
            fill(writer, new)
        assert_holds(writer, old)
        assert reader.execute("SELECT count(*) FROM docs").fetchone() == (300,)
        reader.commit()
        writer.swap()
        assert reader.execute("SELECT count(*) FROM docs").fetchone() == (200,)


def test_old_names_of_indexes_do_not_stay(address: str, run: Run) -> None:
    for seed in range(3):
        push_all(address, Rows.make(20, seed=seed))
    names = "SELECT relname FROM pg_class WHERE relname LIKE 'docs%' ORDER BY 1"
    assert run(names) == [("docs",), ("docs_pkey",), ("docs_vector_idx",)]
    assert run("SELECT conname FROM pg_constraint WHERE conname LIKE 'docs\\_\\_%'") == []


def test_settings_go_over(address: str, run: Run, tablespace: str) -> None:
    old, new = (
        Rows.make(50, seed=s, k=4 + s, **{"n%": pa.array(range(50)), "t": pa.array(["x"] * 50)})
        for s in (0, 1)
    )
    push_all(address, old)
    for order in (
        "ALTER COLUMN vector SET STORAGE PLAIN",
        "ALTER COLUMN t SET COMPRESSION pglz",
        "ALTER COLUMN t SET STATISTICS 500",
        "ALTER COLUMN t SET (n_distinct = -0.5)",
        'ALTER COLUMN "n%" SET NOT NULL',
        'ALTER COLUMN "n%" SET DEFAULT 7 % 4',
        "ALTER COLUMN t SET DEFAULT '{}'",
        "SET (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.5)",
        "SET (toast.autovacuum_enabled = false)",
        "REPLICA IDENTITY FULL",
        f"SET TABLESPACE {tablespace}",
    ):
        run(f"ALTER TABLE docs {order}")
    run("COMMENT ON INDEX docs_vector_idx IS 'ours'")
    run("CREATE INDEX own ON docs (t)")
    run("COMMENT ON INDEX own IS 'it''s {own}'")
    told = [
        "SELECT attname, attstorage, attcompression, attstattarget, attnotnull, attoptions, "
        "pg_get_expr(adbin, adrelid) FROM pg_attribute LEFT JOIN pg_attrdef ON adrelid = attrelid "
        "AND adnum = attnum WHERE attrelid = 'docs'::regclass AND attnum > 0 ORDER BY attnum",
        "SELECT c.reloptions, t.reloptions, c.relreplident, s.spcname FROM pg_class c "
        "JOIN pg_class t ON t.oid = c.reltoastrelid JOIN pg_tablespace s "
        "ON s.oid = c.reltablespace WHERE c.oid = 'docs'::regclass",
        "SELECT obj_description('docs_vector_idx'::regclass), obj_description('own'::regclass)",
    ]
    before = [run(each) for each in told]
    assert before[2] == [("ours", "it's {own}")]
    assert before[1][0][2:] == ("f", tablespace)
    for _ in range(2):
        push_all(address, new)
        assert [run(each) for each in told] == before
    # Set while rows are pushed.
    with open_writer(address, "docs") as writer:
        writer.begin(old.pushed, old.layout)
        writer.append(old.batches()[0])
        # Storage has an effect on rows that come later alone.
        ((name,),) = run("SELECT relname FROM pg_class WHERE relname ~ '^docs__[0-9a-f]{8}$'")
        plain = run(f"SELECT attstorage FROM pg_attribute WHERE attrelid = '{name}'::regclass "
                    "AND attname = 'vector'")  # fmt: skip
        assert plain == [("p",)]
        writer.finish(old.layout)
        run("ALTER TABLE docs ALTER COLUMN t SET NOT NULL, ALTER COLUMN t SET STATISTICS 77")
        before = [run(each) for each in told]
        writer.swap()
    assert [run(each) for each in told] == before
    # What is set before the load has an effect on it.
    empty = Rows.make(3, n=pa.array([1, 2, 3]), t=pa.array(["x", None, "y"]))
    with (
        open_writer(address, "docs") as writer,
        pytest.raises(DatabaseError, match="drop NOT NULL"),
    ):
        fill(writer, empty)


def test_an_index_of_vectors_that_users_renamed(address: str, run: Run) -> None:
    """It is built once, and keeps their name."""
    query = "SELECT indexname FROM pg_indexes WHERE tablename = 'docs' AND indexdef ~ 'hnsw'"
    push_all(address, Rows.make())
    run("ALTER INDEX docs_vector_idx RENAME TO mine")
    for seed in (1, 2):
        push_all(address, Rows.make(seed=seed))
        assert run(query) == [("mine",)]
    run("CREATE INDEX wide ON docs USING hnsw (vector vector_cosine_ops) WITH (m = 32)")
    push_all(address, Rows.make())
    assert sorted(run(query)) == [("mine",), ("wide",)]


def test_new_readers_do_not_wait_behind_a_swap_that_waits(address: str) -> None:
    old, new = Rows.make(), Rows.make(200, seed=1)
    push_all(address, old)
    waits: list[float] = []
    ended: list[float] = []
    with psycopg.connect(address) as holder, open_writer(address, "docs") as writer:
        writer.begin(new.pushed, new.layout)
        for batch in new.batches():
            writer.append(batch)
        writer.finish(new.layout)
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
        assert_holds(writer, new)


def test_an_automatic_vacuum_makes_way_for_a_swap(address: str, run: Run) -> None:
    """It does so for who waits longer than ``deadlock_timeout``."""
    old, new = Rows.make(4000, k=50), Rows.make(200, seed=1)
    push_all(address, old, index="none")
    run("ALTER TABLE docs SET (autovacuum_vacuum_cost_delay = 100, autovacuum_vacuum_cost_limit "
        "= 1, autovacuum_vacuum_threshold = 1, autovacuum_vacuum_scale_factor = 0)")  # fmt: skip
    run("ALTER SYSTEM SET autovacuum_naptime = '1s'")
    run("SELECT pg_reload_conf()")
    try:
        run("DELETE FROM docs WHERE id % 2 = 0")
        working = "SELECT 1 FROM pg_stat_progress_vacuum WHERE relid = 'docs'::regclass"
        end = time.monotonic() + 30
        while not run(working):
            assert time.monotonic() < end
            time.sleep(0.2)
        with open_writer(address, "docs", options={"lock_timeout": "4"}) as writer:
            writer.begin(new.pushed, new.layout)
            for batch in new.batches():
                writer.append(batch)
            writer.finish(new.layout)
            assert run(working)
            writer.swap()
            assert_holds(writer, new)
    finally:
        run("ALTER SYSTEM RESET autovacuum_naptime")
        run("SELECT pg_reload_conf()")
