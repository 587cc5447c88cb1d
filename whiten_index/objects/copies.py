"""Where copies of what is in a bucket are kept on this machine, and what tells them apart."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from pathlib import Path

from whiten_index.artifacts.atomic import make_folder
from whiten_index.artifacts.files import read_bytes, writing
from whiten_index.artifacts.limits import load_json
from whiten_index.artifacts.manifest import MANIFEST, MANIFEST_BYTES, fingerprint
from whiten_index.artifacts.schema import Files, Schema
from whiten_index.objects.bucket import endpoint

DOWNLOADS = ".downloads"
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

    Raises:
        StorageError: the disk cannot be written.
    """
    with writing(folder):
        make_folder(folder / DOWNLOADS)
        for path in (folder / DOWNLOADS).iterdir():
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _LEFT_BEHIND:
                    remove(path)


def stamp(manifest: bytes) -> str:
    """Return the name of the folder that an artifact's files are in, from its manifest's bytes."""
    return hashlib.sha256(manifest).hexdigest()[:16]


def manifest_of(path: Path) -> bytes:
    """Return the bytes of the manifest of an artifact here, none where it has none."""
    try:
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


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
