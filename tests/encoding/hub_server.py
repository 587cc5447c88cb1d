"""A Hugging Face hub on this machine: as much of its HTTP as fetching a model takes.

What it answers is what the hub answers: names that moved are redirected by a relative address;
small files lie behind a redirect to a cache of the same host; weights lie on another host (here:
another port), which takes byte ranges and is given no token; a name that is not there is a 401 to
whoever is not logged in. Left out is Xet storage, which the hub offers beside plain downloads.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[2]
COMMAND_LINE = "from whiten_index.cli import main; main()"
_LARGE = (".safetensors", ".bin", ".h5", ".msgpack", ".onnx", ".ot")
_NAME = r"(?P<name>[^/]+/[^/]+|[^/]+)"
_API = re.compile(rf"/api/models/{_NAME}(/(?P<what>revision|tree)/(?P<revision>[^/]+))?")
_RESOLVE = re.compile(rf"/{_NAME}/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
_CACHE = re.compile(rf"/api/resolve-cache/models/{_NAME}/(?P<revision>[0-9a-f]{{40}})/(?P<file>.+)")


@dataclass(frozen=True)
class Request:
    """One request as the hub or its storage saw it.

    Attributes:
        host: ``hub`` or ``storage``.
        method: ``GET`` or ``HEAD``.
        path: with the query left out.
        status: answered.
        span: the header ``Range``, else empty.
        token: the header ``Authorization``, else empty.
    """

    host: str
    method: str
    path: str
    status: int
    span: str = ""
    token: str = ""


@dataclass
class Repo:
    """A model's files by commit, and who may read them.

    Attributes:
        commits: commit -> path -> content.
        branches: name -> commit.
        reader: the one token that may read a gated model, None where everyone may.
    """

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    reader: str | None = None

    def commit(self, revision: str) -> str | None:
        """Return the commit that a branch, or a commit itself or its beginning, stands for."""
        if revision in self.branches:
            return self.branches[revision]
        found = [each for each in self.commits if len(revision) > 6 and each.startswith(revision)]
        return found[0] if len(found) == 1 else None


class Hub:
    """The hub and its storage, each on a port of its own, until it is stopped.

    Attributes:
        log: the requests answered so far.
        moved: old name -> name.
        faults: name of a file in storage -> what befalls its next downloads, in turn: ``cut`` (the
            connection is closed after 90 %), ``reset`` (likewise, but torn) or ``503``.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.moved: dict[str, str] = {}
        self.faults: defaultdict[str, list[str]] = defaultdict(list)
        self.log = list[Request]()
        self._servers = [_serve(_HubHandler, self), _serve(_StorageHandler, self)]
        self.url, self.storage_url = (
            f"http://127.0.0.1:{server.server_address[1]}" for server in self._servers
        )

    def add(
        self, name: str, folder: Path, *, branch: str = "main", reader: str | None = None
    ) -> str:
        """Take in a folder as a branch of a model and return its commit."""
        files = {
            file.relative_to(folder).as_posix(): file.read_bytes()
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        }
        return self.commit(name, files, branch=branch, reader=reader)

    def commit(
        self, name: str, files: dict[str, bytes], *, branch: str = "main", reader: str | None = None
    ) -> str:
        """Make files the content of a branch and return the commit."""
        digests = {path: hashlib.sha256(data).hexdigest() for path, data in files.items()}
        commit = hashlib.sha1(json.dumps([name, branch, digests]).encode()).hexdigest()
        repo = self.repos.setdefault(name, Repo())
        repo.commits[commit] = files
        repo.branches[branch] = commit
        repo.reader = reader
        return commit

    def downloads(self, name: str) -> list[str]:
        """Return the paths of a model's files whose content was given away, once for each time."""
        prefixes = (f"/api/resolve-cache/models/{name}/", f"/{name}/")
        return sorted(
            request.path.removeprefix(prefix).partition("/")[2]
            for request, prefix in ((r, prefixes[r.host == "storage"]) for r in self.log)
            if request.method == "GET"
            and request.status in (200, 206)
            and request.path.startswith(prefix)
        )

    def stop(self) -> None:
        """Be gone: from now on connections are refused."""
        for server in self._servers:
            server.shutdown()
            server.server_close()


def at_hub(
    hub: Hub,
    home: Path,
    *arguments: Any,
    code: str = COMMAND_LINE,
    cwd: Path | None = None,
    **more: str,
) -> subprocess.CompletedProcess[str]:
    """Run Python in another process, whose only hub is ``hub`` and whose cache is ``home``."""
    # The tests' own setting keeps every other test off the network; here a user's is meant.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**inherited, **settings, "PYTHONPATH": str(ROOT), **more},
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
    )


def _serve(handler: type[_Handler], hub: Hub) -> ThreadingHTTPServer:
    bound = type(handler.__name__, (handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), bound)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server


