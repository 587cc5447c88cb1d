"""Milvus: Lite on a file, the same behind a port as a server is, and what only a server has."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest
from milvus_lite.adapter.grpc.server import start_server_in_thread
from milvus_lite.server_manager import server_manager_instance
from pymilvus import DataType, MilvusClient
from pymilvus.client.prepare import Prepare

from tests.vectordb.writer_contract import (
    EngineContract,
    Rows,
    assert_asking_makes_nothing,
    assert_finds,
    assert_holds,
    assert_no_secret,
    fill,
)
from whiten_index.corpus.batches import PASSAGE
from whiten_index.errors import ConfigError, DatabaseError
from whiten_index.vectordb.database_writer import DatabaseWriter, Neighbours, VectorDtype
from whiten_index.vectordb.milvus import building, connection, searching
from whiten_index.vectordb.milvus import rows as milvus_rows
from whiten_index.vectordb.milvus.address import Place
from whiten_index.vectordb.milvus.milvus_writer import MilvusWriter
from whiten_index.vectordb.milvus.options import IndexOptions
from whiten_index.vectordb.registry import open_writer

pytestmark = pytest.mark.service
HERE = Path(__file__).parent
SECRET = "hush-hush"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "docs.db"


@pytest.fixture
def lite(file: Path) -> Iterator[DatabaseWriter]:
    with open_writer(f"milvus://{file}", "docs") as writer:
        yield writer


@pytest.fixture
def client(file: Path) -> Iterator[MilvusClient]:
    """A client of the user's own; without one in the process, the file is closed at the end."""
    made = MilvusClient(server_manager_instance.start_and_get_uri(str(file)), dedicated=True)
    yield made
    made.close()
    server_manager_instance.release_server(str(file))


class TestMilvusLite(EngineContract):
    takes_any_name: ClassVar[bool] = False
    halves: ClassVar[bool] = False
    transactions: ClassVar[bool] = False
    big: ClassVar[int] = 5_000

    @pytest.fixture
    def address(self, tmp_path: Path) -> str:
        return f"milvus://{tmp_path}/docs.db"


