"""Storage of stores and indexes: local files, and the interface that a bucket has too."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from whiten_index.artifacts.atomic import discard, make_folder, remove_path, replace_file
from whiten_index.artifacts.files import exists, list_folder, read_bytes, reading, writing
from whiten_index.artifacts.limits import load_json
from whiten_index.artifacts.manifest import (
    MANIFEST,
    MANIFEST_BYTES,
    Files,
    Schema,
    check_files,
    fingerprint,
    sealed_json,
)
from whiten_index.artifacts.object_store import Tag, endpoint
from whiten_index.errors import ArtifactError, StorageError

# A folder, or the URI of a bucket's prefix.
Place = Path | str


class Here:
    """No bucket: what a folder is to hold is in it. A ``Mirror`` is one whose bucket counts.

    Attributes:
        uri: of the prefix, empty for none.
        mended: what was damaged in the bucket, and was put there again from a sound copy.
    """

    uri = ""
    mended: Sequence[str] = ()

    def fetch(self, path: Path, *, compare: bool = False) -> None:
        """Get an artifact or a file that is in the bucket and not here.

        Args:
            path: where it belongs.
            compare: replace a copy of an artifact if the bucket has another one by now.

        Raises:
            ArtifactError: what the bucket has instead of the copy is damaged.
        """

    def fetch_all(self, paths: Iterable[Path]) -> None:
        """Fetch several at a time."""

    def fetch_again(self, path: Path) -> bool:
        """Replace a damaged copy by what the bucket has; return whether that is sound."""
        return False

    def latest(self, path: Path) -> Tag | None:
        """Make a file what the bucket has now, removing it where that has none; return its tag.

        One that was never in the bucket is left alone where the bucket was listed.
        """
        return None

    def settle(self, path: Path) -> None:
        """Make a copy of an artifact what the bucket has of it, if that is sound."""

    def keep(self, path: Path) -> None:
        """Put a sound artifact or file into the bucket, if it is missing or damaged there."""

    def push(self, path: Path) -> None:
        """Put an artifact or file into the bucket; the artifact that is there already counts."""

    def replace(self, path: Path, data: bytes, tag: Tag | None) -> None:
        """Put a file where it is still what ``latest`` saw.

        Raises:
            ChangedError: it is not.
        """
        replace_file(path, data)

    def drop(self, path: Path) -> None:
        """Remove a damaged artifact here, so that it is written again everywhere."""
        remove_path(path)

    def remove(self, path: Path) -> None:
        """Remove a file, here and in the bucket."""
        path.unlink(missing_ok=True)

    def holds(self, path: Path) -> bool:
        """Return whether an artifact or file is in the bucket, or here if there is no bucket."""
        return exists(path)

    def has(self, path: Path) -> bool:
        """Return whether an artifact or file is here or in the bucket, sound or not."""
        return exists(path)

    def names(self, folder: Path) -> set[str]:
        """Return the names of the artifacts and files in a folder of the bucket."""
        return set()

    def folders_with(self, root: Path, name: str, *, only: str | None = None) -> list[Path]:
        """Return the folders right below ``root`` that have a file of that name, made the latest.

        Args:
            root: the folder, or that of the copies.
            name: of the file.
            only: the one folder to look at, None for all.
        """
        folders = list_folder(root) if only is None else [root / only]
        return [folder for folder in folders if exists(folder / name)]

    def look_again(self) -> bool:
        """Read changes that others made in the bucket since; return whether there is a bucket."""
        return False


HERE = Here()


DOWNLOADS = ".downloads"
# In a copy of an artifact: which objects it is a copy of.
NOTE = ".objects.json"
FILE_NOTES = ".objects"
_LEFT_BEHIND = 24 * 3600.0  # seconds
_FILES = Schema("files", 1, Files)


def cache_folder(uri: str) -> Path:
    """Return where copies of what is below a URI are kept on this machine."""
    named = os.environ.get("WHITEN_INDEX_CACHE")
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    root = Path(named) if named else Path(cache) / "whiten-index"
    identity = fingerprint({"uri": uri, "endpoint": endpoint() if uri.startswith("s3:") else ""})
    return root.absolute() / "objects" / identity


def make_cache(folder: Path) -> None:
    """Make a folder of copies, and remove what downloads that died left there long ago.

    The folder that all copies are in is for its owner alone: buckets may be private.

    Raises:
        StorageError: the disk cannot be written, or the folder is another user's.
    """
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
        make_folder(folder / DOWNLOADS)
        for path in list_folder(folder / DOWNLOADS):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _LEFT_BEHIND:
                    discard(path)


def stamp(manifest: bytes) -> str:
    """Return the name of the folder that an artifact's files are in, from its manifest's bytes."""
    return hashlib.sha256(manifest).hexdigest()[:16]


def manifest_of(path: Path) -> bytes:
    """Return the bytes of the manifest of an artifact here, none where it has none."""
    try:
        with reading(path / MANIFEST):
            return read_bytes(path / MANIFEST, limit=MANIFEST_BYTES)
    except FileNotFoundError:
        return b""


def files_in(data: bytes) -> dict[str, int] | None:
    """Return the files that a manifest names and their bytes, None where it is damaged."""
    try:
        files = _FILES.check(load_json(data)["files"])
    except (ValueError, KeyError, TypeError):
        return None
    return None if any("/" in name for name in files) else {n: f["bytes"] for n, f in files.items()}


def is_sound(folder: Path) -> bool:
    """Return whether an artifact and its manifest match their checksums."""
    data = manifest_of(folder)
    try:
        fields = load_json(data)
        check_files(folder, {"files": _FILES.check(fields["files"])}, content=True)
        return data == sealed_json(fields)
    except (ArtifactError, KeyError, TypeError, ValueError, AttributeError):
        return False
