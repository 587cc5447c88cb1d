"""A prefix in a bucket, with a local cache of its artifacts and files.

The bucket counts: an object there is only replaced if it was found damaged, and none is ever
renamed. An artifact, a folder with a manifest, is kept as::

    <name>/manifest.json            put last, and only if absent
    <name>/<stamp>/<file>           its files; the stamp is a hash of the manifest

so that two writers of one artifact never touch each other's files, and a manifest is only visible
with all files that it names, of one writer.

A copy has a note of the sizes and e-tags that its objects had when they were copied; that of a
single file is in ``.objects``. If the bucket lists others now, the objects are read again.
"""

import contextlib
import hashlib
import json
import logging
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from typing_extensions import override

from whiten_index.artifacts.atomic import (
    make_folder,
    remove_killed,
    rename_unless_taken,
    replace_file,
    temporary_folder,
)
from whiten_index.artifacts.files import (
    exists,
    is_file,
    is_folder,
    read_bytes,
    reading,
    sha256_file,
    writing,
)
from whiten_index.artifacts.limits import MANIFEST_BYTES, load_json
from whiten_index.artifacts.manifest import (
    MANIFEST,
    Files,
    Schema,
    check_files,
    fingerprint,
    sealed_json,
)
from whiten_index.artifacts.object_store import ANY, Bucket, ChangedError, Stat, Tag, endpoint
from whiten_index.artifacts.storage import LOCAL, Place, Storage
from whiten_index.errors import ArtifactError, BusyError, ConfigError, FormatError, StorageError
from whiten_index.paths import as_place

_AT_ONCE = 16
_DOWNLOADS = ".downloads"
# In a copy of an artifact: sizes and e-tags of its objects. In the cache: those of single files.
_NOTE, _FILE_NOTES = ".objects.json", ".objects"
_FILES = Schema("files", 1, Files)
# Cache folder -> URI, for messages.
_URIS: dict[str, str] = {}
_LOG = logging.getLogger(__name__)


class Listing(dict[str, Stat]):
    """Objects by key, with sizes and e-tags; a folder with a manifest is an artifact."""

    def is_artifact(self, key: str) -> bool:
        """Return whether a folder has a manifest."""
        return f"{key}/{MANIFEST}" in self

    def names(self, folder: str) -> set[str]:
        """Return the names of the artifacts and files right in a folder."""
        # An artifact has one object with this name, and its other files are a folder below.
        keys = (key.removesuffix(f"/{MANIFEST}") for key in self.below(folder))
        return {key for key in keys if "/" not in key}

    def below(self, folder: str) -> dict[str, int]:
        """Return the bytes of all objects below a folder, by their keys there."""
        prefix = f"{folder}/"
        # Copied, as another thread may add to it.
        found = list(self.items())
        return {key[len(prefix) :]: stat[0] for key, stat in found if key.startswith(prefix)}


