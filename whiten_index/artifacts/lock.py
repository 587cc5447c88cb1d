"""One writer a folder: a lock that the system frees when its holder dies, however it dies.

The system's own lock has the first word: while it is held the folder is busy, and where it is free
an owner of this host is dead. Some shared file systems keep such locks to one host, so the owner
also says who he is in a file that he renews; another host's owner holds the folder as long as he
does. Ages are told by the file system's clock, and nobody is taken for dead who was not watched
for a while, so that no clock put right takes a folder from its owner.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import json
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whiten_index.artifacts.atomic import host_facts, make_folder
from whiten_index.artifacts.files import writing
from whiten_index.errors import BusyError

RENEWED_EVERY = 30.0  # seconds
STALE_AFTER = 600.0
_LOCK, _OWNER = ".lock", ".lock-owner"
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_TRIES, _MOST_BYTES = 100, 4096


@contextlib.contextmanager
def only_writer(folder: Path, *, what: str) -> Iterator[Held]:
    """Hold ``folder`` for the block.

    Args:
        folder: made if it is not there.
        what: how to call it in the error.

    Raises:
        BusyError: another process holds it; the message says which. At the end of the block:
            another host took it over, as this process showed no sign of life for too long.
        StorageError: the folder cannot be written.
    """
    import filelock

    # A soft lock, filelock's substitute where the system has none, would outlive its holder.
    lock = filelock.FileLock(folder / _LOCK, timeout=0, fallback_to_soft=False)
    with writing(folder):
        make_folder(folder)
        try:
            lock.acquire()
        except filelock.Timeout as error:
            seen = _look(folder / _OWNER)
            raise BusyError(_busy(folder, what, seen)) from error
    try:
        with writing(folder):
            held = Held(folder, what)
            held.claim()
        with held.renewed():
            yield held
    finally:
        lock.release()


class Held:
    """A folder that this process is the one writer of."""

    def __init__(self, folder: Path, what: str) -> None:
        self._folder, self._what = folder, what
        self._path = folder / _OWNER
        # The thread that renews the file may have to make it anew, and so may this one.
        self._making = threading.Lock()
        self._me = {**host_facts(), "pid": os.getpid(), "since": _now(), "token": uuid.uuid4().hex}

    def require(self) -> None:
        """Check that this is so still; for right before what cannot be taken back.

        Raises:
            BusyError: another host took the folder over.
            StorageError: the disk does not tell.
        """
        with writing(self._path):
            seen = _look(self._path)
            if seen is None and not self._create():
                seen = _look(self._path)
        self._refuse(seen)

    def claim(self) -> None:
        """Become the owner.

        Raises:
            BusyError: another host's process is.
        """
        watched: _Seen | None = None
        for _ in range(_TRIES):
            if self._create():
                return
            seen = _look(self._path)
            if seen is None:
                continue
            if self._is_mine(seen):
                # The file system made the link and lost the answer.
                return
            if seen.here or seen == watched:
                self._remove(seen)
            elif watched is not None or self._is_fresh(seen):
                break
            else:
                watched = seen
                time.sleep(2 * RENEWED_EVERY)
        raise BusyError(_busy(self._folder, self._what, _look(self._path), shared=True))

    @contextlib.contextmanager
    def renewed(self) -> Iterator[None]:
        """Show signs of life during the block, and leave the folder at its end."""
        ended = threading.Event()

        def renew() -> None:
            while not ended.wait(RENEWED_EVERY):
                # A disk that fails for a while may do so for less than it takes to be given up.
                with contextlib.suppress(OSError):
                    seen = _look(self._path)
                    if seen is None:
                        self._create()
                    elif self._is_mine(seen):
                        os.utime(self._path)

        thread = threading.Thread(target=renew, name="lock", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            # Left behind it is that of a dead process, which the next one of this host removes.
            seen = None
            with contextlib.suppress(OSError):
                seen = _look(self._path)
                if seen is not None and self._is_mine(seen):
                    self._path.unlink(missing_ok=True)
        self._refuse(seen)

    def _refuse(self, seen: _Seen | None) -> None:
        if seen is None or self._is_mine(seen):
            return
        raise BusyError(
            f"{self._what} {self._folder} was taken over by {seen}, as this process showed no sign "
            f"of life for {STALE_AFTER / 60:g} minutes; look at what is there, and run the same "
            "command again when that one has ended"
        )

    def _is_mine(self, seen: _Seen) -> bool:
        return seen.owner.get("token") == self._me["token"]

    def _is_fresh(self, seen: _Seen) -> bool:
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".tmp-clock-") as probe:
            os.utime(probe.name)
            age = os.stat(probe.name).st_mtime - seen.renewed  # noqa: PTH116 (its name is a text)
        return -2 * RENEWED_EVERY <= age <= STALE_AFTER

    def _create(self) -> bool:
        """Make the owner's file, with all that is in it; tell whether there was none."""
        with self._making:
            return self._make()

    def _make(self) -> bool:
        temporary = self._aside("new")
        try:
            # What a killed process left may be a second name of the owner's file.
            temporary.unlink(missing_ok=True)
            with temporary.open("w", encoding="utf-8") as file:
                json.dump(self._me, file)
                file.flush()
                os.fsync(file.fileno())
            return _put_in_place(temporary, self._path)
        finally:
            temporary.unlink(missing_ok=True)

    def _remove(self, dead: _Seen) -> None:
        """Remove the file of a dead owner, unless another host did and has its own there."""
        aside = self._aside("old")
        try:
            self._path.rename(aside)
        except FileNotFoundError:
            return
        taken = _look(aside)
        if taken is not None and taken.text != dead.text:
            with contextlib.suppress(OSError):
                os.link(aside, self._path)
        aside.unlink(missing_ok=True)

    def _aside(self, name: str) -> Path:
        # One name a host, so that what a killed process leaves is written over.
        host = hashlib.sha256(json.dumps(host_facts()).encode()).hexdigest()[:12]
        return self._folder / f".tmp-{host}~{name}{_OWNER}"


