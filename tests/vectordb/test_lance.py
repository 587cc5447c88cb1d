"""The contract on LanceDB, and what is LanceDB's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import lancedb
import numpy as np
import pyarrow as pa
import pytest

from tests.vectordb.writer_contract import (
    HERE,
    EngineContract,
    Rows,
    assert_asking_makes_nothing,
    assert_clean,
    assert_finds,
    assert_holds,
    fill,
)
from whiten_index.corpus.batches import PASSAGE
from whiten_index.errors import ConfigError, DatabaseError
from whiten_index.vectordb.database_writer import DatabaseWriter, Metric, VectorDtype
from whiten_index.vectordb.lance import filling
from whiten_index.vectordb.lance.changes import LanceChanges
from whiten_index.vectordb.lance.options import LanceOptions
from whiten_index.vectordb.lance.table import TableState, key_that_comes_twice
from whiten_index.vectordb.registry import open_writer
from whiten_index.vectordb.row_checks import RowsError

pytestmark = pytest.mark.service

INDEXED = {"index": "ivf_sq", "num_partitions": "100", "nprobes": "30", "refine_factor": "2"}

# A push that stops, for good, in the middle of what its last argument names.
CHILD = """
import sys, time
from pathlib import Path
from tests.vectordb.writer_contract import Rows, fill
from whiten_index.vectordb.registry import open_writer
from whiten_index.vectordb.lance import filling
from whiten_index.vectordb.lance.changes import LanceChanges
from whiten_index.vectordb.lance.place import Place
address, marker, where = sys.argv[1:]
def stop(*_, **__):
    Path(marker).touch()
    time.sleep(600)
rows = Rows.make(2000, seed=1)
slices, apply = filling.slices, LanceChanges.apply
def cut(table, rows, schema):
    yield next(slices(table, rows, schema)).slice(0, 100)
    stop()
def applied(self, table):
    apply(self, table)
    stop()
if where == "overwriting":
    filling.slices = cut
elif where == "ending":
    Place.end_swap = stop
elif where == "changing":
    # The first is on the branch.
    applies = iter([apply, applied])
    LanceChanges.apply = lambda self, table: next(applies)(self, table)
with open_writer(address, "docs", options={"index": "ivf_flat"}) as writer:
    if where in ("changing", "looking"):
        with writer.changing(rows.pushed, rows.layout) as changing:
            changing.upsert(rows.take(range(10)))
            writer.count()
            if where == "looking":
                stop()
    else:
        fill(writer, rows)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "a folder"


@pytest.fixture
def address(folder: Path) -> str:
    return f"lancedb://{folder}"


def kill(address: str, where: str, marker: Path) -> None:
    """Kill a push when it has come to where it stops."""
    marker.unlink(missing_ok=True)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, address, str(marker), where],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
    )
    try:
        deadline = time.monotonic() + 120
        while not marker.exists():
            assert child.poll() is None, "it ended by itself"
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class TestLance(EngineContract):
    takes_any_name: ClassVar[bool] = False
    options: ClassVar[dict[str, str]] = INDEXED

    @pytest.fixture
    def address(self, folder: Path) -> str:
        return f"lancedb://{folder}"


@pytest.mark.parametrize("there", ["LOCK", "meta.json", "corpus.parquet"])
def test_a_folder_that_is_anothers(address: str, folder: Path, there: str) -> None:
    folder.mkdir()
    (folder / there).write_text("mine")
    with pytest.raises(ConfigError, match=f"than those of LanceDB, such as '{there}'; name a"):
        open_writer(address, "docs")
    assert [each.name for each in folder.iterdir()] == [there]


def test_asking_makes_nothing(address: str, folder: Path) -> None:
    assert_asking_makes_nothing(address, folder)
    empty = folder.parent / "empty"
    empty.mkdir()
    with open_writer(f"lancedb://{empty}", "docs", make=False) as writer:
        assert writer.published() is None
    assert list(empty.iterdir()) == []


