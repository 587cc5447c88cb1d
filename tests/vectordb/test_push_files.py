"""The rows of an index as a file: Parquet, Arrow and .npy."""

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

from tests.helpers import builds
from tests.helpers.bad_input import fails, succeed
from tests.vectordb.pushed_rows import Rows
from whiten_index import PushConfig, QueryTransform, push_index, pushed_version
from whiten_index.artifacts.atomic import locked
from whiten_index.errors import ConfigError, DatabaseError, StorageError
from whiten_index.vectordb.push import PushReport
from whiten_index.vectordb.push_source import PushSource
from whiten_index.vectordb.pushed_table import Layout, PushedTable
from whiten_index.vectordb.vector_files import write_rows, written_files, written_version

ROWS, K = 200, 6


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("files")
    texts = [f"t{i}" for i in range(ROWS)]
    corpus = builds.write_rows(root / "c.parquet", builds.random_rows(rows=ROWS), text=texts)
    builds.build(root / "index", corpus, keep=("text",))
    return root / "index"


def push(index: Path, to: Path, **options: Any) -> PushReport:
    return push_index(PushConfig(index=str(index), to=str(to), batch_rows=64, **options))


def status(index: Path, to: Path) -> dict[str, Any]:
    return json.loads(succeed("push", index, "--to", to, "--status", "--json"))


def described(rows: int, k: int) -> PushedTable:
    return PushedTable(version="v", transform="t", k=k, dtype="float32", rows=rows)


def test_which_vectors_documents_belong_to(index: Path, tmp_path: Path) -> None:
    """Two files are not put in place in one step; a cut between the two can be told."""
    digests = set()
    for k in (K, 4):
        push(index, tmp_path / "v.npy", k=k)
        digest = pq.read_metadata(tmp_path / "v.documents.parquet").metadata[b"vectors_blake2b"]
        assert digest.decode() == hashlib.blake2b(np.load(tmp_path / "v.npy").data).hexdigest()
        digests.add(digest)
    assert len(digests) == 2


@pytest.mark.parametrize("name", ["v.parquet", "v.arrow", "v.npy"])
@pytest.mark.parametrize("k", [K, 4])
def test_a_file_tells_which_query_half_fits(index: Path, tmp_path: Path, name: str, k: int) -> None:
    report = push(index, tmp_path / name, k=k)
    path = written_files(tmp_path / name)[-1]
    if path.suffix == ".arrow":
        schema = pa.ipc.open_file(path.read_bytes()).schema
    else:
        schema = pq.read_schema(path)
    facts = json.loads(schema.metadata[b"whiten_index"])
    del facts["digest"]  # of the other facts
    assert facts == {
        "version": report.version, "rows": ROWS, "k": k, "dtype": "float32",
        "columns": ["id", "vector", "text"],
        "query_digest": QueryTransform.of(index, k=k).query_digest,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["v.parquet", "v.arrow", "v.npy"])
