"""LanceDB's own: plain tables, kills within a swap, pushes that meet in the engine, indexes."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import lancedb
import pyarrow as pa
import pytest
from lancedb.index import BTree

from tests.vectordb.pushed_rows import Rows, append, child_at, end
from whiten_index.errors import ConfigError, DatabaseError, GateError
from whiten_index.vectordb import lance_writer
from whiten_index.vectordb.lance_writer import read_metadata, write_metadata
from whiten_index.vectordb.push import pushed_version
from whiten_index.vectordb.pushed_table import PushedTable
from whiten_index.vectordb.registry import open_writer

pytestmark = pytest.mark.service

TAKEN = "another push to .* took this one over"

# A push that stops, for good, in the middle of what its last argument names.
CHILD = """
import sys, time
from pathlib import Path
from tests.vectordb.pushed_rows import Rows
from whiten_index.vectordb import lance_writer
from whiten_index.vectordb.lance_writer import LanceWriter
address, marker, where = sys.argv[1:]
def stop(*_, **__):
    Path(marker).touch()
    time.sleep(600)
rows = Rows.make(2000, seed=1)
slices = lance_writer.read_slices
def cut(table, rows, schema):
    yield next(slices(table, rows, schema)).slice(0, 100)
    stop()
if where == "overwriting":
    lance_writer.read_slices = cut
elif where == "ending":
    LanceWriter._complete_swap = stop
rows.push_to(address, index="ivf_flat")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "a folder"


@pytest.fixture
def address(folder: Path) -> str:
    return f"lancedb://{folder}"


def kill_at(address: str, where: str, marker: Path) -> None:
    """Kill a push when it has come to where it stops."""
    with child_at(marker.exists, "-c", CHILD, address, str(marker), where):
        pass


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


def test_the_table_is_a_plain_one(address: str, folder: Path) -> None:
    columns = {"n": pa.array(range(300)), "day": pa.array([3] * 300, pa.date32())}
    rows = Rows.make(ids=pa.array(map(str, range(300)), pa.large_string()), **columns)
    halves = replace(rows, layout=replace(rows.layout, dtype="float16"))
    for each, kind in ((rows, pa.float32()), (halves, pa.float16())):
        each.push_to(address)
        database = lancedb.connect(folder)
        assert list(database.list_tables().tables) == ["docs"]
        table = database.open_table("docs")
        assert table.schema.types == [pa.string(), pa.list_(kind, 12), pa.int64(), pa.date32()]
        found = table.search(rows.vectors[5]).limit(1).to_list()
        assert (found[0]["id"], found[0]["n"]) == ("5", 5)


@pytest.mark.parametrize("added", ["column mine", "index n_idx"])
def test_what_users_added_is_not_lost(address: str, folder: Path, added: str) -> None:
    rows = Rows.make(n=pa.array(range(300)))
    with open_writer(address, "docs") as writer:
        rows.fill(writer)
        table = lancedb.connect(folder).open_table("docs")
        if added.startswith("column"):
            table.add_columns({"mine": "n + 1"})
        else:
            table.create_index("n", config=BTree())
        with pytest.raises(DatabaseError, match=f"users added, .* would lack: {added}; drop"):
            rows.fill(writer)
        rows.change(writer, rows.take(range(6, 9)), gone=[5])
    table.checkout_latest()
    assert table.count_rows() == 299


def test_a_pipe_in_the_folder_is_not_waited_for(address: str, folder: Path) -> None:
    Rows.make().push_to(address)
    path = next(folder.glob("docs.lance/_versions/*.manifest"))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="is a pipe, a socket or a device, and is left as it is"):
        open_writer(address, "docs", make=False)


def test_what_killed_pushes_were_uploading_goes(address: str, folder: Path) -> None:
    with open_writer(address, "docs") as writer:
        Rows.make().fill(writer)
        old, new = (folder / "docs.lance" / "data" / f".tmp{name}" for name in ("old", "new"))
        for path in (old, new):
            path.write_bytes(b"x")
        os.utime(old, (0, 0))
        Rows.make().fill(writer)
    # A new one may be of another program.
    assert (old.exists(), new.exists()) == (False, True)


