"""One writer a folder: a lock that the system frees when its holder dies, however it dies."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from whiten_index.errors import BusyError
from whiten_index.manifest import writing

_LOCK, _OWNER = ".lock", ".lock-owner"


@contextlib.contextmanager
def only_writer(folder: Path, *, what: str) -> Iterator[None]:
    """Hold ``folder`` for the block.

    Args:
        folder: made if it is not there.
        what: how to call it in the error.

    Raises:
        BusyError: another process holds it; the message says which.
        OutputError: the folder cannot be written.
    """
    import filelock

    # A soft lock, filelock's substitute where the system has none, would outlive its holder.
    lock = filelock.FileLock(folder / _LOCK, timeout=0, fallback_to_soft=False)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except filelock.Timeout as error:
            raise BusyError(
                f"{what} {folder} is being written by {_owner(folder)}; wait for it to end, or "
                "choose another folder"
            ) from error
    try:
        with writing(folder):
            (folder / _OWNER).write_text(_me())
        yield
    finally:
        (folder / _OWNER).unlink(missing_ok=True)
        lock.release()


def _me() -> str:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return f"process {os.getpid()} on {socket.gethostname()} since {now}"


def _owner(folder: Path) -> str:
    try:
        return (folder / _OWNER).read_text() or "another process"
    except OSError:
        return "another process"