class TestMilvusBehindAPort(TestMilvusLite):
    """As a server is reached: it goes on when the pushing process is killed."""

    @pytest.fixture
    def address(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
        server, database, port = start_server_in_thread(str(tmp_path / "server.db"))
        monkeypatch.setenv("MILVUS_TOKEN", f"somebody:{SECRET}")
        yield f"milvus://127.0.0.1:{port}"
        server.stop(grace=0).wait()
        database.close()


# What users do with it.


def test_users_query_by_the_alias_and_filter_by_kept_columns(
    file: Path, client: MilvusClient
) -> None:
    rows = Rows.make(20, n=pa.array(range(20)), lang=pa.array(["en", "de"] * 10))
    with open_writer(f"milvus://{file}", "docs") as writer:
        fill(writer, rows)
    found = client.query("docs", filter='n > 5 and lang == "en"', output_fields=["n", "lang"])
    assert sorted(row["n"] for row in found) == [6, 8, 10, 12, 14, 16, 18]
    assert client.get("docs", ids=[3])[0]["n"] == 3
    hits = client.search("docs", data=[rows.vectors[4]], limit=1, filter="n < 5")
    assert hits[0][0]["id"] == 4


@pytest.mark.parametrize("ids", [pa.array(["a", "a", "b"]), pa.array([-7, -7, 2**62])])
def test_columns_of_names_that_milvus_keeps_for_itself(lite: DatabaseWriter, ids: pa.Array) -> None:
    names = ["$meta", "_seq", "_partition", "pk", "pk_", "entity", "distance", "count(*)", "a.b"]
    columns = {name: pa.array([at, None, -at]) for at, name in enumerate(names)}
    numbers = pa.array([0, 1, 0], pa.int32())
    rows = Rows.make(3, ids=ids, **columns, **{PASSAGE: numbers})
    fill(lite, rows)
    assert_holds(lite, rows)
    assert lite.search(rows.vectors[:1], 1).ids == [[ids[0].as_py()]]
    plain = Rows.make(3, ids=pa.array(range(-1, 2)), **columns)
    fill(lite, plain)
    assert_holds(lite, plain)


def test_thousands_of_ids_that_need_quotes(lite: DatabaseWriter) -> None:
    odd = [f"{at} \" ' \\ \\n \n\r\t ü; --" for at in range(3000)]
    rows = Rows.make(3000, ids=pa.array(odd, pa.large_string()))
    fill(lite, rows, batch=1000)
    with lite.changing(rows.pushed, rows.layout) as changing:
        changing.delete(odd[:2500])
    assert lite.count() == 500
    assert sorted(lite.fetch(odd, rows.layout)["id"].to_pylist()) == sorted(odd[2500:])


def test_long_ids(lite: DatabaseWriter) -> None:
    fits = "é" * 32_767 + "x"
    rows = Rows.make(2, ids=pa.array([fits, "a"], pa.large_string()))
    fill(lite, rows)
    assert_holds(lite, rows)
    long = Rows.make(2, ids=pa.array([fits + "x", "a"], pa.large_string()))
    lite.begin(long.pushed, long.layout)
    with pytest.raises(DatabaseError, match="65,536 bytes"):
        lite.append(long.batches()[0])
    assert lite.count(pending=True) == 0


# Indexes and searches.


@pytest.mark.parametrize(
    "options",
    [
        {"index": "flat"},
        {"index": "ivf_flat", "nlist": "8", "nprobe": "8"},
        {"index": "autoindex"},
        {"index": "hnsw", "m": "8", "ef_construction": "50", "ef": "300"},
    ],
)
def test_indexes(file: Path, client: MilvusClient, options: dict[str, str]) -> None:
    rows = Rows.make()
    with open_writer(f"milvus://{file}", "docs", options=options) as writer:
        fill(writer, rows)
        told = client.describe_index("docs", "vector")
        assert told["index_type"] == options["index"].upper()
        built = {"m": "M", "ef_construction": "efConstruction", "nlist": "nlist"}
        for name in built.keys() & options.keys():
            assert str(told["params"][built[name]]) == options[name]
        assert_finds(writer, rows)
        assert_finds(writer, rows, exact=False)


@pytest.mark.parametrize("before", [{"index": "ivf_flat"}, {"m": "30"}])
@pytest.mark.parametrize("after", [{"index": "flat"}, {"m": "8"}])
def test_another_index_is_built_again(
    file: Path, client: MilvusClient, before: dict[str, str], after: dict[str, str]
) -> None:
    rows = Rows.make()
    with open_writer(f"milvus://{file}", "docs", options=before) as writer:
        writer.begin(rows.pushed, rows.layout)
        for batch in rows.batches():
            writer.append(batch)
        writer.finish(rows.layout)
    with open_writer(f"milvus://{file}", "docs", options=after) as writer:
        writer.resume(rows.layout)
        writer.finish(rows.layout)
        writer.swap()
        told = client.describe_index("docs", "vector")
        assert told["index_type"] == after.get("index", "hnsw").upper()
        assert str(told.get("params", {}).get("M", "")) == after.get("m", "")
        assert_finds(writer, rows)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("page", [7, 300])
@pytest.mark.parametrize("by_key", [True, False])
def test_exact_search_goes_through_pages(
    lite: MilvusWriter, monkeypatch: pytest.MonkeyPatch, whole: bool, page: int, by_key: bool
) -> None:
    """By keys, as suits Milvus Lite, or by their order, as suits a server."""
    monkeypatch.setattr(searching, "_PAGE_ROWS", page)
    monkeypatch.setattr(lite._milvus, "lite", by_key)
    quotes = ["", '"', '""']
    odd = [f"{at % 10}{quotes[at % 3]}\\{at}" for at in range(300)]
    ids = pa.array(range(-150, 150)) if whole else pa.array(["", *odd[1:]], pa.large_string())
    rows = Rows.make(ids=ids)
    fill(lite, rows)
    assert_finds(lite, rows)


# Names, pushed tables and what others made.


def test_a_collection_or_alias_that_no_push_made(file: Path, client: MilvusClient) -> None:
    rows = Rows.make()
    client.create_collection("docs", dimension=4)
    with open_writer(f"milvus://{file}", "docs") as writer:
        for call in (writer.published, lambda: fill(writer, rows), writer.discard):
            with pytest.raises(DatabaseError, match="no push made"):
                call()
    client.create_alias("docs", "other")
    with open_writer(f"milvus://{file}", "other") as writer:
        for call in (writer.published, lambda: fill(writer, rows), writer.discard):
            with pytest.raises(DatabaseError, match="is an alias of 'docs', which no push"):
                call()
    assert client.list_collections() == ["docs"]
    # That of another push is not to be dropped either.
    with open_writer(f"milvus://{file}", "mine") as writer:
        fill(writer, rows)
    client.create_alias(client.describe_alias("mine")["collection_name"], "third")
    with (
        open_writer(f"milvus://{file}", "third") as writer,
        pytest.raises(DatabaseError, match="no push made"),
    ):
        fill(writer, rows)


def test_cut_off_between_the_swap_and_the_drop(
    lite: MilvusWriter, client: MilvusClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = Rows.make(), Rows.make(200, seed=1)
    fill(lite, old)

    def fail(*_: object) -> None:
        raise DatabaseError("cut off")

    lite.begin(new.pushed, new.layout)
    for batch in new.batches():
        lite.append(batch)
    lite.finish(new.layout)
    with monkeypatch.context() as patch:
        patch.setattr(lite._milvus, "drop_collection", fail, raising=False)
        with pytest.raises(DatabaseError, match="cut off"):
            lite.swap()
    assert_holds(lite, new)
    assert len(client.list_collections()) == 2
    assert lite.pending() is None
    lite.discard()
    assert len(client.list_collections()) == 1
    assert_holds(lite, new)


def test_a_user_released_what_is_published(
    lite: DatabaseWriter, file: Path, client: MilvusClient
) -> None:
    rows = Rows.make()
    fill(lite, rows)
    client.release_collection("docs")
    with open_writer(f"milvus://{file}", "docs") as writer:
        assert_holds(writer, rows)
        assert_finds(writer, rows)


# Milvus Lite runs in this process, and is to leave nothing behind.


def test_sinks_of_one_file_share_a_server(file: Path) -> None:
    rows = Rows.make()
    with open_writer(f"milvus://{file}", "one") as one:
        with open_writer(f"milvus://{file}", "two") as two:
            fill(two, rows)
        fill(one, rows)
        assert_holds(one, rows)
    assert _opened_elsewhere(file).returncode == 0


def test_a_client_of_the_user_goes_on(file: Path, client: MilvusClient) -> None:
    with open_writer(f"milvus://{file}", "docs") as writer:
        fill(writer, Rows.make())
    assert client.query("docs", filter="", output_fields=["count(*)"])[0]["count(*)"] == 300


@pytest.mark.parametrize("there", ["meta.json", "docs.lance", "notes.txt"])
def test_a_folder_that_is_anothers(file: Path, there: str) -> None:
    file.mkdir()
    (file / there).write_text("mine")
    with pytest.raises(ConfigError, match=f"than those of Milvus Lite, such as '{there}'; name a"):
        open_writer(f"milvus://{file}", "docs")
    assert [each.name for each in file.iterdir()] == [there]


def test_asking_makes_nothing(file: Path) -> None:
    assert_asking_makes_nothing(f"milvus://{file}", file)
    empty = file.with_name("empty.db")
    empty.mkdir()
    with pytest.raises(DatabaseError, match="is not there, or nothing was pushed to it yet"):
        open_writer(f"milvus://{empty}", "docs", make=False)
    assert list(empty.iterdir()) == []


def test_a_file_in_the_place_of_the_folder(file: Path) -> None:
    file.write_text("mine")
    with pytest.raises(ConfigError, match=r"is a file, and Milvus Lite .* makes a folder; name"):
        open_writer(f"milvus://{file}", "docs")
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(1, "may not write there: change"), (13, "may not write there: change"),
     (30, "may not write there: change"), (28, "make room"), (5, "see to that, or name another")],
)  # fmt: skip
def test_a_folder_that_cannot_be_written(
    file: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number), str(file))

    monkeypatch.setattr("milvus_lite.adapter.grpc.server.start_server_in_thread", refuse)
    with pytest.raises(DatabaseError, match=remedy) as told:
        open_writer(f"milvus://{file}", "docs")
    assert "one process" not in str(told.value)


