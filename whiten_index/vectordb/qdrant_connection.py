"""Connections to Qdrant: a server, or a folder of the client's own engine."""

from __future__ import annotations

import os
import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from qdrant_client import QdrantClient

from whiten_index.errors import ConfigError, DatabaseError
from whiten_index.vectordb.engine_options import QdrantOptions
from whiten_index.vectordb.engine_support import (
    disk_advice,
    first_line,
    reporting,
    require_engine_folder,
)

# Collections keep metadata, in which a push writes what they hold, from this release on.
_LEAST_RELEASE = (1, 16)
_PORT = 6333
_FORMS = f"qdrant://host:{_PORT}, qdrant+https://host:{_PORT} and qdrant:///folder"


@dataclass(frozen=True)
class QdrantAddress:
    """A server or a folder.

    Attributes:
        shown: the address.
        url: of a server, empty for a folder.
        folder: None for a server.
    """

    shown: str
    url: str = ""
    folder: Path | None = None

    @classmethod
    def parse(cls, address: str) -> QdrantAddress:
        """Return what an address names.

        Raises:
            ConfigError: the address has another form.
        """
        parts = urlsplit(address)
        https, path = parts.scheme == "qdrant+https", unquote(parts.path).rstrip("/")
        if not parts.netloc and path and not https:
            return cls(f"qdrant://{path}", folder=Path(path))
        try:
            host, port = parts.hostname or "", parts.port or _PORT
        except ValueError:
            host, port = "", 0
        if not host:
            raise ConfigError(f"the address of Qdrant is one of {_FORMS}")
        place = f"{f'[{host}]' if ':' in host else host}:{port}{path}"
        return cls(f"{parts.scheme}://{place}", f"http{'s' if https else ''}://{place}")

    def explain(self, error: Exception) -> tuple[str, str]:
        """Return the reason of an error of the client, and what to do."""
        # REST and gRPC have their own errors, and wrap those of their transports.
        cause = getattr(error, "source", error)
        status, code = getattr(error, "status_code", None), getattr(error, "code", None)
        why: object = cause
        if status is not None:
            why = f"{status}: {_answer(error)}"
        elif callable(code):
            status = code().name
            why = f"{status}: {getattr(error, 'details', str)()}"
        elif type(cause).__module__.startswith(("httpx", "httpcore")):
            status = "UNAVAILABLE"
        reason = first_line(why)
        return reason, self._advice(status, reason)

    def _advice(self, status: Any, reason: str) -> str:
        if "CERTIFICATE_VERIFY_FAILED" in reason:
            return "name a file of the certificates to trust with --option tls_ca=FILE"
        if status in (401, 403, "UNAUTHENTICATED", "PERMISSION_DENIED"):
            return "give a key that may write in QDRANT_API_KEY"
        if status in ("UNAVAILABLE", "DEADLINE_EXCEEDED", 502, 503, 504):
            return (
                "check that a Qdrant server answers there, or give it more seconds with "
                "--option timeout=N; push again to resume"
            )
        if "already accessed" in reason:
            return "another connection has this folder, and it takes one at a time; close that one"
        if self.folder is not None:
            return disk_advice(reason) or "push again when that is mended"
        return "see the log of the server, and push again"


def open_client(
    address: QdrantAddress, options: QdrantOptions, *, make: bool
) -> tuple[QdrantClient, str]:
    """Return a connected client, and the name and release of the engine.

    Raises:
        ConfigError: the certificates cannot be read, the folder has other files in it, or options
            are given for a folder.
        DatabaseError: nothing answers there, it is too old, or the folder cannot be opened.
    """
    if address.folder is not None:
        return _open_folder(address, address.folder, options, make=make)
    with reporting(address.shown, "it could not be reached", address.explain):
        client = QdrantClient(
            url=address.url, api_key=os.environ.get("QDRANT_API_KEY") or None,
            timeout=options.timeout, prefer_grpc=options.prefer_grpc,
            grpc_port=options.grpc_port, check_compatibility=False,
            **_trusting(address, options.tls_ca),
        )  # fmt: skip
        release = str(client.info().version)
    numbers = re.match(r"v?(\d+)\.(\d+)", release)
    if numbers and tuple(map(int, numbers.groups())) < _LEAST_RELEASE:
        raise DatabaseError(
            f"{address.shown} is Qdrant {release}, whose collections keep no metadata; a push "
            f"needs {'.'.join(map(str, _LEAST_RELEASE))} or later"
        )
    return client, f"Qdrant {release}"


def _open_folder(
    address: QdrantAddress, folder: Path, options: QdrantOptions, *, make: bool
) -> tuple[QdrantClient, str]:
    if options.model_fields_set:
        raise ConfigError(
            f"{address.shown} is Qdrant's local mode, which searches exactly and has no options; "
            f"leave out --option {min(options.model_fields_set)}"
        )
    marks = ("meta.json", "collection")
    require_engine_folder(folder, engine="Qdrant", marks=marks, address=address.shown, make=make)
    with reporting(address.shown, "it could not be opened", address.explain):
        client = QdrantClient(path=str(folder))
        return client, f"Qdrant's local mode {client.info().version}, which searches exactly"


def _trusting(address: QdrantAddress, path: str | None) -> dict[str, Any]:
    """Return the arguments by which a client trusts the certificates in a file."""
    if path is None:
        return {}
    if not address.url.startswith("https:"):
        raise ConfigError("--option tls_ca is for an address that begins with qdrant+https://")
    try:
        context, certificates = ssl.create_default_context(cafile=path), Path(path).read_bytes()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--option tls_ca: {path} holds no certificates that can be read ({error})"
        ) from error
    return {"verify": context, "grpc_options": {"root_certificates": certificates}}


def _answer(error: Any) -> str:
    """Return the answer of a server by REST."""
    try:
        return str(error.structured()["status"]["error"])
    except (ValueError, LookupError, TypeError):
        return str(error.reason_phrase or "no reason given")
