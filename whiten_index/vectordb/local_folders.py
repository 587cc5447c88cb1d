"""Folders of this machine in which an engine without a server keeps its tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from whiten_index.artifacts.files import is_folder, list_folder
from whiten_index.artifacts.paths import cut
from whiten_index.errors import ConfigError, DatabaseError

# Made by systems beside what users put into a folder; names that begin with a dot are too.
_NOBODYS = ("lost+found",)
# The words of C's library, in which Python and Rust tell them, Rust's numbers, and SQLite's words.
_REMEDIES = (
    (
        re.compile(
            r"permission denied|operation not permitted|read-only file system|readonly database"
            r"|\(os error (1|13|30)\)",
            re.IGNORECASE,
        ),
        "this user may not write there: change the permissions of the folder, or name another",
    ),
    (
        re.compile(r"no space left|quota exceeded|\(os error (28|122)\)", re.IGNORECASE),
        "make room on that disk, and push again: it goes on where it was",
    ),
)


def require_own(folder: Path, *, engine: str, marks: Sequence[str], address: str) -> None:
    """Refuse a folder that has something in it, and nothing by which an engine's is known.

    One that is empty or not there yet is fine.

    Args:
        folder: in which tables are to be.
        engine: whose folder it must be.
        marks: patterns of names of which one stands for something in every folder of the engine,
            also in one that it had no time to finish.
        address: of the folder, as it may be shown.

    Raises:
        ConfigError: files that are there are others'.
    """
    # What is no folder the engine refuses itself.
    inside = list_folder(folder) if is_folder(folder) else []
    there = [
        each.name for each in inside if not each.name.startswith(".") and each.name not in _NOBODYS
    ]
    if there and not any(list_folder(folder, each) for each in marks):
        raise ConfigError(
            f"{address} is a folder with other files than those of {engine}, such as "
            f"{cut(there[0])!r}; name a folder that is empty or not there yet"
        )


def require_there(folder: Path, *, marks: Sequence[str] = (), address: str) -> None:
    """Refuse a folder that an engine would have to make before anything is read.

    Args:
        folder: in which tables are to be.
        marks: patterns of names that the engine makes if they are not there.
        address: of the folder, as it may be shown.

    Raises:
        DatabaseError: it is not there, or nothing was ever put into it.
    """
    if not is_folder(folder) or not all(list_folder(folder, each) for each in marks):
        raise DatabaseError(
            f"{address} is not there, or nothing was pushed to it yet; look at the path in the "
            "address, or push an index to it first"
        )


def remedy_of(told: str) -> str | None:
    """Return what to do where a disk or its permissions are what an engine tells of, else None."""
    return next((remedy for form, remedy in _REMEDIES if form.search(told)), None)
