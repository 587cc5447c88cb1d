"""Rows in a real PostgreSQL with pgvector: values of every kind, searches, and interruptions."""

import datetime
import itertools
import math
import subprocess
import threading
import time
from dataclasses import replace
from decimal import Decimal
from typing import Any
from unittest.mock import patch

import numpy as np
import psycopg
import pyarrow as pa
import pytest

from tests.vectordb.postgres.helpers import Run, connected
from tests.vectordb.pushed_rows import Rows, append, end
from whiten_index.errors import ConfigError, DatabaseError
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


KINDS: dict[str, tuple[pa.DataType, list[Any], str]] = {
    "int8": (pa.int8(), [-128, 127], "smallint"),
    "uint8": (pa.uint8(), [0, 255], "smallint"),
    "uint16": (pa.uint16(), [0, 65535], "integer"),
    "uint32": (pa.uint32(), [0, 2**32 - 1], "bigint"),
    "uint64": (pa.uint64(), [0, 2**64 - 1], "numeric(20,0)"),
    "half": (pa.float16(), [np.float16(0.5), np.float16(-2)], "real"),
    "float": (pa.float32(), [math.inf, -0.0], "real"),
    "double": (pa.float64(), [5e-324, -math.inf], "double precision"),
    "null": (pa.null(), [None, None], "text"),
    "decimal": (pa.decimal128(38, 10), [Decimal("-0.0000000001"), Decimal(10) ** 27], None),
    "wide decimal": (pa.decimal256(76, 0), [Decimal(10) ** 75, Decimal(-7)], "numeric(76,0)"),
    "date64": (pa.date64(), [datetime.date(1, 1, 1), datetime.date(9999, 12, 31)], "date"),
    "seconds": (pa.time32("s"), [0, 86399], "time without time zone"),
    "nanoseconds of day": (pa.time64("ns"), [1000, 86399999999000], "time without time zone"),
    "second": (pa.timestamp("s"), [-(10**10), 10**11], "timestamp without time zone"),
    "nanosecond": (pa.timestamp("ns", "Asia/Tokyo"), [1000, -5000], "timestamp with time zone"),
    "duration": (pa.duration("s"), [-3, 10**10], "interval"),
    "fixed bytes": (pa.binary(3), [b"\0\0\0", b"abc"], "bytea"),
    "numbers": (pa.list_(pa.int32()), [[1, None, -3], []], "integer[]"),
    "large list": (pa.large_list(pa.large_string()), [["", None, "é"], ["a"]], "text[]"),
    "pairs": (pa.list_(pa.float32(), 2), [[0.5, None], [1, 2]], "real[]"),
    "times": (pa.list_(pa.timestamp("us")), [[0, -1], [None]], "timestamp without time zone[]"),
    "decimals": (pa.list_(pa.decimal128(5, 2)), [[Decimal("1.25")], []], "numeric(5,2)[]"),
    "flags": (pa.list_(pa.bool_()), [[True, None], [False]], "boolean[]"),
    "lists": (pa.list_(pa.list_(pa.int8())), [[[1], None, []], []], "jsonb"),
    "deep": (
        pa.struct([("x", pa.float64()), ("t", pa.list_(pa.string()))]),
        [{"x": 1e300, "t": ["\\u0000", '"']}, {"x": 2.0, "t": None}],
        "jsonb",
    ),
}  # fmt: skip


def columns_of(nulls: bool) -> dict[str, pa.Array]:
    """Every kind of column, in the middle of a longer array, as a block of a batch is."""
    found = {}
    for name, (kind, values, _) in KINDS.items():
        raw = kind if not pa.types.is_date64(kind) else pa.date64()
        middle = [None] if nulls else [values[0]]
        found[name] = pa.array([values[1], *values, *middle, values[1]], raw)[1:4]
    return found


@pytest.mark.parametrize("nulls", [False, True])
def test_every_kind_of_column(address: str, run: Run, nulls: bool) -> None:
    rows = Rows.make(3, **columns_of(nulls))
    with open_writer(address, "docs") as writer:
        rows.fill(writer)
        rows.assert_held(writer)
        there = writer.fetch(rows.ids, rows.layout).sort_by("id")
        for name in KINDS:
            assert there[name].combine_chunks().equals(rows.table[name].combine_chunks()), name
        rows.change(writer, rows.take([1, 2]))
        rows.assert_held(writer)
    found = run(
        "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
        "WHERE attrelid = 'docs'::regclass AND attnum > 2"
    )
    assert dict(found) == {
        name: sql_type or "numeric(38,10)" for name, (_, _, sql_type) in KINDS.items()
    }


