"""Marks in a bucket, which has no locks: of those who write a place, and of one who cleans it.

Each puts a mark of its own and lists those of others afterwards, so that of two that meet at least
one sees the other. Many may write at once; who removes what nothing needs must be alone. A mark is
put again every minute, and before its owner publishes or removes some objects. It may be taken if
it was not for ten minutes, by the server's clock, or its owner ended on this host; a live owner
then stops.
"""

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from whiten_index.artifacts.lock import has_ended, named_owner, this_owner
from whiten_index.artifacts.object_store import Bucket, ChangedError, e_tag
from whiten_index.errors import ArtifactError, BusyError, StorageError
from whiten_index.paths import as_place

if TYPE_CHECKING:
    from whiten_index.artifacts.storage import Place

WRITER, CLEANER = "writer", "cleaner"
_FOLDER, _TAKEN = ".marks", b"taken"
_EVERY, _STALE = 60.0, 600.0


class _Mark:
    def __init__(self, bucket: Bucket, kind: str) -> None:
        self.bucket, self.kind = bucket, kind
        self.key = f"{_FOLDER}/{kind}-{uuid.uuid4().hex}"
        self._owner, self._putting = this_owner(), threading.Lock()
        self.bucket.put(self.key, self._content(), over=None)

    def _content(self) -> bytes:
        return json.dumps({**self._owner, "put": time.time_ns()}).encode()

    def require(self) -> None:
        """Put the mark again; raise ``BusyError`` if it was taken."""
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
        """Put the mark again every minute."""
        while not ended.wait(_EVERY):
            # What needs the mark asks for it, and fails there.
            with contextlib.suppress(BusyError, StorageError):
                self.require()

    def meet_others(self) -> None:
        """Raise ``BusyError`` if this may not go on."""
        there = self.bucket.objects(_FOLDER)
        if self.key not in there:
            raise BusyError(f"another process removes marks from {self.bucket.uri}; run it again")
        now = there.pop(self.key).modified
        for key, mark in there.items():
            both = {self.kind, key.removeprefix(f"{_FOLDER}/").partition("-")[0]}
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