def _digest(path: str, data: bytes) -> str:
    """Return what names a file's content: SHA-256 for a large file, git's own for others."""
    if path.endswith(_LARGE):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub
    host: str

    def log_message(self, *_: Any) -> None:
        """Keep standard error for the tests."""

    def do_HEAD(self) -> None:
        """Answer without a body."""
        self.answer(urlsplit(self.path).path)

    def do_GET(self) -> None:
        """Answer with a body."""
        self.answer(urlsplit(self.path).path)

    def answer(self, path: str) -> None:
        """Answer one request."""
        raise NotImplementedError

    def reply(self, status: int, body: bytes = b"", *, of: int = -1, **headers: object) -> None:
        """Send an answer; ``of`` is the length stated where the body ends before it."""
        span, token = (self.headers.get(each, "") for each in ("Range", "Authorization"))
        path = unquote(urlsplit(self.path).path)
        # Noted first: whoever has the answer finds it in the log.
        self.hub.log.append(Request(self.host, self.command, path, status, span, token))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if of < 0 else of))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class _HubHandler(_Handler):
    host = "hub"

    def answer(self, path: str) -> None:
        """Answer for a model's description, its list of files, or one of them."""
        found = _API.fullmatch(path) or _CACHE.fullmatch(path) or _RESOLVE.fullmatch(path)
        if found is None:
            self._refuse(404, "", "Sorry, we can't find the page you are looking for.")
            return
        name, asked = found["name"], unquote(found["revision"] or "main")
        if name in self.hub.moved:
            self.reply(307, Location=path.replace(f"/{name}", f"/{self.hub.moved[name]}", 1))
            return
        token = self.headers.get("Authorization", "")
        repo = self.hub.repos.get(name)
        commit = repo and repo.commit(asked)
        if repo is None:
            if token:
                self._refuse(404, "RepoNotFound", "Repository not found")
            else:
                self._refuse(401, "", "Invalid username or password.")
        elif commit is None:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {asked}")
        elif found.re is _API:
            self._describe(name, repo.commits[commit], commit, tree=found["what"] == "tree")
        elif repo.reader is not None and token != f"Bearer {repo.reader}":
            why = f"Access to model {name} is restricted."
            self._refuse(403 if token else 401, "GatedRepo", why)
        else:
            self._file(found, repo.commits[commit], commit)

    def _refuse(self, status: int, code: str, why: str, **more: str) -> None:
        headers = {"X-Error-Code": code, **more} if code else {}
        self.reply(status, json.dumps({"error": why}).encode(), X_Error_Message=why, **headers)

    def _describe(self, name: str, files: dict[str, bytes], commit: str, *, tree: bool) -> None:
        about: Any = {"id": name, "sha": commit, "siblings": [{"rfilename": p} for p in files]}
        if tree:
            about = [_entry(path, data) for path, data in files.items()]
            folders = {parent.as_posix() for path in files for parent in Path(path).parents}
            about += [
                {"type": "directory", "path": path, "size": 0, "oid": "0" * 40}
                for path in sorted(folders - {"."})
            ]
        self.reply(200, json.dumps(about).encode(), Content_Type="application/json")

    def _file(self, found: re.Match[str], files: dict[str, bytes], commit: str) -> None:
        name, path = found["name"], unquote(found["file"])
        if path not in files:
            self._refuse(404, "EntryNotFound", "Entry not found", X_Repo_Commit=commit)
            return
        etag = f'"{_digest(path, files[path])}"'
        if found.re is _CACHE:
            self.reply(200, files[path], ETag=etag, X_Repo_Commit=commit)
            return
        location = f"/api/resolve-cache/models/{name}/{commit}/{found['file']}"
        if path.endswith(_LARGE):
            location = f"{self.hub.storage_url}/{name}/{commit}/{found['file']}"
        linked = {"X-Linked-Size": len(files[path]), "X-Linked-ETag": etag}
        self.reply(
            302 if path.endswith(_LARGE) else 307, Location=location, X_Repo_Commit=commit, **linked
        )


class _StorageHandler(_Handler):
    host = "storage"

    def answer(self, path: str) -> None:
        """Answer with a large file or the rest of it, or fail as was asked."""
        name, commit, file = re.fullmatch(r"/(.+)/([0-9a-f]{40})/(.+)", unquote(path)).groups()  # type: ignore[union-attr]
        data = self.hub.repos[name].commits[commit][file]
        span = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(span[1]) if span else 0
        fault = self.hub.faults[file].pop(0) if self.hub.faults[file] else ""
        if fault.isdigit():
            self.reply(int(fault))
            return
        last = len(data) * 9 // 10 if fault else len(data)
        headers = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if span else {}
        self.reply(206 if span else 200, data[start:last], of=len(data) - start, **headers)
        if fault:
            self._hang_up(torn=fault == "reset")

    def _hang_up(self, *, torn: bool) -> None:
        self.wfile.flush()
        self.close_connection = True
        if torn:
            # Closed with nothing lingering, a socket sends a reset instead of an end.
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.connection.close()
        else:
            self.connection.shutdown(socket.SHUT_RDWR)


def _entry(path: str, data: bytes) -> dict[str, Any]:
    """Return what the hub lists of a file."""
    about: dict[str, Any] = {"type": "file", "path": path, "size": len(data)}
    if path.endswith(_LARGE):
        sha256 = _digest(path, data)
        about["lfs"] = {"oid": sha256, "size": len(data), "pointerSize": 134}
    return {**about, "oid": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()}