def test_one_process_at_a_time(file: Path) -> None:
    with open_writer(f"milvus://{file}", "docs") as writer:
        fill(writer, Rows.make())
        other = _opened_elsewhere(file)
        assert other.returncode == 10
        assert "one process at a time" in other.stdout
        assert "holds the lock" in other.stdout
        assert other.stderr == ""
    # What was closed is free at once, and the other process ends by itself.
    other = _opened_elsewhere(file)
    assert (other.returncode, other.stdout, other.stderr) == (0, "300\n", "")


def _opened_elsewhere(file: Path) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys\n"
        "from whiten_index.errors import WhitenIndexError\n"
        "from whiten_index.vectordb import open_writer\n"
        "try:\n"
        f"    with open_writer('milvus://{file}', 'docs') as writer:\n"
        "        print(writer.count() if writer.published() else '')\n"
        "except WhitenIndexError as error:\n"
        "    print(error)\n"
        "    sys.exit(error.exit_code)\n"
    )
    return _ran(code)


def _ran(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
    )


def test_nothing_is_written_to_stderr(file: Path) -> None:
    """In a process of its own, where nothing else takes up what is logged."""
    code = f"""
import numpy as np
from tests.vectordb.writer_contract import Rows, fill
from whiten_index.errors import DatabaseError
from whiten_index.vectordb.registry import open_writer
for options in ({{}}, {{"index": "ivf_flat"}}, {{"index": "flat"}}):
    with open_writer("milvus://{file}", "docs", options=options) as writer:
        fill(writer, Rows.make())
        writer.search(Rows.make().vectors, 3)
        try:
            writer.search(np.zeros((1, 5), dtype=np.float32), 3)
        except DatabaseError as error:
            print(error)
"""
    ran = _ran(code)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.count("search failed (") == ran.stdout.count("; mend that") == 3


