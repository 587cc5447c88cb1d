"""Where copies of what is in a bucket are kept on this machine, and what tells them apart."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path

from whiten_index.artifacts.atomic import discard, make_folder
from whiten_index.artifacts.files import list_folder, reading, writing
from whiten_index.artifacts.manifest import MANIFEST, fingerprint
from whiten_index.objects.bucket import endpoint

DOWNLOADS = ".downloads"
_LEFT_BEHIND = 24 * 3600.0  # seconds


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
            return (path / MANIFEST).read_bytes()
    except FileNotFoundError:
        return b""


def files_in(data: bytes) -> dict[str, int] | None:
    """Return the files that a manifest names and their bytes, None where it is damaged."""
    try:
        files = {name: int(entry["bytes"]) for name, entry in json.loads(data)["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return files if all("/" not in name and name not in ("", ".", "..") for name in files) else None
