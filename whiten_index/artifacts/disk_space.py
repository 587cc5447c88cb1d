"""Disk space, checked before the work."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from whiten_index.artifacts.files import exists, writing
from whiten_index.errors import StorageError


def require_space(wanted: Mapping[Path, int], what: str) -> None:
    """Check that files still to be written will fit, each file system by its sum.

    Space reserved for the root user does not count as free. Quotas, and file systems that do not
    report their free space, show only when they are written.

    Args:
        wanted: folder or file, existing or not -> bytes that will be added to its file system.
        what: name of the work, for the error.
    """
    disks: dict[int, list[Path]] = {}
    for path, size in wanted.items():
        if size > 0:
            with writing(path):
                disks.setdefault(_nearest(path).stat().st_dev, []).append(path)
    for paths in disks.values():
        with writing(paths[0]):
            free = free_bytes(paths[0])
        total = sum(wanted[path] for path in paths)
        if free is not None and total > free:
            raise StorageError(
                f"{what} needs about {total:,} bytes for {' and '.join(map(str, paths))}, and the "
                f"disk there has {free:,} free; free {total - free:,} bytes more, or choose "
                "folders on another disk, then run the same command again"
            )


def free_bytes(path: Path) -> int | None:
    """Return the bytes that this user may still write at ``path``, None if unknown."""
    found = os.statvfs(_nearest(path))
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def _nearest(path: Path) -> Path:
    """Return the path itself if it exists, else the nearest existing folder above it."""
    path = path.absolute()
    while not exists(path) and path != path.parent:
        path = path.parent
    return path
