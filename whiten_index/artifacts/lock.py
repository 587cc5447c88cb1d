"""One writer for each folder, and marks in a bucket, which has no locks.

The writer of a folder holds ``flock`` on the file ``.lock`` and writes its host and process into
it. The system frees the lock when the process ends, however it ends. Some shared file systems do
not share locks between hosts. A lock that is free but names another host is therefore refused: only
the user can know whether that process is still alive.

In a bucket, every process that writes or cleans puts a marker object there, then lists the markers
of others. Of two processes at the same time, at least one therefore sees the other. Writers may run
together; a process that removes objects must be alone. A marker is put again every minute, and
before its process publishes or removes objects. One that was not put again for ten minutes, by the
clock of the bucket's server, or whose process on this host has ended, may be taken over; if the
process is still alive, it then stops.
"""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import socket
import stat
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whiten_index.artifacts.atomic import make_folder
from whiten_index.artifacts.files import exists, is_link, writing
from whiten_index.artifacts.object_store import Bucket, ChangedError, e_tag
from whiten_index.errors import ArtifactError, BusyError, StorageError
from whiten_index.paths import as_place

if TYPE_CHECKING:
    from whiten_index.artifacts.storage import Place

LOCK = ".lock"
_MOST_BYTES = 4096
_BUSY = (errno.EWOULDBLOCK, errno.EACCES, errno.EAGAIN)


@contextlib.contextmanager
def only_writer(folder: Path, *, what: str) -> Iterator[None]:
    """Hold the lock of ``folder``, a ``what`` that is created if it does not exist.

    Raises:
        BusyError: another process holds it, or one of another host did and may still be alive.
    """
    path = folder / LOCK
    with writing(folder):
        make_folder(folder)
        if exists(path) or is_link(path):
            _require_plain(path, path.lstat())
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        with writing(folder):
            _require_plain(path, os.fstat(descriptor))
            _acquire(descriptor, path, what)
        try:
            yield
        finally:
            # A lock that names nobody can be taken from any host.
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
    finally:
        # It ends the lock, whatever a file server says; the error of the block says more.
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _require_plain(path: Path, found: os.stat_result) -> None:
    """Refuse a lock that is a link of any kind or no file: its target would be truncated."""
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        raise ArtifactError(
            f"{path} is not a plain file, as a lock is; remove it, then run the same command again"
        )