def test_an_open_table_stays_as_it_was(address: str, folder: Path) -> None:
    old, new = Rows.make(), Rows.make(200, seed=1, k=5)
    with open_writer(address, "docs") as writer:
        old.fill(writer)
        table = lancedb.connect(folder).open_table("docs")
        new.fill(writer)
    assert table.count_rows() == 300
    assert table.search(old.vectors[7]).limit(1).to_list()[0]["id"] == 7
    table.checkout_latest()
    assert table.search(new.vectors[7]).limit(1).to_list()[0]["id"] == 7


def test_a_copy_of_a_table_is_one_of_its_own(address: str, folder: Path) -> None:
    rows = Rows.make()
    rows.push_to(address)
    shutil.copytree(folder / "docs.lance", folder / "copied.lance")
    with open_writer(address, "copied") as copied:
        assert copied.published() is not None
        after = Rows(rows.table.slice(1), rows.layout)
        after.change(copied, gone=[0])
        after.assert_clean(copied)
        copied.remove()
    rows.assert_held_at(address)


def test_lists_at_which_the_engine_breaks_down(address: str) -> None:
    pairs = pa.array([["a", "b"], ["c", None], None], pa.list_(pa.string(), 2))
    rows = Rows.make(3, pairs=pairs)
    rows.push_to(address)
    rows.assert_held_at(address)


HUGE = PushedTable("v", "t", 12, "float32", rows=10**400).text


@pytest.mark.parametrize("metadata", [None, "[]", '{"metric": "cosine"}', HUGE])
def test_a_table_that_no_push_made(address: str, folder: Path, metadata: str | None) -> None:
    rows = Rows.make()
    field = rows.layout.schema.field(0)
    field = field if metadata is None else field.with_metadata({"whiten_index": metadata})
    schema = rows.layout.schema.set(0, field)
    for name in ("docs", "others__pending"):
        lancedb.connect(folder).create_table(name, data=rows.table.cast(schema))
    for name in ("docs", "others"):
        with pytest.raises(DatabaseError, match="that no push made"):
            rows.push_to(address, name)
    for name in ("docs", "others__pending"):
        assert lancedb.connect(folder).open_table(name).count_rows() == 300


def test_a_table_that_names_code_is_not_written(address: str, folder: Path) -> None:
    Rows.make().push_to(address)
    table = lancedb.connect(folder).open_table("docs").to_arrow()
    named = table.replace_schema_metadata({"embedding_functions": "[]"})
    lancedb.connect(folder).create_table("docs", data=named, mode="overwrite")
    with pytest.raises(DatabaseError, match="names embedding functions of LanceDB"):
        pushed_version(address, "docs")


def test_a_version_that_a_user_tagged_stays(address: str, folder: Path) -> None:
    """Whether all rows are pushed again, or some changed."""
    rows = Rows.make(30)
    with open_writer(address, "docs", options={"keep_days": "0", "index": "none"}) as writer:
        rows.fill(writer)
        table = lancedb.connect(folder).open_table("docs")
        table.tags.create("mine", table.version)
        Rows.make(40, seed=1).fill(writer)
        for number in range(12):
            after = replace(rows.pushed, version=f"{number:06d}-abc", rows=40)
            assert writer.published() is not None
            with writer.changing(after, rows.layout) as changes:
                changes.upsert(rows.batches(1)[number])
        assert writer.pending() is None
        assert not (folder / "docs__pending.lance").exists()
        table.checkout("mine")
        assert table.count_rows() == 30


def test_secrets_of_the_object_store_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x" * 9)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.setenv("OBJECT_STORE_CLIENT_MAX_RETRIES", "0")
    monkeypatch.setenv("OBJECT_STORE_CLIENT_RETRY_TIMEOUT", "1")
    with pytest.raises(DatabaseError, match="s3://bucket/prefix, table docs: it could") as error:
        pushed_version("lancedb+s3://bucket/prefix", "docs")
    assert "hush-hush" not in str(error.value)