def test_what_a_file_held_is_told_and_not_lost(index: Path, tmp_path: Path, name: str) -> None:
    assert pushed_version(str(tmp_path / name)) is None
    with pytest.raises(ConfigError, match="nothing is pushed under that name"):
        QueryTransform.of(index).require(pushed_version(str(tmp_path / name)))
    assert status(index, tmp_path / name)["version"] is None
    first = push(index, tmp_path / name)
    QueryTransform.of(index).require(pushed_version(str(tmp_path / name)))
    assert status(index, tmp_path / name)["fits"]
    pushed = pushed_version(str(tmp_path / name))
    assert (pushed.version, pushed.rows, pushed.k) == (first.version, ROWS, K)
    assert pushed.query_digest == first.query_digest
    assert push(index, tmp_path / name).notes == ()
    report = push(index, tmp_path / name, k=4)
    assert (report.was, report.rows_before) == (first.version, ROWS)
    with pytest.raises(ConfigError, match=f"query digest {report.query_digest}, and this query"):
        QueryTransform.of(index).require(pushed_version(str(tmp_path / name)))
    found = status(index, tmp_path / name)
    assert (found["version"], found["k"], found["fits"]) == (first.version, 4, False)
    shown = succeed("push", index, "--to", tmp_path / name, "--status")
    assert ("fits                no" in shown, "done" in shown) == (True, False)
    assert f"reduced again: the query digest was {first.query_digest};" in report.notes[0]
    held = written_files(tmp_path / name)[-1].read_bytes()
    with patch.object(PushSource, "__len__", lambda _: ROWS // 2):
        said = f"has {ROWS // 2}, and --max-shrink is 0.2"
        fails(9, said, "push", index, "--to", tmp_path / name)
        assert written_files(tmp_path / name)[-1].read_bytes() == held
        assert push(index, tmp_path / name, max_shrink=1.0).rows == ROWS // 2


def test_a_link_to_a_file_of_another_ending(index: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").symlink_to(tmp_path / "rows.arrow")
    with pytest.raises(ConfigError, match=r"rows.arrow, which does not end in .parquet"):
        push(index, tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match=r"rows.arrow, which does not end in .parquet"):
        pushed_version(str(tmp_path / "rows.parquet"))


@pytest.mark.parametrize("name", ["v.parquet", "v.npy"])
def test_a_link_stays_one(index: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / name).symlink_to(tmp_path / "there" / name)
    for k in (K, 4):
        push(index, tmp_path / name, k=k)
        assert (tmp_path / name).is_symlink()
        names = {each.name for each in written_files(Path(name))}
        assert {each.name for each in (tmp_path / "there").iterdir()} == names
        assert pushed_version(str(tmp_path / name)).k == k


def test_documents_without_their_vectors_count_as_nothing(index: Path, tmp_path: Path) -> None:
    path = tmp_path / "v.npy"
    push(index, path)
    data = path.read_bytes()
    for other in (b"", data[:-8] + b"\0\1\2\3\4\5\6\7"):
        path.write_bytes(other)
        assert pushed_version(str(path)) is None
    path.unlink()
    assert not status(index, path)["fits"]
    push(index, path)
    assert path.read_bytes() == data


def test_a_file_that_does_not_say_what_it_holds(index: Path, tmp_path: Path) -> None:
    path = tmp_path / "v.parquet"
    for text in ("push", "{}", '{"rows": []}', "[]", "5", "null"):
        pq.write_table(pa.table({"id": [1]}).replace_schema_metadata({"whiten_index": text}), path)
        with pytest.raises(ConfigError, match="does not say what it holds"):
            pushed_version(str(path))
        with pytest.raises(ConfigError, match="does not say what it holds"):
            push(index, path)
    pq.write_table(pa.table({"id": [1]}), path)
    with pytest.raises(ConfigError, match="holds something else than rows that a push wrote"):
        pushed_version(str(path))


@pytest.mark.parametrize("name", ["v.parquet", "v.arrow", "v.documents.parquet"])
@pytest.mark.parametrize("how", ["rows", "columns"])
def test_rows_and_columns_that_users_put_into_a_file_are_not_lost(
    index: Path, tmp_path: Path, name: str, how: str
) -> None:
    """Arrow keeps the metadata of a file that is read and written again."""
    to, mine = tmp_path / name.replace("documents.parquet", "npy"), tmp_path / name
    push(index, to)
    table = pads.dataset(mine, format=mine.suffix[1:]).to_table()
    changed = pa.concat_tables([table, table.slice(0, 5)])
    if how == "columns":
        changed = table.append_column("label", table["id"])
    if name == "v.arrow":
        feather.write_feather(changed, mine)
    else:
        pq.write_table(changed, mine)
    held = mine.read_bytes()
    fails(2, "name another file", "push", str(index), "--to", str(to))
    assert mine.read_bytes() == held


@pytest.mark.parametrize("name", ["v.parquet", "v.arrow", "v.npy"])
def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    layout = Layout(pa.schema([("id", pa.int64()), ("vector", pa.list_(pa.float32(), 1))]))
    for each in written_files(path):
        each.write_text("before")

    def batches() -> Iterator[pa.RecordBatch]:
        raise OSError(28, "No space left on device")
        yield

    with pytest.raises(StorageError, match="free space"):
        write_rows(path, layout, described(1, 1), batches(), before=None)
    assert {each.name for each in tmp_path.iterdir()} == {e.name for e in written_files(path)}
    assert {each.read_text() for each in written_files(path)} == {"before"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"table": "docs"}, "--table"),
        ({"options": {"m": "1"}}, "--option"),
        ({"full": True}, "--full"),
        ({"check": 0}, "--check"),
        ({"metric": "ip"}, "--metric"),
        ({"full": True, "metric": "ip"}, "--full and no --metric"),
    ],
)
def test_options_that_a_file_has_no_use_for(
    index: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"is a file, which takes no {message}$"):
        push(index, tmp_path / "v.parquet", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name", ["v.parquet", "v.arrow", "v.npy", "V.PARQUET", "v.documents.parquet"]
)
def test_a_file_that_no_push_wrote_is_not_lost(index: Path, tmp_path: Path, name: str) -> None:
    path, to = tmp_path / name, tmp_path / name.replace("documents.parquet", "npy")
    path.write_bytes((index.parent / "c.parquet").read_bytes())
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=f"{name} holds something else than rows that a push"):
        push_index(PushConfig(index=str(index), to=str(to)))
    assert [each.name for each in tmp_path.iterdir()] == [name]
    assert path.read_bytes() == before
    path.unlink()
    for _ in range(2):
        # What a push wrote, the next one replaces.
        assert push_index(PushConfig(index=str(index), to=str(to))).rows == ROWS


