"""Support for the writers of Qdrant, LanceDB and Milvus: their errors, folders and names."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from whiten_index.address import hide_secrets
from whiten_index.artifacts.files import is_folder, list_folder
from whiten_index.errors import ConfigError, DatabaseError, WhitenIndexError
from whiten_index.paths import cut

Method = TypeVar("Method", bound=Callable[..., Any])

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


def reports(doing: str) -> Callable[[Method], Method]:
    """Let a writer's method raise ``DatabaseError`` in place of any error of its client."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with reporting(self.target, doing, self.explain):
                return method(self, *args, **kwargs)

        return cast(Method, call)

    return decorate


@contextmanager
def reporting(
    target: str, doing: str, explain: Callable[[Exception], tuple[str, str]]
) -> Iterator[None]:
    """Raise ``DatabaseError`` in place of any error of the engine's client."""
    try:
        yield
    except (WhitenIndexError, MemoryError):
        raise
    except Exception as error:
        # Clients raise errors of several libraries, which have no base in common.
        reason, advice = explain(error)
        # The error itself may show a secret.
        raise DatabaseError(f"{target}: {doing} ({reason}); {advice}") from None


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


def host_and_port(address: str, port: int, forms: str) -> str:
    """Return ``host:port`` of an address, with a default port; refuse one of another form."""
    parts = urlsplit(address)
    try:
        host, port = parts.hostname or "", parts.port or port
    except ValueError:
        host = ""
    # A file needs three slashes.
    if not host or host.endswith(".db"):
        raise ConfigError(forms)
    return f"{f'[{host}]' if ':' in host else host}:{port}"


def require_name(name: str, pattern: str, *, longest: int, engine: str, rule: str) -> None:
    """Refuse a name that an engine gives no table."""
    if not re.fullmatch(pattern, name) or len(name.encode()) > longest:
        raise ConfigError(
            f"{engine} cannot give a table the name {cut(name)!r}; use 1 to {longest} bytes, {rule}"
        )


def first_line(told: object) -> str:
    """Return the first line of a message or an error, without secrets, cut to a length.

    If an error has no message, return the name of its class.
    """
    # A secret may contain a line break.
    lines = hide_secrets(str(told)).strip().splitlines()
    return lines[0][:_SHOWN] if lines else type(told).__name__