def test_a_url_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the engine, which would cut it off at a # or ? of its own."""
    opened = list[str]()
    monkeypatch.setattr(lancedb, "connect", opened.append)
    open_writer("lancedb+s3://bucket/a%23b%3F", "docs")
    assert opened == ["s3://bucket/a%23b%3F"]


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (OSError(13, "Permission denied"), "this user may not write there"),
        (OSError(5, "Input/output error"), "look at the disk before you remove anything"),
        (KeyError("id"), "run this again"),
    ],
)
def test_errors_of_the_engine(
    address: str, monkeypatch: pytest.MonkeyPatch, error: Exception, why: str
) -> None:
    rows = Rows.make(20)
    with open_writer(address, "docs") as writer:
        rows.fill(writer)
        monkeypatch.setattr(lancedb.table.LanceTable, "add", Mock(side_effect=error))
        with pytest.raises(DatabaseError, match=f"rows could not be added .*{why}"):
            rows.fill(writer)
        rows.assert_held(writer)


@pytest.mark.parametrize("first", [True, False])
def test_killed_while_it_overwrites(address: str, tmp_path: Path, first: bool) -> None:
    old, new = Rows.make(), Rows.make(2000, seed=1)
    with open_writer(address, "docs") as writer:
        if not first:
            old.fill(writer)
        kill_at(address, "overwriting", tmp_path / "marker")
        if first:
            assert writer.published() is None
        else:
            old.assert_held(writer)
        pending = writer.pending()
        assert pending.done == 2000
        writer.resume(new.layout)
        end(writer)
        new.assert_held(writer)
        assert writer.pending() is None


@pytest.mark.parametrize("again", [False, True])
def test_killed_before_the_index_is_there(
    address: str, folder: Path, tmp_path: Path, again: bool
) -> None:
    new = Rows.make(2000, seed=1)
    kill_at(address, "ending", tmp_path / "marker")
    with open_writer(address, "docs", options={"index": "ivf_flat"}) as writer:
        new.assert_clean(writer)
        new.assert_found(writer, exact=False)
        table = lancedb.connect(folder).open_table("docs")
        assert not list(table.list_indices())
        if again:
            writer.resume(new.layout)
            end(writer)
        else:
            # The next push has nothing to do, and drops what is pending.
            writer.discard()
        assert writer.pending() is None
        table.checkout_latest()
        assert [each.index_type for each in table.list_indices()] == ["IvfFlat"]
        new.assert_held(writer)


