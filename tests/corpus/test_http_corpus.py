"""A corpus at an HTTP server: a server that refuses or fails is neither absence nor damage."""

import json
import threading
import time
import traceback
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import aiohttp
import fsspec
import numpy as np
import pytest

from tests.helpers.bad_input import CORPUS, DISK, OPTIONS, process, run
from tests.helpers.builds import write_rows
from whiten_index import BuildConfig, encode_corpus
from whiten_index.errors import StorageError

SIGNATURE = "0123456789abcdef0123456789abcdef"


# Servers at which tag and date stay as they are.
_SAME = ("bare", "far", "second")


class _Answers(BaseHTTPRequestHandler):
    """Serves a file; the first folder of the path says how it fails, and after how many ranges."""

    data: bytes
    ranges: dict[str, int]
    hosts: list[str]

    def log_message(self, *_: Any) -> None:
        """Keep standard error for the tests."""

    def do_GET(self) -> None:
        how, _, after = self.path.split("/")[1].partition("-after-")
        host = self.headers["Host"].partition(":")[0]
        self.hosts.append(f"{host} with secret" if SIGNATURE in str(self.headers) else host)
        if how == "asked":
            self._answer(200, json.dumps([self.ranges, self.hosts]).encode())
            return
        wanted = self.headers.get("Range")
        self.ranges[self.path] = self.ranges.get(self.path, 0) + (wanted is not None)
        fails = not after or (wanted is not None and self.ranges[self.path] > int(after))
        fails = fails and how != "sound"
        tags = {"ETag": '"1"'} if how not in ("dated", "bare", "far") else {}
        if how in ("far", "second"):
            year = "99999999999" if how == "far" else "2024"
            tags["Last-Modified"] = f"Mon, 01 Jan {year} 00:00:00 GMT"
        if how in ("dated", "tagged"):
            later = self.ranges[self.path] > int(after)
            tags["Last-Modified"] = f"Mon, 01 Jan 2024 00:00:0{1 + later} GMT"
        if not fails or how in ("whole", "dated", "tagged", *_SAME):
            whole = how == "whole" or wanted is None
            first, last = (0, None) if whole else map(int, wanted[6:].split("-"))
            data = self.data[first : None if last is None else last + 1]
            if how in _SAME and fails:
                data = data.replace(b"parquet-cpp", b"parquet-cqq")
            self._answer(200 if whole else 206, data, **tags)
        elif how == "moved":
            self._answer(302, b"", Location=f"/403/x.parquet?X-Amz-Signature={SIGNATURE}")
        elif how == "elsewhere":
            there = self.headers["Host"].replace("127.0.0.1", "localhost")
            self._answer(302, b"", Location=f"http://{there}/sound/x.parquet")
        elif how.startswith("port"):
            self._answer(302, b"", Location=f"http://127.0.0.1:{how[4:]}/sound/x.parquet")
        elif how == "slow":
            time.sleep(3)
        elif how == "short":
            self._answer(206, self.data[:9], length=1000)
        elif how in ("part", "other"):
            first, last = map(int, wanted[6:].split("-"))
            first, last = (first, last - 1) if how == "part" else (first - 1, last - 1)
            given = {"Content-Range": f"bytes {first}-{last}/{len(self.data)}"}
            self._answer(206, self.data[first : last + 1], **given)
        elif how == "long":
            self._answer(206, self.data)
        elif how == "quoted":
            session = str(self.headers["Cookie"]).rpartition("=")[2]
            bearer = str(self.headers["Authorization"]).rpartition(" ")[2]
            self.send_error(403, f"not with {self.headers['X-Api-Key']}, {session}, {bearer}")
        elif how != "reset":
            self._answer(int(how), b"no")

    do_HEAD = do_GET  # noqa: N815

    def _answer(self, status: int, data: bytes, length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length or len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    yield from _served(tmp_path, monkeypatch)


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    yield from _served(tmp_path, monkeypatch)


def _served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    # Larger than what fsspec reads at once, of which the footer is the first.
    rows = np.random.default_rng(0).standard_normal((60_000, 32), dtype=np.float32)
    written = Path(write_rows(tmp_path / "x.parquet", rows))
    answers = type(
        "Answers", (_Answers,), {"data": written.read_bytes(), "ranges": {}, "hosts": []}
    )
    monkeypatch.setitem(
        fsspec.config.conf, "http", {"client_kwargs": {"timeout": aiohttp.ClientTimeout(1)}}
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), answers)
    # Clients hang up as they like.
    monkeypatch.setattr(server, "handle_error", lambda *_: None)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def _encode(source: str, store: Path) -> tuple[int, str]:
    options = ("--embedding-column", "embedding", "--id-column", "id", "--store", store)
    status, _, stderr = run("encode", source, *options)
    return status, stderr.strip()


