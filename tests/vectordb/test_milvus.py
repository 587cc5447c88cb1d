"""Milvus's own: Lite in this process, the same behind a port as a server is, and addresses."""

import errno
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from milvus_lite.index.faiss_hnsw import FaissHnswIndex
from milvus_lite.server_manager import server_manager_instance
from pymilvus import MilvusClient
from pymilvus.client.grpc_handler import GrpcHandler

from tests.helpers.bad_input import process
from tests.vectordb.pushed_rows import Rows, assert_no_secret, some_changes
from whiten_index.errors import ConfigError, DatabaseError, StorageError
from whiten_index.vectordb import milvus_writer
from whiten_index.vectordb.database_writer import DatabaseWriter
from whiten_index.vectordb.registry import open_writer

pytestmark = pytest.mark.service
SECRET = "hush-hush"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "docs.db"


@pytest.fixture
def writer(file: Path) -> Iterator[DatabaseWriter]:
    with open_writer(f"milvus://{file}", "docs") as opened:
        yield opened


@pytest.fixture
def client(file: Path) -> Iterator[MilvusClient]:
    """A client of the user; without one in the process, the file is closed at the end."""
    made = MilvusClient(server_manager_instance.start_and_get_uri(str(file)), dedicated=True)
    yield made
    made.close()
    server_manager_instance.release_server(str(file))


def test_users_query_by_the_alias_and_filter_by_kept_columns(
    file: Path, client: MilvusClient
) -> None:
    rows = Rows.make(20, n=pa.array(range(20)), lang=pa.array(["en", "de"] * 10))
    rows.push_to(f"milvus://{file}")
    found = client.query("docs", filter='n > 5 and lang == "en"', output_fields=["n", "lang"])
    assert sorted(row["n"] for row in found) == [6, 8, 10, 12, 14, 16, 18]
    assert client.get("docs", ids=[3])[0]["n"] == 3
    hits = client.search("docs", data=[rows.vectors[4]], limit=1, filter="n < 5")
    assert hits[0][0]["id"] == 4
    # The client goes on when the writer is closed.
    assert client.query("docs", filter="", output_fields=["count(*)"])[0]["count(*)"] == 20


@pytest.mark.parametrize("name", ["pk", "$meta"])
def test_a_column_of_a_name_that_milvus_keeps_for_itself(writer: DatabaseWriter, name: str) -> None:
    columns = {each: pa.array([1, None, -1]) for each in ("pk_", "entity", "distance", "a.b")}
    rows = Rows.make(3, **columns)
    rows.fill(writer)
    rows.assert_held(writer)
    reserved = Rows.make(3, **{name: pa.array(range(3))})
    with pytest.raises(ConfigError, match=r"Milvus Lite .* cannot give a column the name"):
        writer.begin(reserved.pushed, reserved.layout)


def test_long_ids(writer: DatabaseWriter) -> None:
    fits = "é" * 32_767 + "x"
    rows = Rows.make(2, ids=pa.array([fits, "a"], pa.large_string()))
    rows.fill(writer)
    rows.assert_held(writer)


