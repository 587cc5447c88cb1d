"""Where copies of what is in a bucket are kept on this machine, and what tells them apart."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from pathlib import Path

from whiten_index.artifacts.atomic import discard, make_folder
from whiten_index.artifacts.files import exists, list_folder, read_bytes, reading, writing
from whiten_index.artifacts.limits import load_json
from whiten_index.artifacts.manifest import (
    MANIFEST,
    MANIFEST_BYTES,
    check_files,
    fingerprint,
    sealed_json,
)
from whiten_index.artifacts.schema import Files, Schema
from whiten_index.errors import ArtifactError, StorageError
from whiten_index.objects.bucket import endpoint

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
    """Tell whether an artifact matches the checksums of its manifest, and that its own."""
    data = manifest_of(folder)
    try:
        fields = load_json(data)
        check_files(folder, {"files": _FILES.check(fields["files"])}, content=True)
        return data == sealed_json(fields)
    except (ArtifactError, KeyError, TypeError, ValueError, AttributeError):
        return False