@pytest.mark.parametrize("name", ["v.parquet", "v.arrow", "v.npy", "v.documents.parquet"])
@pytest.mark.parametrize("bytes_left", [20, 3000])
def test_a_file_of_a_push_that_was_cut_short_is_damaged(
    index: Path, tmp_path: Path, name: str, bytes_left: int
) -> None:
    command = ("push", str(index), "--to", str(tmp_path / name.replace("documents.parquet", "npy")))
    succeed(*command)
    os.truncate(tmp_path / name, bytes_left)
    fails(5, f"{name} is damaged", *command)
    for each in tmp_path.iterdir():
        each.unlink()
    succeed(*command)


def test_rows_of_a_file_that_cannot_be_counted_are_damaged(index: Path, tmp_path: Path) -> None:
    path = tmp_path / "v.arrow"
    succeed("push", index, "--to", path)
    data = bytearray(path.read_bytes())
    # After the schema comes the length of the next message.
    place = 20 + int.from_bytes(data[12:16], "little")
    data[place : place + 4] = (-5).to_bytes(4, "little", signed=True)
    path.write_bytes(data)
    fails(5, "v.arrow is damaged", "push", index, "--to", path)
    assert path.read_bytes() == data


@pytest.mark.parametrize("name", ["v.parquet", "v.arrow", "v.npy", "v.documents.parquet"])
def test_a_file_that_came_while_rows_were_written_is_not_lost(tmp_path: Path, name: str) -> None:
    rows, to = Rows.make(20), tmp_path / name.replace("documents.parquet", "npy")

    def batches() -> Iterator[pa.RecordBatch]:
        yield from rows.batches()
        (tmp_path / name).write_text("mine")

    with pytest.raises(ConfigError, match=f"{name} holds something else than rows that a push"):
        write_rows(to, rows.layout, rows.pushed, batches(), before=None)
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [(name, "mine")]


@pytest.mark.parametrize("name", ["v.parquet", "v.npy"])
@pytest.mark.parametrize("first", [True, False])
def test_two_pushes_to_a_file(tmp_path: Path, name: str, first: bool) -> None:
    """What the other wrote was not looked at when this one began."""
    path, old, mine, theirs = tmp_path / name, *(Rows.make(20, seed=seed) for seed in range(3))
    before = None
    if not first:
        write_rows(path, old.layout, old.pushed, old.batches(), before=None)
        before = written_version(path)
    other = replace(theirs.pushed, version="000007-other")

    def batches() -> Iterator[pa.RecordBatch]:
        write_rows(path, theirs.layout, other, theirs.batches(), before=before)
        yield from mine.batches()

    with pytest.raises(DatabaseError, match=f"another push to .*{name} took this one over"):
        write_rows(path, mine.layout, mine.pushed, batches(), before=before)
    assert written_version(path).version == "000007-other"
    assert {each.name for each in tmp_path.iterdir()} == {e.name for e in written_files(path)}


def test_two_pushes_that_end_at_once_leave_the_rows_of_one(tmp_path: Path) -> None:
    path, barrier = tmp_path / "v.npy", threading.Barrier(2)
    every = [Rows.make(20, seed=seed, ids=pa.array(range(seed, seed + 20))) for seed in range(2)]

    def push(rows: Rows) -> int:
        def batches() -> Iterator[pa.RecordBatch]:
            yield from rows.batches()
            barrier.wait(60)

        try:
            write_rows(path, rows.layout, rows.pushed, batches(), before=None)
        except DatabaseError:
            return 0
        return 1

    for _ in range(30):
        with ThreadPoolExecutor(2) as pool:
            assert sum(pool.map(push, every)) == 1
        documents = path.with_suffix(".documents.parquet")
        (rows,) = [one for one in every if one.ids == pq.read_table(documents)["id"].to_pylist()]
        assert (np.load(path) == rows.vectors).all()
        path.unlink()
        documents.unlink()


def test_a_folder_that_another_program_locks_takes_pushes(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under ``flock DIR COMMAND``, by which jobs of cron run one at a time."""
    monkeypatch.setattr("whiten_index.vectordb.vector_files._PAUSE", 0)
    with locked(tmp_path):
        push_index(PushConfig(index=str(index), to=str(tmp_path / "v.npy")))
    assert len(np.load(tmp_path / "v.npy"))