def test_large_rows_are_sent_in_parts(
    writer: DatabaseWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(milvus_writer, "_SENT_BYTES", 20_000)
    rows = Rows.make(64, text=pa.array(["x" * (30_000 if at == 9 else 500) for at in range(64)]))
    sizes = [part.nbytes for part in milvus_writer.parts(rows.batches()[0])]
    assert len(sizes) > 2
    assert sum(size > 20_000 for size in sizes) == 1
    rows.fill(writer)
    rows.assert_held(writer)


def test_a_collection_or_alias_that_no_push_made(file: Path, client: MilvusClient) -> None:
    rows = Rows.make()
    client.create_collection("docs", dimension=4)
    client.create_alias("docs", "other")
    rows.push_to(f"milvus://{file}", "mine")
    # The collection of another push is not to be dropped either.
    client.create_alias(client.describe_alias("mine")["collection_name"], "third")
    for name in ("docs", "other", "third"):
        with open_writer(f"milvus://{file}", name) as writer:
            for call in (writer.published, lambda: rows.fill(writer)):
                with pytest.raises(DatabaseError, match="no push made"):
                    call()
    assert len(client.list_collections()) == 2


def test_a_collection_that_another_alias_names_stays(
    writer: DatabaseWriter, file: Path, client: MilvusClient
) -> None:
    rows = Rows.make()
    rows.fill(writer)
    first = client.describe_alias("docs")["collection_name"]
    client.create_alias(first, "prod")
    rows.fill(writer)
    assert client.describe_alias("prod")["collection_name"] == first
    assert client.describe_alias("docs")["collection_name"] != first
    rows.assert_held(writer)
    client.drop_alias("prod")
    rows.fill(writer)
    assert first not in client.list_collections()


def test_a_user_released_what_is_published(
    writer: DatabaseWriter, file: Path, client: MilvusClient
) -> None:
    rows = Rows.make()
    rows.fill(writer)
    client.release_collection("docs")
    with open_writer(f"milvus://{file}", "docs") as another:
        rows.assert_held(another)
        rows.assert_found(another)


@pytest.mark.parametrize("database", ["default", "mine"])
def test_what_a_killed_process_left_of_a_collection(
    file: Path, client: MilvusClient, monkeypatch: pytest.MonkeyPatch, database: str
) -> None:
    stat = os.stat

    def fail(path: Any, **how: Any) -> os.stat_result:
        if str(path).endswith("schema.json"):
            raise OSError(errno.EIO, "Input/output error")
        return stat(path, **how)

    client.create_database("mine")
    rows, options = Rows.make(), {"db": database}
    with open_writer(f"milvus://{file}", "docs", options=options) as writer:
        rows.fill(writer)
        (schema,) = file.rglob("schema.json")
        collections = schema.parents[1]
        for name in ("docs__0123abcd", "docs__other"):
            (collections / name / "wal").mkdir(parents=True)
        writer.discard()
        assert {each.name for each in collections.iterdir()} == {schema.parent.name, "docs__other"}
        # Milvus Lite lists no collection whose file cannot be read.
        with monkeypatch.context() as failing:
            failing.setattr(os, "stat", fail)
            with pytest.raises(StorageError):
                writer.discard()
        rows.assert_held(writer)


def test_what_a_killed_process_left_of_an_index(file: Path) -> None:
    rows = Rows.make()
    rows.push_to(f"milvus://{file}")
    (index,) = file.rglob("*.idx")
    index.write_bytes(index.read_bytes()[:99])
    with open_writer(f"milvus://{file}", "docs") as writer:
        rows.assert_held(writer)
        rows.assert_found(writer)


def change(writer: DatabaseWriter, now: Rows, put: pa.RecordBatch) -> None:
    with writer.changing(now.pushed, now.layout) as changes:
        changes.upsert(put)
        changes.delete([7])
        assert writer.count() == 299


def test_changes_whose_index_cannot_be_written_are_not_told_as_made(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: FaissHnswIndex, path: str) -> None:
        Path(path).write_bytes(b"a part")
        raise OSError(28, "No space left on device")

    old, now, put = some_changes()
    old.push_to(f"milvus://{file}")
    with monkeypatch.context() as full, open_writer(f"milvus://{file}", "docs") as writer:
        assert writer.count() == 300
        full.setattr(FaissHnswIndex, "save", fail)
        with pytest.raises(DatabaseError, match="make room"):
            change(writer, now, put)
    with open_writer(f"milvus://{file}", "docs") as writer:
        now.assert_found(writer)


def test_the_log_of_a_process_that_was_killed_after_its_rows_were_flushed(file: Path) -> None:
    old, now, put = some_changes()
    with open_writer(f"milvus://{file}", "docs") as writer:
        old.fill(writer)
        change(writer, now, put)
        logs = {each: each.read_bytes() for each in file.rglob("wal/*")}
    for path, log in logs.items():
        path.write_bytes(log)
    now.assert_held_at(f"milvus://{file}")


def test_a_file_in_the_place_of_the_folder(file: Path) -> None:
    file.write_text("mine")
    with pytest.raises(ConfigError, match="makes a folder of that name"):
        open_writer(f"milvus://{file}", "docs")
    assert file.read_text() == "mine"


def test_milvus_lite_is_missing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "milvus_lite.server_manager", None)
    with pytest.raises(ConfigError, match=r"pip install 'milvus-lite>=3\.2\.2'"):
        open_writer(f"milvus://{file}", "docs")


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(milvus_writer, "_CONNECT_SECONDS", 0.5)
    monkeypatch.setenv("MILVUS_TOKEN", f"root:{SECRET}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(DatabaseError, match=r"could not be reached .* check that the") as caught:
        open_writer(f"milvus://127.0.0.1:{port}", "docs")
    assert_no_secret("".join(traceback.format_exception(caught.value)), SECRET)


def test_a_server_that_falls_silent(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(milvus_writer, "_ANSWER_SECONDS", 1.0)
    code = (
        "import signal; from milvus_lite.server_manager import server_manager_instance as of\n"
        f"print(of.start_and_get_uri({str(file)!r}), flush=True); signal.pause()"
    )
    with process(code=code) as child:
        assert child.stdout is not None
        address = child.stdout.readline().strip().replace("http:", "milvus:")
        with open_writer(address, "docs", options={"index_timeout": "1"}) as writer:
            with monkeypatch.context() as never_loaded:
                never_loaded.setattr(GrpcHandler, "get_loading_progress", lambda *_, **__: 0)
                with pytest.raises(DatabaseError, match="the index could not be built"):
                    Rows.make(5).fill(writer)
            child.send_signal(signal.SIGSTOP)
            started = time.monotonic()
            with pytest.raises(DatabaseError, match="check that the server runs and answers"):
                writer.published()
            assert time.monotonic() - started < 20
        child.kill()
