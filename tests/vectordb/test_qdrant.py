"""Qdrant's own: points as other clients see them, addresses, options, and answers of servers."""

import socket
import sqlite3
import threading
import time
import traceback
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest
from qdrant_client import QdrantClient, models

from tests.vectordb.pushed_rows import Rows, assert_no_secret
from whiten_index.corpus.batches import PASSAGE
from whiten_index.errors import ConfigError, DatabaseError
from whiten_index.vectordb.qdrant_writer import row_uuid
from whiten_index.vectordb.registry import open_writer

pytestmark = pytest.mark.service

SECRET = "s3cr3t-key"
PARAMS = models.VectorParams(size=4, distance=models.Distance.COSINE)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"qdrant://{tmp_path}/q"


@contextmanager
def a_client(address: str) -> Iterator[QdrantClient]:
    made = QdrantClient(path=address.removeprefix("qdrant://"))
    yield made
    made.close()


def test_ids_are_uuids_that_never_change() -> None:
    namespace = uuid.UUID("9d621fcd-1abb-43aa-ac44-d636e07596b2")
    assert row_uuid("d7") == str(uuid.uuid5(namespace, "s:d7"))
    assert row_uuid("d7") == "77990fa7-0c05-564c-8108-3c8a8a7d6faa"
    names = ["7", "", ":7", "1:7", "s:7"]
    made = [row_uuid(7), *map(row_uuid, names), row_uuid("7", 0), row_uuid(7, 0), row_uuid("7", 1)]
    assert len(set(made)) == len(made)


@pytest.mark.parametrize("kind", [pa.int64(), pa.large_string()])
def test_points_as_other_clients_see_them(address: str, kind: pa.DataType) -> None:
    ids = pa.array([f"{at // 2}" for at in range(20)]).cast(kind)
    numbers = pa.array([at % 2 for at in range(20)], pa.int32())
    rows = Rows.make(20, ids=ids, n=pa.array(range(20)), **{PASSAGE: numbers})
    plain = Rows.make(20, ids=pa.array([f"{at}" for at in range(20)]).cast(kind))
    for name, each in (("passages", rows), ("docs", plain)):
        each.push_to(address, name)
    with a_client(address) as client:
        name = rows.ids[7]
        (point,) = client.retrieve("passages", [row_uuid(name, 1)], with_payload=True)
        assert point.payload == {"id": name, "n": 7, PASSAGE: 1}
        name = plain.ids[3]
        (point,) = client.retrieve("docs", [row_uuid(name)], with_payload=True)
        assert point.payload == {"id": name}
        other = int(name) if isinstance(name, str) else str(name)
        assert client.retrieve("docs", [row_uuid(other)]) == []
        (found,) = client.query_points("docs", query=plain.vectors[3].tolist(), limit=1).points
        assert found.payload == {"id": name}


def test_what_no_push_made_stays(address: str) -> None:
    with a_client(address) as client:
        client.create_collection("docs", vectors_config=PARAMS)
        client.create_collection("other__0123abcd", vectors_config=PARAMS, metadata={"a": 1})
        alias = models.CreateAlias(collection_name="docs", alias_name="shown")
        client.update_collection_aliases([models.CreateAliasOperation(create_alias=alias)])
    rows = Rows.make(5)
    for name, why in (("docs", "a collection that no push made"), ("shown", "alias of 'docs'")):
        with open_writer(address, name) as writer:
            for act in (writer.published, writer.pending, lambda: rows.fill(writer)):
                with pytest.raises(DatabaseError, match=why):
                    act()
    with open_writer(address, "other") as writer:
        # The form of a name alone makes no staged table.
        assert writer.pending() is None
        rows.fill(writer)
        rows.fill(writer)
    with a_client(address) as client:
        left = {each.name for each in client.get_collections().collections}
    assert {"docs", "other__0123abcd"} < left
    assert len(left) == 3


@pytest.mark.parametrize("renamed", [False, True])
def test_a_collection_that_another_alias_names_stays(address: str, renamed: bool) -> None:
    rows = Rows.make()
    rows.push_to(address)
    with a_client(address) as client:
        (alias,) = client.get_aliases().aliases
        first = alias.collection_name
        made = models.CreateAlias(collection_name=first, alias_name="prod")
        gone = models.DeleteAlias(alias_name="docs")
        steps = [models.CreateAliasOperation(create_alias=made)]
        steps += [models.DeleteAliasOperation(delete_alias=gone)] * renamed
        client.update_collection_aliases(steps)
    with open_writer(address, "docs") as writer:
        assert writer.pending() is None
        rows.fill(writer)
        rows.assert_held(writer)
    with a_client(address) as client:
        assert client.count("prod").count == len(rows.ids)
        gone = models.DeleteAlias(alias_name="prod")
        client.update_collection_aliases([models.DeleteAliasOperation(delete_alias=gone)])
    rows.push_to(address)
    with a_client(address) as client:
        assert first not in {each.name for each in client.get_collections().collections}


@pytest.mark.parametrize("name", ["x" * 245, "a b'; DROP TABLE docs --", "é%2F{}"])
def test_names_that_are_odd(address: str, name: str) -> None:
    for _ in range(2):
        Rows.make(5).push_to(address, name)
        Rows.make(5).assert_held_at(address, name)