def test_loggers_are_as_they_were(lite: DatabaseWriter) -> None:
    named = ("pymilvus", "pymilvus.milvus_client", "milvus_lite", "grpc")
    before = [(log.handlers, log.propagate) for log in map(logging.getLogger, named)]
    fill(lite, Rows.make())
    assert [(log.handlers, log.propagate) for log in map(logging.getLogger, named)] == before


def test_milvus_lite_is_missing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "milvus_lite.server_manager", None)
        with pytest.raises(ConfigError, match=r"pip install 'milvus-lite>=3\.2\.2'"):
            open_writer(f"milvus://{file}", "docs")
    real = metadata.version

    def fake(name: str) -> str:
        return "2.5.1" if name == "milvus-lite" else real(name)

    monkeypatch.setattr(metadata, "version", fake)
    with pytest.raises(
        ConfigError, match=r"Milvus Lite 2\.5\.1 .* pip install 'milvus-lite>=3\.2\.2'"
    ):
        open_writer(f"milvus://{file}", "docs")


def test_what_milvus_lite_cannot_do_is_told_at_the_start(
    lite: DatabaseWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    halves = Rows.make(dtype=VectorDtype.FLOAT16)
    for call in (lambda: lite.begin(halves.pushed, halves.layout),
                 lambda: lite.resume(halves.layout)):  # fmt: skip
        with pytest.raises(ConfigError, match="Milvus Lite keeps no float16"):
            call()
    monkeypatch.setattr(building, "find_spec", lambda _: None)
    rows = Rows.make()
    with pytest.raises(ConfigError, match="pip install faiss-cpu, or give --option index=flat"):
        lite.begin(rows.pushed, rows.layout)


# Addresses, options and secrets.


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("milvus:///nowhere/at/all/x.db", "folder /nowhere/at/all is not there"),
        ("milvus:///tmp/x", "ends in .db"),
        ("milvus://x.db", "three strokes"),
        ("milvus://host:port", "may be a password"),
        ("milvus://host:99999", "is one of milvus://host:19530"),
        ("milvus://key@host", "MILVUS_TOKEN"),
        ("milvus://host?tls=1", "a parameter tls of the address"),
        ("milvus://host/one", "'one' and --option db 'two'"),
    ],
)
def test_addresses_that_cannot_be_used(address: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_writer(address, "docs", options={"db": "two"})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "address",
    [
        f"milvus://{SECRET}@host",
        f"milvus://me:12/34{SECRET}@host/db",
        f"milvus://me:a/{SECRET}@host",
        f"milvus://me:{SECRET}@host:port",
        f"milvus://host?{SECRET}",
        f"milvus://host?{SECRET}=",
        f"milvus://host?token={SECRET}",
        f"milvus://host#{SECRET}",
        f"milvus://h password={SECRET}",
        f"milvus://host/db password={SECRET}",
        f"milvus://host/db;token={SECRET}",
        f"milvus:///root:{SECRET}@host",
        f"milvus://[{SECRET}",
    ],
)
def test_addresses_that_cannot_be_used_show_no_secret(address: str) -> None:
    with pytest.raises(ConfigError, match=r"milvus|Milvus") as caught:
        open_writer(address, "docs")
    shown = "".join(traceback.format_exception(caught.value))
    assert_no_secret(shown.replace(address, ""), SECRET)


