"""A bucket whose answers to reads are compared with its list of objects."""

import threading
from pathlib import Path

from typing_extensions import override

from whiten_index.artifacts.limits import MANIFEST_BYTES
from whiten_index.artifacts.object_store import ANY, Bucket, Digests, Stat, Tag, stat_of
from whiten_index.errors import StorageError


class ListedBucket(Bucket):
    """A bucket of which folders are listed on first need, and then kept up to date.

    A read whose size, of two tries, is not the listed one raises ``StorageError``: a proxy or a
    replica answers what is no content of the object, which may be sound. Objects right below the
    prefix are not worth a list, and not judged.
    """

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        # By the first part of the key.
        self._known: dict[str, dict[str, Stat]] = {}
        self._listing = threading.Lock()

    def listed(self, key: str) -> dict[str, Stat]:
        """Return what is listed in the folder of the first part of a key."""
        area = key.split("/")[0]
        with self._listing:
            if area not in self._known:
                self._known[area] = self.objects(area)
            return self._known[area]

    def stat(self, key: str) -> Stat | None:
        """Return what is listed of an object, None if nothing is."""
        return self.listed(key).get(key) if "/" in key else None

    def forget(self, key: str) -> None:
        """Take an object off the list."""
        self.listed(key).pop(key, None)

    def look_again(self) -> None:
        """Forget the lists, as another machine may have changed the objects."""
        self._known.clear()

    @override
    def put(self, key: str, data: bytes, *, over: Tag | None = ANY) -> Tag:
        tag = super().put(key, data, over=over)
        self._note(key, stat_of(len(data), tag))
        return tag

    @override
    def upload(self, key: str, path: Path) -> Stat:
        made = super().upload(key, path)
        self._note(key, made)
        return made

    @override
    def delete(self, key: str) -> None:
        super().delete(key)
        self.forget(key)

    @override
    def get(self, key: str) -> tuple[bytes, Tag] | None:
        for _ in range(2):
            found, listed = super().get(key), self.stat(key)
            size = None if found is None else len(found[0])
            if listed is not None and size == MANIFEST_BYTES + 1:
                size = listed.size  # it was cut
            if self._is_as_listed(key, size):
                return found
        raise self.contradiction(key)

    @override
    def download(self, key: str, path: Path) -> bool:
        for _ in range(2):
            there = super().download(key, path)
            if self._is_as_listed(key, path.stat().st_size if there else None):
                return there
        raise self.contradiction(key)

    @override
    def digest(self, key: str) -> Digests | None:
        for _ in range(2):
            found = super().digest(key)
            if self._is_as_listed(key, None if found is None else found.size):
                return found
        raise self.contradiction(key)

    @override
    def piece(self, key: str, start: int, stop: int) -> bytes:
        for _ in range(2):
            found, listed = super().piece(key, start, stop), self.stat(key)
            whole = len(found) == stop - start
            if self._is_as_listed(key, listed.size if listed and whole else None):
                return found
        raise self.contradiction(key)

    def contradiction(self, key: str) -> StorageError:
        """Return the error of an answer that is not what the server lists."""
        return StorageError(
            f"cannot read {self.uri}/{key}: what the server answers is another object than it "
            "lists, as from a broken proxy or a replica that lags; try again, and keep proxies "
            "from changing answers; if it stays so without any, the object is damaged: remove it, "
            "then run the build or encode that made it again"
        )

    def _note(self, key: str, there: Stat) -> None:
        if "/" in key:
            self.listed(key)[key] = there

    def _is_as_listed(self, key: str, size: int | None) -> bool:
        """Return whether the size of an answer, None for no object, is the listed one."""
        listed = self.stat(key)
        if listed is None or listed.size == size:
            return True
        # Another machine may have changed or removed it.
        there = self.objects(key.rpartition("/")[0]).get(key)
        if there is None:
            self.forget(key)
        else:
            self._note(key, there)
        return size == (None if there is None else there.size)
