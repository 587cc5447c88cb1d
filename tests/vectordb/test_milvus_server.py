"""Milvus: the contract on a real server, release 2.3, which the tests start, kill and stop."""

import lzma
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import pyarrow as pa
import pytest
from pymilvus import MilvusClient
from pymilvus.client import grpc_handler

from tests.vectordb.pushed_rows import (
    HERE,
    Rows,
    append,
    assert_no_secret,
    child_at,
    pushed_by_child,
    some_changes,
)

# The behaviour of every writer, here on a server. A push and changes that were cut off are below.
from tests.vectordb.test_milvus import (  # noqa: F401
    test_a_collection_or_alias_that_no_push_made,
    test_a_collection_that_another_alias_names_stays,
    test_a_user_released_what_is_published,
    test_long_ids,
    test_users_query_by_the_alias_and_filter_by_kept_columns,
)
from tests.vectordb.writers.engines import Backend
from tests.vectordb.writers.test_writer_changes import (  # noqa: F401
    test_changes_that_fail,
    test_of_two_changes_one_alone_ends,
)
from tests.vectordb.writers.test_writer_pushes import (  # noqa: F401
    test_of_two_pushes_one_alone_goes_on,
    test_users_see_the_old_rows_and_metadata_until_the_swap,
)
from tests.vectordb.writers.test_writer_rows import (  # noqa: F401
    test_few_rows_and_none,
    test_ids_may_be_any_text,
    test_kept_columns_of_every_type,
    test_many_real_vectors,
    test_passages_have_keys_of_two_columns,
    test_rows_come_back_and_are_found,
)
from whiten_index.errors import ConfigError, DatabaseError
from whiten_index.vectordb import milvus_writer
from whiten_index.vectordb.database_writer import DatabaseWriter
from whiten_index.vectordb.registry import open_writer

if (sys.platform, platform.machine()) != ("linux", "x86_64"):
    if os.environ.get("CI"):
        pytest.fail("run CI on Linux x86_64: no package has a server of Milvus for another machine")
    pytest.skip("no package has a server of Milvus for this machine", allow_module_level=True)
import milvus

pytestmark = pytest.mark.service
ROOT, SECRET = "root:Milvus", "p@ss/w:ord"
# A server looks at its segments once a second, keeps them open for two, and waits half a minute
# for one before it that died; a test has few rows.
_SHORT = {
    "PROXY_TIMETICKINTERVAL": "50",
    "COMMON_SESSION_TTL": "2",
    "DATACOORD_SEGMENT_ASSIGNMENTEXPIRATION": "200",
    "QUERYCOORD_DISTPULLINTERVAL": "50",
    "QUERYCOORD_CHECKCHANNELINTERVAL": "50",
    "QUERYCOORD_CHECKSEGMENTINTERVAL": "50",
}