def test_a_place_shows_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILVUS_TOKEN", f"me:{SECRET}")
    place = Place.of("milvus://host/db", "")
    assert (place.token, place.shown) == (f"me:{SECRET}", "milvus://host:19530/db")
    assert_no_secret(repr(place), SECRET, "me:")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"index": "diskann"}, "use one of hnsw, flat, ivf_flat, autoindex"),
        ({"m": "0"}, "whole number from 1 to"),
        ({"nprobe": "8"}, "no use to index=hnsw"),
        ({"ef": "many"}, "'many' was given"),
    ],
)
def test_options_that_cannot_be_used(file: Path, options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_writer(f"milvus://{file}", "docs", options=options)
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["1docs", "a b", "a-b", "naïve", "docs\n"])
def test_names(file: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="letters, digits and underscores"):
        open_writer(f"milvus://{file}", name)


@pytest.mark.parametrize(
    ("address", "uri", "database"),
    [
        ("milvus://host", "http://host:19530", ""),
        ("milvus://host:1", "http://host:1", ""),
        ("milvus://[::1]:1/docs", "http://[::1]:1", "docs"),
        ("milvus+https://host/?server_name=x", "https://host:443", ""),
    ],
)
def test_how_a_server_is_asked(
    monkeypatch: pytest.MonkeyPatch, address: str, uri: str, database: str
) -> None:
    asked: dict[str, Any] = {}

    class Client:
        def __init__(self, **kwargs: Any) -> None:
            asked.update(kwargs)

        def get_server_version(self) -> str:
            return "v2.6.2"

        def close(self) -> None:
            asked["closed"] = True

    monkeypatch.setattr(connection, "MilvusClient", Client)
    for given in ("", SECRET, f"root:{SECRET}"):
        monkeypatch.setenv("MILVUS_TOKEN", given)
        with open_writer(address, "docs") as writer:
            assert writer.engine == "Milvus v2.6.2"
            assert_no_secret(writer.target, "root", SECRET)
        assert (asked["uri"], asked["db_name"]) == (uri, database)
        assert asked["token"] == given
        assert asked.get("server_name") == ("x" if "?" in address else None)
        assert asked["closed"]


