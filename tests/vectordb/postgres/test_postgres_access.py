"""Where a PostgreSQL is, and as whom it is reached."""

import os
import re
import signal
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.vectordb.postgres.helpers import SECRET, Run, as_role
from tests.vectordb.pushed_rows import Rows, assert_no_secret, end, some_changes
from whiten_index.errors import ConfigError, DatabaseError
from whiten_index.vectordb.registry import open_writer, require_database

pytestmark = pytest.mark.service


def test_what_is_shown(address: str, run: Run) -> None:
    with open_writer(address, "docs") as writer:
        (release,) = run("SHOW server_version")[0]
        assert writer.engine.startswith(f"PostgreSQL {release.split()[0]}, pgvector 0.")
        assert writer.target.endswith(', table "public"."docs"')
        assert "host=/" in writer.target


def test_no_password_is_shown(
    address: str, role: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("CREATE EXTENSION vector")
    with open_writer(as_role(address, role), "docs") as writer:
        assert_no_secret(writer.target, SECRET)
        why = r"permission denied for schema public\); connect as a role that may do this"
        with pytest.raises(DatabaseError, match=why) as error:
            Rows.make(3).fill(writer)
        assert_no_secret(error.value, SECRET)
    monkeypatch.setenv("PGPASSWORD", SECRET)
    # Who mixes up the places may have written a password there.
    why = r'refuses the connection: .*role "…" does not exist; check user'
    with pytest.raises(DatabaseError, match=why) as error:
        open_writer(address.replace("postgres:@", "no_such_role@"), "docs")
    assert_no_secret(error.value, SECRET, "no_such_role")


def test_a_server_that_falls_silent(
    address: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whiten_index.vectordb.postgres_server._SILENCE", 0)
    with open_writer(address, "docs", options={"lock_timeout": "1"}) as writer:
        of = "SELECT pid FROM pg_stat_activity WHERE application_name = 'whiten-index'"
        ((pid,),) = run(of)
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(DatabaseError, match=r"answer within 1 seconds\); run this again"):
                writer.published()
        finally:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://{secret}@127.0.0.1:1/db",
        "postgresql://{secret}@/db?host={folder}",
        "postgresql://{secret}@127.0.0.1:1",
        "postgresql://127.0.0.1:1,127.0.0.1:2/db",
    ],
)
def test_a_server_that_is_not_there(tmp_path: Path, address: str) -> None:
    with pytest.raises(DatabaseError, match=r"^PostgreSQL cannot be reached: ") as error:
        open_writer(address.format(secret=SECRET, folder=tmp_path), "docs")
    assert ("127.0.0.1" if "127" in address else str(tmp_path)) in str(error.value)
    assert_no_secret(error.value, SECRET)


def test_what_the_client_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DatabaseError, match="invalid sslmode value; check") as error:
        open_writer(f"postgresql://127.0.0.1:1/db?sslmode={SECRET}", "docs")
    assert_no_secret(error.value, SECRET)
    # A password before a host that was forgotten.
    with pytest.raises(ConfigError, match="leave it out, and set PGPASSWORD") as error:
        require_database("postgresql://me:1234567/db", {})
    assert_no_secret(error.value, "1234567")
    for name, value in (("PGPORT", f"me:{SECRET}@h"), ("PGHOST", f"h.invalid,me:{SECRET}@h")):
        monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match=f"{name} .* leave it out, and set PG") as error:
            open_writer("postgresql:///db", "docs")
        assert_no_secret(error.value, SECRET)


@pytest.fixture
def guarded(postgres: Any, role: str, run: Run) -> Iterator[str]:
    """A role that needs its password, and may go to no database but the tests' own."""
    rules = postgres.pgdata / "pg_hba.conf"
    before = rules.read_text()
    mine = f"local postgres {role} reject\nlocal all {role} scram-sha-256\n"
    rules.write_text(mine + before)
    run("SELECT pg_reload_conf()")
    yield role
    rules.write_text(before)
    run("SELECT pg_reload_conf()")


