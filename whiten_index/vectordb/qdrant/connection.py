"""Connections to Qdrant: where it is, and what went wrong with a call."""

from __future__ import annotations

import functools
import ipaddress
import logging
import os
import re
import ssl
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit

from qdrant_client import QdrantClient

from whiten_index.errors import ConfigError, DatabaseError, WhitenIndexError
from whiten_index.vectordb.local_folders import remedy_of, require_own, require_there
from whiten_index.vectordb.option_values import first_line
from whiten_index.vectordb.qdrant.options import Options

_LOG = logging.getLogger(__name__)
_MEMORY = "qdrant://:memory:"
# In every folder of local mode.
_MARKS = ("meta.json",)
_PORT = 6333
# Collections keep metadata, in which a push writes what they hold, from this release on.
_LEAST = (1, 16)


@dataclass(frozen=True)
class Place:
    """What an address names: a server, a folder, or this process's memory.

    Attributes:
        shown: the address.
        host: of a server, None for local mode.
        port: of its REST interface.
        https: whether it is asked by TLS.
        prefix: of its paths.
        key: its API key.
        folder: of local mode on disk, None in memory.
    """

    shown: str
    host: str | None = None
    port: int = _PORT
    https: bool = False
    prefix: str = ""
    key: str | None = field(default=None, repr=False)
    folder: Path | None = None

    @classmethod
    def of(cls, address: str) -> Self:
        """Return what an address names, with the API key in QDRANT_API_KEY.

        Raises:
            ConfigError: it has another form.
        """
        if address == _MEMORY:
            return cls(_MEMORY)
        try:
            parts = urlsplit(address)
            host, port = parts.hostname or "", parts.port or _PORT
        except ValueError:
            raise ConfigError(f"the address of Qdrant {_FORMS}") from None
        path = unquote(parts.path)
        https = parts.scheme == "qdrant+https"
        if parts.query or parts.fragment:
            raise ConfigError("an address of Qdrant has no ? and no #; give --option NAME=VALUE")
        if not parts.netloc and path.strip("/") and not https:
            return cls(f"qdrant://{path}", folder=Path(path))
        if not re.fullmatch(r"[\w.-]+|[0-9a-f:.]+(%[\w.-]+)?", host):
            raise ConfigError(f"the address of Qdrant {_FORMS}")
        key = os.environ.get("QDRANT_API_KEY") or None
        host = f"[{host}]" if ":" in host else host
        prefix = path.rstrip("/")
        return cls(
            f"{parts.scheme}://{host}:{port}{prefix}", host, port, https, prefix, key
        )  # fmt: skip

    @property
    def local(self) -> bool:
        """Whether it is the client's own engine rather than a server."""
        return self.host is None


_FORMS = (
    f"is one of qdrant://host:{_PORT}, qdrant+https://host:{_PORT}, qdrant:///folder and {_MEMORY}"
)


@dataclass(frozen=True)
class Told:
    """Turns what a call of the client raises into DatabaseErrors, which show no secret."""

    place: Place

    @contextmanager
    def __call__(self, doing: str) -> Iterator[None]:
        """Raise a DatabaseError in place of any error within.

        Args:
            doing: what was to be done, such as ``rows could not be added``.
        """
        try:
            yield
        except WhitenIndexError:
            raise
        except Exception as error:
            # A client raises errors of four libraries, which have no base of their own.
            why, remedy = self._why(error)
            # What it came of may show the key.
            raise DatabaseError(f"{self.place.shown}: {doing} ({why}); {remedy}") from None

    def _why(self, error: Exception) -> tuple[str, str]:
        """Return what went wrong, and what to do."""
        cause = getattr(error, "source", error)
        status = getattr(error, "status_code", None)
        code = getattr(error, "code", None)
        why: object = cause
        if status is not None:
            why = f"{status}: {_answer(error)}"
        elif callable(code):
            status = code().name
            why = f"{status}: {getattr(error, 'details', str)()}"
        if type(cause).__module__.startswith(("httpx", "httpcore")):
            status = "UNAVAILABLE"
        shown = first_line(why)
        return shown, self._remedy(status, shown)

    def _remedy(self, status: Any, why: str) -> str:
        if "CERTIFICATE_VERIFY_FAILED" in why:
            return "name a file of the certificates to trust with --option tls_ca=FILE"
        if status in (401, 403, "UNAUTHENTICATED", "PERMISSION_DENIED"):
            return "give a key that may write in QDRANT_API_KEY"
        if status in ("UNAVAILABLE", "DEADLINE_EXCEEDED", 502, 503, 504):
            return (
                "see that a Qdrant server answers there, or give it more seconds with "
                "--option timeout=N; a push goes on where it was"
            )
        if status == 413:
            return "let the server take larger requests (max_request_size_mb), or keep less text"
        if "Value out of range" in why:
            return "gRPC carries whole numbers below 2**63 alone; leave out --option prefer_grpc"
        if "already accessed" in why:
            return "another connection has this folder, and it takes one at a time; close that one"
        if self.place.local:
            return remedy_of(why) or "see the message, and push again"
        return "see the log of the server, and push again"