@pytest.mark.parametrize("does", ["resume", "begin", "resume and swap"])
def test_rows_under_way_while_another_push_takes_over(
    address: str, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    """The lease was read, and the commit comes after the other one's."""
    rows, theirs = Rows.make(), replace(Rows.make(500, seed=1), version="000002-def")
    first, *rest = rows.batches(100)
    with open_writer(address, "docs") as one, open_writer(address, "docs") as two:
        one.begin(rows.pushed, rows.layout)
        one.append(first)

        def take() -> None:
            if does == "begin":
                two.begin(theirs.pushed, theirs.layout)
                two.append(theirs.batches(100)[0])
                return
            two.resume(rows.layout)
            if does != "resume":
                end(two, rest)

        before(monkeypatch, lance_writer, "as_stored", take)
        with pytest.raises(DatabaseError, match=None if "swap" in does else TAKEN):  # noqa: PT012
            one.append(rest[0])
            # If the table is gone the engine takes them; those before them are not there.
            assert does == "resume and swap"
            end(one, rest[1:])
        if does == "resume":
            end(two, rest)
        elif does == "begin":
            end(two, theirs.batches(100)[1:])
        (theirs if does == "begin" else rows).assert_held(two)


@pytest.mark.parametrize("does", ["change", "fill"])
def test_a_change_under_way_while_another_push_publishes(
    address: str, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    """The first has marked the table; what it then commits is refused, and undoes nothing."""
    old, mine, theirs = (Rows.make(300, seed=seed) for seed in range(3))
    theirs = replace(theirs, version="000003-fed")
    with open_writer(address, "docs") as one, open_writer(address, "docs") as two:
        old.fill(one)

        def publish() -> None:
            if does == "fill":
                theirs.fill(two)
                return
            found = two.published()
            assert found.changing == "000002-def"
            theirs.change(two, theirs.take(range(300)))

        def change_meanwhile() -> None:
            after = replace(mine, version="000002-def").pushed
            with one.changing(after, mine.layout) as changing:
                changing.upsert(mine.take(range(10)))
                before(monkeypatch, lance_writer, "with_ids", publish)
                changing.delete([20])

        with pytest.raises(DatabaseError, match=TAKEN):
            change_meanwhile()
        theirs.assert_held(one)
        theirs.assert_clean(one)


def test_rows_of_others_stay_where_a_change_fails(address: str, folder: Path) -> None:
    rows = Rows.make()
    with open_writer(address, "docs") as writer:
        rows.fill(writer)
        table = lancedb.connect(folder).open_table("docs")

        def change() -> None:
            with writer.changing(
                replace(rows, version="000002-def").pushed, rows.layout
            ) as changes:
                changes.delete([5])
                table.checkout_latest()
                table.add([{**table.head(1).to_pylist()[0], "id": -1}])
                raise GateError("it counts one row too many")

        with pytest.raises(GateError, match="one row too many"):
            change()
        table.checkout_latest()
        assert table.count_rows("id = -1") == 1


def test_a_pending_table_without_its_files(address: str, folder: Path) -> None:
    """A commit that was under way when the table was dropped."""
    rows = Rows.make()
    with open_writer(address, "docs") as writer:
        writer.begin(rows.pushed, rows.layout)
        writer.append(rows.batches(100)[0])
        table = lancedb.connect(folder).open_table("docs__pending")
        metadata = read_metadata(table)
        assert metadata is not None
        writer.discard()
        write_metadata(table, metadata)
        assert lancedb.connect(folder).open_table("docs__pending").count_rows() == 100
        assert writer.pending() is None
        rows.fill(writer)
        (folder / "docs__pending.lance").mkdir()
        writer.discard()
        rows.assert_held(writer)
    assert [each.name for each in folder.iterdir()] == ["docs.lance"]


@pytest.mark.parametrize("does", ["begin", "resume"])
def test_a_swap_under_way_while_another_push_takes_over(
    address: str, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    old, rows, theirs = (Rows.make(300, seed=seed) for seed in range(3))
    with open_writer(address, "docs") as one, open_writer(address, "docs") as two:
        old.fill(one)
        one.begin(rows.pushed, rows.layout)
        append(one, rows.batches())

        def take() -> None:
            if does == "begin":
                two.begin(theirs.pushed, theirs.layout)
            else:
                two.resume(rows.layout)

        before(monkeypatch, lance_writer, "read_slices", take)
        with pytest.raises(DatabaseError, match=TAKEN):
            end(one)
        old.assert_held(two)
        # What the other one holds is left to it.
        one.discard()
        end(two, theirs.batches()) if does == "begin" else end(two)
        (theirs if does == "begin" else rows).assert_held(one)


@pytest.mark.parametrize("batches", range(5))
def test_a_table_that_was_dropped_and_made_again(address: str, batches: int) -> None:
    """Whatever numbers its versions have, it is another one's."""
    mine, theirs = Rows.make(500), Rows.make(500, seed=1)
    with open_writer(address, "docs") as one, open_writer(address, "docs") as two:
        one.begin(mine.pushed, mine.layout)
        append(one, mine.batches(100)[:2])
        two.discard()
        two.begin(theirs.pushed, theirs.layout)
        append(two, theirs.batches(100)[:batches])
        with pytest.raises(DatabaseError, match=TAKEN):
            one.append(mine.batches(100)[2])
        end(two, theirs.batches(100)[batches:])
        theirs.assert_held(two)
