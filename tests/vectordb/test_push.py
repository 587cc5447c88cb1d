"""From an index to a database: all rows, the changed ones, or none; cut off, and checked."""

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
import pyarrow.parquet as pq
import pytest

from tests.helpers.builds import build, write_rows
from tests.vectordb.memory_writer import MemoryWriter, Server, Table
from whiten_index import PushConfig, UpdateConfig, Whitening, push_index, update_index
from whiten_index.errors import ArtifactError, ConfigError, DatabaseError, GateError
from whiten_index.vectordb.database_writer import Find, Hit
from whiten_index.vectordb.push import PushReport, differences
from whiten_index.vectordb.pushed_table import Layout, RowsError
from whiten_index.versions.retention import prune, rollback

ROWS, DIM, K = 300, 16, 8
# The writer of this address is replaced.
HERE = "postgresql://me@here/db"


class World:
    """A corpus, its index and a database."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.server, self.monkeypatch = root, Server(), monkeypatch
        self.opened = list[dict[str, str]]()
        rng = np.random.default_rng(0)
        self.rows = {f"d{i}": (rng.standard_normal(DIM).astype("f4"), i) for i in range(ROWS)}
        monkeypatch.setattr("whiten_index.vectordb.push.open_writer", self._connect)

    def _connect(
        self, address: str, name: str, *, options: dict[str, str], make: bool = True
    ) -> MemoryWriter:
        assert (address, name) == (HERE, "docs")
        self.opened.append(dict(options))
        return MemoryWriter(self.server)

    def write(self) -> None:
        table = pa.table(
            {
                "id": list(self.rows),
                "e": pa.array(
                    [row.tolist() for row, _ in self.rows.values()], pa.list_(pa.float32())
                ),
                "n": [number for _, number in self.rows.values()],
            }
        )
        pq.write_table(table, self.root / "corpus.parquet")

    def build(self, **options: Any) -> None:
        self.write()
        given = {"embedding_column": "e", "keep": ("n",), "k": K} | options
        build(self.root / "index", str(self.root / "corpus.parquet"), **given)

    def update(self, **options: Any) -> None:
        self.write()
        given = {"refit": "never"} | options
        update_index(UpdateConfig(index=str(self.root / "index"), **given))

    def push(self, **options: Any) -> PushReport:
        given = {"to": HERE, "table": "docs", "batch_rows": 64} | options
        return push_index(PushConfig(index=str(self.root / "index"), **given))

    def change(self, *numbers: int, more: int = 0) -> None:
        """Give documents other vectors, and columns of ``more``, and update the index."""
        for number in numbers:
            row, column = self.rows[f"d{number}"]
            self.rows[f"d{number}"] = (row + 1, column + more)
        self.update()

    @property
    def table(self) -> Table:
        """The published table."""
        assert self.server.published is not None
        return self.server.published

    def cut_off(self, after: int, **options: Any) -> None:
        """Push to a server that fails after so many batches."""
        self.server.fails_after = after
        with pytest.raises(DatabaseError):
            self.push(**options)
        self.server.fails_after = None

    def assert_same(self, **options: Any) -> None:
        """The database holds the documents there are, with the vectors of a fresh push."""
        table = self.table
        assert table.pushed.changing == ""
        assert table.pushed.done == table.pushed.rows == len(table.rows)
        found = dict(sorted((row["id"], row) for row in table.rows.values()))
        assert {name: row["n"] for name, row in found.items()} == {
            name: number for name, (_, number) in sorted(self.rows.items())
        }
        folder = self.root / "index" / "versions" / table.pushed.version
        whitening = Whitening.load(folder / "whitening.safetensors")
        if "k" in options:
            whitening = whitening.truncate(options["k"])
        raw = np.array([self.rows[name][0] for name in found])
        made = whitening.apply(raw)
        made /= np.linalg.norm(made, axis=1, keepdims=True)
        vectors = np.array([row["vector"] for row in found.values()])
        assert np.abs(vectors - made).max() < 1e-6


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the corpus and its index, and a copy of it beside."""
    root = tmp_path_factory.mktemp("made") / "work"
    root.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        World(root, patch).build()
    shutil.copytree(root, root.with_name("kept"))
    return root


