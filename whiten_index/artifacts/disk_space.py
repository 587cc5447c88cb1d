"""Disk space, checked before the work."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from whiten_index.artifacts.files import exists, writing
from whiten_index.errors import StorageError


@dataclass
class _Disk:
    """One file system: bytes free to this user, None where it does not say, and what is to come."""

    free: int | None
    paths: list[Path] = field(default_factory=list)
    wanted: int = 0


def require_space(wanted: Mapping[Path, int], what: str) -> None:
    """Make sure that files still to be written will fit, each file system by its sum.

    What the root user keeps in reserve does not count as free. Quotas, and file systems that do
    not say how much is free, are found by the writing itself.

    Args:
        wanted: folder or file, there or not -> bytes that will be added to its file system.
        what: who writes them, for the error.

    Raises:
        StorageError: they will not fit, or a path cannot be looked at.
    """
    disks: dict[int, _Disk] = {}
    for path, size in wanted.items():
        if size <= 0:
            continue
        with writing(path):
            there = _nearest(path)
            disk = disks.setdefault(there.stat().st_dev, _Disk(free_bytes(there)))
        disk.paths.append(path)
        disk.wanted += size
    for disk in disks.values():
        if disk.free is None or disk.wanted <= disk.free:
            continue
        paths = " and ".join(map(str, disk.paths))
        raise StorageError(
            f"{what} needs about {disk.wanted:,} bytes for {paths}, and the disk there has "
            f"{disk.free:,} free; free {disk.wanted - disk.free:,} bytes more, or choose folders "
            "on another disk, then run the same command again"
        )


def free_bytes(path: Path) -> int | None:
    """Return the bytes that this user may still write where ``path`` is, or will be.

    None where the file system does not say, as some on the network do not.

    Raises:
        OSError: it cannot be looked at.
    """
    found = os.statvfs(_nearest(path))
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def _nearest(path: Path) -> Path:
    """Return the path itself where it exists, else the nearest folder above it that does."""
    path = path.absolute()
    while not exists(path) and path != path.parent:
        path = path.parent
    return path
