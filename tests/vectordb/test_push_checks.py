"""Checks of a push: its index, its options, the existing table, and the answers."""

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pyarrow as pa
import pytest

from tests.helpers.bad_input import run
from tests.helpers.builds import build, write_rows
from tests.vectordb.memory_writer import MemoryWriter
from tests.vectordb.push_world import HERE, ROWS, K, World
from whiten_index import PushConfig, push_index
from whiten_index.errors import ArtifactError, ConfigError, DatabaseError, GateError
from whiten_index.vectordb.database_writer import Find, Hit
from whiten_index.vectordb.push import differences
from whiten_index.vectordb.pushed_table import Layout, RowsError
from whiten_index.versions.retention import prune

SECRET = "hunter2"


def test_what_failed_its_check_is_dropped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    first = world.push()
    before = world.server.published

    with monkeypatch.context() as patched:
        patched.setattr(MemoryWriter, "finish", MemoryWriter.finish_short)
        with pytest.raises(GateError, match=r"299 rows .*as it was.*dropped: push again"):
            world.push(full=True, check=0)
    assert world.server.published is before
    assert world.server.pending is None
    report = world.push(full=True)
    assert (report.resumed, report.was) == (0, first.version)
    world.assert_same()


def test_rows_that_a_database_refuses_are_dropped(world: World) -> None:
    for finish, left in (
        (Mock(side_effect=DatabaseError("the server is gone")), True),
        (Mock(side_effect=RowsError("d5 comes twice")), False),
    ):
        with patch.object(MemoryWriter, "finish", finish), pytest.raises(DatabaseError):
            world.push()
        assert (world.server.pending is not None) is left
    assert world.push().resumed == 0
    world.assert_same()


@pytest.mark.parametrize("to", [HERE, "v.parquet", "v.arrow", "v.npy"])
def test_numbers_that_are_no_half(world: World, tmp_path: Path, to: str) -> None:
    world.rows["d250"][0][3] = -65_505
    shutil.rmtree(world.root / "index")
    world.build(whiten="none", similarity="dot", k=None)
    where = {} if to == HERE else {"to": str(tmp_path / to), "table": None}
    with pytest.raises(RowsError, match=r"beyond 65,504.*--dtype float32"):
        world.push(dtype="float16", **where)
    assert not list(tmp_path.iterdir())
    assert world.server.pending is None
    assert world.push(**where).rows == ROWS
    world.rows["d250"][0][3] = -65_504
    world.update()
    assert world.push(dtype="float16", full=to == HERE, **where).rows == ROWS


def test_more_rows_than_were_sent_are_not_gone_on_with(world: World) -> None:
    world.cut_off(2)
    pending = world.server.pending
    assert pending is not None
    pending.pushed = replace(pending.pushed, done=ROWS + 1)
    assert world.push().resumed == 0
    world.assert_same()


def test_a_version_that_is_pruned_while_it_is_pushed(world: World) -> None:
    begin = MemoryWriter.begin

    def dropping(self: MemoryWriter, *given: Any) -> None:
        world.change(1)
        prune(world.root / "index", keep=1)
        (world.root / "index" / "store").rename(world.root / "aside")
        begin(self, *given)

    with (
        patch.object(MemoryWriter, "begin", dropping),
        pytest.raises(ArtifactError, match=r"was pruned while it was being pushed.*push again"),
    ):
        world.push()
    (world.root / "aside").rename(world.root / "index" / "store")
    report = world.push()
    assert (report.resumed, report.mode) == (0, "all")
    world.assert_same()


@pytest.mark.parametrize("changed", [False, True])
def test_damaged_embeddings_are_not_pushed(world: World, changed: bool) -> None:
    """The check compares with the same store, so it cannot see it."""
    if changed:
        world.push()
        world.change(1)
    shards = sorted(world.root.glob("index/store/*/segments/*/embeddings.safetensors"))
    for path in shards:
        data = bytearray(path.read_bytes())
        data[-4:] = np.float32(10).tobytes()
        path.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"embeddings\.safetensors is missing or damaged"):
        world.push()
    assert (world.server.published is not None) == changed


@pytest.mark.parametrize("name", ["documents.arrow", "whitening.safetensors", "corpus.json"])
def test_what_is_read_is_checked(world: World, name: str) -> None:
    (path,) = world.root.glob(f"index/versions/*/{name}")
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(ArtifactError, match=f"{name} is damaged: .*checksum.*whiten-index verify"):
        world.push()


