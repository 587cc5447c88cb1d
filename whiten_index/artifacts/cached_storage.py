"""A prefix in a bucket, and a local folder with copies of what was read or written there.

The bucket counts: what is not in it is of no use to other machines, and what is there already is
not replaced but by who found it damaged. Nothing in it is ever renamed. An artifact, a folder with
a manifest, lies there as::

    <name>/manifest.json            put last, and only where there is none
    <name>/<stamp>/<file>           its files; the stamp is of the manifest's own bytes

so that of two writers of one artifact neither touches the other's files, and whoever sees a
manifest sees all that it names, of one writer.

A copy has a note of the sizes and e-tags that its objects had when they were copied, that of a
single file in ``.objects``. Where the bucket now lists others, the copy proves nothing: the objects
are read again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from whiten_index.artifacts.atomic import discard, make_folder, replace_file
from whiten_index.artifacts.files import (
    exists,
    is_file,
    is_folder,
    reading,
    resolved,
    sha256_file,
    writing,
)
from whiten_index.artifacts.manifest import MANIFEST
from whiten_index.artifacts.object_store import ANY, Bucket, ChangedError, Stat, Tag, plain_uri
from whiten_index.artifacts.storage import (
    DOWNLOADS,
    FILE_NOTES,
    HERE,
    NOTE,
    Here,
    Place,
    cache_folder,
    files_in,
    is_sound,
    make_cache,
    manifest_of,
    stamp,
)
from whiten_index.errors import ArtifactError, BusyError, ConfigError
from whiten_index.paths import as_place, is_uri, require_no_secret

_AT_ONCE = 16
# Folder of copies -> what it has copies of, for messages alone.
_URIS: dict[str, str] = {}


class Mirror(Here):
    """A prefix in a bucket with a folder of copies; pickled, it knows its URI only.

    Attributes:
        uri: of the prefix.
        folder: of the copies, on this machine.
    """

    def __init__(self, uri: str) -> None:
        """Take the URI; nothing is asked of the server yet.

        Raises:
            ConfigError: it names no bucket, or obstore is not installed.
        """
        self._bucket = Bucket(uri)
        self.uri = self._bucket.uri
        self.folder = cache_folder(self.uri)
        _URIS[str(self.folder)] = self.uri
        # By the first part of the path. Listed on first need, then kept up to date.
        self._known: dict[str, Listing] = {}
        self._listing = threading.Lock()
        self._failed: set[str] = set()
        self._again: set[str] = set()
        self._dropped: set[str] = set()
        self.mended: list[str] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return Mirror, (self.uri,)

    def fetch(self, path: Path, *, compare: bool = False) -> None:
        """Get an artifact or a file that is in the bucket and not here; see ``Here``."""
        key = self._key(path)
        if exists(path):
            if compare and self._is_known(key) and self._differs(key, path):
                # Once is enough: it may be gigabytes.
                self._again.add(key)
                if not self._take(key, path):
                    raise ArtifactError(
                        f"{self.uri}/{key} is damaged: it changed since this machine uploaded or "
                        f"downloaded it; whiten-index verify {self.uri} names what is damaged, and "
                        "the same build, run on this machine, mends it from a copy"
                    )
            return
        known = self._listed(key)
        if known.is_artifact(key):
            if key not in self._failed and not self._get_artifact(key, path):
                self._failed.add(key)
        elif key in known and not self._get_file(key, path):
            known.discard(key)

    def fetch_all(self, paths: Iterable[Path]) -> None:
        """Fetch several at a time: what takes long of a small one is to wait for the answer."""
        wanted = [path for path in dict.fromkeys(paths) if not exists(path)]
        pool = ThreadPoolExecutor(_AT_ONCE)
        try:
            for _ in pool.map(self.fetch, wanted):
                pass
        finally:
            # Where one failed, or was interrupted, the others are not waited for.
            pool.shutdown(cancel_futures=True)

    def fetch_again(self, path: Path) -> bool:
        """Replace a damaged copy, once, by what the bucket has; return whether that is sound."""
        key = self._key(path)
        if key in self._again or not self._is_known(key):
            return False
        self._again.add(key)
        if self._listed(key).is_artifact(key):
            return self._take(key, path)
        return self._get_file(key, path)

    def latest(self, path: Path) -> Tag | None:
        """Make a file what the bucket has now; return its tag, None where it has none."""
        key = self._key(path)
        # What is right below the prefix is no store's, and is not worth a listing.
        listed = "/" in key
        if listed and key not in self._listed(key):
            return None
        found = self._bucket.get(key)
        if found is None:
            if listed:
                self._listed(key).discard(key)
            path.unlink(missing_ok=True)
            return None
        if not exists(path) or path.read_bytes() != found[0]:
            with writing(path):
                make_folder(path.parent)
                replace_file(path, found[0])
        return found[1]

    def settle(self, path: Path) -> None:
        """Make a copy of an artifact what the bucket has of it, if that is sound."""
        key = self._key(path)
        if not exists(path):
            self.fetch(path)
        elif self._is_known(key) and self._differs(key, path) and not self._take(key, path):
            self._dropped.add(key)

    def keep(self, path: Path) -> None:
        """Put a sound artifact or file into the bucket, if it is missing or damaged there."""
        key = self._key(path)
        was_there = exists(path / NOTE)
        if is_folder(path) and key not in self._dropped:
            self.settle(path)
        known = self._is_known(key) and key not in self._dropped
        if not known or (is_file(path) and not self._has_same_file(key, path)):
            self.push(path)
            self.mended += [f"{self.uri}/{key}"] if was_there else []

    def differs(self, path: Path) -> bool:
        """Return whether the bucket has something else by now than what a copy is a copy of."""
        return exists(path / NOTE) and self._differs(self._key(path), path)

    def push(self, path: Path) -> None:
        """Put an artifact or file into the bucket; the artifact that is there already counts.

        Raises:
            StorageError: the server does not take it.
        """
        key = self._key(path)
        with writing(path):
            if is_folder(path):
                self._push_artifact(key, path)
            else:
                stat = self._bucket.upload(key, path)
                self._listed(key).add(key, stat)
                self._note_file(key)

    def _push_artifact(self, key: str, path: Path) -> None:
        data, pointer = manifest_of(path), f"{key}/{MANIFEST}"
        for name in files_in(data) or ():
            stat = self._bucket.upload(f"{key}/{stamp(data)}/{name}", path / name)
            self._listed(key).add(f"{key}/{stamp(data)}/{name}", stat)
        try:
            stat = self._bucket.put(pointer, data, over=ANY if key in self._dropped else None)
            self._listed(key).add(pointer, stat)
            replace_file(path / NOTE, self._note(key, data))
        except ChangedError:
            # Another machine made the same meanwhile. What others pick from it is in the bucket.
            self.look_again()
            self._remove_copy(path)
            self.fetch(path)
        self._dropped.discard(key)

    def replace(self, path: Path, data: bytes, tag: Tag | None) -> None:
        """Put a file where it is still what ``latest`` saw.

        Raises:
            ChangedError: it is not.
        """
        self._bucket.put(self._key(path), data, over=tag)
        replace_file(path, data)

    def drop(self, path: Path) -> None:
        """Remove a damaged artifact here, and write what comes in its place over the bucket's."""
        key = self._key(path)
        if self._listed(key).discard(f"{key}/{MANIFEST}"):
            self._dropped.add(key)
        self._remove_copy(path)

    def remove(self, path: Path) -> None:
        """Remove a file, here and in the bucket."""
        key = self._key(path)
        self._bucket.delete(key)
        self._listed(key).discard(key)
        path.unlink(missing_ok=True)

    def holds(self, path: Path) -> bool:
        """Return whether an artifact or file is in the bucket, sound or not."""
        return self._is_known(self._key(path))

    def has(self, path: Path) -> bool:
        """Return whether an artifact or file is here or in the bucket, sound or not."""
        return exists(path) or self._is_known(self._key(path))

    def names(self, folder: Path) -> set[str]:
        """Return the names of the artifacts and files in a folder of the bucket."""
        key = self._key(folder)
        return self._listed(key).names(key)

    def folders_with(self, root: Path, name: str, *, only: str | None = None) -> list[Path]:
        """Return the folders below the prefix that have a file of that name, made the latest."""
        folders = [root / each for each in (self._bucket.folders() if only is None else [only])]
        return [folder for folder in folders if self.latest(folder / name) is not None]

    def look_again(self) -> bool:
        """Take note of what others put into the bucket since."""
        self._known.clear()
        self._failed.clear()
        return True

    def manifest(self, path: Path) -> bytes | None:
        """Return the bytes of an artifact's manifest in the bucket, None where it has none."""
        found = self._bucket.get(f"{self._key(path)}/{MANIFEST}")
        return None if found is None else found[0]

    def size(self, path: Path) -> int:
        """Return the bytes of all objects of an artifact."""
        key = self._key(path)
        return sum(self._listed(key).below(key).values())

    def sizes(self, path: Path, data: bytes) -> dict[str, int]:
        """Return the bytes of the files of an artifact in the bucket, by name."""
        key = self._key(path)
        return self._listed(key).below(f"{key}/{stamp(data)}")

    def _key(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _listed(self, key: str) -> Listing:
        area = key.split("/")[0]
        with self._listing:
            if area not in self._known:
                self._known[area] = Listing(self._bucket.objects(area))
            return self._known[area]

    def _is_known(self, key: str) -> bool:
        known = self._listed(key)
        return key in known or known.is_artifact(key)

    def digest(self, path: Path) -> tuple[int, str] | None:
        """Return the bytes of an object and their SHA-256 as it is read now, None for no object."""
        key = self._key(path)
        return self._bucket.digest(key, self._listed(key).size(key))

    def _note(self, key: str, data: bytes) -> bytes:
        """Return what a copy notes of the objects that it is a copy of."""
        names = [MANIFEST, *(f"{stamp(data)}/{name}" for name in files_in(data) or ())]
        return json.dumps(self._listed(key).stats(f"{key}/{name}" for name in names)).encode()

    def _differs(self, key: str, path: Path) -> bool:
        try:
            with reading(path):
                noted = (path / NOTE).read_bytes()
            return noted != self._note(key, manifest_of(path))
        except FileNotFoundError:
            return True

    def _take(self, key: str, path: Path) -> bool:
        """Replace a copy by what the bucket has, if that is sound; return whether it is."""
        with self._downloading(path) as temporary:
            if not self._get_artifact(key, temporary) or not is_sound(temporary):
                return False
            self._remove_copy(path)
            _rename(temporary, path)
        return True

    def _get_artifact(self, key: str, path: Path) -> bool:
        """Download an artifact whole or not at all; return whether the bucket has all of it."""
        found = self._bucket.get(f"{key}/{MANIFEST}")
        names = None if found is None else files_in(found[0])
        if found is None or names is None:
            return False
        with self._downloading(path) as temporary:
            temporary.mkdir()
            for name, size in names.items():
                source = f"{key}/{stamp(found[0])}/{name}"
                if not self._bucket.download(source, temporary / name, size):
                    return False
            (temporary / MANIFEST).write_bytes(found[0])
            (temporary / NOTE).write_bytes(self._note(key, found[0]))
            _rename(temporary, path)
        return True

    def _get_file(self, key: str, path: Path) -> bool:
        with self._downloading(path) as temporary:
            if not self._bucket.download(key, temporary, self._listed(key).size(key)):
                return False
            temporary.replace(path)
            self._note_file(key)
        return True

    def _has_same_file(self, key: str, path: Path) -> bool:
        """Return whether the bucket has a file as it is here; read it if its e-tag is another."""
        note = self.folder / FILE_NOTES / key
        if exists(note) and note.read_bytes() == self._file_note(key):
            return True
        if self.digest(path) != (path.stat().st_size, sha256_file(path)):
            return False
        self._note_file(key)
        return True

    def _note_file(self, key: str) -> None:
        note = self.folder / FILE_NOTES / key
        if not exists(note.parent):
            make_folder(note.parent)
        note.write_bytes(self._file_note(key))

    def _file_note(self, key: str) -> bytes:
        return json.dumps(self._listed(key).stats([key])).encode()

    @contextlib.contextmanager
    def _downloading(self, path: Path) -> Iterator[Path]:
        """Give a path to write to, out of the way of those who tidy up, and remove what is left."""
        downloads = self.folder / DOWNLOADS
        temporary = downloads / uuid.uuid4().hex
        with writing(path):
            if not exists(downloads):
                make_folder(downloads)
            if not exists(path.parent):
                make_folder(path.parent)
            try:
                yield temporary
            finally:
                discard(temporary)

    def _remove_copy(self, path: Path) -> None:
        """Remove what is here, in one step for every reader."""
        if not exists(path):
            return
        with self._downloading(path) as aside, contextlib.suppress(FileNotFoundError):
            path.rename(aside)


def _rename(temporary: Path, path: Path) -> None:
    try:
        temporary.rename(path)
    except OSError as error:
        # Where another process was faster, its copy is as good.
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise


@contextlib.contextmanager
def naming() -> Iterator[None]:
    """Let the block's errors name the bucket, not the folder of its copies.

    Those of the disk name the folder, which is where it is full.
    """
    try:
        yield
    except (ArtifactError, BusyError, ConfigError) as error:
        text = str(error)
        for folder, uri in _URIS.items():
            text = text.replace(folder, uri)
        error.args = (text, *error.args[1:])
        raise


def place_of(place: Place | Mirror) -> tuple[Path, Here]:
    """Return the folder that a path or URI stands for, and what is to be known of its bucket.

    Raises:
        ConfigError: the URI is none of an object store or holds a secret, or obstore is not
            installed.
    """
    if isinstance(place, Mirror):
        return place.folder, place
    require_no_secret(place, what="the place")
    found = as_place(str(place), what="the place") if is_uri(place) else place
    if not is_uri(found):
        return Path(found), HERE
    mirror = Mirror(str(found))
    make_cache(mirror.folder)
    return mirror.folder, mirror


def settled(place: Place) -> Place:
    """Return a place in the form that names it whatever the working directory."""
    if isinstance(place, str) and is_uri(place):
        return plain_uri(place)
    return resolved(place)


_NONE: Stat = (0, "")
_OF_ARTIFACT = f"/{MANIFEST}"


class Listing:
    """Keys with their sizes and e-tags; an artifact is known by its folder, which has a manifest.

    Looking for one of a hundred thousand shards that is not there takes a look-up or two.
    """

    def __init__(self, objects: Mapping[str, Stat]) -> None:
        self._sizes = dict(objects)
        # By folders that were asked for.
        self._names: dict[str, set[str]] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._sizes

    def is_artifact(self, key: str) -> bool:
        """Return whether a folder has a manifest."""
        return f"{key}{_OF_ARTIFACT}" in self._sizes

    def size(self, key: str) -> int:
        """Return the bytes of an object, 0 without one."""
        return self._sizes.get(key, _NONE)[0]

    def stats(self, keys: Iterable[str]) -> dict[str, Stat]:
        """Return the sizes and e-tags of objects, of those that are there."""
        return {key: self._sizes[key] for key in keys if key in self._sizes}

    def add(self, key: str, stat: Stat) -> None:
        """Take note of an object."""
        self._sizes[key] = stat
        for folder, name in _places(key):
            if folder in self._names:
                self._names[folder].add(name)

    def discard(self, key: str) -> bool:
        """Forget an object; return whether it was known."""
        known = self._sizes.pop(key, None) is not None
        for folder, name in _places(key):
            if folder in self._names:
                self._names[folder].discard(name)
        return known

    def names(self, folder: str) -> set[str]:
        """Return the names of the artifacts and files right in a folder."""
        if folder not in self._names:
            # Copied, as another thread may add to it.
            places = (place for key in list(self._sizes) for place in _places(key))
            self._names[folder] = {name for parent, name in places if parent == folder}
        return set(self._names[folder])

    def below(self, folder: str) -> dict[str, int]:
        """Return the bytes of all objects below a folder, by their keys there."""
        prefix = f"{folder}/"
        found = list(self._sizes.items())
        return {key[len(prefix) :]: stat[0] for key, stat in found if key.startswith(prefix)}


def _places(key: str) -> list[tuple[str, str]]:
    """Return the folder and the name of a file, and those of an artifact by its manifest."""
    found = [_split(key)]
    if key.endswith(_OF_ARTIFACT):
        found.append(_split(key.removesuffix(_OF_ARTIFACT)))
    return found


def _split(key: str) -> tuple[str, str]:
    folder, _, name = key.rpartition("/")
    return folder, name
