"""Connections to Milvus: a server, or Milvus Lite on a file."""

from __future__ import annotations

import importlib
import logging
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from pymilvus import MilvusClient

from whiten_index.artifacts.files import is_file, is_folder
from whiten_index.errors import ConfigError, DatabaseError
from whiten_index.vectordb.engine_support import (
    disk_advice,
    first_line,
    reporting,
    require_engine_folder,
)

_TOKEN = "MILVUS_TOKEN"
_PORT = 19530
_FORMS = (
    f"the address of Milvus is one of milvus://host:{_PORT}, milvus+https://host and "
    f"milvus:///folder/file.db; give the token, or user:password, in {_TOKEN}"
)
_CONNECT_SECONDS = 10.0

# What the client and Milvus Lite log as errors, they raise too.
for _name in ("pymilvus", "milvus_lite", "grpc"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)


@dataclass(frozen=True)
class MilvusAddress:
    """A server or a file.

    Attributes:
        shown: the address.
        uri: of a server, as the client takes it; empty for a file.
        file: of Milvus Lite, None for a server.
        database: of the server, empty for its default.
        tls: parameters of the client.
    """

    shown: str
    uri: str = ""
    file: Path | None = None
    database: str = ""
    tls: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, address: str, database: str) -> MilvusAddress:
        """Return what an address and the option ``db`` name.

        Raises:
            ConfigError: the address has another form.
        """
        parts = urlsplit(address)
        path = unquote(parts.path)
        if not parts.netloc:
            if not path.endswith(".db"):
                raise ConfigError(
                    f"milvus://{path}: Milvus Lite takes a file that ends in .db, in its full path"
                )
            return cls(f"milvus://{path}", file=Path(path).absolute())
        secure = parts.scheme == "milvus+https"
        try:
            host, port = parts.hostname or "", parts.port or (443 if secure else _PORT)
        except ValueError:
            raise ConfigError(_FORMS) from None
        if not host or host.endswith(".db"):
            raise ConfigError(f"milvus://{host}: {_FORMS}")
        inside = path.strip("/")
        if inside and database and inside != database:
            raise ConfigError(
                f"the address names the database {inside!r} and --option db {database!r}"
            )
        at = f"{f'[{host}]' if ':' in host else host}:{port}"
        named = "/".join(filter(None, (at, inside or database)))
        return cls(
            f"{parts.scheme}://{named}",
            f"http{'s' if secure else ''}://{at}",
            database=inside or database,
            tls=dict(parse_qsl(parts.query)),
        )

    def explain(self, error: Exception) -> tuple[str, str]:
        """Return the reason of an error of the client, and what to do."""
        # A client that cannot connect has the server's word in the cause alone.
        below = error.__cause__ if callable(getattr(error.__cause__, "details", None)) else error
        details = getattr(below, "details", None)
        text = getattr(below, "message", "") or (details() if callable(details) else error)
        reason = first_line(text or error)
        lower = reason.lower()
        if "auth" in lower or "privilege" in lower or "permission" in lower:
            return reason, f"give user:password, or the token, in {_TOKEN}"
        if "json" in lower and "length" in lower:
            return reason, (
                "leave the longest column out of --keep, or raise the server's common.JSONMaxLength"
            )
        if "connect" in lower or "unavailable" in lower or "timeout" in lower:
            return reason, "check that the server runs and that the address is right"
        return reason, disk_advice(reason) or "push again to resume when that is mended"


class MilvusConnection:
    """A connected client; ``close`` ends what it started.

    Attributes:
        client: of pymilvus.
        engine: the database and its release.
        lite: whether that is Milvus Lite.
    """

    def __init__(self, address: MilvusAddress, *, make: bool) -> None:
        """Connect.

        Raises:
            ConfigError: Milvus Lite is not installed, its folder has other files in it, or the
                server is too old for the database that is named.
            DatabaseError: nothing answers there, or it refuses.
        """
        self._lite = None if address.file is None else _Lite(address.file, make=make)
        try:
            with reporting(address.shown, "it could not be reached", address.explain):
                self.client: Any = MilvusClient(
                    uri=address.uri if self._lite is None else self._lite.uri,
                    token=os.environ.get(_TOKEN, ""), db_name=address.database, dedicated=True,
                    timeout=_CONNECT_SECONDS, **address.tls,
                )  # fmt: skip
                release = str(self.client.get_server_version())
        except BaseException:
            if self._lite is not None:
                self._lite.stop()
            raise
        self.lite = release.startswith("milvus_lite")
        number = release.removeprefix("milvus_lite").lstrip("-")
        self.engine = f"Milvus Lite {number}" if self.lite else f"Milvus {release}"
        if address.database not in ("", "default") and not self.has_2_4:
            self.close()
            raise ConfigError(
                f"{address.shown}: {self.engine} finds no aliases in the database "
                f"{address.database!r}, which a push needs; use the database 'default', or Milvus "
                "2.4 or later"
            )

    @property
    def has_2_4(self) -> bool:
        """Whether the server is 2.4 or later; Milvus Lite has its own releases."""
        numbers = re.search(r"(\d+)\.(\d+)", self.engine)
        return self.lite or numbers is None or (int(numbers[1]), int(numbers[2])) >= (2, 4)

    def close(self) -> None:
        """End the connection, and the server of Milvus Lite if it was started here."""
        self.client.close()
        if self._lite is not None:
            self._lite.stop()


class _Lite:
    """Milvus Lite: a server of a file, in threads of this process.

    A server that another client of this process started is shared and left running.
    """

    def __init__(self, file: Path, *, make: bool) -> None:
        shown = f"milvus://{file}"
        try:
            module = importlib.import_module("milvus_lite.server_manager")
        except ImportError as error:
            raise ConfigError(
                f"a file needs Milvus Lite, which is not installed ({error}); run pip install "
                "'milvus-lite>=3.2.2'"
            ) from error
        if is_file(file) or not is_folder(file.parent):
            raise ConfigError(
                f"{shown}: Milvus Lite makes a folder of that name inside a folder that is there; "
                f"name another that ends in .db, or make {file.parent}"
            )
        require_engine_folder(
            file, engine="Milvus Lite", marks=("collections", "LOCK", "databases"), address=shown,
            make=make,
        )  # fmt: skip
        self._file, self._manager = str(file), module.server_manager_instance
        self._shared = self._file in self._manager._servers
        self.uri = self._manager.start_and_get_uri(self._file)
        if self.uri is None:
            raise DatabaseError(
                f"Milvus Lite does not open {file}, which it locks for one process at a time and "
                "must be able to write; close the other process or change the permissions of the "
                "folder, or use a server"
            )

    def stop(self) -> None:
        if not self._shared:
            self._manager.release_server(self._file)