def _asked(address: str) -> tuple[dict[str, int], list[str]]:
    """Return how many ranges of paths were asked for; and of what hosts, and with a secret."""
    with urllib.request.urlopen(f"{address}/asked") as answer:
        paths, hosts = json.load(answer)
    return paths, hosts


def test_a_number_sign_is_part_of_a_name(address: str, tmp_path: Path) -> None:
    status, said = _encode(f"{address}/sound/x#1.parquet", tmp_path / "store")
    assert status == 0, said
    assert [*_asked(address)[0]] == ["/sound/x%231.parquet"]


_KEY = {"X-Api-Key": SIGNATURE, "Cookie": f"session={SIGNATURE}"}
_BEARER = {"client_kwargs": {"headers": {"Authorization": f"Bearer {SIGNATURE}"}}}


@pytest.mark.parametrize("after", ["", "-after-2"])
@pytest.mark.parametrize(
    "settings", [{"headers": _KEY}, {"client_kwargs": {"headers": _KEY}},
                 {"client_kwargs": {"cookies": _KEY}}]
)  # fmt: skip
def test_a_redirect_to_another_host_takes_no_secret_there(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str, settings: Any
) -> None:
    monkeypatch.setitem(fsspec.config.conf, "http", settings)
    source = f"{address}/elsewhere{after}/x.parquet"
    status, said = _encode(source, tmp_path / "store")
    assert status == DISK
    assert said.startswith(f"Error: cannot read {source}: it redirects to http://localhost:")
    assert ", to which the headers of fsspec's configuration are not sent" in said
    assert "\n" not in said
    assert SIGNATURE not in said
    assert not {"localhost", "localhost with secret"}.intersection(_asked(address)[1])
    # On its own host, the server may redirect.
    status, said = _encode(f"{address}/moved/x.parquet", tmp_path / "store")
    assert "403, message='Forbidden'" in said
    status, said = _encode(f"{address}/quoted/x.parquet", tmp_path / "store")
    assert "403, message='not with " in said
    assert SIGNATURE not in said


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("conf.ini", f"[http\nAuthorization: Bearer {SIGNATURE}"),
        ("conf.json", f'{{"http": {{"headers": "{SIGNATURE}"'),
        ("conf.json", f'{{"http": "{SIGNATURE}"}}'),
        ("conf.json", f'{{"http": {{"client_kwargs": "{SIGNATURE}"}}}}'),
        ("conf.json", f'{{"http": {{"headers": ["{SIGNATURE}"]}}}}'),
        ("conf.json", f'{{"http": {{"headers": {{"X-Key": ["{SIGNATURE}"]}}}}}}'),
        ("conf.json", f'{{"http": {{"client_kwargs": {{"cookies": "{SIGNATURE}"}}}}}}'),
        ("conf.json", f'{{"http": {{"client_kwargs": {{"{SIGNATURE}": 1}}}}}}'),
        ("conf.json", "[" * 10**5),
        ("conf.json/is a folder", ""),
    ],
)
def test_a_broken_configuration_of_fsspec_is_not_shown(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    monkeypatch.setenv("FSSPEC_CONFIG_DIR", str(tmp_path))
    command = ("encode", f"{address}/x.parquet", "--embedding-column", "e", "--store", "s")
    with process(*command) as child:
        out, said = child.communicate()
    assert child.returncode == (OPTIONS if content else DISK)
    assert "the configuration of fsspec" in said
    assert SIGNATURE not in out + said
    assert len(said.splitlines()) == 1


def test_a_traceback_shows_no_line_of_the_configuration(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conf.ini").write_text(f"headers = {SIGNATURE}")
    monkeypatch.setenv("FSSPEC_CONFIG_DIR", str(tmp_path))
    config = "BuildConfig(corpus=sys.argv[1], embedding_column='e', store='s')"
    code = f"import sys; from whiten_index import *; encode_corpus({config})"
    with process(f"{address}/x.parquet", code=code) as child:
        said = child.communicate()[1]
    assert "ConfigError: the configuration of fsspec" in said
    assert SIGNATURE not in said


def test_a_bearer_that_a_server_quotes_is_hidden(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fsspec.config.conf, "http", _BEARER)
    _, said = _encode(f"{address}/quoted/x.parquet", tmp_path / "store")
    assert "403, message='not with " in said
    assert SIGNATURE not in said


def test_a_redirect_to_another_port_takes_no_secret_there(
    address: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fsspec.config.conf, "http", {"headers": _KEY})
    there = other.rpartition(":")[2]
    status, said = _encode(f"{address}/port{there}/x.parquet", tmp_path / "store")
    assert status == DISK
    assert f"it redirects to http://127.0.0.1:{there}, to which" in said
    assert _asked(other)[1] == ["127.0.0.1"]  # by this line


@pytest.mark.parametrize("headers", [{}, {"Authorization": SIGNATURE, "User-Agent": "a"}])
def test_a_redirect_to_another_host_is_followed_without_a_secret(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str]
) -> None:
    """Servers of public files redirect; ``Authorization`` is left out by aiohttp."""
    monkeypatch.setitem(fsspec.config.conf, "http", {"client_kwargs": {"headers": headers}})
    status, said = _encode(f"{address}/elsewhere/x.parquet", tmp_path / "store")
    assert status == 0, said
    asked = _asked(address)[1]
    assert "localhost" in asked
    assert "localhost with secret" not in asked


@pytest.mark.parametrize("how", ["404", "410"])
def test_only_a_server_that_says_so_has_no_such_file(
    address: str, tmp_path: Path, how: str
) -> None:
    source = f"{address}/{how}/x.parquet"
    status, said = _encode(source, tmp_path / "store")
    assert (status, said) == (CORPUS, f"Error: {source} does not exist; check the path")


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("401", "401, message='Unauthorized'"),
        ("403", "403, message='Forbidden'"),
        ("500", "500, message='Internal Server Error'"),
        ("503", "503, message='Service Unavailable'"),
        ("reset", "Server disconnected"),
        ("slow", "TimeoutError"),
        ("moved", "403, message='Forbidden'"),
        ("long", "the answer is longer than the range"),
        # After its footer was read.
        ("500-after-1", "500, message='Internal Server Error'"),
        ("403-after-2", "403, message='Forbidden'"),
        ("reset-after-2", "Server disconnected"),
        ("slow-after-2", "TimeoutError"),
        ("short-after-2", "Response payload is not completed"),
        ("part-after-2", "the answer is not the range that was asked for"),
        ("other-after-2", "the answer is not the range that was asked for"),
        ("200-after-2", "the answer is not the range that was asked for"),
        ("416-after-2", "it refuses a range of the file"),
        ("whole", "The HTTP server doesn't appear to support range requests"),
    ],
)
def test_a_server_that_refuses_or_fails_is_told_as_such(
    address: str, tmp_path: Path, how: str, why: str
) -> None:
    source = f"{address}/{how}/x.parquet"
    status, said = _encode(source, tmp_path / "store")
    assert status == DISK
    assert said.startswith(f"Error: cannot read {source}: ")
    assert why in said
    assert SIGNATURE not in said
    assert said.endswith("check the address, its server and keys, then run the same command again")
    config = BuildConfig(corpus=source, embedding_column="embedding", store=tmp_path / "store")
    with pytest.raises(StorageError) as raised:
        encode_corpus(config)
    assert SIGNATURE not in "".join(traceback.format_exception(raised.value))


