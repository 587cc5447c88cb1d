"""Atomic replacement of files and folders, and removal of what killed writers left.

A writer makes a temporary file or folder, flushes it, and renames it: a reader sees the old one or
the new one, whole.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from whiten_index.artifacts.files import (
    exists,
    fsync_path,
    is_file,
    is_folder,
    is_link,
    list_folder,
    require_path,
    walk_files,
    writing,
)
from whiten_index.errors import ConfigError, StorageError

_TEMPORARY = ".tmp-"
_TRIES = 3


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path to write, and put it at ``path`` in one step when the block ends."""
    temporary = path.with_name(temporary_name(path.name))
    try:
        yield temporary
        fsync_path(temporary)
        temporary.replace(path)
        fsync_path(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def replace_file(path: Path, data: bytes) -> None:
    """Put ``data`` at ``path`` in one step: a reader sees the old bytes or the new ones."""
    for left in reversed(range(_TRIES)):
        try:
            with replacing(path) as temporary:
                temporary.write_bytes(data)
        except FileNotFoundError:
            # Whoever tidies the folder may take what is written here for a leftover.
            if not left or not is_folder(path.parent):
                raise
        else:
            return


def leftovers_in(folder: Path) -> list[Path]:
    """Return the temporary files and folders in ``folder``."""
    return list_folder(folder, f"{_TEMPORARY}*")


def remove_leftovers(folder: Path) -> int:
    """Remove the temporary files and folders in ``folder``, and return how many there were.

    Only for whoever is the one writer of ``folder``, so that all of them are of dead processes.
    """
    leftovers = leftovers_in(folder)
    for path in leftovers:
        remove_path(path)
    return len(leftovers)


def remove_path(path: Path) -> None:
    """Remove a file, a link or a folder with all below it, if it exists.

    Raises:
        StorageError: the system does not remove all of it.
    """
    with writing(path, kept=""), contextlib.suppress(FileNotFoundError):
        if is_folder(path) and not is_link(path):
            shutil.rmtree(path)
        else:
            path.unlink()


def discard(path: Path) -> None:
    """Remove a file or a folder that nothing needs any more, as far as the system lets it go.

    For the end of work: what is left behind does no harm.
    """
    with contextlib.suppress(StorageError):
        remove_path(path)


def make_folder(path: Path) -> None:
    """Make a folder and those above it, so that a power cut takes none of them away again."""
    missing = [each for each in (path, *path.parents) if not exists(each)]
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        fsync_path(each.parent)


def remove_folder(path: Path) -> None:
    """Remove a published folder: to whoever looks, it is whole or not there at all.

    What is left of it when this process dies, ``remove_leftovers`` takes for what it is.

    Raises:
        StorageError: the disk does not let it go.
    """
    with writing(path, kept=""):
        aside = path.with_name(temporary_name(path.name))
        path.rename(aside)
        fsync_path(path.parent)
        shutil.rmtree(aside)


def temporary_name(name: str) -> str:
    """Return a new name that ``remove_leftovers`` recognises, for work on ``name``."""
    whole = f"{_TEMPORARY}{uuid.uuid4().hex[:12]}~{name}"
    # Disks count bytes, and a name that fills them all leaves no room for more.
    return os.fsencode(whole)[:200].decode("utf-8", "ignore")


def require_replaceable(path: Path, is_ours: Callable[[Path], bool], what: str) -> None:
    """Refuse to lose a file of another kind.

    Args:
        path: where a file is to go.
        is_ours: tells whether a file is of the same kind.
        what: such a file holds, for messages.

    Raises:
        ConfigError: a folder, a pipe, or a file of another kind is there.
        StorageError: what is there cannot be read.
    """
    with writing(path, kept=""):
        if is_folder(path):
            raise ConfigError(f"{path} is a folder; name a file")
        # Who opens a pipe waits for ever.
        if exists(path) and not is_file(path):
            raise ConfigError(f"{path} is no file, but a pipe or a device; name another one")
        if is_link(path) and not exists(path):
            raise ConfigError(
                f"{path} is a link to what is not there, and is left as it is; name another file"
            )
        if exists(path) and not is_ours(path):
            raise ConfigError(
                f"{path} holds something else than {what}, and is left as it is; name another file"
            )


def require_free(
    path: Path | str, *, files: Callable[[Path], Collection[str] | None], what: str
) -> Path:
    """Refuse a path at which ``replace_folder`` would have to lose something else; return it whole.

    Args:
        path: where a folder is to go.
        files: see ``replace_folder``.
        what: likewise.

    Raises:
        ConfigError: something else stands there, or lies among its files.
        StorageError: what is there cannot be read.
    """
    final = require_path(path).resolve()
    if exists(final) and not is_folder(final):
        raise ConfigError(f"{final} is no folder, and {what} is one; name another path")
    if exists(final) and list_folder(final):
        _require_ours(final, files(final), what)
    return final


def replace_folder(
    path: Path | str,
    make: Callable[[Path], object],
    *,
    files: Callable[[Path], Collection[str] | None],
    what: str,
) -> Path:
    """Make a folder under another name, and put it at ``path`` when it is whole.

    An old one is renamed first and removed last, so that one of the two is there whatever fails.

    Args:
        path: where it goes; missing, an empty folder, or one of the same kind made before.
        make: makes the folder at the path given, where nothing is yet.
        files: names the files, by their paths in it, that belong to a folder of the same kind; None
            for another.
        what: the folder holds, for messages.

    Returns:
        The path.

    Raises:
        ConfigError: something else stands there, or lies among its files.
        StorageError: the disk is full or cannot be written.
        WhitenIndexError: ``files`` does not let the folder be replaced.
    """
    final = require_free(path, files=files, what=what)
    there = exists(final)
    aside, before = (
        final.with_name(f".whiten-index-{uuid.uuid4().hex[:12]}.{name}") for name in ("new", "old")
    )
    try:
        with writing(final, kept=""):
            make_folder(final.parent)
            make(aside)
            if there:
                final.rename(before)
            try:
                aside.rename(final)
            except BaseException:
                if there:
                    before.rename(final)
                raise
            fsync_path(final.parent)
            if there:
                shutil.rmtree(before)
    finally:
        if exists(aside):
            remove_folder(aside)
    return final


def _require_ours(folder: Path, files: Collection[str] | None, what: str) -> None:
    if files is None:
        raise ConfigError(
            f"{folder} holds something else than {what}, and is left as it is; name a folder that "
            "is new, empty, or was made by the same command"
        )
    inside = (each.relative_to(folder).as_posix() for each in walk_files(folder))
    strange = next((name for name in inside if name not in files), None)
    if strange is not None:
        raise ConfigError(
            f"{folder} holds {strange} beside {what}, which would be lost; move it away, or name a "
            "new folder"
        )