def _answer(error: Any) -> str:
    """Return what a server answered by REST."""
    try:
        return str(error.structured()["status"]["error"])
    except (ValueError, LookupError, TypeError):
        return str(error.reason_phrase or "no reason given")


@functools.cache
def _in_memory() -> Any:
    """Return the one client of this process that keeps all in memory."""
    return QdrantClient(":memory:")


def open_client(place: Place, options: Options, *, make: bool = True) -> Any:
    """Return a client of Qdrant, connected.

    A key that goes over a network as it is, without TLS, is told of by a warning in the log.

    Raises:
        ConfigError: the certificates cannot be read, or the folder has others' files in it.
        DatabaseError: nothing answers there, or the folder is taken, or it is not there and ``make``
            is false.
    """
    if place.folder is not None:
        require_own(
            place.folder, engine="Qdrant", marks=(*_MARKS, "collection"), address=place.shown
        )
        if not make:
            require_there(place.folder, marks=_MARKS, address=place.shown)
    if place.key is not None and not place.https and not _is_this_machine(place.host or ""):
        _LOG.warning(
            "%s is asked without TLS: whoever is on the way can read the API key; where the server "
            "takes TLS write qdrant+https://",
            place.shown,
        )
    with Told(place)("it could not be opened"), warnings.catch_warnings():
        # The client's own words are of a line of its source.
        warnings.filterwarnings("ignore", "Api key is used with an insecure connection")
        if place.folder is not None:
            return QdrantClient(path=str(place.folder))
        if place.host is None:
            return _in_memory()
        more: dict[str, Any] = {}
        if options.tls_ca is not None:
            more = _trusting(place, Path(options.tls_ca))
        return QdrantClient(
            host=place.host, port=place.port, https=place.https, prefix=place.prefix or None,
            api_key=place.key, timeout=options.timeout, prefer_grpc=options.prefer_grpc,
            grpc_port=options.grpc_port, check_compatibility=False, **more,
        )  # fmt: skip


def _is_this_machine(host: str) -> bool:
    """Tell whether what is sent to a host goes over no network."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host.rstrip(".") == "localhost"


def close_client(client: Any, place: Place) -> None:
    """Close a client, but the one in memory, which stays for the next connection."""
    if not place.local or place.folder is not None:
        client.close()


def _trusting(place: Place, path: Path) -> dict[str, Any]:
    """Return what lets a client trust certificates.

    Raises:
        ConfigError: they cannot be read, or the address asks for no TLS.
    """
    if not place.https:
        raise ConfigError("--option tls_ca is for an address that begins with qdrant+https://")
    try:
        context, certificates = ssl.create_default_context(cafile=str(path)), path.read_bytes()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--option tls_ca: {path} holds no certificates that can be read ({error})"
        ) from error
    return {"verify": context, "grpc_options": {"root_certificates": certificates}}


def engine_of(client: Any, place: Place) -> str:
    """Return what answers there, and its release.

    Raises:
        DatabaseError: nothing does, or it is too old.
    """
    with Told(place)("it could not be reached"):
        release = str(client.info().version)
    if place.local:
        return f"Qdrant's local mode {release}, which searches exactly"
    numbers = re.match(r"v?(\d+)\.(\d+)", release)
    if numbers and tuple(map(int, numbers.groups())) < _LEAST:
        raise DatabaseError(
            f"{place.shown} is Qdrant {release}, whose collections keep no metadata; a push needs "
            f"{'.'.join(map(str, _LEAST))} or later"
        )
    return f"Qdrant {release}"