def test_folders_that_are_taken(address: str, folder: Path) -> None:
    """An empty one, and one with a table in it, whatever users put beside that."""
    folder.mkdir()
    (folder / ".hidden").write_text("")
    lancedb.connect(folder).create_table("theirs", pa.table({"a": [1]}))
    (folder / "README.md").write_text("mine")
    rows = Rows.make(20)
    with open_writer(address, "docs") as writer:
        assert writer.target == f"lancedb://{folder}, table docs"
        fill(writer, rows)
        assert_holds(writer, rows)
    assert (folder / "README.md").exists()


def test_a_folder_that_cannot_be_written(
    address: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(13, "Permission denied", str(folder))

    with open_writer(address, "docs") as writer:
        fill(writer, Rows.make(20))
        monkeypatch.setattr(lancedb.table.LanceTable, "add", refuse)
        with pytest.raises(
            DatabaseError, match=r"refuses rows.*this user may not write there: change"
        ):
            fill(writer, Rows.make(20))
    monkeypatch.setattr(lancedb, "connect", refuse)
    with pytest.raises(DatabaseError, match=r"cannot be opened .*this user may not write there"):
        open_writer(address, "docs")
    # An object store has permissions of another kind.
    with pytest.raises(DatabaseError, match=r"denied.*; see to it, and push again"):
        open_writer("lancedb+s3://bucket/x", "docs")


def test_the_least_id_of_all_is_refused_by_name(address: str) -> None:
    edges = [-(2**63) + 1, -1, 0, 2**53 + 1, 2**63 - 1]
    with open_writer(address, "docs") as writer:
        rows = Rows.make(5, ids=pa.array(edges, pa.int64()))
        fill(writer, rows)
        assert_holds(writer, rows)
        writer.begin(rows.pushed, rows.layout)
        least = Rows.make(5, ids=pa.array([-(2**63), *edges[1:]], pa.int64()))
        with pytest.raises(RowsError, match="cannot look for the id -9223372036854775808"):
            writer.append(least.batches()[0])


def test_the_table_is_a_plain_one(address: str, folder: Path) -> None:
    columns = {"n": pa.array(range(300)), "day": pa.array([3] * 300, pa.date32())}
    rows = Rows.make(ids=pa.array(map(str, range(300)), pa.large_string()), **columns)
    halves = replace(rows, layout=replace(rows.layout, dtype=VectorDtype.FLOAT16))
    for each, kind in ((rows, pa.float32()), (halves, pa.float16())):
        with open_writer(address, "docs") as writer:
            fill(writer, each)
        database = lancedb.connect(folder)
        assert list(database.list_tables().tables) == ["docs"]
        table = database.open_table("docs")
        assert table.schema.types == [pa.string(), pa.list_(kind, 12), pa.int64(), pa.date32()]
        found = table.search(rows.vectors[5]).limit(1).to_list()
        assert (found[0]["id"], found[0]["n"]) == ("5", 5)


def test_an_open_table_stays_as_it_was(address: str, folder: Path) -> None:
    old, new = Rows.make(), Rows.make(200, seed=1, k=5)
    with open_writer(address, "docs") as writer:
        fill(writer, old)
        table = lancedb.connect(folder).open_table("docs")
        fill(writer, new)
    assert table.count_rows() == 300
    assert table.search(old.vectors[7]).limit(1).to_list()[0]["id"] == 7
    table.checkout_latest()
    assert table.search(new.vectors[7]).limit(1).to_list()[0]["id"] == 7


@pytest.mark.parametrize("first", [True, False])
def test_killed_while_it_overwrites(address: str, tmp_path: Path, first: bool) -> None:
    old, new = Rows.make(), Rows.make(2000, seed=1)
    with open_writer(address, "docs") as writer:
        if not first:
            fill(writer, old)
        kill(address, "overwriting", tmp_path / "marker")
        if first:
            assert writer.published() is None
        else:
            assert_holds(writer, old)
        pending = writer.pending()
        assert pending is not None
        assert pending.done == 2000
        writer.resume(new.layout)
        writer.finish(new.layout)
        writer.swap()
        assert_holds(writer, new)
        assert writer.pending() is None


def test_killed_before_the_index_is_there(address: str, folder: Path, tmp_path: Path) -> None:
    new = Rows.make(2000, seed=1)
    kill(address, "ending", tmp_path / "marker")
    with open_writer(address, "docs", options={"index": "ivf_flat"}) as writer:
        assert_holds(writer, new)
        assert_finds(writer, new, exact=False)
        published = writer.published()
        assert published is not None
        assert replace(published, name="", done=0, lease="") == new.pushed
        table = lancedb.connect(folder).open_table("docs")
        assert not list(table.list_indices())
        # The next push has nothing to do, and drops what is pending.
        writer.discard()
        assert writer.pending() is None
        table.checkout_latest()
        assert [each.index_type for each in table.list_indices()] == ["IvfFlat"]
        assert_holds(writer, new)


def test_killed_while_it_changes(address: str, tmp_path: Path) -> None:
    """Rows that may be of either version are told to be; the changed ones are pushed again."""
    old = Rows.make(2000)
    before = replace(old, version="000000-old")
    with open_writer(address, "docs") as writer:
        fill(writer, before)
        kill(address, "changing", tmp_path / "marker")
        told = writer.published()
        assert told is not None
        assert (told.version, told.changing) == (before.version, "000001-abc")
        # The changed rows alone bring it back.
        with writer.changing(before.pushed, old.layout) as changing:
            changing.upsert(old.take(range(10)))
        assert_holds(writer, before)
        assert_clean(writer, before)


def test_killed_while_changes_are_looked_at(address: str, folder: Path, tmp_path: Path) -> None:
    old, new = Rows.make(2000), Rows.make(2000, seed=1)
    with open_writer(address, "docs") as writer:
        fill(writer, old)
        before = writer.published()
        kill(address, "looking", tmp_path / "marker")
        assert writer.published() == before
        assert_holds(writer, old)
        table = lancedb.connect(folder).open_table("docs")
        assert table.branches.list()
        with writer.changing(replace(old.pushed, rows=1999), old.layout) as changing:
            assert_holds(writer, old)
            changing.delete([0])
            changing.upsert(new.take([1]))
        now = [new.take([1]), old.take(range(2, 2000))]
        assert_holds(writer, Rows(pa.Table.from_batches(now), old.layout))
        assert not table.branches.list()


def test_an_engine_that_fails_in_mid_change(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old = Rows.make()
    apply = LanceChanges.apply

    def fail(self: LanceChanges, table: object) -> None:
        apply(self, table)
        raise OSError("disk full, /root/src/io.rs:12:3")

    with open_writer(address, "docs") as writer:
        fill(writer, old)
        before = writer.published()
        monkeypatch.setattr(LanceChanges, "apply", fail)

        def change() -> None:
            after = replace(old.pushed, version="2")
            with writer.changing(after, old.layout) as changing:
                changing.upsert(Rows.make(seed=1).take(range(5)))
                changing.delete([7])

        with pytest.raises(DatabaseError, match=r"cannot be changed \(disk full\)"):
            change()
        monkeypatch.undo()
        assert writer.published() == before
        assert_holds(writer, old)


def test_users_see_no_change_before_it_was_looked_at(address: str, folder: Path) -> None:
    old = Rows.make()
    other = Rows.make(seed=1)
    with open_writer(address, "docs") as writer:
        fill(writer, old)
        after = replace(old.pushed, version="2", rows=299)
        with writer.changing(after, old.layout) as changing:
            changing.upsert(other.take(range(5)))
            assert writer.count() == 300
            changing.delete([7])
            assert writer.count() == 299
            assert len(writer.fetch([7], old.layout)) == 0
            assert writer.search(other.vectors[:1], 1, exact=True).ids == [[0]]
            users = lancedb.connect(folder).open_table("docs")
            assert users.count_rows() == 300
            assert users.search(old.vectors[0]).limit(1).to_list()[0]["id"] == 0
        assert writer.count() == 299
        assert not users.branches.list()


def test_what_was_said_last_counts(address: str) -> None:
    old, one, two = (Rows.make(10, seed=seed) for seed in range(3))
    with open_writer(address, "docs") as writer:
        fill(writer, old)
        with writer.changing(replace(old.pushed, rows=8), old.layout) as changing:
            changing.delete([0, 1, 2])
            changing.upsert(one.take([0, 1, 3, 4, 5]))
            changing.upsert(two.take([3, 4]))
            changing.delete([4, 5])
        now = [one.take([0, 1]), two.take([3]), old.take([6, 7, 8, 9])]
        assert_holds(writer, Rows(pa.Table.from_batches(now), old.layout))


def test_thousands_of_ids_that_need_quotes(address: str) -> None:
    odd = ["'", "''", "\\", "\\'", '"', "\n", "%", "--", "\0", "`", "𝄞"]
    names = [f"{each}{number}" for number in range(2500) for each in odd]
    rows = Rows.make(len(names), ids=pa.array(names, pa.large_string()), k=4)
    with open_writer(address, "docs") as writer:
        fill(writer, rows, batch=10_000)
        assert_holds(writer, rows)
        after = replace(rows.pushed, rows=11)
        with writer.changing(after, rows.layout) as changing:
            changing.delete(names[11:])
        assert_holds(writer, Rows(rows.table.slice(0, 11), rows.layout))


def test_passages_that_are_no_longer_there(address: str) -> None:
    """Thousands of documents, each of which loses another number of passages."""
    names = [f"d{number}" for number in range(1000) for _ in range(5)]
    numbers = pa.array([passage for _ in range(1000) for passage in range(5)], pa.int32())
    ids = pa.array(names, pa.large_string())
    rows = Rows.make(5000, ids=ids, **{PASSAGE: numbers})
    stays = [row for row in range(5000) if row % 5 <= row // 5 % 5]
    now = Rows(pa.Table.from_batches([rows.take(stays)]), rows.layout)
    with open_writer(address, "docs") as writer:
        fill(writer, rows)
        with writer.changing(now.pushed, rows.layout) as changing:
            changing.delete(sorted(set(names)))
            changing.upsert(rows.take(stays))
        assert_holds(writer, now)


def test_nightly_changes_do_not_grow_the_folder_for_ever(address: str, folder: Path) -> None:
    old = Rows.make(2000, k=64)
    rng = np.random.default_rng(0)
    with open_writer(address, "docs", options={"keep_days": "0", "index": "ivf_flat"}) as writer:
        fill(writer, old)
        first = size(folder)
        most = 0
        for night in range(30):
            new = Rows.make(2000, k=64, seed=night + 1)
            after = replace(old.pushed, version=str(night))
            with writer.changing(after, old.layout) as changing:
                changing.upsert(new.take(rng.choice(2000, 20, replace=False)))
            most = max(most, size(folder))
        assert writer.count() == 2000
    assert most < 3 * first


def test_a_table_that_no_push_made(address: str, folder: Path) -> None:
    database = lancedb.connect(folder)
    for name in ("docs", "others__pending"):
        database.create_table(name, data=[{"id": 1, "vector": [1.0, 2.0]}])
    with open_writer(address, "docs") as writer:
        with pytest.raises(DatabaseError, match="no push made"):
            writer.published()
        with pytest.raises(DatabaseError, match="no push made"):
            fill(writer, Rows.make())
    with (
        open_writer(address, "others") as writer,
        pytest.raises(DatabaseError, match="has a table others__pending that no push made"),
    ):
        writer.begin(Rows.make().pushed, Rows.make().layout)
    assert [database.open_table(name).count_rows() for name in ("docs", "others__pending")] == [
        1,
        1,
    ]


def test_lists_at_which_the_engine_breaks_down(address: str) -> None:
    pairs = pa.array([["a", "b"], ["c", None], None], pa.list_(pa.string(), 2))
    inside = pa.array([[{"a": each}] for each in ([1, 2], None, [3, 4])],
                      pa.list_(pa.struct([("a", pa.list_(pa.int32(), 2))])))  # fmt: skip
    rows = Rows.make(3, pairs=pairs, inside=inside)
    with open_writer(address, "docs") as writer:
        fill(writer, rows)
        assert_holds(writer, rows)


@pytest.mark.parametrize("name", ["a.b", "`", "", "_rowid", "_distance", "_row_created_at_version"])
def test_columns_that_the_engine_refuses(address: str, name: str) -> None:
    rows = Rows.make(3, **{name: pa.array(["a", "b", "c"])})
    with open_writer(address, "docs") as writer:
        with pytest.raises(ConfigError, match="rename it in the corpus"):
            writer.begin(rows.pushed, rows.layout)
        assert writer.pending() is None


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("lancedb://vectors", "names no folder; write the folder from the root on"),
        ("lancedb://vectors/here", "names no folder"),
        ("lancedb://", "names no folder"),
        ("lancedb:///", "names no folder"),
        ("lancedb+s3:///prefix", "names no bucket; write lancedb\\+s3://bucket/prefix"),
        ("lancedb+s3://KEY:s3cret@bucket/prefix", "leave it out, and set AWS_ACCESS_KEY_ID"),
        ("lancedb:///folder?token=s3cret", "leave it out, and set AWS_ACCESS_KEY_ID"),
        ("lancedb:///folder#s3cret", "leave it out, and set AWS_ACCESS_KEY_ID"),
    ],
)
def test_addresses_that_name_no_place(address: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        open_writer(address, "docs")
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"index": "hnsw"},
        {"nprobes": "0"},
        {"nprobes": "many"},
        {"keep_days": "-1"},
        {"keep_days": "inf"},
        {"keep_days": "nan"},
        {"index": "ivf_flat", "m": "16"},
        {"index": "none", "num_partitions": "4"},
    ],
)
def test_options_out_of_bounds(address: str, options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="--option"):
        open_writer(address, "docs", options=options)