class Server:
    """A server of the package ``milvus`` with its data in a folder, at ports that are free.

    It is started without that package's own ``MilvusServer``, which waits for minutes where the
    server has died, starts no second one beside a server, and none at the port of one just killed.
    """

    def __init__(self, folder: Path, binaries: Path, *, guarded: bool = False) -> None:
        self._folder, self._binary = folder, binaries / "milvus"
        self._process: subprocess.Popen[bytes] | None = None
        config = milvus.MilvusServerConfig(data_dir=str(folder))
        ports = [name for name in config.configurable_items if name.endswith("_port")]
        etcd, peers, health, *free = _free_ports(3 + len(ports))
        config.update(**dict(zip(ports, free, strict=True)))
        config.set("authorization_enabled", guarded)
        config.resolve()
        self.port = int(config.get("proxy_port"))
        self._health = f"http://127.0.0.1:{health}/healthz"
        at, others = f"http://127.0.0.1:{etcd}", f"http://127.0.0.1:{peers}"
        (folder / "etcd.yaml").write_text(
            f"name: one\ndata-dir: {config.get('etcd_data_dir')}\n"
            f"listen-client-urls: {at}\nadvertise-client-urls: {at}\n"
            f"listen-peer-urls: {others}\ninitial-advertise-peer-urls: {others}\n"
            f"initial-cluster: one={others}\n"
        )
        self._environment = {
            **os.environ,
            **_SHORT,
            "DEPLOY_MODE": "STANDALONE",
            "METRICS_PORT": str(health),
            "ETCD_CONFIG_PATH": str(folder / "etcd.yaml"),
            "LD_LIBRARY_PATH": str(binaries),
        }

    def start(self) -> None:
        """Start it, and wait until it answers."""
        log = self._folder / "server.log"
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [self._binary, "run", "standalone"],
                cwd=self._folder, env=self._environment, stdout=out, stderr=out,
            )  # fmt: skip
        deadline = time.monotonic() + 120
        while not self._answers():
            ended = self._process.poll() is not None
            if ended or time.monotonic() > deadline:
                self.kill()
                last = log.read_bytes()[-3000:].decode(errors="replace")
                raise RuntimeError(f"Milvus {'ended' if ended else 'does not answer'}: {last}")
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self._health, timeout=5) as answer:
                return b"OK" in answer.read()
        except (urllib.error.URLError, OSError):
            return False

    def kill(self) -> None:
        """End it as a loss of power would, with what it had written."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def remove(self) -> None:
        """Kill it, and take its folder away."""
        self.kill()
        shutil.rmtree(self._folder)


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


@pytest.fixture(scope="module")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The server and its libraries, a quarter of a gigabyte."""
    folder = tmp_path_factory.mktemp("binaries")
    for packed in (Path(milvus.__file__).parent / "data" / "bin").glob("*.lzma"):
        (folder / packed.stem).write_bytes(lzma.decompress(packed.read_bytes()))
    (folder / "milvus").chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def server(binaries: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _running(Server(tmp_path_factory.mktemp("milvus"), binaries))


@pytest.fixture(scope="module")
def guarded(binaries: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A second one, which wants a user and a password; tests kill it and start it again."""
    yield from _running(Server(tmp_path_factory.mktemp("guarded"), binaries, guarded=True))


def _running(made: Server) -> Iterator[Server]:
    try:
        made.start()
        yield made
    finally:
        made.remove()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client looks twice a second whether the server is done; here more often."""
    clock = {**vars(time), "sleep": lambda seconds: time.sleep(min(seconds, 0.05))}
    monkeypatch.setattr(grpc_handler, "time", SimpleNamespace(**clock))


@pytest.fixture
def shared(backend: Backend) -> Backend:
    return backend


@pytest.fixture
def client(server: Server) -> Iterator[MilvusClient]:
    yield from _emptied(server, "")


@pytest.fixture
def root(guarded: Server) -> Iterator[MilvusClient]:
    yield from _emptied(guarded, ROOT)


def _emptied(server: Server, token: str) -> Iterator[MilvusClient]:
    """Yield a client of the user's own, and drop all that there is at the end."""
    made = MilvusClient(f"http://127.0.0.1:{server.port}", token=token, dedicated=True)
    yield made
    made.close()
    # One that saw the server die may be of no use.
    made = MilvusClient(f"http://127.0.0.1:{server.port}", token=token, dedicated=True)
    for alias in made.list_aliases()["aliases"]:
        made.drop_alias(alias)
    for collection in made.list_collections():
        made.drop_collection(collection)
    made.close()


@pytest.fixture
def file(server: Server, client: MilvusClient) -> str:
    return f"127.0.0.1:{server.port}"


@pytest.fixture
def backend(file: str) -> Backend:
    return Backend(f"milvus://{file}", halves=False, transactions=False)


@pytest.fixture
def writer(backend: Backend) -> Iterator[DatabaseWriter]:
    with backend.open() as opened:
        yield opened


def test_the_target_is_shown(server: Server, writer: DatabaseWriter) -> None:
    assert writer.engine.startswith("Milvus v2.3.")
    assert writer.target == f"milvus://127.0.0.1:{server.port}, collection docs"


@pytest.mark.parametrize(
    ("index", "least"),
    [("flat", 1.0), ("ivf_flat", 0.8), ("ivf_sq8", 0.8), ("ivf_pq", 0.4), ("scann", 0.4)],
)
def test_indexes(file: str, client: MilvusClient, index: str, least: float) -> None:
    """Of more rows than a server searches without one."""
    rows = Rows.make(3000, k=32)
    with open_writer(f"milvus://{file}", "docs", options={"index": index}) as writer:
        rows.fill(writer, batch=3000)
        assert client.describe_index("docs", "vector")["index_type"] == index.upper()
        rows.assert_found(writer)
        assert rows.recall(writer) >= least


@pytest.mark.parametrize("whole", [True, False])
def test_exact_search_goes_through_pages_of_all_segments(
    writer: DatabaseWriter, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """Rows that were changed lie apart from those pushed before, some of one page in each."""
    old, after, put = some_changes()
    if not whole:
        kind = pa.large_string()
        old, after = (
            Rows.of(rows.vectors, ids=pa.array([f'{at:03}"\\' for at in rows.ids], kind))
            for rows in (old, after)
        )
        put = after.take(range(5))
    old.fill(writer)
    after.change(writer, put, gone=[old.ids[7]])
    for page in (7, 300):
        monkeypatch.setattr(milvus_writer, "_PAGE_ROWS", page)
        after.assert_found(writer)


def test_of_databases_the_default_alone(file: str, client: MilvusClient) -> None:
    client.create_database("other")
    try:
        with pytest.raises(ConfigError, match=r"no aliases in the database 'other'.*2\.4"):
            open_writer(f"milvus://{file}/other", "docs")
        with open_writer(f"milvus://{file}", "docs", options={"db": "default"}) as writer:
            assert writer.published() is None
    finally:
        client.drop_database("other")


def test_users_that_are_not_let_in(
    guarded: Server, root: MilvusClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"127.0.0.1:{guarded.port}"
    message = "give credentials that may write there, in MILVUS_TOKEN"
    hidden = quote(SECRET, safe="")
    for token in ("", f"root:{SECRET}", f"nobody:{SECRET}"):
        monkeypatch.setenv("MILVUS_TOKEN", token)
        with pytest.raises(DatabaseError, match=message) as caught:
            open_writer(f"milvus://{place}", "docs").published()
        assert_no_secret(caught.value, SECRET, hidden)
    root.create_user("reader", SECRET)
    try:
        rows = Rows.make()
        monkeypatch.setenv("MILVUS_TOKEN", f"reader:{SECRET}")
        with open_writer(f"milvus://{place}", "docs") as writer:
            # Its password was taken.
            with pytest.raises(DatabaseError, match=f"deny to reader.*{message}") as caught:
                rows.fill(writer)
            assert_no_secret(caught.value, SECRET, hidden)
    finally:
        root.drop_user("reader")


@pytest.mark.parametrize("within", [False, True])
def test_the_server_is_killed_in_mid_push(
    guarded: Server, root: MilvusClient, tmp_path: Path, within: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Between two batches, or at any moment of another process; then it is started again."""
    monkeypatch.setenv("MILVUS_TOKEN", ROOT)
    address, old, rows = f"milvus://127.0.0.1:{guarded.port}", Rows.make(), pushed_by_child()
    with open_writer(address, "docs") as writer:
        assert_no_secret(writer.target, ROOT)
        old.fill(writer)
        if within:
            _push_and_kill(guarded, address, tmp_path / "marker")
        else:
            writer.begin(rows.pushed, rows.layout)
            append(writer, rows.batches(100)[:7])
            guarded.kill()
            for _ in range(2):
                with pytest.raises(DatabaseError, match="check that the server runs"):
                    writer.append(rows.batches(100)[7])
    with pytest.raises(DatabaseError, match="check that the server runs") as caught:
        open_writer(address, "docs")
    assert_no_secret(caught.value, ROOT)
    guarded.start()
    with open_writer(address, "docs") as writer:
        old.assert_held(writer)
        pending = writer.pending()
        assert pending.done % 100 == 0
        assert 500 <= pending.done < 2000 if within else pending.done == 700
        writer.resume(rows.layout)
        append(writer, rows.batches(100)[pending.done // 100 :])
        writer.finish()
        rows.assert_held(writer, pending=True)
        writer.swap()
        rows.assert_held(writer)
        rows.assert_clean(writer)
        rows.assert_found(writer)


def _push_and_kill(server: Server, address: str, marker: Path) -> None:
    """Kill the server while another process pushes, which is told and ends."""
    marker.write_text("0")
    script = (str(HERE / "writer_child.py"), "push", address, "docs", str(marker))
    with child_at(lambda: int(marker.read_text() or 0) >= 5, *script) as child:
        server.kill()
        _, stderr = child.communicate(timeout=60)
    assert child.returncode == 1
    assert "check that the server runs" in stderr.splitlines()[-1]


def test_the_server_is_killed_while_rows_are_changed(
    guarded: Server, root: MilvusClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILVUS_TOKEN", ROOT)
    address = f"milvus://127.0.0.1:{guarded.port}"
    old, after, put = some_changes()
    with open_writer(address, "docs") as writer:
        old.fill(writer)
        with (  # noqa: PT012 - what comes after the kill fails
            pytest.raises(DatabaseError, match="check that the server runs"),
            writer.changing(after.pushed, old.layout) as changing,
        ):
            changing.upsert(put)
            guarded.kill()
            changing.delete([7])
    guarded.start()
    with open_writer(address, "docs") as writer:
        pushed = writer.published()
        assert (pushed.version, pushed.changing) == (old.version, after.version)
        after.change(writer, put, gone=[7])
        after.assert_held(writer)
        after.assert_clean(writer)
        after.assert_found(writer)