def test_a_glob_at_a_server_that_refuses_is_not_empty(address: str, tmp_path: Path) -> None:
    status, said = _encode(f"{address}/403/*.parquet", tmp_path / "store")
    assert status == DISK
    assert "403, message='Forbidden'" in said


@pytest.mark.parametrize("how", _SAME)
def test_a_file_that_changes_while_tag_and_date_stay(
    address: str, tmp_path: Path, how: str
) -> None:
    """Its footer is read again after all of its rows."""
    place = f"{how}-after-999/x.parquet"
    assert _encode(f"{address}/{place}", tmp_path / "store")[0] == 0
    count = _asked(address)[0][f"/{place}"]
    status, said = _encode(f"{address}/{how}-after-{count - 1}/x.parquet", tmp_path / "other")
    assert (status, "x.parquet changed while it was read" in said) == (CORPUS, True)


@pytest.mark.parametrize("how", ["404", "dated", "tagged"])
def test_a_file_that_vanishes_or_has_another_date_has_changed(
    address: str, tmp_path: Path, how: str
) -> None:
    """Many servers give no ETag; and one that is put back has the ETag that it had."""
    status, said = _encode(f"{address}/{how}-after-2/x.parquet", tmp_path / "store")
    assert status == CORPUS
    assert "x.parquet changed while it was read" in said
    assert _encode(f"{address}/{how}-after-999/x.parquet", tmp_path / "store")[0] == 0