def test_a_folder_takes_no_options_and_one_connection(address: str) -> None:
    with pytest.raises(ConfigError, match=r"local mode.*leave out --option m"):
        open_writer(address, "docs", options={"m": "16"})
    with (
        open_writer(address, "docs"),
        pytest.raises(DatabaseError, match="which takes one at a time; close it"),
    ):
        open_writer(address, "docs")
    with open_writer(address, "docs") as writer:
        Rows.make(5).fill(writer)
        Rows.make(5).assert_clean(writer)


@pytest.mark.parametrize("part", ["", '{"collections": '])
def test_a_folder_that_a_killed_process_or_a_full_disk_left(address: str, part: str) -> None:
    folder = Path(address.removeprefix("qdrant://"))
    folder.mkdir()
    (folder / "meta.json").write_text(part)
    with open_writer(address, "docs") as writer:
        Rows.make(5).fill(writer)
        for name in ("docs__0123abcd", "docs__other"):
            (folder / "collection" / name).mkdir()
        writer.discard()
        Rows.make(5).assert_held(writer)
    left = sorted(each.name for each in (folder / "collection").iterdir())
    assert (len(left), left.pop()) == (2, "docs__other")


def test_a_file_of_others_in_the_folder_is_left_as_it_is(address: str) -> None:
    folder = Path(address.removeprefix("qdrant://"))
    folder.mkdir()
    (folder / "meta.json").write_text('{"title": "mine"}')
    with pytest.raises(ConfigError, match=r"meta\.json that Qdrant did not begin"):
        open_writer(address, "docs")
    assert (folder / "meta.json").read_text() == '{"title": "mine"}'


def test_a_folder_without_the_list_of_its_tables_is_left_as_it_is(address: str) -> None:
    folder = Path(address.removeprefix("qdrant://"))
    Rows.make(5).push_to(address)
    (folder / "meta.json").rename(folder.parent / "away.json")
    with pytest.raises(ConfigError, match=r"no meta\.json, which lists them"):
        open_writer(address, "docs")
    (folder.parent / "away.json").rename(folder / "meta.json")
    with open_writer(address, "docs") as writer:
        Rows.make(5).assert_held(writer)


def test_a_pickle_in_a_folder_runs_no_code(address: str, tmp_path: Path) -> None:
    Rows.make(5).push_to(address)
    (file,) = Path(address.removeprefix("qdrant://")).glob("collection/*/storage.sqlite")
    mark = tmp_path / "ran"
    model = "qdrant_client.http.models.models", "PointStruct.__class__"
    for code in (f"cos\nsystem\n(S'touch {mark}'\ntR.", "c{}\n{}\n.".format(*model)):
        with closing(sqlite3.connect(file)) as points, points:
            points.execute("UPDATE points SET point = ?", (code.encode(),))
        with pytest.raises(DatabaseError, match="which no client of Qdrant writes"):
            open_writer(address, "docs", make=False)
    assert not mark.exists()


def test_a_folder_that_cannot_be_closed(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: QdrantClient) -> None:
        monkeypatch.undo()
        raise OSError(5, "Input/output error")

    with (
        pytest.raises(DatabaseError, match=r"could not be closed .*Input/output error"),
        open_writer(address, "docs"),
    ):
        monkeypatch.setattr(QdrantClient, "close", fail)


def test_a_folder_that_cannot_be_written(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = Mock(side_effect=PermissionError(1, "Operation not permitted", address))
    monkeypatch.setattr("whiten_index.vectordb.qdrant_writer.QdrantClient", refuse)
    with pytest.raises(DatabaseError, match="this user may not write there: change"):
        open_writer(address, "docs")


@pytest.mark.parametrize("grpc", ["true", "false"])
def test_a_server_that_does_not_answer(grpc: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = str(silent.getsockname()[1])
        options = {"timeout": "1", "prefer_grpc": grpc, "grpc_port": port}
        began = time.monotonic()
        with pytest.raises(DatabaseError, match="check that the server runs"):
            open_writer(f"qdrant://127.0.0.1:{port}", "docs", options=options)
        assert time.monotonic() - began < 20


@contextmanager
def answering(status: int, body: str) -> Iterator[tuple[int, list[Any]]]:
    """A server that answers everything alike; its port, and the keys that it was given."""
    keys = list[Any]()

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys.append(self.headers["api-key"])
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.replace("KEY", SECRET).encode())

        do_PUT = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server.server_port, keys
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (401, '{"status": {"error": "no: KEY is wrong"}}', "401: no: … is wrong.*QDRANT_API_KEY"),
        (503, "", "check that the server runs"),
        (500, '{"status": {"error": "disk"}}', r"\(500: disk\); run this again"),
        (200, '{"title": "q", "version": "1.15.5"}', "a push needs 1.16 or later"),
    ],
)
def test_answers_of_a_server(
    monkeypatch: pytest.MonkeyPatch, status: int, body: str, why: str
) -> None:
    monkeypatch.setenv("QDRANT_API_KEY", SECRET)
    with (
        answering(status, body) as (port, keys),
        pytest.warns(UserWarning, match="insecure connection"),
        pytest.raises(DatabaseError, match=why) as raised,
    ):
        open_writer(f"qdrant://127.0.0.1:{port}", "docs")
    assert keys == [SECRET]
    assert_no_secret("".join(traceback.format_exception(raised.value)), SECRET)