class BucketStorage(Storage):
    """A prefix in a bucket, with a cache in ``folder``; pickled, it keeps its URI only."""

    def __init__(self, uri: str) -> None:
        """Take the URI, without a request to the server."""
        self._bucket = Bucket(uri)
        self.uri = self._bucket.uri
        self.folder = _cache_folder(self.uri)
        _URIS[str(self.folder)] = self.uri
        # By the first part of the path. Listed on first need, then kept up to date.
        self._known: dict[str, Listing] = {}
        self._listing = threading.Lock()
        self._failed: set[str] = set()
        self._again: set[str] = set()
        self._dropped: set[str] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return BucketStorage, (self.uri,)

    @override
    def fetch(self, path: Path, *, compare: bool = False) -> None:
        key = self._key(path)
        if exists(path):
            if compare and self._is_known(key) and self._differs(key, path):
                # Once is enough: it may be gigabytes.
                self._again.add(key)
                if not self._get_artifact(key, path, replace=True):
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
            known.pop(key, None)

    @override
    def fetch_all(self, paths: Iterable[Path]) -> None:
        wanted = [path for path in dict.fromkeys(paths) if not exists(path)]
        pool = ThreadPoolExecutor(_AT_ONCE)
        try:
            for _ in pool.map(self.fetch, wanted):
                pass
        finally:
            # After a failure or an interrupt, the others are not waited for.
            pool.shutdown(cancel_futures=True)

    @override
    def fetch_again(self, path: Path) -> bool:
        key = self._key(path)
        if key in self._again or not self._is_known(key):
            return False
        self._again.add(key)
        artifact = self._listed(key).is_artifact(key)
        got = self._get_artifact(key, path, replace=True) if artifact else self._get_file(key, path)
        if got:
            _LOG.warning(
                "note: the copy of %s/%s here was damaged, and was fetched again", self.uri, key
            )
        return got

    @override
    def latest(self, path: Path) -> Tag | None:
        key = self._key(path)
        # Files right below the prefix are of no store, and not worth a listing.
        listed = "/" in key
        if listed and key not in self._listed(key):
            return None
        found = self._bucket.get(key)
        if found is None:
            if listed:
                self._listed(key).pop(key, None)
            path.unlink(missing_ok=True)
            return None
        if _content(path) != found[0]:
            with writing(path):
                make_folder(path.parent)
                replace_file(path, found[0])
        return found[1]

    @override
    def settle(self, path: Path) -> None:
        try:
            self.fetch(path, compare=True)
        except ArtifactError:
            self._dropped.add(self._key(path))

    @override
    def keep(self, path: Path) -> None:
        key = self._key(path)
        was_there = exists(path / _NOTE) or exists(self.folder / _FILE_NOTES / key)
        if is_folder(path) and key not in self._dropped:
            self.settle(path)
        known = self._is_known(key) and key not in self._dropped
        if not known or (is_file(path) and not self._has_same_file(key, path)):
            self.push(path)
            if was_there:
                _LOG.warning(
                    "note: %s/%s was missing or damaged, and was put there again from a copy here",
                    self.uri,
                    key,
                )

    def differs(self, path: Path) -> bool:
        """Return whether the bucket has another artifact by now than when it was copied."""
        return exists(path / _NOTE) and self._differs(self._key(path), path)

    @override
    def push(self, path: Path) -> None:
        key = self._key(path)
        with writing(path):
            if is_folder(path):
                self._push_artifact(key, path)
            else:
                self._listed(key)[key] = self._bucket.upload(key, path)
                self._note_file(key)

    def _push_artifact(self, key: str, path: Path) -> None:
        data, pointer = read_bytes(path / MANIFEST, limit=MANIFEST_BYTES), f"{key}/{MANIFEST}"
        for name in _described(data) or ():
            target = f"{key}/{stamp(data)}/{name}"
            self._listed(key)[target] = self._bucket.upload(target, path / name)
        try:
            over = ANY if key in self._dropped else None
            self._listed(key)[pointer] = self._bucket.put(pointer, data, over=over)
            replace_file(path / _NOTE, self._note(key, data))
        except ChangedError:
            # Another machine made the same meanwhile, and its files are the ones in the bucket.
            self.look_again()
            self._remove_copy(path)
            self.fetch(path)
        self._dropped.discard(key)

    @override
    def replace(self, path: Path, data: bytes, tag: Tag | None) -> None:
        self._bucket.put(self._key(path), data, over=tag)
        replace_file(path, data)

    @override
    def drop(self, path: Path) -> None:
        key = self._key(path)
        if self._listed(key).pop(f"{key}/{MANIFEST}", None):
            self._dropped.add(key)
        self._remove_copy(path)

    @override
    def remove_folder(self, path: Path) -> None:
        key = self._key(path)
        known = self._listed(key)
        # The manifest first: without it, nobody looks for the files.
        for name in (MANIFEST, *known.below(key)):
            self._bucket.delete(f"{key}/{name}")
            known.pop(f"{key}/{name}", None)
        self._remove_copy(path)

    @override
    def remove(self, path: Path) -> None:
        key = self._key(path)
        self._bucket.delete(key)
        self._listed(key).pop(key, None)
        path.unlink(missing_ok=True)

    @override
    def holds(self, path: Path) -> bool:
        return self._is_known(self._key(path))

    @override
    def names(self, folder: Path) -> set[str]:
        key = self._key(folder)
        return self._listed(key).names(key)

    @override
    def folders_with(self, root: Path, name: str, *, only: str | None = None) -> list[Path]:
        folders = [root / each for each in (self._bucket.folders() if only is None else [only])]
        return [folder for folder in folders if self.latest(folder / name) is not None]

    @override
    def look_again(self) -> bool:
        self._known.clear()
        self._failed.clear()
        return True

    def manifest(self, path: Path) -> bytes | None:
        """Return the bytes of an artifact's manifest in the bucket, None if it has none."""
        found = self._bucket.get(f"{self._key(path)}/{MANIFEST}")
        return None if found is None else found[0]

    def damaged(self, path: Path, data: bytes, *, content: bool = False) -> dict[str, str]:
        """Return the damaged objects of the artifact with this manifest, and why.

        Sizes are compared, or with ``content`` what is read now.
        """
        files = _described(data, exact=True)
        if files is None:
            return {MANIFEST: "is damaged: its fields do not match its digest"}
        place, found = path / stamp(data), {}
        sizes = self.sizes(place)
        for name, wanted in files.items():
            digest = self.digest(place / name) if content else None
            size, sha256 = digest or (sizes.get(name), wanted["sha256"])
            if size is None or (content and digest is None):
                found[f"{place.name}/{name}"] = "is missing"
            elif size != wanted["bytes"]:
                found[f"{place.name}/{name}"] = f"has {size} bytes instead of {wanted['bytes']}"
            elif sha256 != wanted["sha256"]:
                found[f"{place.name}/{name}"] = "does not match its checksum"
        return found

    def sizes(self, folder: Path) -> dict[str, int]:
        """Return the bytes of all objects below a folder, by their keys there."""
        key = self._key(folder)
        return self._listed(key).below(key)

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
        return self._bucket.digest(self._key(path))

    def _note(self, key: str, data: bytes | None = None) -> bytes:
        """Return the note of a copy: sizes and e-tags of its object, or of those of a manifest."""
        keys = [key]
        if data is not None:
            files = (f"{stamp(data)}/{name}" for name in _described(data) or ())
            keys = [f"{key}/{name}" for name in (MANIFEST, *files)]
        known = self._listed(key)
        return json.dumps({each: known[each] for each in keys if each in known}).encode()

    def _differs(self, key: str, path: Path) -> bool:
        return _content(path / _NOTE) != self._note(key, _content(path / MANIFEST) or b"")

    def _get_artifact(self, key: str, path: Path, *, replace: bool = False) -> bool:
        """Download an artifact, whole or not at all; return whether the bucket has all of it.

        With ``replace``, it takes the place of a copy if it is sound.
        """
        data = self.manifest(path)
        names = None if data is None else _described(data)
        if data is None or names is None:
            return False
        with self._downloading(path) as temporary:
            temporary.mkdir()
            for name in names:
                source = f"{key}/{stamp(data)}/{name}"
                if not self._bucket.download(source, temporary / name):
                    return False
            (temporary / MANIFEST).write_bytes(data)
            (temporary / _NOTE).write_bytes(self._note(key, data))
            if replace:
                if not _is_sound(temporary):
                    return False
                self._remove_copy(path)
            rename_unless_taken(temporary, path)
        return True

    def _get_file(self, key: str, path: Path) -> bool:
        with self._downloading(path) as temporary:
            if not self._bucket.download(key, temporary):
                return False
            temporary.replace(path)
            self._note_file(key)
        return True

    def _has_same_file(self, key: str, path: Path) -> bool:
        """Return whether the bucket has the same file; read it if its e-tag changed."""
        note = self.folder / _FILE_NOTES / key
        if _content(note) == self._note(key):
            return True
        if self.digest(path) != (path.stat().st_size, sha256_file(path)):
            return False
        self._note_file(key)
        return True

    def _note_file(self, key: str) -> None:
        note = self.folder / _FILE_NOTES / key
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_bytes(self._note(key))

    @contextlib.contextmanager
    def _downloading(self, path: Path) -> Iterator[Path]:
        """Give a path in the folder of downloads, and remove what stays there."""
        downloads = self.folder / _DOWNLOADS
        with writing(path):
            for folder in (downloads, path.parent):
                folder.mkdir(parents=True, exist_ok=True)
            with temporary_folder(downloads / path.name) as temporary:
                yield temporary / path.name

    def _remove_copy(self, path: Path) -> None:
        """Remove a copy, in one step for every reader."""
        if not exists(path):
            return
        with self._downloading(path) as aside, contextlib.suppress(FileNotFoundError):
            path.rename(aside)


