"""Tables of a real PostgreSQL with pgvector: what is PostgreSQL's own, and interruptions."""

import itertools
import subprocess
import threading
import time
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import psycopg
import pyarrow as pa
import pytest

from tests.vectordb.postgres.helpers import Run, connected
from tests.vectordb.pushed_rows import Rows, append, end
from whiten_index.errors import DatabaseError
from whiten_index.vectordb.registry import open_writer

pytestmark = pytest.mark.service


def test_two_pushes_at_once(address: str) -> None:
    rows, short = Rows.make(), {"lock_timeout": "1"}
    with open_writer(address, "docs") as one, open_writer(address, "docs", options=short) as two:
        one.begin(rows.pushed, rows.layout)
        for attempt in (two.pending, lambda: two.begin(rows.pushed, rows.layout)):
            with pytest.raises(DatabaseError, match="another push is filling or changing"):
                attempt()
        end(one, rows.batches(100))
        with one.changing(replace(rows, version="000002-def").pushed, rows.layout):
            # Who only reads does not wait.
            assert two.count() == 300


def test_two_first_pushes_at_once(address: str) -> None:
    """Each for its own name, before pgvector is installed."""
    failed: list[BaseException] = []

    def push(name: str) -> None:
        try:
            Rows.make(20).push_to(address, name)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=push, args=(f"docs{n}",)) for n in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert failed == []


def test_the_server_is_stopped_in_mid_push(postgres: Any, address: str) -> None:
    rows = Rows.make(2000, ids=pa.array([f"d{i}" for i in range(2000)], pa.large_string()))
    batches = rows.batches(100)
    old = Rows.make(50, seed=5, ids=pa.array([f"o{i}" for i in range(50)], pa.large_string()))
    old.push_to(address)
    writer = open_writer(address, "docs")
    with writer:
        writer.begin(rows.pushed, rows.layout)
        append(writer, batches[:7])
        stop(postgres)
        with pytest.raises(DatabaseError, match="run this again when that is mended, to resume"):
            writer.append(batches[7])
        with pytest.raises(DatabaseError):
            writer.append(batches[7])
    with pytest.raises(DatabaseError, match="cannot be reached"):
        open_writer(address, "docs")
    postgres.ensure_postgres_running()
    with open_writer(address, "docs") as writer:
        old.assert_held(writer)
        pending = writer.pending()
        assert pending.done % 100 == 0
        assert pending.done <= 700
        assert writer.count(pending=True) == pending.done
        writer.resume(rows.layout)
        append(writer, batches[pending.done // 100 :])
        writer.finish()
        rows.assert_held(writer, pending=True)
        writer.swap()
        rows.assert_held(writer)
        rows.assert_found(writer)


def stop(server: Any) -> None:
    """Stop the server as a loss of power would, without letting it write anything."""
    command = [server.bin_path / "pg_ctl", "-D", server.pgdata, "-m", "immediate", "-w", "stop"]
    subprocess.run(command, check=True, user=server.system_user, capture_output=True)


def test_half_a_batch_leaves_nothing(address: str) -> None:
    """The connection breaks when rows of a batch are there, and before its end."""
    rows = Rows.make(10_000)
    with open_writer(address, "docs") as writer:
        writer.begin(rows.pushed, rows.layout)
        writer.append(rows.batches(5000)[0])
        whole, sent = psycopg.Copy.write, itertools.count()

        def broken(self: psycopg.Copy, block: bytes) -> None:
            if next(sent) == 2:
                with psycopg.connect(address) as other:
                    other.execute(
                        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
                        "WHERE datname = current_database() AND pid <> pg_backend_pid() "
                        "AND backend_type = 'client backend'"
                    )
            whole(self, block)

        with patch.object(psycopg.Copy, "write", broken), pytest.raises(DatabaseError):
            writer.append(rows.batches(5000)[1])
    with open_writer(address, "docs") as writer:
        pending = writer.pending()
        assert (pending.done, writer.count(pending=True)) == (5000, 5000)
        writer.resume(rows.layout)
        end(writer, rows.batches(5000)[1:])
        rows.assert_held(writer)


def test_a_table_that_is_not_there(address: str) -> None:
    rows = Rows.make()
    with open_writer(address, "docs") as writer:
        with pytest.raises(DatabaseError, match=r"no push to .* was begun"):
            writer.resume(rows.layout)
        with pytest.raises(DatabaseError, match=r"no push to .* was begun"):
            writer.append(rows.batches()[0])
        with pytest.raises(DatabaseError, match="is not there; push"):
            writer.count()


def test_a_pending_table_that_was_dropped(address: str, run: Run) -> None:
    rows = Rows.make(20)
    with open_writer(address, "docs") as writer:
        writer.begin(rows.pushed, rows.layout)
    ((name,),) = run("SELECT relname FROM pg_class WHERE relname ~ '^docs__[0-9a-f]{8}$'")
    run(f"DROP TABLE {name}")
    with open_writer(address, "docs") as writer:
        assert writer.pending() is None
        rows.fill(writer)
        rows.assert_held(writer)


def test_exact_search_uses_no_index(address: str) -> None:
    """The server counts the searches of an index."""
    rows, counts = Rows.make(3000, k=8), []
    counted = "SELECT idx_scan FROM pg_stat_user_indexes WHERE indexrelname = 'docs_vector_idx'"
    for exact in (True, False):
        with open_writer(address, "docs") as writer:
            if exact:
                rows.fill(writer)
            writer.search(rows.vectors[:1], 10, exact=exact)
        # A session tells what it counted when it ends.
        with connected(address) as connection:
            ended = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'whiten-index'"
            while connection.execute(ended).fetchone()[0]:
                time.sleep(0.01)
            counts.append(connection.execute(counted).fetchone()[0])
    assert counts == [0, 1]
