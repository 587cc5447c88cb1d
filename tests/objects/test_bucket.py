"""The requests to a bucket, and what is said where they fail."""

import importlib
import os
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import obstore
import pytest

from tests.helpers.bad_input import process, run
from whiten_index.artifacts.cached_storage import BucketStorage
from whiten_index.artifacts.object_store import Bucket, ChangedError
from whiten_index.errors import ConfigError, StorageError

pytestmark = pytest.mark.service


@pytest.fixture(params=["", "/plain", "/with spaces/und Ümläute/日本+%41"])
def uri(request: pytest.FixtureRequest, bucket: str) -> str:
    return f"s3://{bucket}{request.param}"


def test_what_is_put_is_got_and_listed(uri: str) -> None:
    there = Bucket(uri)
    assert there.get("a/b") is None
    there.put("a/b", b"one")
    there.put("a/c d", b"three")
    there.put("other", b"")
    assert (there.get("a/b") or ["nothing"])[0] == b"one"
    sizes = {key: stat.size for key, stat in there.objects("a").items()}
    assert sizes == {"a/b": 3, "a/c d": 5}
    assert there.folders() == ["a"]
    there.delete("a/b")
    there.delete("a/b")
    assert there.get("a/b") is None


@pytest.mark.parametrize("size", [0, 1, (16 << 20) + 1, (64 << 20) + 17])
def test_files_of_any_size_come_back(bucket: str, tmp_path: Path, size: int) -> None:
    there = Bucket(f"s3://{bucket}/files")
    (tmp_path / "up").write_bytes(bytes(range(256)) * (size // 256) + b"x" * (size % 256))
    there.upload("a", tmp_path / "up")
    assert there.download("a", tmp_path / "down")
    assert (tmp_path / "down").read_bytes() == (tmp_path / "up").read_bytes()
    assert not there.download("b", tmp_path / "none")


@pytest.mark.parametrize("versioned", [False, True])
def test_what_a_put_returns_is_taken_by_the_next(s3: Any, bucket: str, versioned: bool) -> None:
    """As the server gave it, with quotes and a version, which some servers ask for."""
    if versioned:
        s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    there = BucketStorage(f"s3://{bucket}/p")
    tag: Any = None
    for data in (b"first", b"second"):
        tag = there.replace(there.folder / "CURRENT", data, tag)
        assert tag == there.latest(there.folder / "CURRENT")
        assert ("version" in tag) == versioned


def test_put_where_there_is_none(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    there = Bucket(f"s3://{bucket}/p")
    there.put("a", b"first", over=None)
    with pytest.raises(ChangedError):
        there.put("a", b"second", over=None)
    assert there.get("a") is not None
    # An answer may be lost and the put sent again: the same bytes are no one else's.
    there.put("a", b"first", over=None)
    gone = importlib.import_module("obstore.exceptions").NotFoundError("NoSuchUpload")
    monkeypatch.setattr("obstore.put", Mock(side_effect=gone))
    with pytest.raises(StorageError, match="NoSuchUpload"):
        there.upload("a", Path(__file__))


@pytest.mark.parametrize("kind", ["AlreadyExistsError", "PreconditionError", "NotFoundError"])
def test_a_put_that_is_refused_without_a_reason(
    bucket: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """S3 answers so while two puts meet, of which the other may fail."""
    put, there = obstore.put, Bucket(f"s3://{bucket}/p")
    refusal = getattr(importlib.import_module("obstore.exceptions"), kind)(
        "<Code>ConditionalRequestConflict</Code>"
    )
    refused = Mock(side_effect=[refusal, refusal, refusal])
    for over in (None, {}):
        monkeypatch.setattr("obstore.put", refused)
        with pytest.raises(StorageError, match="ConditionalRequestConflict"):
            there.put("a", b"first", over=over)
        refused.side_effect = [refusal, refusal, refusal]
    asked = iter([refusal, refusal])

    def late(*given: Any, **options: Any) -> Any:
        for each in asked:
            raise each
        return put(*given, **options)

    monkeypatch.setattr("obstore.put", late)
    there.put("a", b"first", over=None)
    assert (there.get("a") or [b""])[0] == b"first"


def test_keys_that_the_server_does_not_know(bucket: str, guarded: None) -> None:
    with pytest.raises(StorageError, match="permission is denied; check AWS_ACCESS_KEY_ID"):
        Bucket(f"s3://{bucket}/p").objects("a")
    with pytest.raises(StorageError, match="permission is denied; check AWS_ACCESS_KEY_ID"):
        Bucket(f"s3://{bucket}/p").put("a", b"1")


@pytest.mark.parametrize("address", ["nonsense", "ftp://host", "http://", "http://a b"])
def test_no_address(bucket: str, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    with pytest.raises(ConfigError, match=r"AWS_ENDPOINT_URL is no address"):
        Bucket(f"s3://{bucket}/p")


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "AWS_REGION"])
def test_a_line_break_in_the_environment(bucket, machine, monkeypatch, name):
    monkeypatch.setenv(name, "from-a-file\n")
    status, _, said = run("search", f"s3://{bucket}/index", "a")
    assert status == 2
    assert f"{name} has a line break" in said
    assert "from-a-file" not in said


def test_nobody_answers(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        started = time.monotonic()
        with pytest.raises(StorageError, match="does not answer"):
            Bucket(f"s3://{bucket}/p").objects("a")
        assert time.monotonic() - started < 25


class _Silent(BaseHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, size: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(size))
        self.send_header("Last-Modified", self.date_time_string())
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(body)


@contextmanager
def answering(kind: type[BaseHTTPRequestHandler], monkeypatch: Any) -> Iterator[None]:
    """Let a server of this kind answer requests to buckets."""
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        yield
        server.shutdown()


class _Endless(_Silent):
    """Objects of 64 TiB."""

    def do_GET(self) -> None:
        size, part = 1 << 46, self.headers.get("Range")
        if part is None:
            self.answer(200, size, b"", ETag='"1"')
            return
        first, last = map(int, part.removeprefix("bytes=").split("-"))
        given, count = f"bytes {first}-{last}/{size}", last - first + 1
        self.answer(206, count, b"[" * count, ETag='"1"', Content_Range=given)


def test_an_object_too_large_for_what_it_is_takes_no_memory(s3, tmp_path, monkeypatch):
    monkeypatch.setenv("WHITEN_INDEX_CACHE", str(tmp_path))
    # Where memory cannot be had, obstore ends the process.
    with answering(_Endless, monkeypatch), process("search", "s3://bucket/index", "a") as child:
        said = child.communicate()[1]
    assert child.returncode == 5, said
    assert "CURRENT" in said
    assert "more than 67,108,864 bytes" in said


def test_more_than_was_asked_for_is_not_read(s3, monkeypatch):
    class Generous(_Silent):
        def do_GET(self) -> None:
            size, given = 100_000_000, "bytes 0-9/100000000"
            self.answer(206, size, b"a" * size, ETag='"1"', Content_Range=given)

    with answering(Generous, monkeypatch), pytest.raises(StorageError, match="longer than what"):
        Bucket("s3://bucket/p").piece("a", 0, 10)


def test_a_page_that_is_not_there_answers_no_removal_and_no_put(s3, monkeypatch):
    class NotFound(_Silent):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_error(404)

        do_PUT = do_POST  # noqa: N815

    with answering(NotFound, monkeypatch):
        with pytest.raises(StorageError, match="cannot remove s3://bucket/p/a"):
            Bucket("s3://bucket/p").delete("a")
        with pytest.raises(StorageError, match="cannot put s3://bucket/p/a"):
            Bucket("s3://bucket/p").put("a", b"", over={"e_tag": "1"})


@pytest.mark.parametrize("status", [400, 403])
def test_no_traceback_has_what_a_server_quotes(s3, monkeypatch, status):
    class Quoting(_Silent):
        def do_GET(self) -> None:
            said = f"<Code>Bad</Code>{self.headers}".encode()
            self.answer(status, len(said), said)

    monkeypatch.setenv("AWS_SESSION_TOKEN", "0123456789abcdef")
    with answering(Quoting, monkeypatch), pytest.raises(StorageError) as raised:
        Bucket("s3://bucket/p").get("a")
    assert "0123456789abcdef" not in "".join(traceback.format_exception(raised.value))


def test_an_answer_without_a_tag_is_refused(s3, monkeypatch):
    class Untagged(_Silent):
        def do_GET(self) -> None:
            self.answer(200, 3, b"one")

    # By its tag an object is put over, so that no change of another machine is lost.
    with answering(Untagged, monkeypatch), pytest.raises(StorageError, match="has no ETag"):
        Bucket("s3://bucket/p").get("a")


def test_a_redirect_to_another_host_takes_no_session_token_there(s3, monkeypatch):
    """obstore follows it, with all headers but ``Authorization``."""
    asked: list[str] = []

    class Moved(_Silent):
        def do_GET(self) -> None:
            asked.append(self.headers["Host"])
            host = self.headers["Host"].replace("127.0.0.1", "localhost")
            self.answer(302, 0, b"", Location=f"http://{host}/bucket/p/a")

    monkeypatch.setenv("AWS_SESSION_TOKEN", "token")
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    refusal = "redirects to another host, to which no keys are sent; check AWS_ACCESS_KEY_ID"
    with answering(Moved, monkeypatch):
        with pytest.raises(StorageError, match=refusal):
            Bucket("s3://bucket/p").get("a")
        with pytest.raises(StorageError, match=refusal):
            Bucket("s3://bucket/p").objects("a")
    assert asked
    assert {host.partition(":")[0] for host in asked} == {"127.0.0.1"}


def test_an_address_that_is_written_otherwise_is_the_same_host(bucket, monkeypatch):
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    address = os.environ["AWS_ENDPOINT_URL"].replace("127.0.0.1", "127.1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    assert Bucket(f"s3://{bucket}/p").get("a") is None


def test_a_proxy_of_the_users_is_asked(s3, monkeypatch):
    asked: list[str] = []

    class Proxy(_Silent):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(403)

    with answering(Proxy, monkeypatch):
        monkeypatch.setenv("http_proxy", os.environ["AWS_ENDPOINT_URL"])
        monkeypatch.setenv("no_proxy", "")
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://bucket.test")
        with pytest.raises(StorageError, match="permission is denied"):
            Bucket("s3://bucket/p").get("a")
    assert asked == ["http://bucket.test/bucket/p/a"]
