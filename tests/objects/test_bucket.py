"""The requests to a bucket, and what is said where they fail."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from whiten_index.artifacts.object_store import Bucket, ChangedError
from whiten_index.errors import ConfigError, StorageError

pytestmark = pytest.mark.service


def _sizes(of: Bucket, folder: str) -> dict[str, int]:
    return {key: size for key, (size, _) in of.objects(folder).items()}


@pytest.fixture(params=["", "/plain", "/with spaces/und Ümläute/日本+%41"])
def uri(request: pytest.FixtureRequest, bucket: str) -> str:
    return f"s3://{bucket}{request.param}"


def test_what_is_put_is_got_and_listed(uri: str) -> None:
    there = Bucket(uri)
    assert there.get("a/b") is None
    there.put("a/b", b"one")
    there.put("a/c d", b"three")
    there.put("other", b"")
    found = there.get("a/b")
    assert found is not None
    assert found[0] == b"one"
    assert _sizes(there, "a") == {"a/b": 3, "a/c d": 5}
    assert there.folders() == ["a"]
    there.delete("a/b")
    there.delete("a/b")
    assert there.get("a/b") is None


@pytest.mark.parametrize("size", [0, 1, (16 << 20) + 1, (64 << 20) + 17])
def test_files_of_any_size_come_back(bucket: str, tmp_path: Path, size: int) -> None:
    there = Bucket(f"s3://{bucket}/files")
    (tmp_path / "up").write_bytes(bytes(range(256)) * (size // 256) + b"x" * (size % 256))
    there.upload("a", tmp_path / "up")
    assert there.download("a", tmp_path / "down", size)
    assert (tmp_path / "down").read_bytes() == (tmp_path / "up").read_bytes()
    assert not there.download("b", tmp_path / "none", size)


def test_put_where_there_is_none(bucket: str) -> None:
    there = Bucket(f"s3://{bucket}/p")
    there.put("a", b"first", over=None)
    with pytest.raises(ChangedError):
        there.put("a", b"second", over=None)
    assert there.get("a") is not None
    # An answer may be lost and the put sent again: the same bytes are no one else's.
    there.put("a", b"first", over=None)


def test_keys_that_the_server_does_not_know(bucket: str, guarded: None) -> None:
    with pytest.raises(StorageError, match="permission is denied; check AWS_ACCESS_KEY_ID"):
        Bucket(f"s3://{bucket}/p").objects("a")
    with pytest.raises(StorageError, match="permission is denied; check AWS_ACCESS_KEY_ID"):
        Bucket(f"s3://{bucket}/p").put("a", b"1")


@pytest.mark.parametrize("address", ["nonsense", "ftp://host", "http://", "http://a b"])
def test_no_address(bucket: str, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    with pytest.raises(ConfigError, match=r"AWS_ENDPOINT_URL is .*, which is no address"):
        Bucket(f"s3://{bucket}/p")


def test_nobody_answers(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        started = time.monotonic()
        with pytest.raises(StorageError, match="does not answer"):
            Bucket(f"s3://{bucket}/p").objects("a")
        assert time.monotonic() - started < 25
