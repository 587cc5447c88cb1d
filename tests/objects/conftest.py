"""A real server of S3, an empty bucket in it for each test, and caches of several machines."""

import itertools
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.objects.helpers import corpus_file

_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The server's address."""
    # The default suite, which installs no server, collects this file too.
    from moto.server import ThreadedMotoServer

    made = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    made.start()
    host, port = made.get_host_and_port()
    yield f"http://{host}:{port}"
    made.stop()


@pytest.fixture
def s3(server: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of the server, for which the environment is set as users set it."""
    import boto3

    for name, value in (
        ("AWS_ENDPOINT_URL", server),
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
        ("AWS_EC2_METADATA_DISABLED", "true"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    return boto3.client("s3", endpoint_url=server)


@pytest.fixture
def bucket(s3: Any) -> str:
    """The name of an empty bucket."""
    name = f"bucket{next(_NUMBERS)}"
    s3.create_bucket(Bucket=name)
    return name


@pytest.fixture
def out(bucket: str) -> str:
    """The place of an index in the bucket."""
    return f"s3://{bucket}/index"


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """A corpus on this machine."""
    return corpus_file(tmp_path / "c.parquet")


Machine = Callable[[str], Path]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return ``go(name)``, from which on this is another machine: with its own cache and marks."""
    held: dict[str, list[Any]] = {}

    def go(name: str) -> Path:
        monkeypatch.setattr("whiten_index.artifacts.lock._HELD", held.setdefault(name, []))
        cache = tmp_path / "caches" / name
        monkeypatch.setenv("WHITEN_INDEX_CACHE", str(cache))
        return cache

    go("first")
    return go


Overtaken = Callable[[Any, str, Callable[[], Any]], AbstractContextManager[None]]


@pytest.fixture
def overtaken(machine: Machine) -> Overtaken:
    """Return ``overtaken(room, name, work)``: before a function is called first, another works."""

    @contextmanager
    def before(room: Any, name: str, work: Callable[[], Any]) -> Iterator[None]:
        real = getattr(room, name)

        def called(*arguments: Any, **options: Any) -> Any:
            patch.undo()
            machine("second")
            work()
            machine("first")
            return real(*arguments, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(room, name, called)
            yield

    return before


@pytest.fixture
def guarded(server: str, s3: Any) -> Iterator[None]:
    """From now on the server takes known keys only."""

    def let(actions: str) -> None:
        plain = {"Content-Type": "text/plain"}
        address = f"{server}/moto-api/reset-auth"
        request = urllib.request.Request(address, actions.encode(), plain)
        urllib.request.urlopen(request).close()

    let("0")
    yield
    let("inf")


@pytest.fixture
def cluster(s3: Any, machine: Any, tmp_path: Path) -> Iterator[Any]:
    """Two machines that have a cache each."""
    from benchmarks.local_cluster import Cluster

    made = Cluster(tmp_path / "cluster", nodes=0)
    for name in ("one", "two"):
        machine(name)
        made.add()
    machine("driver")
    yield made
    made.stop()