def _acquire(descriptor: int, path: Path, what: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _BUSY:
            raise
        raise BusyError(
            f"{what} {path.parent} is being written by {named_owner(_content(descriptor))}; wait "
            "for it to end, or choose another folder"
        ) from error
    before, mine = _content(descriptor), this_owner()
    if _owner(before).get("host", mine["host"]) != mine["host"]:
        raise BusyError(
            f"{what} {path.parent} was locked by {named_owner(before)} and never unlocked. If that "
            f"process has ended, remove the lock and run the same command again: rm {path}"
        )
    data = json.dumps(mine).encode()
    # Longer text of a killed owner ends behind the new one until it is cut off.
    os.pwrite(descriptor, data, 0)
    os.ftruncate(descriptor, len(data))
    os.fsync(descriptor)


def _content(descriptor: int) -> bytes:
    return os.pread(descriptor, _MOST_BYTES, 0)


def this_owner() -> dict[str, Any]:
    """Return host, process and time of a lock that this process takes now."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"host": socket.gethostname(), "pid": os.getpid(), "space": _space(), "since": now}


def _space() -> str:
    """Return the boot and the container in which a number names a process; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def has_ended(data: bytes) -> bool:
    """Return whether the owner of a lock was a process of this host that has ended."""
    owner, mine = _owner(data), this_owner()
    here = mine["space"] and all(owner.get(name) == mine[name] for name in ("host", "space"))
    try:
        if here:
            os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return True
    except (OSError, KeyError, TypeError, OverflowError):
        pass
    return False


def _owner(data: bytes) -> dict[str, Any]:
    """Return host, process and start of a lock's owner, empty if it names none."""
    try:
        found = json.loads(data[:_MOST_BYTES])
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def named_owner(data: bytes) -> str:
    """Return the owner of a lock by its content, as messages name it."""
    owner = _owner(data)
    if not owner:
        return "another process"
    return f"process {owner.get('pid')} on {owner.get('host')} since {owner.get('since')}"


WRITER, CLEANER = "writer", "cleaner"
_MARKS, _TAKEN = ".marks", b"taken"
_EVERY, _STALE = 60.0, 600.0


class _Mark:
    def __init__(self, bucket: Bucket, kind: str) -> None:
        self.bucket, self.kind = bucket, kind
        self.key = f"{_MARKS}/{kind}-{uuid.uuid4().hex}"
        self._owner, self._putting = this_owner(), threading.Lock()
        self.bucket.put(self.key, self._content(), over=None)

    def _content(self) -> bytes:
        return json.dumps({**self._owner, "put": time.time_ns()}).encode()

    def require(self) -> None:
        with self._putting:
            found = self.bucket.get(self.key)
            if found is not None and found[0] != _TAKEN:
                with contextlib.suppress(ChangedError):
                    self.bucket.put(self.key, self._content(), over=found[1])
                    return
        raise BusyError(
            f"this process was not heard of for {_STALE / 60:g} minutes, and others may have "
            f"removed what it found in {self.bucket.uri}; run the same command again, which is "
            "quick, as what was encoded is kept"
        )

    def keep_until(self, ended: threading.Event) -> None:
        while not ended.wait(_EVERY):
            # What needs the mark asks for it, and fails there.
            with contextlib.suppress(BusyError, StorageError):
                self.require()

    def meet_others(self) -> None:
        """Raise ``BusyError`` if this may not go on."""
        there = self.bucket.objects(_MARKS)
        if self.key not in there:
            raise BusyError(f"another process removes marks from {self.bucket.uri}; run it again")
        now = there.pop(self.key).modified
        for key, mark in there.items():
            both = {self.kind, key.removeprefix(f"{_MARKS}/").partition("-")[0]}
            found = None if both == {WRITER} else self.bucket.get(key)
            ended = now - mark.modified >= _STALE or (found and has_ended(found[0]))
            if ended and self._take(key, mark.e_tag):
                continue
            if both != {WRITER}:
                raise BusyError(
                    f"{self.bucket.uri} is in use by {named_owner(found[0] if found else b'')}; "
                    f"wait for it to end, or, if it was killed elsewhere, for {_STALE / 60:g} "
                    "minutes, and run the same command again"
                )

    def _take(self, key: str, seen: str) -> bool:
        """Take a mark from its owner, unless that put it again by now."""
        found = self.bucket.get(key)
        try:
            if found is not None and e_tag(found[1]) != seen:
                return False
            if found is not None:
                self.bucket.put(key, _TAKEN, over=found[1])
        except ChangedError:
            return False
        self.bucket.delete(key)
        return True


# Of this process.
_HELD: list[_Mark] = []


@contextlib.contextmanager
def marked(place: "Place | None", kind: str) -> Iterator[None]:
    """Hold a mark at a place; a folder needs none, as it has locks.

    Raises:
        BusyError: another process cleans there, or writes while this one is to clean.
    """
    found = None if place is None else as_place(place, what="the place")
    if found is None or isinstance(found, Path):
        yield
        return
    mark, ended = _Mark(Bucket(found), kind), threading.Event()
    try:
        mark.meet_others()
        threading.Thread(target=mark.keep_until, args=(ended,), daemon=True).start()
        _HELD.append(mark)
        yield
    except ArtifactError:
        # Others may have written or removed since what was read, if the mark was taken.
        mark.require()
        raise
    finally:
        ended.set()
        if mark in _HELD:
            _HELD.remove(mark)
        with contextlib.suppress(StorageError):
            mark.bucket.delete(mark.key)


def require_marks() -> None:
    """Raise ``BusyError`` if a mark of this process was taken: it may not publish or remove."""
    for mark in list(_HELD):
        mark.require()