@dataclass(frozen=True)
class _Seen:
    """An owner's file: what it says, and when it was renewed by the file system's clock."""

    text: str
    renewed: float

    @property
    def owner(self) -> Mapping[str, Any]:
        """Return what it says, nothing where that is not understood."""
        try:
            found = json.loads(self.text)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def here(self) -> bool:
        """Tell whether the owner is, or was before the last boot, of this very host.

        One of the same kernel and another name, as in another container, is none: what both see as
        a folder may be mounts that know nothing of each other's locks.
        """
        me, owner = host_facts(), self.owner
        same = {name for name, value in me.items() if value == owner.get(name)}
        return "host" in same and bool(same & {"boot", "machine"})

    def __str__(self) -> str:
        owner = self.owner
        life = datetime.datetime.fromtimestamp(self.renewed, datetime.UTC)
        who = self.text.strip() or "another process"
        if owner:
            who = f"process {owner.get('pid')} on {owner.get('host')} since {owner.get('since')}"
        return f"{who} (last sign of life {life.isoformat(timespec='seconds')})"


def _look(path: Path) -> _Seen | None:
    try:
        # Opened, not only looked at: over a network this asks the server.
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES)
            return _Seen(data.decode(errors="replace"), os.fstat(file.fileno()).st_mtime)
    except FileNotFoundError:
        return None


def _put_in_place(temporary: Path, path: Path) -> bool:
    """Give a file its name, unless there is one of that name; tell whether there was none."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if path.exists():
            return False
        temporary.rename(path)
    return True


def _busy(folder: Path, what: str, seen: _Seen | None, *, shared: bool = False) -> str:
    gone = (
        f"; if that host is gone, run again {STALE_AFTER / 60:g} minutes after its last sign of "
        "life"
    )
    return (
        f"{what} {folder} is being written by {seen or 'another process'}; wait for it to end, or "
        f"choose another folder{gone if shared else ''}"
    )


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
