"""The files below a folder of this machine, and what must not be passed over in silence."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from whiten_index.artifacts.files import exists, is_link, list_folder, system_error
from whiten_index.errors import CorpusError

Test = Callable[[Sequence[str]], bool]
_Place = tuple[int, int]


def walk(root: str, *, may_hold: Test, wanted: Test) -> Iterator[str]:
    """Yield the paths of the files below ``root``; links are followed.

    A listing that leaves out what cannot be looked at would make its rows look deleted.

    Args:
        root: a folder.
        may_hold: tells by the names from ``root`` on whether something may be, or hold, a file of
            the corpus; folders of which it says no are not looked into.
        wanted: likewise whether it is such a file.

    Raises:
        CorpusError: a link leads nowhere or to a folder above itself, or what has a file's name is
            none.
        StorageError: the system does not list a folder, or does not let a file be looked at.
    """
    top = Path(root)
    found = top.stat()
    yield from _below(top, (), {(found.st_dev, found.st_ino)}, may_hold, wanted)


def _below(
    folder: Path, names: tuple[str, ...], above: set[_Place], may_hold: Test, wanted: Test
) -> Iterator[str]:
    for path in _entries(folder):
        inside = (*names, path.name)
        if not may_hold(inside):
            continue
        found = _look(path)
        if stat.S_ISREG(found.st_mode):
            yield str(path)
        elif stat.S_ISDIR(found.st_mode):
            place = (found.st_dev, found.st_ino)
            if place in above:
                raise CorpusError(
                    f"the link {path} leads to a folder above it, so that the corpus has no end; "
                    "remove the link"
                )
            yield from _below(path, inside, above | {place}, may_hold, wanted)
        elif wanted(inside):
            raise CorpusError(
                f"{path} is neither a file nor a folder; remove it, or name the corpus's files"
            )


def _entries(folder: Path) -> list[Path]:
    entries = list_folder(folder)
    if not entries and not exists(folder):
        raise CorpusError(
            f"{folder} was removed while the corpus was listed; run the same command again"
        )
    return entries


def _look(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP) and is_link(path):
            raise CorpusError(
                f"the link {path} leads nowhere ({error.strerror}), and what it named would be "
                "missing from the corpus; restore that, or remove the link"
            ) from error
        raise system_error(path, error) from error