def test_far_fewer_rows_are_not_pushed_over_many(world: World) -> None:
    """As where the index or the table is another one than was meant."""
    first = world.push()
    for i in range(70):
        del world.rows[f"d{i}"]
    world.build(force=True)
    for options in ({}, {"full": True}, {"k": 4}):
        with pytest.raises(GateError, match=r"has 300 rows and version .* has 230, .* 0\.2: is it"):
            world.push(**options)
    assert (world.server.pending, world.server.connections) == (None, 0)
    assert world.table.pushed.version == first.version
    report = world.push(max_shrink=0.25)
    assert (report.rows_before, report.rows) == (300, 230)
    world.assert_same()


def test_rows_that_no_push_sent_are_not_lost(world: World) -> None:
    world.push()
    table = world.table
    mine = {**next(iter(table.rows.values())), "id": "mine"}
    table.rows[("mine",)] = mine
    world.change(1)
    for options in ({}, {"k": 4}):
        with pytest.raises(GateError, match="has 301 rows, and 1 of them were put there by somet"):
            world.push(**options)
    assert table.rows[("mine",)] is mine
    report = world.push(full=True)
    assert (report.rows_before, report.rows) == (301, 300)
    world.assert_same()


@pytest.mark.parametrize("options", [{}, {"metric": "ip"}])
@pytest.mark.parametrize("many", [False, True])
def test_rows_that_come_after_a_change_was_cut_off_are_not_lost(
    world: World, options: dict[str, Any], many: bool
) -> None:
    world.server.transactions = False
    world.push()
    table = world.table
    for name in ("d200", "d201"):
        del world.rows[name]
    world.change(0, 1, 2, more=1000)
    world.cut_off(1, batch_rows=1)
    if many:
        world.change(*range(50), more=2000)
    mine = {(f"m{n}",): {**next(iter(table.rows.values())), "id": f"m{n}"} for n in range(3)}
    table.rows.update(mine)
    with pytest.raises(GateError, match="of them were put there by something"):
        world.push(**options)
    assert mine.keys() <= table.rows.keys()
    for key in mine:
        del table.rows[key]
    assert world.push(**options).rows == ROWS - 2
    world.assert_same()


def test_rows_that_come_while_a_table_is_filled_are_not_lost(world: World) -> None:
    world.push()
    table, finish = world.table, MemoryWriter.finish

    def meanwhile(self: MemoryWriter) -> None:
        table.rows[("mine",)] = {**next(iter(table.rows.values())), "id": "mine"}
        finish(self)

    message = "has 301 rows, and 1 of them were put there by something"
    with patch.object(MemoryWriter, "finish", meanwhile), pytest.raises(GateError, match=message):
        world.push(metric="ip")
    assert world.table is table
    del table.rows[("mine",)]
    # What was sent is not sent again.
    assert world.push(metric="ip").resumed == ROWS