@pytest.mark.parametrize("name", ["a b", "a/b", "é", "docs__pending", "a$b", "../a"])
def test_names_that_lance_does_not_take(address: str, name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        open_writer(address, name)


def test_what_the_object_store_is_told_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x" * 9)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    options = {"storage.endpoint": "http://nowhere.invalid", "storage.region": "eu-west-1",
               "storage.timeout": "1s", "storage.client_max_retries": "0",
               "storage.retry_timeout": "1s"}  # fmt: skip
    with (
        pytest.raises(DatabaseError, match="s3://bucket/prefix, table docs cannot be op") as caught,
        open_writer("lancedb+s3://bucket/prefix", "docs", options=options) as writer,
    ):
        writer.published()
    assert "hush-hush" not in str(caught.value)


@pytest.mark.parametrize("kind", ["ivf_flat", "ivf_sq", "ivf_pq", "ivf_hnsw_sq"])
def test_every_kind_of_index(address: str, folder: Path, kind: str) -> None:
    rows = Rows.make(2000, k=16)
    with open_writer(address, "docs", options={"index": kind, "refine_factor": "50"}) as writer:
        fill(writer, rows)
        table = lancedb.connect(folder).open_table("docs")
        named = [each.index_type.lower() for each in table.list_indices()]
        assert named == [kind.replace("_", "")]
        assert_finds(writer, rows, exact=False, least=0.9)


