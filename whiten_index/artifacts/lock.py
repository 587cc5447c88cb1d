"""One writer for each folder.

The writer holds ``flock`` on the file ``.lock`` and writes its host and process into it. The system
frees the lock when the process ends, however it ends. Some shared file systems do not share locks
between hosts. A lock that is free but names another host is therefore refused: only the user can
know whether that process is still alive.
"""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from whiten_index.artifacts.atomic import make_folder
from whiten_index.artifacts.files import exists, is_link, writing
from whiten_index.errors import ArtifactError, BusyError

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
