"""Files and folders that are made new each time, where nobody else's may be replaced."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Collection
from pathlib import Path

from whiten_index.errors import ConfigError, OutputError
from whiten_index.manifest import fsync_path, make_folder, remove_folder, require_path, writing


def require_replaceable(path: Path, is_ours: Callable[[Path], bool], what: str) -> None:
    """Refuse to lose a file of another kind.

    Args:
        path: where a file is to go.
        is_ours: tells whether a file is of the same kind.
        what: such a file holds, for messages.

    Raises:
        ConfigError: a folder, a pipe, or a file of another kind is there.
        OutputError: what is there cannot be read.
    """
    with writing(path, kept=""):
        if path.is_dir():
            raise ConfigError(f"{path} is a folder; name a file")
        # Who opens a pipe waits for ever.
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is no file, but a pipe or a device; name another one")
        if path.is_symlink() and not path.exists():
            raise ConfigError(
                f"{path} is a link to what is not there, and is left as it is; name another file"
            )
        if path.exists() and not is_ours(path):
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
        OutputError: what is there cannot be read.
    """
    final = require_path(path).resolve()
    if final.exists() and not final.is_dir():
        raise ConfigError(f"{final} is no folder, and {what} is one; name another path")
    if final.exists() and any(_listed(final)):
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
        OutputError: the disk is full or cannot be written.
        WhitenIndexError: ``files`` does not let the folder be replaced.
    """
    final = require_free(path, files=files, what=what)
    there = final.exists()
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
        if aside.exists():
            remove_folder(aside)
    return final


def _require_ours(folder: Path, files: Collection[str] | None, what: str) -> None:
    if files is None:
        raise ConfigError(
            f"{folder} holds something else than {what}, and is left as it is; name a folder that "
            "is new, empty, or was made by the same command"
        )
    inside = (each.relative_to(folder).as_posix() for each in folder.rglob("*") if _is_leaf(each))
    strange = next((name for name in sorted(inside) if name not in files), None)
    if strange is not None:
        raise ConfigError(
            f"{folder} holds {strange} beside {what}, which would be lost; move it away, or name a "
            "new folder"
        )


def _is_leaf(path: Path) -> bool:
    """Tell whether nothing is below a path: a file, a link, or an empty folder."""
    return path.is_symlink() or not path.is_dir() or not any(_listed(path))


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError as error:
        raise OutputError(
            f"{folder} cannot be read ({error.strerror}); change its permissions or name another "
            "folder"
        ) from error
