"""Versions of an index: each a folder, whole or absent, and ``CURRENT`` that names one.

Layout::

    CURRENT                       {"version": …, "manifest_sha256": …}, replaced in one step
    versions/<version>/           manifest.json, whitening.safetensors, moments.safetensors,
                                  index.faiss (and index.ivfdata), documents.arrow
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from whiten_index import manifest
from whiten_index.errors import ArtifactError, ConfigError
from whiten_index.index.library import load_faiss

KIND, FORMAT_VERSION = "index", 1
CURRENT, VERSIONS = "CURRENT", "versions"
INDEX, WHITENING = "index.faiss", "whitening.safetensors"
MOMENTS, DOCUMENTS = "moments.safetensors", "documents.arrow"
_VERSION = re.compile(r"(\d{6,})-[0-9a-f]{12}")
VERIFY = ("full", "manifest")


def tidy(root: Path) -> None:
    """Remove what a build that died left in the index folder."""
    with manifest.writing(root):
        manifest.remove_leftovers(root)
        manifest.remove_leftovers(root / VERSIONS)


def find_version(root: Path, identity: str) -> str | None:
    """Return a whole version made of the same inputs and choices, if there is one."""
    for folder in sorted((root / VERSIONS).glob("[0-9]*"), reverse=True):
        try:
            fields = manifest.read_manifest(folder, kind=KIND, version=FORMAT_VERSION)
            if fields.get("identity") == identity:
                manifest.check_files(folder, fields, content=True)
                return folder.name
        except ArtifactError:
            continue
    return None


def next_version(root: Path, identity: str) -> str:
    """Return a name for a new version: one number up, then the identity's first digits."""
    names = (_VERSION.fullmatch(path.name) for path in (root / VERSIONS).glob("*"))
    numbers = [int(name[1]) for name in names if name]
    return f"{max(numbers, default=0) + 1:06d}-{identity[:12]}"


def publish(root: Path, version: str, fill: Callable[[Path], Mapping[str, Any]]) -> dict[str, Any]:
    """Write a version's folder, whole or not at all; ``set_current`` makes it the one read."""
    return manifest.publish_folder(root / VERSIONS / version, fill)


def set_current(root: Path, version: str) -> None:
    """Make ``version`` the one that readers open, in one step."""
    digest = manifest.sha256_file(root / VERSIONS / version / manifest.MANIFEST)
    with manifest.writing(root / CURRENT):
        manifest.write_json(root / CURRENT, {"version": version, "manifest_sha256": digest})


def write_index(index: Any, path: Path) -> None:
    """Write a FAISS index; unlike FAISS's own writer, notice a disk that fills up."""
    faiss = load_faiss()
    with path.open("wb") as file:

        def write(data: bytes) -> int:
            return file.write(data)

        faiss.write_index(index, faiss.PyCallbackIOWriter(write))
        file.flush()
        os.fsync(file.fileno())


def read_fields(root: Path, *, verify: str = "full") -> tuple[Path, dict[str, Any]]:
    """Return the published version's folder and manifest, checked before anyone uses them.

    Args:
        root: the index folder.
        verify: ``full`` checks every file's SHA-256, ``manifest`` its size and the manifest.

    Raises:
        ArtifactError: nothing is published there, or it is damaged.
    """
    if verify not in VERIFY:
        raise ConfigError(f"verify {verify!r} is unknown; use {', '.join(VERIFY)}")
    current = _read_current(root)
    folder = root / VERSIONS / str(current["version"])
    fields = manifest.read_manifest(folder, kind=KIND, version=FORMAT_VERSION)
    if manifest.sha256_file(folder / manifest.MANIFEST) != current["manifest_sha256"]:
        raise ArtifactError(
            f"{folder / manifest.MANIFEST} is damaged: it does not match {CURRENT}; restore it "
            "from a copy, or run the build again"
        )
    manifest.check_files(folder, fields, content=verify == "full")
    return folder, fields


def vector_bytes(index: Any, *, file_bytes: int) -> int:
    """Return the bytes of the reduced vectors: rows times code size.

    Where the kind of index has no fixed code size, it is ``file_bytes``, those of the whole file.
    """
    faiss = load_faiss()
    inner = faiss.downcast_index(index.index)
    holder = faiss.downcast_index(inner.storage) if hasattr(inner, "storage") else inner
    size = getattr(holder, "code_size", None)
    return int(index.ntotal) * int(size) if size else file_bytes


def _read_current(root: Path) -> dict[str, Any]:
    if not root.exists():
        raise ArtifactError(f"{root} does not exist; check the path, or build an index there")
    current = manifest.read_json(root / CURRENT, what="a published index")
    if not {"version", "manifest_sha256"} <= set(current):
        raise ArtifactError(f"{root / CURRENT} is damaged; run the build again")
    return current