@contextlib.contextmanager
def naming() -> Iterator[None]:
    """Let the block's errors name the bucket, not its cache; those of the disk name the folder."""
    try:
        yield
    except (ArtifactError, BusyError, ConfigError, FormatError) as error:
        text = str(error)
        for folder, uri in _URIS.items():
            text = text.replace(folder, uri)
        error.args = (text, *error.args[1:])
        raise


def place_of(place: Place | BucketStorage) -> tuple[Path, Storage]:
    """Return the folder and the storage of a path or URI."""
    if isinstance(place, BucketStorage):
        return place.folder, place
    found = as_place(place, what="the place")
    if isinstance(found, Path):
        return found, LOCAL
    mirror = BucketStorage(found)
    _make_cache(mirror.folder)
    return mirror.folder, mirror


def _cache_folder(uri: str) -> Path:
    named = os.environ.get("WHITEN_INDEX_CACHE")
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    root = Path(named) if named else Path(cache) / "whiten-index"
    identity = fingerprint({"uri": uri, "endpoint": endpoint() if uri.startswith("s3:") else ""})
    return root.absolute() / "objects" / identity


def _make_cache(folder: Path) -> None:
    """Make a cache that only its owner can read, and remove what killed downloads left."""
    every = folder.parent
    with writing(folder):
        made = not exists(every.parent)
        make_folder(every)
        if os.name == "posix" and every.stat().st_uid != os.getuid():
            raise StorageError(
                f"{every} belongs to another user, and copies of what is in a bucket go there; "
                "name a folder of your own with WHITEN_INDEX_CACHE"
            )
        for each in (every.parent, every) if made else (every,):
            each.chmod(0o700)
        make_folder(folder / _DOWNLOADS)
        remove_killed(folder / _DOWNLOADS)


def stamp(manifest: bytes) -> str:
    """Return the name of the folder of an artifact's files, from its manifest's bytes."""
    return hashlib.sha256(manifest).hexdigest()[:16]


def _content(path: Path) -> bytes | None:
    """Return the bytes of a small file of a copy, None if it is missing or too long."""
    try:
        with reading(path):
            return read_bytes(path, limit=MANIFEST_BYTES)
    except (FileNotFoundError, ValueError):
        return None


def _described(data: bytes, *, exact: bool = False) -> Files | None:
    """Return the files of a manifest, None if it is damaged; ``exact`` compares its digest too."""
    try:
        fields = load_json(data)
        files = _FILES.check(fields["files"])
        sound = not exact or data == sealed_json(fields)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    inside = not any("/" in name or name in (MANIFEST, _NOTE) for name in files)
    return files if sound and inside else None


def _is_sound(folder: Path) -> bool:
    """Return whether an artifact and its manifest match their checksums."""
    files = _described(_content(folder / MANIFEST) or b"", exact=True)
    try:
        check_files(folder, {"files": files or {}}, content=True)
    except ArtifactError:
        return False
    return files is not None