def test_a_server_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(connection, "_CONNECT_SECONDS", 0.5)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"milvus://127.0.0.1:{port}"
    monkeypatch.setenv("MILVUS_TOKEN", f"root:{SECRET}")
    with pytest.raises(
        DatabaseError, match=r"connect failed .* see that the server runs"
    ) as caught:
        open_writer(address, "docs")
    assert_no_secret(caught.value, SECRET)
    assert f"127.0.0.1:{port}" in str(caught.value)
    assert SECRET not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("told", "remedy"),
    [
        (f"auth check failure: root:{SECRET} is not known\nmore", "MILVUS_TOKEN"),
        (f"auth check failure: {'x' * 475}{SECRET}", "MILVUS_TOKEN"),
        ("the length (70000) of json field ($meta) exceeds max length (65536)", "--keep"),
    ],
)
def test_errors_of_a_server(
    file: Path, monkeypatch: pytest.MonkeyPatch, told: str, remedy: str
) -> None:
    monkeypatch.setenv("MILVUS_TOKEN", SECRET)

    class Client:
        def __init__(self, **_: Any) -> None:
            pass

        def get_server_version(self) -> str:
            return "v2.6.2"

        def list_collections(self) -> list[str]:
            raise connection.MilvusException(message=told)

        def close(self) -> None:
            pass

    monkeypatch.setattr(connection, "MilvusClient", Client)
    with open_writer("milvus://host", "docs") as writer:
        with pytest.raises(DatabaseError, match=remedy) as caught:
            writer.published()
        # Nor a part of it, at the end of what is cut.
        assert_no_secret(caught.value, SECRET, SECRET[:3], "more")


# What Milvus Lite has not, with a server that writes down what it is asked.


class Recorder:
    """A server of one alias: collections with their properties and rows, and calls in order."""

    engine, shown, lite, has_2_4 = "Milvus v2.6.2", "milvus://host", False, True

    def __init__(self) -> None:
        self.collections: dict[str, dict[str, Any]] = {}
        self.alias: str | None = None
        self.calls: list[tuple[str, ...]] = []
        self.sent: list[list[dict[str, Any]]] = []

    def close(self) -> None:
        self.calls.append(("close",))

    def list_collections(self) -> list[str]:
        return list(self.collections)

    def list_aliases(self) -> dict[str, list[str]]:
        return {"aliases": ["docs"] if self.alias else []}

    def describe_alias(self, _: str) -> dict[str, Any]:
        return {"collection_name": self.alias}

    def create_collection(self, name: str, *, schema: Any, properties: dict[str, str]) -> None:
        self.collections[name] = {"properties": dict(properties), **schema.to_dict()}

    def describe_collection(self, name: str) -> dict[str, Any]:
        return self.collections[name]

    def alter_collection_properties(self, name: str, properties: dict[str, str]) -> None:
        self.collections[name]["properties"] |= properties
        self.calls.append(("properties", name, *properties))

    def create_alias(self, name: str, _: str) -> None:
        assert self.alias is None
        self.alias = name
        self.calls.append(("create_alias", name))

    def alter_alias(self, name: str, _: str) -> None:
        assert self.alias is not None
        self.alias = name
        self.calls.append(("alter_alias", name))

    def drop_collection(self, name: str) -> None:
        assert name != self.alias
        del self.collections[name]
        self.calls.append(("drop_collection", name))

    def upsert(self, name: str, rows: list[dict[str, Any]]) -> None:
        self.sent.append(rows)

    def list_indexes(self, name: str, field_name: str) -> list[str]:
        return [field_name] if "index" in self.collections[name] else []

    def describe_index(self, name: str, _: str) -> dict[str, Any]:
        return {"index_type": self.collections[name]["index"]}

    def create_index(self, name: str, params: Any) -> None:
        (index,) = params
        self.collections[name]["index"] = index.to_dict()["index_type"]
        self.calls.append(("create_index", name, str(index.to_dict())))

    def flush(self, name: str) -> None:
        self.calls.append(("flush", name))

    def load_collection(self, name: str) -> None:
        self.calls.append(("load", name))

    def search(self, _: str, *, data: list[Any], limit: int, **kwargs: Any) -> list[Any]:
        self.calls.append(("search", str(data[0].dtype), str(kwargs["search_params"])))
        assert kwargs["consistency_level"] == "Strong"
        return [[{"id": 3, "distance": 0.5, "entity": {}}] for _ in data]