def test_many_lists_and_nulls_over_several_blocks(address: str) -> None:
    rng = np.random.default_rng(0)

    def some(value: Any) -> Any:
        return None if rng.random() < 0.2 else value

    size = 3000
    rows = Rows.make(
        size,
        ids=pa.array([f"{i}:{'x' * (i % 50)}" for i in range(size)], pa.large_string()),
        tags=pa.array(
            [some([some("t" * n) for n in range(rng.integers(4))]) for _ in range(size)]
        ),
        n=pa.array([some(i) for i in range(size)], pa.int16()),
        text=pa.array([some("é" * int(rng.integers(100))) for _ in range(size)]),
        d=pa.array([some(float(i)) for i in range(size)]),
    )  # fmt: skip
    with open_writer(address, "docs") as writer:
        rows.fill(writer, batch=2500)
        rows.assert_held(writer)


@pytest.mark.parametrize(
    ("column", "why"),
    [
        (pa.array(["ok", "a\0b", None]), "invalid byte .*0x00.*column c.*; mend the corpus"),
        (pa.array([["ok"], ["a\0b"], []]), "invalid byte .*0x00.*column c.*; mend the corpus"),
        (pa.array([{"a": "a\0b"}, None, None]), "u0000.*; mend the corpus"),
        (pa.array([1, 1001, 2000], pa.timestamp("ns")), "'c' .*lose data.*round it to micros"),
        (pa.array([1, 1001, 2000], pa.duration("ns")), "'c' .*lose data.*round it to micros"),
        (pa.array([2**62, 0, 0], pa.timestamp("s")), "'c' .*round it to micros"),
        (pa.array([-(2**63), 0, 0], pa.timestamp("us")), "'c' .*out of range; mend"),
        (pa.array([-(2**31), 0, 0], pa.date32()), "'c' .*; mend the corpus"),
        (pa.array([4_000_000, 0, 0], pa.date32()), "'c' .*out of range; mend"),
    ],
)
def test_values_that_cannot_be_kept(address: str, column: pa.Array, why: str) -> None:
    good = Rows.make(3, c=pa.array([None] * 3, column.type))
    bad = Rows.make(3, seed=1, ids=pa.array([7, 8, 9]), c=column)
    with open_writer(address, "docs") as writer:
        writer.begin(replace(good.pushed, rows=6), good.layout)
        writer.append(good.batches()[0])
        with pytest.raises(DatabaseError, match=why):
            writer.append(bad.batches()[0])
        assert writer.count(pending=True) == 3
        end(writer)
        with pytest.raises(DatabaseError, match=why):
            bad.change(writer, bad.batches()[0])
        good.assert_held(writer)


def test_types_that_postgres_has_nothing_for(address: str) -> None:
    odd = pa.array([(1, 2, 3)], pa.month_day_nano_interval())
    rows = Rows.make(1, c=odd)
    with open_writer(address, "docs") as writer:
        with pytest.raises(DatabaseError, match="column 'c' has the type month_day_nano_interval"):
            writer.begin(rows.pushed, rows.layout)
        long = Rows.make(1, **{"c" * 64: pa.array([1])})
        with pytest.raises(ConfigError, match="1 to 63 bytes"):
            writer.begin(long.pushed, long.layout)
        assert writer.pending() is None


def test_an_id_that_no_index_takes(address: str) -> None:
    letters = np.random.default_rng(0).integers(0x4E00, 0x9FFF, 3000)
    rows = Rows.make(1, ids=pa.array(["".join(map(chr, letters))], pa.large_string()))
    with pytest.raises(DatabaseError, match="shorten the ids"):
        rows.push_to(address)


def test_many_ids_are_fetched_in_several_statements(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Rows.make(100)
    rows.push_to(address)
    monkeypatch.setattr("whiten_index.vectordb.postgres_writer.PostgresWriter.ids_at_once", 7)
    rows.assert_held_at(address)


def test_an_id_that_comes_twice_is_named(address: str) -> None:
    rows = Rows.make(200, ids=pa.array([*range(199), 5]))
    with open_writer(address, "docs") as writer:
        writer.begin(rows.pushed, rows.layout)
        append(writer, rows.batches(100))
        with pytest.raises(DatabaseError, match=r"\(id\)=\(5\).*its own id"):
            writer.finish()
