"""A prefix in a bucket, with a local cache of its artifacts and files.

The bucket counts: an object there is only replaced if it was found damaged, and none is ever
renamed. An artifact, a folder with a manifest, is kept as::

    <name>/manifest.json            put last, and only if absent
    <name>/<stamp>/<file>           its files; the stamp is a hash of the manifest

so that two writers of one artifact never touch each other's files, and a manifest is only visible
with all files that it names, of one writer.

A copy of an artifact begins with the manifest; a file is copied when it is first needed. It has a
note of the sizes and e-tags that all its objects had at the beginning; that of a single file is
in ``.objects``. If the bucket lists others now, the objects that were copied are read again.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import override

from whiten_index.artifacts.atomic import (
    make_folder,
    remove_killed,
    rename_unless_taken,
    replace_file,
    require_path,
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
from whiten_index.artifacts.listed_bucket import ListedBucket
from whiten_index.artifacts.lock import require_marks
from whiten_index.artifacts.manifest import (
    MANIFEST,
    Files,
    Schema,
    check_files,
    fingerprint,
    sealed_json,
)
from whiten_index.artifacts.object_store import ANY, ChangedError, Digests, Tag, endpoint, plain_uri
from whiten_index.artifacts.prefetch import blocks
from whiten_index.artifacts.storage import LOCAL, Names, Place, Storage
from whiten_index.errors import COPIES, ArtifactError, BusyError, FormatError, StorageError, named
from whiten_index.paths import as_place

A = TypeVar("A")
B = TypeVar("B")
_AT_ONCE = 16
_DOWNLOADS = ".downloads"
# In a copy of an artifact: sizes and e-tags of its objects. In the cache: those of single files.
_NOTE, _FILE_NOTES = ".objects.json", ".objects"
_FILES = Schema("files", 1, Files)
_LOG = logging.getLogger(__name__)


class BucketStorage(Storage):
    """A prefix in a bucket, with a cache in ``folder``; pickled, it keeps its URI only."""

    def __init__(self, uri: str) -> None:
        self._bucket = ListedBucket(uri)
        self.uri = self._bucket.uri
        self.folder = _made_cache(self.uri)
        COPIES[str(self.folder)] = self.uri
        self._again: set[str] = set()
        self._dropped: set[str] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return BucketStorage, (self.uri,)

    @override
    def fetch(self, path: Path, *, names: Names = None) -> None:
        key = self._key(path)
        if exists(path):
            # It was there when it was copied, and was removed since.
            gone = exists(path / _NOTE) and not self._is_known(key)
            if gone and self.manifest(path) is None:
                self._remove_copy(path)
        elif f"{key}/{MANIFEST}" in (known := self._bucket.listed(key)):
            self._get_artifact(key, path)
        elif key in known and not self._get_file(key, path):
            known.pop(key, None)
        if exists(path / _NOTE):
            self._fill(key, path, names)

    def _fill(self, key: str, path: Path, names: Names) -> None:
        """Download the files that a copy lacks, all or those named, each in one step."""
        data = _content(path / MANIFEST) or b""
        for name in (_described(data) or ()) if names is None else names:
            if not exists(path / name):
                # Another process may remove the copy.
                with self._downloading(path) as file, contextlib.suppress(FileNotFoundError):
                    if self._bucket.download(f"{key}/{stamp(data)}/{name}", file):
                        file.replace(path / name)

    @override
    def fetch_all(self, paths: Iterable[Path]) -> None:
        at_once(self.fetch, dict.fromkeys(paths))

    @override
    def fetch_again(self, path: Path) -> bool:
        key = self._key(path)
        if key in self._again or not self._is_known(key):
            return False
        self._again.add(key)
        artifact = f"{key}/{MANIFEST}" in self._bucket.listed(key)
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
        known = not listed or key in self._bucket.listed(key)
        found = self._bucket.get(key) if known else None
        if found is None:
            if listed:
                self._bucket.forget(key)
            path.unlink(missing_ok=True)
            return None
        if _content(path) != found[0]:
            with writing(path):
                make_folder(path.parent)
                replace_file(path, found[0])
        return found[1]

    @override
    def settle(self, path: Path) -> None:
        key = self._key(path)
        if not exists(path):
            self.fetch(path, names=())
        elif self._is_known(key) and _content(path / _NOTE) != self._note(
            key, _content(path / MANIFEST) or b""
        ):
            # Once is enough: it may be gigabytes.
            self._again.add(key)
            if not self._get_artifact(key, path, replace=True):
                self._dropped.add(key)

    @override
    def is_as_copied(self, path: Path) -> bool:
        key = self._key(path)
        return _content(self.folder / _FILE_NOTES / key) == self._note(key)

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

    @override
    def push(self, path: Path) -> None:
        key = self._key(path)
        with writing(path):
            if is_folder(path):
                self._push_artifact(key, path)
            else:
                self._bucket.upload(key, path)
                self._note_file(key)

    def _push_artifact(self, key: str, path: Path) -> None:
        data, pointer = read_bytes(path / MANIFEST, limit=MANIFEST_BYTES), f"{key}/{MANIFEST}"
        for name in _described(data) or ():
            target = f"{key}/{stamp(data)}/{name}"
            # What a copy lacks was not fetched yet.
            if exists(path / name) or target not in self._bucket.listed(key):
                self._bucket.upload(target, path / name)
        try:
            over = ANY if key in self._dropped else None
            self._bucket.put(pointer, data, over=over)
            replace_file(path / _NOTE, self._note(key, data))
        except ChangedError:
            # Another machine made the same meanwhile, and its files are the ones in the bucket.
            self.look_again()
            self._remove_copy(path)
            self.fetch(path)
            if not exists(path / MANIFEST):
                raise self._changed() from None
        self._dropped.discard(key)

    @override
    def replace(self, path: Path, data: bytes, tag: Tag | None) -> Tag | None:
        key = self._key(path)
        try:
            made = self._bucket.put(key, data, over=tag)
        except ChangedError as error:
            raise self._changed() from error
        replace_file(path, data)
        return made

    def _changed(self) -> BusyError:
        return BusyError(
            f"{self.uri} was changed by another command meanwhile, and what that did stays; run "
            "the same command again, which is quick, as what was encoded is kept"
        )

    @override
    def drop(self, path: Path) -> None:
        key = self._key(path)
        if self._bucket.listed(key).pop(f"{key}/{MANIFEST}", None):
            self._dropped.add(key)
        self._remove_copy(path)

    @override
    def remove(self, *paths: Path, own: bool = False) -> None:
        # Without its manifest, nobody looks for the files of an artifact.
        keys = self._objects(paths)
        for first in (True, False):
            some = [key for key in keys if key.endswith(f"/{MANIFEST}") == first]
            for together in blocks(some, _AT_ONCE):
                if not own:
                    require_marks()
                at_once(self._bucket.delete, together)
        for path in paths:
            self._remove_copy(path)

    def _objects(self, paths: Iterable[Path]) -> list[str]:
        wanted = set(map(self._key, paths))
        depths = {key.count("/") + 1 for key in wanted}
        listed = [
            key
            for area in {key.split("/")[0] for key in wanted}
            for key in self._bucket.listed(area)
        ]
        return [
            key for key in listed if any("/".join(key.split("/")[:n]) in wanted for n in depths)
        ]

    @override
    def remove_unnamed(self, folder: Path) -> int:
        made: dict[Path, list[Path]] = {}
        for name in {each.rpartition("/")[0] for each in self.sizes(folder) if each.count("/") > 1}:
            made.setdefault(folder / name.partition("/")[0], []).append(folder / name)
        gone = list[Path]()
        for artifact, stamps in made.items():
            if not self.holds(artifact):
                gone += stamps
            elif len(stamps) > 1 and (data := self.manifest(artifact)) is not None:
                gone += [each for each in stamps if each.name != stamp(data)]
        self.remove(*gone)
        return len(gone)

    @override
    def holds(self, path: Path) -> bool:
        return self._is_known(self._key(path))

    @override
    def names(self, folder: Path, pattern: str = "[!.]*") -> list[str]:
        # An artifact has one object with this name, and its other files are a folder below.
        found = {key.removesuffix(f"/{MANIFEST}") for key in self.sizes(folder)}
        return sorted(name for name in found if "/" not in name and fnmatchcase(name, pattern))

    @override
    def folders(self, root: Path) -> list[Path]:
        return [root / name for name in self._bucket.folders() if name[0] != "."]

    @override
    def size(self, *paths: Path) -> int:
        return sum(self._bucket.listed(key)[key].size for key in self._objects(paths))

    @override
    def modified(self, path: Path) -> float:
        known, key = self._bucket.listed(self._key(path)), self._key(path)
        found = known.get(key) or known.get(f"{key}/{MANIFEST}")
        return 0.0 if found is None else found.modified

    @override
    @contextlib.contextmanager
    def opened(self, path: Path, names: Names = None) -> Iterator[Path]:
        key = self._key(path)
        with self._downloading(path) as copy:
            try:
                data = self.manifest(path)
                if data is not None:
                    self._get_files(key, data, copy, names)
                elif not self._bucket.download(key, copy):
                    copy.unlink()
                yield copy
            except (ArtifactError, FormatError) as error:
                if data is not None:
                    self._require_as_stored(key, data, copy, names)
                error.args = (str(error).replace(named(copy), named(path)), *error.args[1:])
                raise

    @override
    def look_again(self) -> bool:
        self._bucket.look_again()
        return True

    def manifest(self, path: Path) -> bytes | None:
        """Return the bytes of an artifact's manifest in the bucket, None if it has none."""
        found = self._bucket.get(f"{self._key(path)}/{MANIFEST}")
        return None if found is None else found[0]

    @override
    def fault(self, path: Path, data: bytes | None = None, *, content: bool = False) -> str:
        data = self.manifest(path) if data is None else data
        wrong = {} if data is None else self.damaged(path, data, content=content)
        return "; ".join(f"{name} {why}" for name, why in sorted(wrong.items()))

    def damaged(self, path: Path, data: bytes, *, content: bool = False) -> dict[str, str]:
        """Return the damaged objects of the artifact with this manifest, and why.

        Sizes are compared, or with ``content`` the objects are read and hashed.
        """
        files = _described(data, exact=True)
        if files is None:
            return {MANIFEST: "is damaged: its fields do not match its digest"}
        found, known = dict[str, str](), self._bucket.listed(self._key(path))
        for name, wanted in files.items():
            each = f"{stamp(data)}/{name}"
            key = self._key(path / each)
            digest = self._bucket.digest(key) if content else known.get(key)
            if digest is None:
                found[each] = "is missing"
            elif digest[0] != wanted["bytes"]:
                found[each] = f"has {digest[0]} bytes instead of {wanted['bytes']}"
            elif isinstance(digest, Digests) and digest.sha256 != wanted["sha256"]:
                self._require_own_content(self._key(path), data, name, digest.md5)
                found[each] = "does not match its checksum"
        return found

    def piece(self, path: Path, start: int, stop: int) -> bytes:
        """Return some bytes of an object, none without an object."""
        return self._bucket.piece(self._key(path), start, stop)

    def sizes(self, folder: Path) -> dict[str, int]:
        """Return the bytes of all objects below a folder, by their keys there."""
        prefix = f"{self._key(folder)}/"
        # Copied, as another thread may add to it.
        found = list(self._bucket.listed(prefix).items())
        return {key[len(prefix) :]: stat.size for key, stat in found if key.startswith(prefix)}

    def _key(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _require_as_stored(self, key: str, data: bytes, folder: Path, names: Names) -> None:
        """Refuse damaged files of an artifact that are not what the server is known to have."""
        for name in (_described(data) or ()) if names is None else names:
            if exists(folder / name):
                self._require_own_content(key, data, name, _md5_of(folder / name))

    def _require_own_content(self, key: str, data: bytes, name: str, md5: str) -> None:
        """Refuse a damaged file of an artifact if the server is known to have other content.

        It is known by e-tags, if that of the artifact's sound manifest is its MD5: encrypted by
        keys of users, objects have other ones.
        """
        each = f"{key}/{stamp(data)}/{name}"
        tags = [found.e_tag.strip('"').lower() if found else ""
                for found in map(self._bucket.stat, (f"{key}/{MANIFEST}", each))]  # fmt: skip
        known = tags[0] == hashlib.md5(data, usedforsecurity=False).hexdigest()
        if known and re.fullmatch("[0-9a-f]{32}", tags[1]) and md5 != tags[1]:
            raise self._bucket.contradiction(each)

    def _is_known(self, key: str) -> bool:
        known = self._bucket.listed(key)
        return key in known or f"{key}/{MANIFEST}" in known

    def _note(self, key: str, data: bytes | None = None) -> bytes:
        """Return the note of a copy: sizes and e-tags of its object, or of those of a manifest."""
        keys = [key]
        if data is not None:
            files = (f"{stamp(data)}/{name}" for name in _described(data) or ())
            keys = [f"{key}/{name}" for name in (MANIFEST, *files)]
        known = self._bucket.listed(key)
        return json.dumps({each: known[each][:2] for each in keys if each in known}).encode()

    def _get_artifact(self, key: str, path: Path, *, replace: bool = False) -> bool:
        """Begin a copy of an artifact, its manifest; return whether the bucket has all of it.

        With ``replace``, it takes the place of a copy, with the files that this has, if all of
        them are sound.
        """
        data = self.manifest(path)
        if data is not None and self.damaged(path, data):
            # One answer of a server may have been cut, or come from a proxy.
            data = self.manifest(path)
        if data is None or self.damaged(path, data):
            return False
        with self._downloading(path) as temporary:
            names = [each for each in _described(data) or () if replace and exists(path / each)]
            if not self._get_files(key, data, temporary, names):
                return False
            (temporary / _NOTE).write_bytes(self._note(key, data))
            if replace:
                try:
                    files = {"files": _described(data) or {}}
                    check_files(temporary, files, content=True, names=names)
                except ArtifactError:
                    self._require_as_stored(key, data, temporary, names)
                    return False
                self._remove_copy(path)
            rename_unless_taken(temporary, path)
        return True

    def _get_files(self, key: str, data: bytes, folder: Path, names: Names) -> bool:
        """Download the files of a manifest into a new folder; return whether all are there."""
        folder.mkdir()
        (folder / MANIFEST).write_bytes(data)
        for name in (_described(data) or ()) if names is None else names:
            if not self._bucket.download(f"{key}/{stamp(data)}/{name}", folder / name):
                (folder / name).unlink()
                return False
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
        if self.is_as_copied(path):
            return True
        found = self._bucket.digest(key)
        if found is None or found[:2] != (path.stat().st_size, sha256_file(path)):
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
        if not exists(path):
            return
        with self._downloading(path) as aside, contextlib.suppress(FileNotFoundError):
            path.rename(aside)


def place_of(place: Place | BucketStorage) -> tuple[Path, Storage]:
    """Return the folder and the storage of a path or URI."""
    if isinstance(place, BucketStorage):
        return place.folder, place
    found = as_place(place, what="the place")
    if isinstance(found, Path):
        return found, LOCAL
    mirror = BucketStorage(found)
    return mirror.folder, mirror


def required_place(given: Place) -> Place:
    """Return a valid folder or URI, whether or not anything is there."""
    found = as_place(given, what="the place")
    return require_path(found) if isinstance(found, Path) else plain_uri(found)


def _made_cache(uri: str) -> Path:
    """Make a cache that only its owner can read, and remove what killed downloads left."""
    named = os.environ.get("WHITEN_INDEX_CACHE")
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    root = Path(named) if named else Path(cache) / "whiten-index"
    identity = fingerprint({"uri": uri, "endpoint": endpoint() if uri.startswith("s3:") else ""})
    every = root.absolute() / "objects"
    folder = every / identity
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
    return folder


def at_once(do: Callable[[A], B], each: Iterable[A]) -> list[B]:
    """Return the results of requests that run sixteen at a time, in their order."""
    pool = ThreadPoolExecutor(_AT_ONCE)
    try:
        return list(pool.map(do, each))
    finally:
        # After a failure or an interrupt, the others are not waited for.
        pool.shutdown(cancel_futures=True)


def _md5_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


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
