"""Support for the writers of the engines: addresses, folders, and what to do about errors."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from whiten_index.artifacts.atomic import require_plain_target
from whiten_index.artifacts.files import (
    exists,
    is_file,
    is_folder,
    is_link,
    list_folder,
    reading,
    resolved,
    size_of,
    walk_files,
)
from whiten_index.errors import ConfigError, DatabaseError
from whiten_index.paths import cut
from whiten_index.vectordb.engine_options import EngineOptions

# The words of C's library, as Python and Rust report them, Rust's numbers, and SQLite's words.
_OF_DISKS = (
    (
        r"permission denied|operation not permitted|read-only file system|readonly database"
        r"|\(os error (1|13|30)\)",
        "this user may not write there: change the permissions of the folder, or name another",
    ),
    (
        r"no space left|quota exceeded|disk is full|\(os error (28|122)\)",
        "make room on that disk; run this again",
    ),
    (
        r"disk image is malformed|i/o error|input/output error|\(os error 5\)",
        "the disk fails or is full, or the file is damaged: look at the disk before you remove "
        "anything; run this again",
    ),
    ("already accessed", "another client has this folder, which takes one at a time; close it"),
    (
        "could not set lock|unique file handle",
        "the engine takes one process at a time if one of them writes: close the other one",
    ),
    (
        "while replaying wal",
        "a process was killed while it wrote: run this again, or open the file once to write, "
        "which ends what was written",
    ),
    ("not a valid .* file|not a database", "name another file: this one has another format"),
    (
        "database is locked",
        "another program writes to the file: run this again when it has ended, or wait longer with "
        "--option lock_timeout=SECONDS",
    ),
)
# Ends of the names of files that DuckDB and SQLite write next to a file.
_LOGS = (".wal", ".wal.checkpoint", ".wal.recovery", "-wal", "-shm", "-journal")
# A folder in the root of a disk, of the system.
_LOST = "lost+found"
_OF_SERVERS = (
    ("certificate_verify_failed", "name a file of certificates to trust in SSL_CERT_FILE"),
    ("auth|privilege|permission|^40[13]", "give credentials that may write there, in {}"),
    (
        "connect|unavailable|timeout|deadline|timed out|^50[234]",
        "check that the server runs and answers at this address; run this again to resume",
    ),
    ("json.*length", "leave out the longest column, or raise the server's common.JSONMaxLength"),
)


@dataclass(frozen=True)
class EngineAddress:
    """A server of Qdrant or Milvus and a path ``inside`` it, or the folder of its local engine.

    ``shown`` is the address without its parameters.
    """

    shown: str
    url: str = ""
    inside: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None

    @classmethod
    def parse(cls, address: str, engine: type[EngineOptions]) -> "EngineAddress":
        """Return what an address of an engine names."""
        parts = urlsplit(address)
        tls, path = parts.scheme.endswith("+https"), unquote(parts.path)
        if not parts.netloc and path and not tls:
            return cls(f"{parts.scheme}://{path}", folder=Path(path).absolute())
        try:
            host, number = parts.hostname or "", parts.port or engine.ports[tls]
        except ValueError:
            host = ""
        # A file needs three slashes.
        if not host or host.endswith(".db"):
            raise ConfigError(f"the address of {engine.engine} is one of {engine.example}")
        at = f"{f'[{host}]' if ':' in host else host}:{number}"
        inside, url = path.strip("/"), f"http{'s' if tls else ''}://{at}"
        shown = "/".join(filter(None, (f"{parts.scheme}://{at}", inside)))
        return cls(shown, url, inside, dict(parse_qsl(parts.query)))


def advice(reason: str, *, credentials: str = "") -> str:
    """Return what to do about an error; an engine without a server has no ``credentials``."""
    known = _OF_SERVERS if credentials else _OF_DISKS
    found = (told for form, told in known if re.search(form, reason, re.IGNORECASE))
    general = "run this again to resume when that is mended"
    return next(found, general).format(credentials)


def require_engine_folder(
    folder: Path, *, engine: str, marks: Sequence[str], address: str, make: bool
) -> None:
    """Refuse a folder of other files, and one that reading would have to make."""
    # The engine itself refuses a file.
    inside = list_folder(folder) if is_folder(folder) else []
    # Another push may remove files meanwhile.
    with suppress(FileNotFoundError):
        for each in walk_files(folder, leave_out=(_LOST,)) if inside else ():
            _require_plain(each)
    others = [e.name for e in inside if not e.name.startswith(".") and e.name != _LOST]
    ours = any(list_folder(folder, each) for each in marks) if inside else False
    if others and not ours:
        raise ConfigError(
            f"{address} is a folder with other files than those of {engine}, such as "
            f"{cut(others[0])!r}; name a folder that is empty or not there yet"
        )
    if not make and not ours:
        raise _not_there(address)


def require_engine_file(
    address: str, engine: type[EngineOptions], *, make: bool
) -> tuple[Path, str]:
    """Return the file that an address names, and the address as it is shown.

    Refuse one that reading would have to make. The engine refuses other formats: the file is not
    opened here, because closing it would end locks that this process has.
    """
    place = EngineAddress.parse(address, engine)
    file, shown = place.folder, place.shown
    if file is None:
        raise ConfigError(f"the address of {engine.engine} is {engine.example}, with three slashes")
    if is_folder(file) or not is_folder(file.parent):
        lacks = "is a folder" if is_folder(file) else "is in a folder that does not exist"
        raise ConfigError(f"{shown} {lacks}; name a file in an existing folder")
    real = resolved(file)
    if not exists(real):
        require_no_link(file)
    for end in ("", *_LOGS):
        beside = real.with_name(real.name + end)
        _require_plain(beside)
        # A log is written in its place, and may end meanwhile.
        with suppress(FileNotFoundError), reading(beside):
            if end and is_file(beside) and beside.stat().st_nlink > 1:
                raise _is_link(beside, "a copy of it in its place")
    if not make and size_of(real) == 0:
        raise _not_there(shown)
    return file, shown


def _require_plain(path: Path) -> None:
    require_plain_target(path)
    require_no_link(path)


def require_no_link(path: Path) -> None:
    """Refuse a place that an engine writes to if it leads elsewhere."""
    if is_link(path):
        raise _is_link(path, "what it leads to in its place, or remove it")


def _is_link(path: Path, remedy: str) -> ConfigError:
    return ConfigError(f"{path} is a link, through which the engine would write; put {remedy}")


def _not_there(address: str) -> DatabaseError:
    return DatabaseError(
        f"{address} is not there, or nothing was pushed to it yet; look at the path in the "
        "address, or push an index to it first"
    )


def quoted(name: str) -> str:
    """Return a name in SQL."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """Return a text in SQL."""
    return "'" + text.replace("'", "''") + "'"