@pytest.fixture
def world(made: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    shutil.rmtree(made)
    shutil.copytree(made.with_name("kept"), made)
    return World(made, monkeypatch)


def test_all_rows_are_pushed_and_checked(world: World) -> None:
    report = world.push()
    world.assert_same()
    assert (report.mode, report.pushed, report.rows, report.was) == ("all", ROWS, ROWS, None)
    assert report.check == {
        "rows": ROWS, "compared": 100, "queries": 20, "exact_recall": 1.0, "recall": 1.0
    }  # fmt: skip
    assert world.server.connections == 0
    assert report.to_json()["check"]["compared"] == 100
    # What is there is not pushed again, and the index itself is not read.
    again = world.push()
    assert (again.mode, again.pushed, again.was) == ("nothing", 0, report.version)
    for path in world.root.glob("index/versions/*/index.faiss"):
        path.write_bytes(b"damaged")
    assert world.push(full=True).mode == "all"
    world.assert_same()


def test_changed_documents_alone_are_pushed(world: World) -> None:
    first = world.push()
    rng = np.random.default_rng(1)
    world.rows["d3"] = (rng.standard_normal(DIM).astype("f4"), 3)
    world.rows["d4"] = (world.rows["d4"][0], 999)
    world.rows["new"] = (rng.standard_normal(DIM).astype("f4"), -1)
    del world.rows["d7"]
    world.update()
    report = world.push()
    assert (report.mode, report.pushed, report.deleted) == ("changes", 3, 1)
    assert report.was == first.version != report.version
    world.assert_same()
    assert world.push().mode == "nothing"


def test_two_nights_are_made_up_at_once_and_a_rollback_too(world: World) -> None:
    world.push()
    for name in ("d1", "d2"):
        del world.rows[name]
        world.update()
    gone = world.push()
    assert (gone.mode, gone.deleted) == ("changes", 2)
    world.assert_same()
    rollback(world.root / "index")
    world.rows["d2"] = (np.random.default_rng(0).standard_normal((3, DIM)).astype("f4")[2], 2)
    back = world.push()
    assert (back.mode, back.pushed) == ("changes", 1)
    world.assert_same()


@pytest.mark.parametrize("options", [{"k": 4}, {"dtype": "float16"}, {"metric": "ip"}])
def test_another_form_makes_a_new_table(world: World, options: dict[str, Any]) -> None:
    first = world.push()
    if options != {"metric": "ip"}:
        with pytest.raises(GateError, match=r"would break: .* keeps .*--full$"):
            world.push(**options)
        assert world.table.pushed.version == first.version
        options = {**options, "full": True}
    report = world.push(**options)
    assert (report.mode, report.k) == ("all", options.get("k", K))
    assert ("queries must be reduced again" in "".join(report.notes)) == ("k" in options)
    world.assert_same(**options)
    # It is what is there now.
    assert world.push(**{**options, "full": False}).mode == "nothing"


@pytest.mark.parametrize("name", ["abc", "011"])
def test_ids_that_were_texts_in_between_make_a_new_table(world: World, name: str) -> None:
    """No number is one of them: 011 is another document than 11."""
    numbers: dict[Any, Any] = {11 + at: row for at, row in enumerate(world.rows.values())}
    texts = {str(number): row for number, row in numbers.items()}
    shutil.rmtree(world.root / "index")
    world.rows = numbers
    world.build()
    first = world.push()
    world.rows = {**texts, name: texts["12"]}
    world.update()
    world.rows = numbers
    world.update()
    report = world.push()
    assert (report.mode, report.why) == ("all", f"ids were texts since version {first.version}")
    world.assert_same()


def test_many_changes_make_a_new_table(world: World) -> None:
    first = world.push()
    world.change(*range(30))
    assert world.push().mode == "changes"
    world.change(30)
    # Thirty of them by one update, one by another: nobody has all of them in one list.
    world.server.published = None
    rollback(world.root / "index", to=first.version)
    world.push()
    latest = max(path.name for path in (world.root / "index" / "versions").iterdir())
    rollback(world.root / "index", to=latest)
    report = world.push()
    why = f"more than a tenth of the 300 rows changed since version {first.version}"
    assert (report.mode, report.why) == ("all", why)
    world.assert_same()


def test_a_push_that_was_cut_off_goes_on(world: World) -> None:
    world.cut_off(2)
    assert world.server.published is None
    report = world.push()
    assert (report.resumed, report.pushed) == (128, ROWS - 128)
    assert world.server.connections == 0
    world.assert_same()


def test_what_was_cut_off_is_dropped_where_another_version_is_published(world: World) -> None:
    world.push()
    world.cut_off(2, k=4, full=True)
    del world.rows["d9"]
    world.update()
    assert world.push(k=4, full=True).resumed == 0
    world.assert_same(k=4)
    world.cut_off(1, full=True)
    assert world.push(k=4).mode == "nothing"
    assert world.server.pending is None


def test_a_change_that_was_cut_off_is_ended(world: World) -> None:
    world.server.transactions = False
    first = world.push()
    world.change(0, 1, 2, more=1000)
    world.cut_off(1, batch_rows=1)
    assert world.table.pushed.version == first.version
    assert world.table.pushed.changing
    assert world.push().mode == "changes"
    world.assert_same()
    assert world.push().mode == "nothing"


def test_a_change_that_was_cut_off_is_taken_back_after_a_rollback(world: World) -> None:
    world.server.transactions = False
    before = dict(world.rows)
    first = world.push()
    del world.rows["d9"]
    world.change(0, 1, 2, more=1000)
    world.cut_off(1, batch_rows=1)
    # The second push, back to the first version, is cut off too.
    rollback(world.root / "index", to=first.version)
    world.cut_off(1, batch_rows=1)
    world.rows = before
    report = world.push()
    assert (report.mode, report.version) == ("changes", first.version)
    assert "had begun to change" in report.why
    world.assert_same()
    assert world.push().mode == "nothing"


def test_a_change_that_was_cut_off_whose_version_is_gone(world: World) -> None:
    world.server.transactions = False
    first = world.push()
    world.change(1)
    world.cut_off(0)
    rollback(world.root / "index", to=first.version)
    world.rows["d1"] = (world.rows["d1"][0] - 1, 1)
    prune(world.root / "index", keep=1)
    assert [path.name for path in (world.root / "index" / "versions").iterdir()] == [first.version]
    report = world.push()
    assert (report.mode, report.why[:12]) == ("all", "what changed")
    world.assert_same()


def test_a_flipped_bit_in_the_list_of_changes_leaves_no_row_as_it_was(world: World) -> None:
    world.push()
    world.change(1)
    (path,) = world.root.glob("index/versions/*/changes.arrow")
    whole = path.read_bytes()
    assert whole.count(b"d1") == 1
    # Arrow reads it all the same: another document would be changed, and this one never.
    path.write_bytes(whole.replace(b"d1", b"d0"))
    with pa.ipc.open_file(path.read_bytes()) as file:
        assert file.read_all()["id"].to_pylist() == ["d0"]
    with pytest.raises(ArtifactError, match=r"changes\.arrow is damaged: its content .*--full"):
        world.push()
    path.write_bytes(whole)
    assert world.push().mode == "changes"
    world.assert_same()


@pytest.mark.parametrize("cut_off", [False, True])
def test_rows_that_others_took_away_are_filled_anew(world: World, cut_off: bool) -> None:
    """A change that was cut off, done again, would be refused night after night."""
    world.server.transactions = not cut_off
    world.push()
    if cut_off:
        world.change(0, 1, 2, more=1000)
        world.cut_off(1, batch_rows=1)
    world.table.rows.pop(("d200",))
    report = world.push()
    assert (report.mode, report.rows) == ("all", ROWS)
    assert "counts 299 rows and should have 300" in report.why
    world.assert_same()
    assert world.push().mode == "nothing"


def test_a_description_that_does_not_fit_its_version(world: World) -> None:
    """It would be named with each search, and queries that fit would be refused for good."""
    world.push()
    table = world.table
    table.pushed = replace(table.pushed, query_digest="9" * 32)
    assert world.push().why == "its description does not fit its version"
    assert world.table.pushed.query_digest != "9" * 32
    assert world.push().mode == "nothing"


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


def test_a_kept_column_that_is_called_as_the_vectors_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "whiten_index.vectordb.push.open_writer", lambda *_, **__: MemoryWriter(Server())
    )
    rows = np.random.default_rng(0).standard_normal((40, 8)).astype("f4")
    corpus = write_rows(tmp_path / "c.parquet", rows, vector=range(40))
    build(tmp_path / "index", corpus, keep=("vector",))
    config = PushConfig(index=str(tmp_path / "index"), to=HERE, table="docs")
    with pytest.raises(ConfigError, match="'vector' has the name that the vectors take"):
        push_index(config)
