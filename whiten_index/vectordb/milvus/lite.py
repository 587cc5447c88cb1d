"""Milvus Lite: a server of a file in threads of this process."""

from __future__ import annotations

import importlib
import re
import threading
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

from whiten_index.artifacts.files import is_file, is_folder
from whiten_index.errors import ConfigError, DatabaseError
from whiten_index.vectordb.local_folders import remedy_of, require_own, require_there
from whiten_index.vectordb.milvus.silence import silence
from whiten_index.vectordb.option_values import first_line

_LITE_FROM = (3, 2, 2)  # the first with aliases, properties, nulls and parameters of a search
# In every folder of its own.
_MARKS = ("collections",)
# What is there first.
_BEGUN = ("LOCK", "databases", *_MARKS)
_PIP_LITE = "run pip install 'milvus-lite>=3.2.2'"
# File -> writers of this process that use its server.
_USERS: Counter[str] = Counter()
_LOCK = threading.Lock()


def start_lite(file: str) -> str:
    """Return the URI of the server of a file, which runs in threads of this process.

    Raises:
        ConfigError: Milvus Lite is not installed, or too old; or the place is another's.
        DatabaseError: another process has the file, or it cannot be written.
    """
    manager = _lite_manager()
    if not is_folder(Path(file).parent):
        raise ConfigError(
            f"milvus://{file}: the folder {Path(file).parent} is not there; make it first"
        )
    _require_usable(file)
    with _LOCK:
        if not _USERS[file] and file in getattr(manager, "_servers", {}):
            # Somebody else in this process uses it: it is not ours to stop.
            _USERS[file] += 1
        with silence() as kept:
            uri = manager.start_and_get_uri(file)
        if uri is None:
            why = first_line(kept.error or "it cannot be opened")
            raise DatabaseError(
                f"Milvus Lite does not open {file} ({why}); {_remedy(kept.error, why)}"
            )
        _USERS[file] += 1
        return str(uri)


def require_lite(file: str) -> None:
    """Refuse a file that Milvus Lite would have to make before anything is read.

    Raises:
        ConfigError: Milvus Lite is not installed, or too old; or the place is another's.
        DatabaseError: it is not there, or nothing was ever put into it.
    """
    _lite_manager()
    _require_usable(file)
    require_there(Path(file), marks=_MARKS, address=f"milvus://{file}")


def _require_usable(file: str) -> None:
    """Refuse a place that is another's.

    Raises:
        ConfigError: it is a file, or a folder with others' files in it.
    """
    shown = f"milvus://{file}"
    if is_file(file):
        raise ConfigError(
            f"{shown} is a file, and Milvus Lite {'.'.join(map(str, _LITE_FROM))} or later makes "
            "a folder; name another that ends in .db"
        )
    require_own(Path(file), engine="Milvus Lite", marks=_BEGUN, address=shown)


def stop_lite(file: str) -> None:
    """Stop the server of a file where no other writer of this process needs it."""
    with _LOCK:
        _USERS[file] -= 1
        if not _USERS[file]:
            _lite_manager().release_server(file)


def _remedy(error: BaseException | None, told: str) -> str:
    if error is None or type(error).__name__ == "DataDirLockedError":
        return "it lets in one process at a time: close the other one, or use a server"
    return remedy_of(told) or "see to that, or name another file"


def _lite_manager() -> Any:
    try:
        release = metadata.version("milvus-lite")
        manager = importlib.import_module("milvus_lite.server_manager").server_manager_instance
    except ImportError as error:
        raise ConfigError(
            f"a file needs Milvus Lite, which is not installed ({error}); {_PIP_LITE}"
        ) from error
    if tuple(int(each) for each in re.findall(r"\d+", release)[:3]) < _LITE_FROM:
        raise ConfigError(f"Milvus Lite {release} lacks what a push needs; {_PIP_LITE}")
    return manager