TAKEN = "another push to .* took this one over"


def before(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, do: Callable[[], None]
) -> None:
    """Do something right before the next call of a function, once."""
    real = getattr(owner, name)

    def called(*given: object) -> object:
        monkeypatch.setattr(owner, name, real)
        do()
        return real(*given)

    monkeypatch.setattr(owner, name, called)


def end(writer: DatabaseWriter, rows: Rows, batches: list[pa.RecordBatch]) -> None:
    for batch in batches:
        writer.append(batch)
    writer.finish(rows.layout)
    writer.swap()


@pytest.mark.parametrize("does", ["resume", "begin", "resume and swap", "discard"])
def test_rows_under_way_while_another_push_takes_over(
    address: str, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    """The mark was read, and the commit comes after the other one's."""
    rows, theirs = Rows.make(), replace(Rows.make(500, seed=1), version="000002-def")
    first, *rest = rows.batches(100)
    with open_writer(address, "docs") as one, open_writer(address, "docs") as two:
        one.begin(rows.pushed, rows.layout)
        one.append(first)

        def take() -> None:
            if does == "begin":
                two.begin(theirs.pushed, theirs.layout)
                two.append(theirs.batches(100)[0])
            elif does == "discard":
                two.discard()
            else:
                two.resume(rows.layout)
                if does != "resume":
                    end(two, rows, rest)

        before(monkeypatch, filling, "as_stored", take)
        with pytest.raises(DatabaseError, match=TAKEN):  # noqa: PT012
            one.append(rest[0])
            # Where the table is gone the engine takes them; those before them are not there.
            assert does in ("resume and swap", "discard")
            end(one, rows, rest[1:])
        if does == "resume":
            assert two.count(pending=True) == 100
            end(two, rows, rest)
        elif does == "begin":
            assert two.count(pending=True) == 100
            end(two, theirs, theirs.batches(100)[1:])
        elif does == "discard":
            assert two.pending() is None
            assert two.published() is None
            fill(two, theirs)
        assert_holds(two, theirs if does in ("begin", "discard") else rows)
        assert two.pending() is None


@pytest.mark.parametrize("step", ["key_that_comes_twice", "slices"])
def test_an_end_under_way_while_another_push_begins(
    address: str, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    old, rows, theirs = (Rows.make(300, seed=seed) for seed in range(3))
    with open_writer(address, "docs") as one, open_writer(address, "docs") as two:
        fill(one, old)
        one.begin(rows.pushed, rows.layout)
        for batch in rows.batches():
            one.append(batch)
        before(monkeypatch, filling, step, lambda: two.begin(theirs.pushed, theirs.layout))
        with pytest.raises(DatabaseError, match=TAKEN):
            end(one, rows, [])
        assert_holds(two, old)
        assert two.count(pending=True) == 0
        # What the other one began is left to it.
        one.discard()
        end(two, theirs, theirs.batches())
        assert_holds(one, theirs)


def test_rows_are_not_published_when_another_push_took_them_up(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, rows = Rows.make(), Rows.make(seed=1)
    with open_writer(address, "docs") as one, open_writer(address, "docs") as two:
        fill(one, old)
        one.begin(rows.pushed, rows.layout)
        for batch in rows.batches():
            one.append(batch)
        before(monkeypatch, filling, "slices", lambda: two.resume(rows.layout))
        with pytest.raises(DatabaseError, match=TAKEN):
            end(one, rows, [])
        assert_holds(two, old)
        end(two, rows, [])
        assert_holds(two, rows)


@pytest.mark.parametrize("batches", range(5))
def test_a_table_that_was_dropped_and_made_again(address: str, batches: int) -> None:
    """Whatever numbers its versions have, it is another one's."""
    mine, theirs = Rows.make(500), Rows.make(500, seed=1)
    with open_writer(address, "docs") as one, open_writer(address, "docs") as two:
        one.begin(mine.pushed, mine.layout)
        for batch in mine.batches(100)[:2]:
            one.append(batch)
        two.discard()
        two.begin(theirs.pushed, theirs.layout)
        for batch in theirs.batches(100)[:batches]:
            two.append(batch)
        with pytest.raises(DatabaseError, match=TAKEN):
            one.append(mine.batches(100)[2])
        end(two, theirs, theirs.batches(100)[batches:])
        assert_holds(two, theirs)


def test_a_branch_that_another_push_dropped(address: str) -> None:
    old, new = Rows.make(), Rows.make(seed=1)
    with open_writer(address, "docs") as one, open_writer(address, "docs") as two:
        fill(one, old)
        with (  # noqa: PT012
            pytest.raises(DatabaseError, match=TAKEN),
            one.changing(old.pushed, old.layout) as mine,
        ):
            mine.upsert(new.take([1]))
            assert one.count() == 300
            with two.changing(old.pushed, old.layout):
                with pytest.raises(DatabaseError, match=TAKEN):
                    one.count()
                assert two.count() == 300
        assert_holds(two, old)
        assert_clean(two, old)


@pytest.mark.parametrize("does", ["change", "fill"])
def test_a_change_under_way_while_another_push_publishes(
    address: str, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    """The first has marked the table; what it then commits is refused, and undoes nothing."""
    old, mine, theirs = (Rows.make(300, seed=seed) for seed in range(3))
    theirs = replace(theirs, version="000003-fed")
    with open_writer(address, "docs") as one, open_writer(address, "docs") as two:
        fill(one, old)

        def publish() -> None:
            if does == "fill":
                fill(two, theirs)
                return
            told = two.published()
            assert told is not None
            assert told.changing == "000002-def"
            with two.changing(theirs.pushed, theirs.layout) as changing:
                changing.upsert(theirs.take(range(300)))

        def change() -> None:
            after = replace(mine, version="000002-def").pushed
            with one.changing(after, mine.layout) as changing:
                changing.upsert(mine.take(range(10)))
                changing.delete([20])
                before(monkeypatch, LanceChanges, "apply", publish)

        with pytest.raises(DatabaseError, match=TAKEN):
            change()
        assert_holds(one, theirs)
        assert_clean(one, theirs)


def test_pushes_of_many_threads(address: str) -> None:
    """Whoever is refused comes again; what is told is what there is."""
    rows = {f"{number:06}-abc": Rows.make(400, seed=number) for number in range(6)}
    faults = list[BaseException]()

    def push(version: str) -> None:
        mine = replace(rows[version], version=version)
        try:
            for _ in range(4):
                with open_writer(address, "docs") as writer:
                    try:
                        if writer.published() is None or version < "000003":
                            fill(writer, mine, batch=50)
                            continue
                        with writer.changing(mine.pushed, mine.layout) as changing:
                            changing.upsert(mine.take(range(400)))
                    except DatabaseError:
                        time.sleep(0.01)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=push, args=[version]) for version in rows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    with open_writer(address, "docs") as writer:
        told = writer.published()
        if told is None or told.changing:
            fill(writer, replace(rows["000000-abc"], version="000000-abc"))
            told = writer.published()
        assert told is not None
        assert_holds(writer, replace(rows[told.version], version=told.version))


def test_rows_that_something_else_adds(address: str, folder: Path) -> None:
    rows = Rows.make()
    first, *rest = rows.batches(100)
    with open_writer(address, "docs") as writer:
        writer.begin(rows.pushed, rows.layout)
        writer.append(first)
        lancedb.connect(folder).open_table("docs__pending").add(rest[0])
        told = "has 200 rows and this push put 100 there: something else writes to it"
        with pytest.raises(DatabaseError, match=told):
            writer.append(rest[0])
        # It cannot be known which of them are whose.
        assert writer.pending() is None
        fill(writer, rows)
        assert_holds(writer, rows)


def test_a_pending_table_without_its_files(address: str, folder: Path) -> None:
    """A commit that was under way when the table was dropped."""
    rows = Rows.make()
    with open_writer(address, "docs") as writer:
        writer.begin(rows.pushed, rows.layout)
        writer.append(rows.batches(100)[0])
        table = lancedb.connect(folder).open_table("docs__pending")
        state = TableState.of(table)
        assert state is not None
        writer.discard()
        state.mark(table)
        assert lancedb.connect(folder).open_table("docs__pending").count_rows() == 100
        assert writer.pending() is None
        fill(writer, rows)
        assert_holds(writer, rows)


def test_a_swap_that_was_cut_off_and_taken_up(address: str, tmp_path: Path) -> None:
    new = Rows.make(2000, seed=1)
    kill(address, "ending", tmp_path / "marker")
    with open_writer(address, "docs", options={"index": "ivf_flat"}) as writer:
        writer.resume(new.layout)
        end(writer, new, [])
        assert_holds(writer, new)
        assert_clean(writer, new)
        assert writer.pending() is None


@pytest.mark.parametrize("at_once", [7, 100, 299, 300, 10_000])
def test_keys_are_compared_in_parts(address: str, folder: Path, at_once: int) -> None:
    numbers = np.random.default_rng(0).integers(0, 150, 300)
    rows = Rows.make(300, ids=pa.array(numbers))
    lancedb.connect(folder).create_table("t", data=rows.table)
    table = lancedb.connect(folder).open_table("t")
    found = key_that_comes_twice(table, rows.layout, at_once=at_once)
    values, counts = np.unique(numbers, return_counts=True)
    assert found is not None
    assert found[0] == np.count_nonzero(counts > 1)
    assert found[1] in values[counts > 1]
    once = Rows.make(300)
    lancedb.connect(folder).create_table("once", data=once.table)
    table = lancedb.connect(folder).open_table("once")
    assert key_that_comes_twice(table, once.layout, at_once=at_once) is None


def test_more_changes_than_wait_in_memory() -> None:
    rows = Rows.make()
    with LanceChanges(rows.layout, most=100) as changes:
        changes.upsert(rows.take(range(90)))
        changes.delete(range(80))
        changes.upsert(rows.take(range(80, 90)))
        with pytest.raises(DatabaseError, match=r"more than 100 rows and ids changed.*--full"):
            changes.delete(range(80, 120))


def test_a_full_temporary_folder(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows.make(5000, k=64)
    with open_writer(address, "docs") as writer:
        fill(writer, rows)
        full = Path("/dev/full")
        monkeypatch.setattr(tempfile, "TemporaryFile", lambda: full.open("r+b"))
        after = replace(rows.pushed, version="2")
        with (
            pytest.raises(DatabaseError, match=r"No space left.*TMPDIR"),
            writer.changing(after, rows.layout) as changing,
        ):
            changing.upsert(rows.take(range(5000)))
        assert_holds(writer, rows)
        assert_clean(writer, rows)


@pytest.mark.parametrize("error", [KeyError("id"), TypeError("no"), OverflowError("too large")])
def test_errors_of_every_kind(
    address: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    rows = Rows.make()

    def fail(*_: object) -> None:
        raise error

    with open_writer(address, "docs") as writer:
        writer.begin(rows.pushed, rows.layout)
        monkeypatch.setattr(filling, "as_stored", fail)
        with pytest.raises(DatabaseError, match="docs refuses rows"):
            writer.append(rows.batches()[0])


@pytest.mark.parametrize("told", ["[]", "3", '{"pushed": []}', '{"pushed": {"rows": 1e999}}'])
def test_a_mark_that_no_push_made(address: str, folder: Path, told: str) -> None:
    rows = Rows.make()
    field = rows.layout.schema.field(0).with_metadata({"whiten_index": told})
    lancedb.connect(folder).create_table("docs", schema=rows.layout.schema.set(0, field))
    with open_writer(address, "docs") as writer, pytest.raises(DatabaseError, match="no push made"):
        writer.published()


@pytest.mark.parametrize("metric", list(Metric))
def test_vectors_of_zeros(address: str, metric: Metric) -> None:
    """They come back; cosines do not find them, and nothing else is lost by it."""
    vectors = Rows.make(50).vectors.copy()
    vectors[7] = 0
    whole = Rows.make(50, metric=metric)
    column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), 12)
    rows = Rows(whole.table.set_column(1, whole.layout.schema.field(1), column), whole.layout)
    with open_writer(address, "docs") as writer:
        fill(writer, rows)
        assert_holds(writer, rows)
        found = writer.search(vectors[:10], 50, exact=True)
        there = 49 if metric is Metric.COSINE else 50
        counts = [len(ids) for ids in found.ids]
        assert counts == [there] * 7 + [0 if metric is Metric.COSINE else 50] + [there] * 2
        assert [int(np.isfinite(row).sum()) for row in found.scores] == counts
        # By brute force a row of zeros has the score 0.
        best = rows.best(vectors[:7], 50).sum(axis=1)
        assert np.abs(np.nansum(found.scores[:7], axis=1) - best).max() < 1e-4


def test_a_century_is_the_longest_that_old_versions_are_kept() -> None:
    assert LanceOptions.parse({"keep_days": "36500"}).keep_days == 36_500
    with pytest.raises(ConfigError, match="from 0 to 36500"):
        LanceOptions.parse({"keep_days": "1e300"})


def test_rows_of_another_layout(address: str) -> None:
    rows, others = Rows.make(), Rows.make(n=pa.array(range(300)))
    with open_writer(address, "docs") as writer:
        fill(writer, rows)
        writer.begin(rows.pushed, rows.layout)
        with pytest.raises(DatabaseError, match="another layout"):
            writer.resume(others.layout)
        with (
            pytest.raises(DatabaseError, match="another layout"),
            writer.changing(others.pushed, others.layout),
        ):
            pass
        assert_holds(writer, rows)


def test_numbers_that_halves_cannot_hold(address: str) -> None:
    rows = Rows.make(3, dtype=VectorDtype.FLOAT16)
    vectors = rows.vectors.copy()
    vectors[1, 1] = 70_000
    column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), 12)
    table = rows.table.set_column(1, rows.layout.schema.field(1), column)
    with open_writer(address, "docs") as writer:
        writer.begin(rows.pushed, rows.layout)
        with pytest.raises(DatabaseError, match=r"65,504.*--dtype float32"):
            writer.append(Rows(table, rows.layout).batches()[0])
        assert writer.count(pending=True) == 0
