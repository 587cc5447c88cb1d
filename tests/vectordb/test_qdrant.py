"""Qdrant: the contract on local mode and, over REST and gRPC, on a stand-in for a server."""

from __future__ import annotations

import socket
import time
import traceback
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest
from qdrant_client import models

from tests.vectordb.qdrant_stand_in import StandIn
from tests.vectordb.writer_contract import (
    COLUMNS,
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
from whiten_index.vectordb.database_writer import DatabaseWriter, VectorDtype
from whiten_index.vectordb.ids import NAMESPACE, row_uuid, row_uuids
from whiten_index.vectordb.qdrant import connection as qdrant_connection
from whiten_index.vectordb.qdrant import points as qdrant_points
from whiten_index.vectordb.qdrant.connection import Place
from whiten_index.vectordb.qdrant.options import Options
from whiten_index.vectordb.registry import open_writer

pytestmark = pytest.mark.service

SECRET = "s3cr3t-key"


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QDRANT_API_KEY", raising=False)


@pytest.fixture
def memory() -> Iterator[str]:
    """An address of a memory with nothing in it."""
    qdrant_connection._in_memory.cache_clear()
    yield "qdrant://:memory:"
    qdrant_connection._in_memory.cache_clear()


@pytest.fixture
def server() -> Iterator[StandIn]:
    made = StandIn().start()
    yield made
    made.stop()


@pytest.fixture
def at(server: StandIn) -> str:
    return f"qdrant://127.0.0.1:{server.port}"


class QdrantContract(EngineContract):
    """Local mode is exact, so there is no approximate index whose recall could be low."""

    takes_any_name: ClassVar[bool] = False
    transactions: ClassVar[bool] = False
    recall: ClassVar[float | None] = None
    big: ClassVar[int] = 5_000


class TestLocalMode(QdrantContract):
    """In memory, and on disk what is to outlive a connection or a process."""

    @pytest.fixture
    def address(self, memory: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
        lasting = ("killed", "second_connection", "cut_off", "changed_rows", "passages")
        if any(part in request.node.name for part in lasting):
            return f"qdrant://{tmp_path}/qdrant"
        return memory


class TestOverRest(QdrantContract):
    @pytest.fixture
    def address(self, at: str) -> str:
        return at


class TestOverGrpc(QdrantContract):
    @pytest.fixture
    def address(
        self, server: StandIn, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
    ) -> str:
        """Where it listens; ``prefer_grpc`` is on for every connection of this process."""
        plain = Options.parse

        def preferring(given: Any) -> Options:
            return plain({"prefer_grpc": "true", "grpc_port": str(server.grpc_port), **given})

        monkeypatch.setattr(Options, "parse", preferring)
        return f"qdrant://127.0.0.1:{server.port}"

    def test_kept_columns_of_every_type(self, writer: DatabaseWriter) -> None:
        columns = {
            name: pa.array([one, two, None], kind) for name, (kind, one, two) in COLUMNS.items()
        }
        rows = Rows.make(3, **columns)
        writer.begin(rows.pushed, rows.layout)
        with pytest.raises(
            DatabaseError, match=r"below 2\*\*63 alone; leave out --option prefer_grpc"
        ):
            writer.append(rows.batches()[0])
        columns["uint64"] = pa.array([0, 2**63 - 1, None], pa.uint64())
        rows = Rows.make(3, **columns)
        fill(writer, rows)
        assert_holds(writer, rows)


def test_ids_are_uuids_that_never_change() -> None:
    assert row_uuid("d7") == str(uuid.uuid5(NAMESPACE, "s:d7"))
    assert row_uuid("d7") == "77990fa7-0c05-564c-8108-3c8a8a7d6faa"
    names = ["7", "", ":7", "1:7", "s:7"]
    made = [row_uuid(7), *map(row_uuid, names), row_uuid("7", 0), row_uuid(7, 0), row_uuid("7", 1)]
    assert len(set(made)) == len(made)
    rows = Rows.make(
        2, ids=pa.array(["a", "a"], pa.large_string()), **{PASSAGE: pa.array([0, 3], pa.int32())}
    )
    assert row_uuids(rows.batches()[0], rows.layout) == [row_uuid("a", 0), row_uuid("a", 3)]


@pytest.mark.parametrize("kind", [pa.int64(), pa.large_string()])
def test_what_other_clients_see(memory: str, kind: pa.DataType) -> None:
    """A point found by its id alone, its payload, and the name as an alias."""
    rows = Rows.make(
        20, ids=pa.array([f"{i}" for i in range(20)]).cast(kind), n=pa.array(range(20))
    )
    with open_writer(memory, "docs") as writer:
        fill(writer, rows)
        client = writer._client
        name = rows.ids[3]
        point = client.retrieve("docs", [row_uuid(name)], with_payload=True)[0]
        assert point.payload == {"id": name, "n": 3}
        other = int(name) if isinstance(name, str) else str(name)
        assert client.retrieve("docs", [row_uuid(other)]) == []
        found = client.query_points("docs", query=rows.vectors[3].tolist(), limit=1).points
        assert found[0].payload["id"] == name


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("qdrant://host", Place("qdrant://host:6333", "host", 6333)),
        ("qdrant://host:1", Place("qdrant://host:1", "host", 1)),
        (
            "qdrant+https://host:443/base/",
            Place("qdrant+https://host:443/base", "host", 443, True, "/base"),
        ),
        ("qdrant://[::1]:5", Place("qdrant://[::1]:5", "[::1]", 5)),
        ("qdrant:///a%20b/c", Place("qdrant:///a b/c", folder=Path("/a b/c"))),
        ("qdrant://:memory:", Place("qdrant://:memory:")),
    ],
)
def test_addresses(address: str, expected: Place) -> None:
    assert Place.of(address) == expected
    assert SECRET not in repr(Place.of(address)) + Place.of(address).shown