def test_a_push_that_ends_meanwhile_is_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the name stands for and its rows are asked one after the other."""
    world.push()
    for i in range(10):
        del world.rows[f"d{i}"]
    world.update()
    count, asked = MemoryWriter.count, []

    def ended(self: MemoryWriter, **more: Any) -> int:
        asked.append(more)
        if len(asked) == 1:
            world.push()
        return count(self, **more)

    monkeypatch.setattr(MemoryWriter, "count", ended)
    assert world.push().mode == "nothing"
    world.assert_same()


def test_a_column_that_would_be_gone(world: World) -> None:
    world.push()
    world.build(keep=())
    with pytest.raises(GateError, match="column n would be gone"):
        world.push()
    assert world.push(full=True).columns == ("id", "vector")
    world.build(keep=("n",))
    report = world.push()
    assert (report.mode, report.why) == ("all", "with column n")
    world.assert_same()


def test_an_index_that_does_not_know_what_is_there(world: World) -> None:
    first = world.push()
    shutil.rmtree(world.root / "index")
    world.rows = {name: (row + 1, number) for name, (row, number) in world.rows.items()}
    world.rows["d0"] = (world.rows["d0"][0] * 9, 0)
    world.build()
    report = world.push()
    assert (report.was, report.why) == (
        first.version, "the transform or the encoder is another one"
    )  # fmt: skip
    world.assert_same()


def test_nan_inside_columns_comes_back(world: World) -> None:
    """No number is equal to itself, in a list or a struct either."""
    kinds = {
        "id": pa.int64(),
        "vector": pa.list_(pa.float32(), 1),
        "a": pa.list_(pa.float64()),
        "b": pa.struct([("c", pa.float32())]),
        "t": pa.timestamp("s"),
    }
    layout = Layout(pa.schema(kinds.items()))

    def rows(second: float | None, far: int = 2**50) -> pa.Table:
        values = [[0], [[1.0]], [[1.0, second]], [{"c": second}], [far]]
        pairs = zip(values, layout.schema.types, strict=True)
        return pa.table([pa.array(each, kind) for each, kind in pairs], schema=layout.schema)

    assert differences(rows(math.nan), rows(math.nan), layout) == []
    # A database that keeps JSON has null for it.
    assert differences(rows(math.nan), rows(None), layout) == []
    assert len(differences(rows(math.nan), rows(2.0), layout)) == 2
    assert len(differences(rows(None), rows(math.nan), layout)) == 2
    (fault,) = differences(rows(1.0), rows(1.0, far=2**51), layout)
    assert fault.startswith("column 't' of 1 rows came back changed: 2251799813685248 for ")


@pytest.mark.parametrize(
    ("column", "why"), [("vector", "the vectors of 300 rows"), ("n", "column 'n' of 300 rows")]
)
def test_what_does_not_come_back_is_not_swapped_in(world: World, column: str, why: str) -> None:
    first = world.push()

    def spoiled(self: MemoryWriter) -> None:
        assert self.server.pending is not None
        self.server.pending.indexed = True
        for row in self.server.pending.rows.values():
            row[column] = (-1 - np.asarray(row[column])).tolist()

    with world.monkeypatch.context() as patched:
        patched.setattr(MemoryWriter, "finish", spoiled)
        with pytest.raises(GateError, match=f"{why} came back changed"):
            world.push(full=True, check=ROWS)
    assert world.table.pushed.version == first.version
    world.assert_same()


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (lambda found: found[1:], "could not be searched"),
        (lambda found: [each * 2 for each in found], "could not be searched"),
        (lambda found: [[Hit(h.id, 1) for h in each] for each in found], "exact search finds 10%"),
    ],
)
def test_searches_that_are_answered_wrongly(world: World, lie: Any, why: str) -> None:
    searching = MemoryWriter._searching

    @contextmanager
    def lying(*given: Any, **how: Any) -> Iterator[Find]:
        with searching(*given, **how) as find:
            yield lambda *asked: lie(find(*asked))

    world.monkeypatch.setattr(MemoryWriter, "_searching", lying)
    with pytest.raises((DatabaseError, GateError), match=why):
        world.push()
    assert world.server.published is None


def test_changes_that_do_not_come_back_are_taken_back(world: World) -> None:
    first = world.push()
    before = dict(world.table.rows)
    world.change(1)
    fetch = MemoryWriter.fetch
    world.monkeypatch.setattr(
        MemoryWriter, "fetch", lambda self, ids, layout, **more: fetch(self, [], layout, **more)
    )
    with pytest.raises(GateError, match="1 of 1 rows are not there"):
        world.push()
    assert world.table.pushed.version == first.version
    assert world.table.rows == before


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"k": K + 1}, "--k asks for 9"),
        ({"table": None}, "give --table NAME"),
        ({"table": ""}, "give --table NAME"),
    ],
)
def test_options_that_cannot_be_used(world: World, options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        world.push(**options)
    assert (world.server.published, world.server.pending) == (None, None)


def test_a_missing_table_is_told_after_a_wrong_address(tmp_path: Path) -> None:
    for to in ("mysql://h/db", "v.txt", "s3://bucket/v.parquet"):
        with pytest.raises(ConfigError) as caught:
            push_index(PushConfig(index=str(tmp_path / "none"), to=to))
        assert "--table" not in str(caught.value)


def test_a_kept_column_that_is_called_as_the_vectors_are(world: World) -> None:
    rows = np.random.default_rng(0).standard_normal((40, 8)).astype("f4")
    corpus = write_rows(world.root / "other.parquet", rows, vector=range(40))
    build(world.root / "index", corpus, keep=("vector",), force=True)
    with pytest.raises(ConfigError, match="'vector' has the name that the vectors take"):
        world.push()


def push(world: World, *more: str) -> tuple[int, str, str]:
    return run("push", world.root / "index", "--to", HERE, "--table", "docs", *more)


def test_the_command_prints_its_report(world: World) -> None:
    status, out, _ = push(world, "--json", "--k", "3", "--dtype", "float16", "--check", "5")
    assert status == 0
    seen = json.loads(out)
    assert (seen["mode"], seen["k"], seen["dtype"], seen["notes"]) == ("all", 3, "float16", [])
    assert seen["check"]["compared"] == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--option", SECRET), "takes NAME=VALUE"),
        (("--option", f"={SECRET}"), "takes NAME=VALUE"),
        (("--option", "m=1", "--option", f"m={SECRET}"), "m was given twice"),
    ],
)
def test_options_that_cannot_be_read(world: World, options: tuple[str, ...], message: str) -> None:
    status, out, error = push(world, *options)
    assert status == 2
    assert message in error
    assert SECRET not in out + error
    assert world.server.published is world.server.pending is None