@pytest.mark.parametrize(
    ("user", "password", "database", "why"),
    [
        ("{role}", "wrong!", None, 'password authentication failed for user "…"; check user'),
        ("{role}", "", None, "no password supplied; check user"),
        ("{role}", SECRET, "postgres", "pg_hba.conf rejects .*the server's pg_hba.conf"),
        ("postgres", "", "nosuch", 'database "nosuch" does not exist; check user'),
    ],
)
def test_a_server_that_lets_us_not_in(
    address: str, guarded: str, user: str, password: str, database: str | None, why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("PGPASSWORD", password)
    given = address.replace("postgres:@", user.format(role=guarded) + "@")
    if database is not None:
        given = re.sub(r"@/\w+", f"@/{database}", given)
    deadline = time.monotonic() + 60
    while True:
        # The server reads its rules anew a moment after it is told to.
        try:
            open_writer(given, "docs").__exit__(None, None, None)
        except DatabaseError as error:
            assert re.search(f"^PostgreSQL refuses the connection: .*{why}", str(error))  # noqa: PT017
            assert_no_secret(error, SECRET, "wrong!", guarded)
            break
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_timeouts_of_the_server_end_no_push(address: str, run: Run) -> None:
    (name,) = run("SELECT quote_ident(current_database())")[0]
    timeouts = run(
        "SELECT name FROM pg_settings "
        "WHERE name ~ '^(statement|transaction|idle_.*session)_timeout$'"
    )
    assert len(timeouts) >= 3
    for (each,) in timeouts:
        run(f"ALTER DATABASE {name} SET {each} = '300ms'")
    rows = Rows.make(256)
    with open_writer(address, "docs") as writer:
        writer.begin(rows.pushed, rows.layout)
        writer.append(rows.batches()[0])
        time.sleep(0.5)
        end(writer, rows.batches()[1:])
        with writer.changing(rows.pushed, rows.layout) as changing:
            changing.upsert(rows.take([1]))
            time.sleep(0.5)
            changing.upsert(rows.take([2]))
        for (each,) in timeouts:
            found = writer._connection.execute(f"SHOW {each}")  # type: ignore[attr-defined]
            assert found.fetchone() == ("0",), each


def test_parameters_and_variables_of_libpq(
    postgres: Any, address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    services = tmp_path / "services"
    database = address.split("@/")[1].split("?")[0]
    services.write_text(f"[mine]\nhost={postgres.pgdata}\nuser=postgres\ndbname={database}\n")
    monkeypatch.setenv("PGSERVICEFILE", str(services))
    with open_writer("postgresql://?service=mine&application_name=tests", "docs") as writer:
        assert database in writer.target
        Rows.make(3).fill(writer)


def test_an_extension_that_is_not_there(address: str, role: str, run: Run) -> None:
    run("DROP EXTENSION IF EXISTS vector")
    with open_writer(address, "docs"):
        assert run("SELECT 1 FROM pg_extension WHERE extname = 'vector'")
    run("DROP EXTENSION vector")
    with pytest.raises(
        DatabaseError, match=r"permission denied.*run CREATE EXTENSION vector"
    ) as error:
        open_writer(as_role(address, role), "docs")
    assert_no_secret(error.value, SECRET)


def test_an_extension_in_another_schema(address: str, run: Run) -> None:
    run("CREATE SCHEMA extensions")
    run("CREATE EXTENSION vector SCHEMA extensions")
    for dtype in ("float32", "float16"):
        rows = Rows.make(dtype=dtype)
        with open_writer(address, dtype) as writer:
            rows.fill(writer)
            rows.assert_held(writer)
            rows.assert_found(writer, exact=False, least=0.9)


def test_a_schema(address: str, run: Run) -> None:
    rows, other = Rows.make(20), Rows.make(10, seed=1)
    with pytest.raises(DatabaseError, match=r"no schema 'O\"dd'; create it"):
        open_writer(address, "docs", options={"schema": 'O"dd'})
    run('CREATE SCHEMA "O""dd"')
    rows.push_to(address)
    other.push_to(address, schema='O"dd')
    assert run('SELECT count(*) FROM "O""dd".docs') == [(10,)]
    rows.assert_held_at(address)


def test_rights_that_are_lacking_are_told_before_a_row_is_sent(
    address: str, role: str, run: Run
) -> None:
    rows, after = Rows.make(20), Rows.make(20, seed=1)
    run('CREATE SCHEMA "S; 1"')
    rows.push_to(address, schema="S; 1")
    theirs = as_role(address, role)

    def fails(why: str) -> None:
        with pytest.raises(DatabaseError, match=f"{why}.*; connect as a role that may do this"):
            after.push_to(theirs, schema="S; 1")
        assert run("SELECT relname FROM pg_class WHERE relname ~ '^docs__'") == []

    fails("permission denied for schema")
    run(f'GRANT USAGE, CREATE ON SCHEMA "S; 1" TO {role}')
    with (
        open_writer(theirs, "docs", options={"schema": "S; 1"}) as writer,
        pytest.raises(DatabaseError, match="must be owner"),
    ):
        rows.change(writer)
    fails("must be owner")
    run(f'ALTER TABLE "S; 1".docs OWNER TO {role}')
    after.push_to(theirs, schema="S; 1")
    after.assert_held_at(address, schema="S; 1")


def test_asking_makes_nothing_and_needs_no_rights(address: str, role: str, run: Run) -> None:
    there = "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace ORDER BY 1"
    extension = "SELECT extname FROM pg_extension WHERE extname = 'vector'"
    run("DROP EXTENSION IF EXISTS vector")
    run("CREATE TABLE others (id int)")
    theirs, before = as_role(address, role), run(there)
    for given in (address, theirs):
        with open_writer(given, "docs", make=False) as writer:
            assert writer.published() is None
            assert writer.engine.endswith(" without pgvector")
        with open_writer(given, "others", make=False) as writer:
            with pytest.raises(DatabaseError, match="no push made it"):
                writer.published()
            with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
                writer._connection.execute("DROP TABLE others")  # type: ignore[attr-defined]
    assert (run(there), run(extension)) == (before, [])
    rows = Rows.make(20)
    rows.push_to(address)
    run("REVOKE ALL ON SCHEMA public FROM public")
    before = run(there)
    with open_writer(theirs, "docs", options={"schema": "public"}, make=False) as writer:
        published = writer.published()
        assert published.version == rows.pushed.version
        with pytest.raises(DatabaseError, match=r"denied for schema public\); connect as"):
            writer.count()
    assert run(there) == before


def test_a_table_of_another_role_is_no_interrupted_push(address: str, role: str, run: Run) -> None:
    """It may have triggers, which run with the rights of whoever adds rows."""
    rows = Rows.make()
    run("CREATE EXTENSION IF NOT EXISTS vector")
    run(f"GRANT CREATE, USAGE ON SCHEMA public TO {role}")
    with open_writer(as_role(address, role), "docs") as writer:
        writer.begin(rows.pushed, rows.layout)
        assert writer.pending() is not None
    with open_writer(address, "docs") as writer:
        assert writer.pending() is None
        rows.fill(writer)
        rows.assert_held(writer)
    with open_writer(as_role(address, role), "docs") as writer:
        assert writer.pending() is not None


@pytest.mark.parametrize("path", ['"$user", public', "public, pg_catalog, pg_temp"])
def test_functions_of_users_are_not_called(address: str, run: Run, path: str) -> None:
    """Those of the server are meant, also where the arguments fit others better."""
    run("CREATE TABLE called (what text)")
    for name, arguments, result in (
        ("starts_with", "name, text", "bool"),
        ("obj_description", "oid, text", "text"),
        ("col_description", "oid, int2", "text"),
        ("hashtextextended", "text, int4", "bigint"),
        ("quote_ident", "name", "text"),
        ("format", "text, text, name", "text"),
        ("current_schema", "", "name"),
        ("count", "bigint", "bigint"),
        ("unnest", "text[]", "setof text"),
        ("unnest", "bigint[]", "setof bigint"),
    ):
        given = "" if result.startswith("setof") else " NULL"
        run(
            f"CREATE FUNCTION {name}({arguments}) RETURNS {result} LANGUAGE plpgsql AS "
            f"$$ BEGIN INSERT INTO called VALUES ('{name}'); RETURN{given}; END $$"
        )
    run("CREATE VIEW pg_settings AS SELECT obj_description(1, 'x'::text) AS name")
    (database,) = run("SELECT pg_catalog.quote_ident(pg_catalog.current_database())")[0]
    run(f"ALTER DATABASE {database} SET search_path = {path}")
    old, rows, put = some_changes()
    for _ in range(2):
        old.push_to(address)
    run("CREATE TABLE log (n bigint)")
    run(
        "CREATE FUNCTION logs() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN INSERT INTO log VALUES (OLD.id); RETURN OLD; END $$"
    )
    run("CREATE TRIGGER logs BEFORE DELETE ON docs FOR EACH ROW EXECUTE FUNCTION logs()")
    with open_writer(address, "docs") as writer:
        rows.change(writer, put, gone=[7])
        rows.assert_held(writer)
    with open_writer(address, "docs", make=False) as writer:
        assert writer.published() is not None
    assert run("SELECT DISTINCT what FROM called") == []
    # Those of the table run, on the path of its users.
    assert run("SELECT n FROM log") == [(7,)]


@pytest.mark.parametrize("password", [b"word", b"two  blanks", "Märchen".encode("latin-1")])
def test_a_password_of_a_file_that_the_server_quotes_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, password: bytes
) -> None:
    def quote(server: socket.socket) -> None:
        with server.accept()[0] as client:
            client.recv(1000)
            client.sendall(b"R" + struct.pack("!ii", 8, 3))  # asks for it as it is
            said = b"SFATAL\0C57P03\0Mnot " + client.recv(1000)[5:] + b"\0"
            client.sendall(b"E" + struct.pack("!i", len(said) + 4) + said)

    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in "ab"]
        ports = [server.getsockname()[1] for server in servers]
        lines = (b"127.0.0.1:%d:*:*:of-a-%s-%d\n" % (port, password, port) for port in ports)
        (tmp_path / "pgpass").write_bytes(b"".join(lines))
        (tmp_path / "pgpass").chmod(0o600)
        monkeypatch.setenv("PGPASSFILE", str(tmp_path / "pgpass"))
        stack.enter_context(ThreadPoolExecutor(2)).map(quote, servers)
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        with pytest.raises(DatabaseError, match="FATAL: not …") as raised:
            open_writer(f"postgresql://u@{hosts}/d?sslmode=disable&gssencmode=disable", "docs")
    assert "of-a" not in str(raised.value)
