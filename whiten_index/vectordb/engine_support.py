"""Support for the writers of the engines: addresses, folders, names, and the text of errors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from whiten_index.address import hide_secrets
from whiten_index.artifacts.files import is_folder, list_folder
from whiten_index.errors import ConfigError, DatabaseError
from whiten_index.paths import cut

# The words of C's library, as Python and Rust report them, Rust's numbers, and SQLite's words.
_NOT_WRITABLE = re.compile(
    r"permission denied|operation not permitted|read-only file system|readonly database"
    r"|\(os error (1|13|30)\)",
    re.IGNORECASE,
)
_FULL = re.compile(r"no space left|quota exceeded|\(os error (28|122)\)", re.IGNORECASE)
# Names in every folder that are not the user's: systems make them.
_SYSTEM_NAMES = ("lost+found",)
# Characters shown of a message of an engine.
_SHOWN = 500


@dataclass(frozen=True)
class EngineAddress:
    """A server of Qdrant or Milvus, or the folder of its engine without a server.

    Attributes:
        shown: address without parameters.
        url: of the server, with http or https.
        inside: path at the server, without slashes at its ends.
        parameters: of the address.
        folder: of an engine without a server.
    """

    shown: str
    url: str = ""
    inside: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None

    @classmethod
    def parse(cls, address: str, *, port: int, tls_port: int, forms: str) -> EngineAddress:
        """Return what an address names; ``forms`` is the error of another form."""
        parts = urlsplit(address)
        tls, path = parts.scheme.endswith("+https"), unquote(parts.path)
        if not parts.netloc and path and not tls:
            return cls(f"{parts.scheme}://{path}", folder=Path(path).absolute())
        try:
            host, number = parts.hostname or "", parts.port or (tls_port if tls else port)
        except ValueError:
            host = ""
        # A file needs three slashes.
        if not host or host.endswith(".db"):
            raise ConfigError(forms)
        at = f"{f'[{host}]' if ':' in host else host}:{number}"
        inside, url = path.strip("/"), f"http{'s' if tls else ''}://{at}"
        shown = "/".join(filter(None, (f"{parts.scheme}://{at}", inside)))
        return cls(shown, url, inside, dict(parse_qsl(parts.query)))


def disk_advice(reason: str) -> str:
    """Return what to do if an engine reports a full disk or missing permissions, else nothing."""
    if _NOT_WRITABLE.search(reason):
        return (
            "this user may not write there: change the permissions of the folder, or name another"
        )
    return "make room on that disk, and push again to resume" if _FULL.search(reason) else ""


def require_engine_folder(
    folder: Path, *, engine: str, marks: Sequence[str], address: str, make: bool
) -> None:
    """Refuse a folder of other files, and one that reading would have to make."""
    # The engine itself refuses a file.
    inside = list_folder(folder) if is_folder(folder) else []
    others = [e.name for e in inside if not e.name.startswith(".") and e.name not in _SYSTEM_NAMES]
    ours = any(list_folder(folder, each) for each in marks) if inside else False
    if others and not ours:
        raise ConfigError(
            f"{address} is a folder with other files than those of {engine}, such as "
            f"{cut(others[0])!r}; name a folder that is empty or not there yet"
        )
    if not make and not ours:
        raise DatabaseError(
            f"{address} is not there, or nothing was pushed to it yet; look at the path in the "
            "address, or push an index to it first"
        )


def require_name(name: str, pattern: str, *, longest: int, engine: str, rule: str) -> None:
    """Refuse a name that an engine gives no table."""
    if not re.fullmatch(pattern, name) or len(name.encode()) > longest:
        raise ConfigError(
            f"{engine} cannot give a table the name {cut(name)!r}; use 1 to {longest} bytes, {rule}"
        )


def first_line(message: object) -> str:
    """Return the first line of a message or an error, without secrets, cut to a length.

    If an error has no message, return the name of its class.
    """
    # A secret may contain a line break.
    lines = hide_secrets(str(message)).strip().splitlines()
    return lines[0][:_SHOWN] if lines else type(message).__name__