def _recorded(options: dict[str, str] | None = None) -> tuple[Recorder, MilvusWriter]:
    server = Recorder()
    made: Any = server
    return server, MilvusWriter(made, "docs", IndexOptions.parse(options or {}))


def test_the_swap_of_a_server_is_one_step() -> None:
    server, writer = _recorded()
    rows = Rows.make()
    fill(writer, rows)
    (first,) = server.collections
    assert ("create_alias", first) in server.calls
    server.calls.clear()
    fill(writer, rows)
    (second,) = server.collections
    steps = [call for call in server.calls if call[0] not in ("flush", "load", "create_index")]
    assert steps[-4:] == [
        # What it takes the place of, and then: that this is to go.
        ("properties", second, "whiten_index"),
        ("alter_alias", second),
        ("properties", first, "whiten_index"),
        ("drop_collection", first),
    ]
    assert [call[0] for call in server.calls if call[0] in ("flush", "load", "create_index")] == [
        "flush",
        "create_index",
        "load",
    ]
    # Progress is written after each batch.
    assert steps[:-4] == [("properties", second, "whiten_index")] * 3


def test_halves_on_a_server() -> None:
    server, writer = _recorded({"ef": "5"})
    rows = Rows.make(100, dtype=VectorDtype.FLOAT16)
    fill(writer, rows)
    (told,) = server.collections.values()
    vector = next(field for field in told["fields"] if field["name"] == "vector")
    assert vector["type"] == DataType.FLOAT16_VECTOR
    # The client itself takes the rows so, and gives such vectors back as bytes.
    request = Prepare.row_upsert_param("docs", server.sent[0], "", told["fields"], None, True)
    (sent,) = (field for field in request.fields_data if field.field_name == "vector")
    came = np.frombuffer(sent.vectors.float16_vector, np.float16).reshape(100, -1)
    assert (came == rows.vectors.astype(np.float16)).all()
    for given in (list(map(bytes, came)), [[bytes(each)] for each in came]):
        assert (milvus_rows.as_matrix(given, rows.layout.k) == came.astype(np.float32)).all()
    found: Neighbours = writer.search(rows.vectors[:2], 10)
    assert found.ids == [[3], [3]]
    assert np.isnan(found.scores[:, 1:]).all()
    # Milvus refuses an ef below the rows asked for.
    assert server.calls[-1] == ("search", "float16", "{'params': {'ef': 10}}")


def test_what_is_sent_at_once_is_small_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(milvus_rows, "_SENT_BYTES", 20_000)
    server, writer = _recorded()
    rows = Rows.make(64, text=pa.array(["x" * (30_000 if at == 9 else 500) for at in range(64)]))
    writer.begin(rows.pushed, rows.layout)
    writer.append(rows.batches()[0])
    assert [row["id"] for part in server.sent for row in part] == list(range(64))
    sizes = [sum(len(row["text"]) for row in part) for part in server.sent]
    assert all(
        size <= 20_000 or len(part) == 1 for size, part in zip(sizes, server.sent, strict=True)
    )
    told = writer.pending()
    assert told is not None
    assert told.done == 64