@pytest.mark.parametrize(
    "address",
    ["qdrant://", "qdrant:///", f"qdrant://{SECRET}@host", f"qdrant://host?api_key={SECRET}",
     f"qdrant://:{SECRET}@host:port", "qdrant+https:///folder", f"qdrant://:{SECRET}@host#x",
     f"qdrant://me:12/34{SECRET}@host", f"qdrant://me:a/{SECRET}@host", f"qdrant://h k={SECRET}",
     f"qdrant://host/x key={SECRET}", f"qdrant://host/x;{SECRET}", f"qdrant:///:{SECRET}@host",
     f"qdrant://[{SECRET}", f"qdrant://host:{SECRET}"],
)  # fmt: skip
def test_addresses_that_name_nothing(address: str) -> None:
    with pytest.raises(ConfigError, match=r"qdrant://|--option") as raised:
        open_writer(address, "docs")
    # Nor does what it came of, which Python shows with it.
    assert_no_secret("".join(traceback.format_exception(raised.value)), SECRET)


@pytest.mark.parametrize("name", [".", "..", "a/b", "a\nb", "a:b", "x" * 246, "é" * 123])
def test_names_that_are_no_folder(memory: str, name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        open_writer(memory, name)


def test_a_long_name_and_an_odd_one(tmp_path: Path) -> None:
    for number, name in enumerate(["x" * 245, "a b'; DROP TABLE docs --", "é%2F{}"]):
        with open_writer(f"qdrant://{tmp_path}/{number}", name) as writer:
            fill(writer, Rows.make(5))
        with open_writer(f"qdrant://{tmp_path}/{number}", name) as writer:
            assert_holds(writer, Rows.make(5))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"m": "many"}, "--option m takes a whole number from 0 .* 'many' was given"),
        ({"hnsw_ef": "-1"}, "--option hnsw_ef takes a whole number from 1"),
        ({"timeout": "0"}, "--option timeout takes a whole number from 1"),
        ({"grpc_port": "65536"}, "--option grpc_port takes a whole number from 1 to 65535"),
        ({"prefer_grpc": "maybe"}, "--option prefer_grpc takes true or false"),
        ({"quantization": "product"}, "quantization=product is unknown; use one of none, scalar"),
        ({"oversampling": "0.5"}, "--option oversampling takes a number from 1"),
        ({"nothing": "1"}, "--option nothing is unknown to Qdrant; use one of m, ef_construct"),
        ({"tls_ca": "/nowhere.pem"}, "begins with qdrant\\+https"),
    ],
)
def test_options_that_cannot_be_used(options: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        open_writer("qdrant://127.0.0.1:9", "docs", options=options)


def test_certificates_that_cannot_be_read(tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    for path in (empty, tmp_path / "missing.pem"):
        with pytest.raises(ConfigError, match="holds no certificates"):
            open_writer("qdrant+https://127.0.0.1:9", "docs", options={"tls_ca": str(path)})


def test_local_mode_has_nothing_to_set(memory: str, tmp_path: Path) -> None:
    for address in (memory, f"qdrant://{tmp_path}/q"):
        with pytest.raises(ConfigError, match=r"local mode.*leave out --option m"):
            open_writer(address, "docs", options={"m": "16"})


def test_a_folder_takes_one_connection(tmp_path: Path) -> None:
    address = f"qdrant://{tmp_path}/q"
    taken = pytest.raises(DatabaseError, match="takes one at a time; close that one")
    with open_writer(address, "docs"), taken:
        open_writer(address, "docs")
    with open_writer(address, "docs") as writer:
        assert writer.published() is None
    (tmp_path / "file").write_text("")
    with pytest.raises(DatabaseError, match="could not be opened"):
        open_writer(f"qdrant://{tmp_path}/file", "docs")


PARAMS = models.VectorParams(size=4, distance=models.Distance.COSINE)


def test_a_folder_that_is_anothers(tmp_path: Path) -> None:
    from whiten_index.vectordb.milvus.lite import start_lite, stop_lite

    milvus, notes = tmp_path / "docs.db", tmp_path / "notes"
    start_lite(str(milvus))
    stop_lite(str(milvus))
    notes.mkdir()
    (notes / "notes.txt").write_text("mine")
    for folder, name in ((milvus, "LOCK"), (notes, "notes.txt")):
        before = sorted(each.name for each in folder.iterdir())
        with pytest.raises(ConfigError, match=f"than those of Qdrant, such as '{name}'"):
            open_writer(f"qdrant://{folder}", "docs")
        assert sorted(each.name for each in folder.iterdir()) == before
    empty, rows = tmp_path / "empty", Rows.make(5)
    empty.mkdir()
    for _ in range(2):
        with open_writer(f"qdrant://{empty}", "docs") as writer:
            fill(writer, rows)


def test_asking_makes_nothing(tmp_path: Path) -> None:
    assert_asking_makes_nothing(f"qdrant://{tmp_path}/a folder", tmp_path / "a folder")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DatabaseError, match="is not there, or nothing was pushed to it yet"):
        open_writer(f"qdrant://{empty}", "docs", make=False)
    assert list(empty.iterdir()) == []
    # One of others' stays what it is.
    (empty / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="than those of Qdrant"):
        open_writer(f"qdrant://{empty}", "docs", make=False)


def test_what_is_shown_is_no_address(memory: str, tmp_path: Path) -> None:
    for address in (memory, f"qdrant://{tmp_path}/q"):
        with open_writer(address, "docs") as writer:
            assert writer.target == f"{address}, collection docs"


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted", str(tmp_path))

    monkeypatch.setattr(qdrant_connection, "QdrantClient", refuse)
    with pytest.raises(
        DatabaseError, match=r"not permitted.*this user may not write there: change"
    ):
        open_writer(f"qdrant://{tmp_path}/q", "docs")


def test_what_no_push_made_stays(memory: str) -> None:
    client = qdrant_connection._in_memory()
    client.create_collection("docs", vectors_config=PARAMS)
    client.create_collection("other__0123abcd", vectors_config=PARAMS, metadata={"a": 1})
    alias = models.CreateAlias(collection_name="docs", alias_name="shown")
    client.update_collection_aliases([models.CreateAliasOperation(create_alias=alias)])
    rows = Rows.make(5)
    for name, why in (("docs", "a collection that no push made"), ("shown", "alias of 'docs'")):
        with open_writer(memory, name) as writer:
            for act in (
                writer.published,
                writer.pending,
                writer.discard,
                lambda writer=writer: writer.begin(rows.pushed, rows.layout),
            ):
                with pytest.raises(DatabaseError, match=why):
                    act()
    with open_writer(memory, "other") as writer:
        # The name of a pushed alone makes none.
        assert writer.pending() is None
        fill(writer, rows)
        fill(writer, rows)
    left = {each.name for each in client.get_collections().collections}
    assert {"docs", "other__0123abcd"} < left
    assert len(left) == 3


def test_a_collection_of_the_name_that_came_in_the_meantime(memory: str) -> None:
    rows = Rows.make(5)
    with open_writer(memory, "docs") as writer:
        writer.begin(rows.pushed, rows.layout)
        writer.append(rows.batches()[0])
        qdrant_connection._in_memory().create_collection("docs", vectors_config=PARAMS)
        with pytest.raises(DatabaseError, match="no push made"):
            writer.swap()


@pytest.mark.parametrize("grpc", [False, True])
def test_the_name_is_swapped_in_one_call(server: StandIn, at: str, grpc: bool) -> None:
    options = {"prefer_grpc": "true", "grpc_port": str(server.grpc_port)} if grpc else {}
    with open_writer(at, "docs", options=options) as writer:
        for _ in range(2):
            fill(writer, Rows.make(5))
    first, second = (more["change_aliases_operations"] for _, more in
                     server.named("update_collection_aliases"))  # fmt: skip
    assert [type(each).__name__ for each in first] == ["CreateAliasOperation"]
    assert [type(each).__name__ for each in second] == [
        "DeleteAliasOperation",
        "CreateAliasOperation",
    ]
    assert second[0].delete_alias.alias_name == second[1].create_alias.alias_name == "docs"
    old, new = (each[-1].create_alias.collection_name for each in (first, second))
    assert server.named("delete_collection") == [((old,), {})]
    assert [each.name for each in server.client.get_collections().collections] == [new]


def test_a_swap_that_was_cut_off_after_the_name_leaves_no_old_rows(memory: str) -> None:
    rows = Rows.make(5)
    client = qdrant_connection._in_memory()
    with pytest.MonkeyPatch.context() as patched, open_writer(memory, "docs") as writer:
        fill(writer, rows)
        patched.setattr(client, "delete_collection", _break)
        with pytest.raises(DatabaseError, match="could not be dropped"):
            fill(writer, Rows.make(6))
    with open_writer(memory, "docs") as writer:
        assert len(client.get_collections().collections) == 2
        assert_holds(writer, Rows.make(6))
        # What is left is not taken for a push to go on with.
        assert writer.pending() is None
        writer.discard()
        assert len(client.get_collections().collections) == 1


def test_a_swap_that_was_cut_off_before_the_name_changes_nothing(memory: str) -> None:
    rows = Rows.make(5)
    client = qdrant_connection._in_memory()
    with pytest.MonkeyPatch.context() as patched, open_writer(memory, "docs") as writer:
        fill(writer, rows)
        patched.setattr(client, "update_collection_aliases", _break)
        with pytest.raises(DatabaseError, match="could not be swapped in"):
            fill(writer, Rows.make(6))
    with open_writer(memory, "docs") as writer:
        assert_holds(writer, rows)
        published, pending = writer.published(), writer.pending()
        assert published is not None
        assert pending is not None
        # What users see is not said to be on its way out.
        assert client.get_collection("docs").config.metadata["whiten_index"]["dropped"] is False
        assert pending.done == 6
        writer.resume(rows.layout)
        writer.swap()
        assert_holds(writer, Rows.make(6))
        assert writer.pending() is None


def test_rows_that_a_database_lost_are_sent_again(memory: str) -> None:
    rows = Rows.make(200)
    first, second = rows.batches(100)
    with open_writer(memory, "docs") as writer:
        writer.begin(rows.pushed, rows.layout)
        writer.append(first)
        writer.append(second)
        pending = writer.pending()
        assert pending is not None
        assert pending.done == 200
        writer._client.delete(pending.name, points_selector=[row_uuid(150)])
        again = writer.pending()
        assert again is not None
        assert again.done == 0


def _break(*_: object, **__: object) -> None:
    raise OSError("cut off")


@pytest.mark.parametrize("grpc", [False, True])
def test_the_graph_is_built_after_the_load(server: StandIn, at: str, grpc: bool) -> None:
    options = {
        "m": "24", "ef_construct": "200", "indexing_threshold": "1000", "on_disk": "true",
        "quantization": "scalar", "shard_number": "2", "replication_factor": "1",
    }  # fmt: skip
    if grpc:
        options |= {"prefer_grpc": "true", "grpc_port": str(server.grpc_port)}
    rows = Rows.make(5, dtype=VectorDtype.FLOAT16)
    with open_writer(at, "docs", options=options) as writer:
        writer.begin(rows.pushed, rows.layout)
        writer.append(rows.batches()[0])
        ((_, made),) = server.named("create_collection")
        assert made["vectors_config"].datatype.value == "float16"
        assert made["vectors_config"].on_disk is True
        assert (made["hnsw_config"].m, made["hnsw_config"].ef_construct) == (24, 200)
        assert made["optimizers_config"].indexing_threshold == 0
        assert made.get("quantization_config") is None
        before = len(server.named("update_collection"))
        writer.finish(rows.layout)
        writer.swap()
    assert (made["shard_number"], made["replication_factor"]) == (2, 1)
    (_, sent) = server.named("update_collection")[before]
    assert sent["optimizers_config"].indexing_threshold == 1000
    assert sent["quantization_config"].scalar.type.value == "int8"


def _over(server: StandIn, options: dict[str, str], *, grpc: bool) -> DatabaseWriter:
    if grpc:
        options = options | {"prefer_grpc": "true", "grpc_port": str(server.grpc_port)}
    return open_writer(f"qdrant://127.0.0.1:{server.port}", "docs", options=options)


@pytest.mark.parametrize("grpc", [False, True])
def test_a_push_that_goes_on_has_its_options_and_those_given(server: StandIn, grpc: bool) -> None:
    rows = Rows.make(5)
    first = {"m": "24", "quantization": "scalar", "on_disk": "true", "shard_number": "2"}
    with _over(server, first, grpc=grpc) as writer:
        writer.begin(rows.pushed, rows.layout)
    for options, graph, disk, kind in (
        ({}, (24, None), True, "scalar"),
        ({"m": "8", "ef_construct": "99", "shard_number": "2"}, (8, 99), True, "scalar"),
        ({"quantization": "none", "on_disk": "false"}, (8, 99), False, None),
    ):
        with _over(server, options, grpc=grpc) as writer:
            before = len(server.named("update_collection"))
            writer.resume(rows.layout)
            writer.finish(rows.layout)
            sent = next(more for _, more in server.named("update_collection")[before:]
                        if more.get("hnsw_config"))  # fmt: skip
        assert (sent["hnsw_config"].m, sent["hnsw_config"].ef_construct) == graph
        vectors = sent["vectors_config"]
        assert getattr(vectors, "root", vectors)[""].on_disk is disk
        if kind is None:
            assert sent["quantization_config"] == models.Disabled.DISABLED
        else:
            assert sent["quantization_config"].scalar.type.value == "int8"
    for options in ({"shard_number": "3"}, {"replication_factor": "2"}):
        with (
            _over(server, options, grpc=grpc) as writer,
            pytest.raises(ConfigError, match=r"docs__[0-9a-f]{8} was made with .* leave it out"),
        ):
            writer.resume(rows.layout)


@pytest.fixture
def filled(server: StandIn, at: str) -> Iterator[tuple[DatabaseWriter, Rows]]:
    """Five rows whose index is not built yet, and no pause between two looks at it."""
    rows = Rows.make(5)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("whiten_index.vectordb.qdrant.building._FIRST_PAUSE", 0.01)
        with open_writer(at, "docs", options={"index_timeout": "1"}) as writer:
            writer.begin(rows.pushed, rows.layout)
            writer.append(rows.batches()[0])
            yield writer, rows


def test_a_push_waits_until_the_index_is_built(
    server: StandIn, filled: tuple[DatabaseWriter, Rows]
) -> None:
    writer, rows = filled
    asked = ["green", "yellow", "grey", "grey", "yellow", "green", "green"]
    # Before and after it, who writes the collection is read.
    server.statuses = ["yellow", *asked, "yellow", "red"]
    before = len(server.named("update_collection"))
    writer.finish(rows.layout)
    # One green may come before the work has begun.
    assert server.statuses == ["red"]
    sent = [more for _, more in server.named("update_collection")[before:]]
    # The second asks a server that waits for a change to begin; it changes nothing.
    assert len(sent) == 2
    assert sent[1]["optimizers_config"].model_dump(exclude_none=True) == {}
    server.statuses = []


def test_an_index_that_takes_too_long(server: StandIn, filled: tuple[DatabaseWriter, Rows]) -> None:
    writer, rows = filled
    server.statuses = ["yellow"] * 10_000
    began = time.monotonic()
    with pytest.raises(DatabaseError, match=r"not built after 1 seconds.*--option index_timeout"):
        writer.finish(rows.layout)
    assert time.monotonic() - began < 30
    assert len(server.statuses) > 9_900
    server.statuses = []
    # The next push goes on from here.
    writer.finish(rows.layout)
    writer.swap()
    assert_holds(writer, rows)


def test_an_index_that_fails(server: StandIn, filled: tuple[DatabaseWriter, Rows]) -> None:
    writer, rows = filled
    server.statuses = ["yellow", "yellow", "red"]
    with pytest.raises(DatabaseError, match="failed \\(no space left\\)"):
        writer.finish(rows.layout)


@pytest.mark.parametrize("grpc", [False, True])
def test_how_a_server_is_searched(server: StandIn, at: str, grpc: bool) -> None:
    options = {"hnsw_ef": "77", "quantization": "binary", "oversampling": "3"}
    if grpc:
        options |= {"prefer_grpc": "true", "grpc_port": str(server.grpc_port)}
    rows = Rows.make(70)
    with open_writer(at, "docs", options=options) as writer:
        fill(writer, rows)
        for exact in (True, False):
            assert len(writer.search(rows.vectors, 3, exact=exact).ids) == 70
    asked = [more["requests"] for _, more in server.named("query_batch_points")]
    assert [len(each) for each in asked] == [64, 6, 64, 6]
    exact, fast = asked[0][0].params, asked[2][0].params
    assert exact.exact is True
    assert exact.quantization.ignore is True
    assert not fast.exact
    assert fast.hnsw_ef == 77
    assert fast.quantization.rescore is True
    assert fast.quantization.oversampling == 3
    assert server.named("query_batch_points")[0][0] == ("docs",)


@pytest.mark.parametrize("grpc", [False, True])
def test_passages_are_found_by_an_index_of_their_ids(server: StandIn, at: str, grpc: bool) -> None:
    options = {"prefer_grpc": "true", "grpc_port": str(server.grpc_port)} if grpc else {}
    ids = pa.array(["a"] * 1200, pa.large_string())
    rows = Rows.make(1200, ids=ids, **{PASSAGE: pa.array(range(1200), pa.int32())})
    with open_writer(at, "docs", options=options) as writer:
        fill(writer, rows)
        # More than a page of them.
        assert_holds(writer, rows)
    assert len(server.named("create_payload_index")) == 1
    if not grpc:
        assert server.named("create_payload_index")[0][1]["field_name"] == "id"


def test_a_batch_goes_in_requests_of_bounded_size(server: StandIn, at: str) -> None:
    rows = Rows.make(100, text=pa.array(["x" * 200_000] * 100))
    with open_writer(at, "docs") as writer:
        writer.begin(rows.pushed, rows.layout)
        (batch,) = rows.batches(100)
        sent = server.client.upsert
        taken: list[int] = []

        def upsert(name: str, points: list[Any]) -> Any:
            if len(taken) == 2:
                raise OSError("cut off")
            taken.append(len(points))
            return sent(name, points=points)

        server.client.upsert = upsert  # type: ignore[method-assign]
        with pytest.raises(DatabaseError, match="400: cut off"):
            writer.append(batch)
        assert taken == [5, 5]
        pending = writer.pending()
        assert pending is not None
        assert pending.done == 0
        server.client.upsert = sent  # type: ignore[method-assign]
        writer.append(batch)
        assert writer.count(pending=True) == 100
        writer.swap()
        assert_holds(writer, rows)


def test_a_server_that_goes_and_comes_back(server: StandIn, at: str) -> None:
    rows = Rows.make(300)
    with open_writer(at, "docs", options={"timeout": "5"}) as writer:
        writer.begin(rows.pushed, rows.layout)
        writer.append(rows.batches(100)[0])
        server.stop()
        with pytest.raises(DatabaseError, match="see that a Qdrant server answers there"):
            writer.append(rows.batches(100)[1])
    with pytest.raises(DatabaseError, match="could not be reached"):
        open_writer(at, "docs")
    server.start()
    with open_writer(at, "docs") as writer:
        pending = writer.pending()
        assert pending is not None
        assert pending.done == 100
        writer.resume(rows.layout)
        for batch in rows.batches(100)[1:]:
            writer.append(batch)
        writer.finish(rows.layout)
        writer.swap()
        assert_holds(writer, rows)
        assert_finds(writer, rows)


@pytest.mark.parametrize("grpc", [False, True])
def test_a_server_that_does_not_answer_is_told_in_time(grpc: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        options = {"timeout": "1", "prefer_grpc": str(grpc).lower(), "grpc_port": str(port)}
        began = time.monotonic()
        with pytest.raises(DatabaseError, match="--option timeout=N"):
            open_writer(f"qdrant://127.0.0.1:{port}", "docs", options=options)
        assert time.monotonic() - began < 20


def test_an_old_server_is_refused() -> None:
    for release, told in (("1.15.5", "a push needs 1.16 or later"), ("0.9", "needs 1.16")):
        server = StandIn(release).start()
        with pytest.raises(DatabaseError, match=told):
            open_writer(f"qdrant://127.0.0.1:{server.port}", "docs")
        server.stop()
    server = StandIn("1.16.0").start()
    with open_writer(f"qdrant://127.0.0.1:{server.port}", "docs") as writer:
        assert writer.engine == "Qdrant 1.16.0"
    server.stop()


@pytest.mark.parametrize("grpc", [False, True])
def test_the_key_is_sent_and_never_shown(
    server: StandIn, monkeypatch: pytest.MonkeyPatch, grpc: bool
) -> None:
    address = f"qdrant://127.0.0.1:{server.port}"
    monkeypatch.setenv("QDRANT_API_KEY", SECRET)
    options = {"prefer_grpc": str(grpc).lower(), "grpc_port": str(server.grpc_port)}
    rows = Rows.make(5)
    with open_writer(address, "docs", options=options) as writer:
        fill(writer, rows)
        assert server.headers["api-key"] == SECRET
        assert_no_secret(writer.target + writer.engine, SECRET)
        for status, remedy in ((401, "QDRANT_API_KEY"), (503, "see that a Qdrant server")):
            server.failing = status, f"no: {SECRET} is wrong"
            with pytest.raises(DatabaseError, match=remedy) as raised:
                fill(writer, rows)
            assert_no_secret("".join(traceback.format_exception(raised.value)), SECRET)
            assert server.headers["api-key"] == SECRET
        # Nor is a part of it, at the end of what is cut.
        server.failing = 400, f"{'x' * 490}{SECRET}"
        with pytest.raises(DatabaseError) as raised:
            fill(writer, rows)
        assert_no_secret(raised.value, SECRET[:3])


@pytest.mark.parametrize(
    ("host", "told"),
    [("127.0.0.1", False), ("localhost", False), ("[::1]", False), ("127.8.9.1", False),
     ("10.0.0.1", True), ("db.example", True), ("localhost.example", True)],
)  # fmt: skip
@pytest.mark.parametrize("scheme", ["qdrant", "qdrant+https"])
def test_a_key_without_tls_is_told_in_one_line(
    caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder,
    monkeypatch: pytest.MonkeyPatch, scheme: str, host: str, told: bool,
) -> None:  # fmt: skip
    monkeypatch.setenv("QDRANT_API_KEY", SECRET)
    place = Place.of(f"{scheme}://{host}:1")
    monkeypatch.delenv("QDRANT_API_KEY")
    close = qdrant_connection.open_client(place, Options.parse({"timeout": "1"})).close
    close()
    close = qdrant_connection.open_client(Place.of(f"{scheme}://{host}:1"), Options()).close
    close()
    assert [each for each in recwarn if "insecure" in str(each.message)] == []
    lines = [each.getMessage() for each in caplog.records if each.name.startswith("whiten_index")]
    assert len(lines) == (told and scheme == "qdrant")
    for line in lines:
        assert line.startswith(f"qdrant://{host}:1 is asked without TLS")
        assert line.endswith("write qdrant+https://")
        assert_no_secret(line, SECRET, "connection.py")


@pytest.mark.parametrize(
    ("status", "remedy"), [(413, "take larger requests"), (500, "see the log of the server")]
)
def test_what_a_server_answers_is_told(server: StandIn, at: str, status: int, remedy: str) -> None:
    rows = Rows.make(5)
    with open_writer(at, "docs") as writer:
        writer.begin(rows.pushed, rows.layout)
        server.failing = status, "said the server"
        with pytest.raises(
            DatabaseError, match=rf"added \({status}: said the server\); .*{remedy}"
        ):
            writer.append(rows.batches()[0])
        server.failing = None
        writer.append(rows.batches()[0])
        assert writer.count(pending=True) == 5


@pytest.mark.parametrize(("release", "tries"), [("1.16.2", 1), ("1.19.1", 1), ("1.20.0", 0)])
def test_every_client_tries_once(monkeypatch: pytest.MonkeyPatch, release: str, tries: int) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: release)
    assert qdrant_points._one_attempt.__wrapped__() == tries
