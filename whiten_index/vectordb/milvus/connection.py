"""Connections to Milvus: its client, in silence, and what went wrong with a call."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pymilvus import MilvusClient
from pymilvus.exceptions import MilvusException

from whiten_index.errors import ConfigError, DatabaseError
from whiten_index.vectordb.milvus.address import TOKEN, Place
from whiten_index.vectordb.milvus.lite import start_lite, stop_lite
from whiten_index.vectordb.milvus.options import IndexOptions
from whiten_index.vectordb.milvus.silence import silence
from whiten_index.vectordb.option_values import first_line

_CONNECT_SECONDS = 10.0
_GRPC_ERROR: type[Exception] = importlib.import_module("grpc").RpcError


class Connection:
    """A client whose calls are silent and raise ``DatabaseError``; ``close`` ends what it started.

    Attributes:
        engine: the database and its release.
        lite: whether that is Milvus Lite.
        shown: its address.
    """

    def __init__(self, address: str, options: IndexOptions) -> None:
        """Connect.

        Raises:
            ConfigError: the address cannot be used, or Milvus Lite is not installed; or the server
                is too old for the database that is named.
            DatabaseError: nothing answers there, or it does not let us in.
        """
        self._file: str | None = None
        self._client: Any = None
        wanted = Place.of(address, options.database)
        self.shown = wanted.shown
        uri = wanted.uri
        if wanted.file is not None:
            uri = start_lite(wanted.file)
            self._file = wanted.file
        try:
            with self._calling("connect"):
                self._client = MilvusClient(
                    uri=uri, token=wanted.token, db_name=wanted.database, dedicated=True,
                    timeout=_CONNECT_SECONDS, **wanted.tls,
                )  # fmt: skip
                version = str(self._client.get_server_version())
            self.lite = version.startswith("milvus_lite")
            self.engine = f"Milvus {version}"
            if self.lite:
                self.engine = f"Milvus Lite {version.removeprefix('milvus_lite').lstrip('-')}"
            self._require_aliases_in(wanted.database)
        except BaseException:
            self.close()
            raise

    def __getattr__(self, name: str) -> Any:
        """Return a method of the client."""
        method = getattr(self._client, name)

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._calling(name):
                return method(*args, **kwargs)

        return call

    @property
    def has_2_4(self) -> bool:
        """Whether what Milvus 2.4 brought is there; Milvus Lite has a release of its own."""
        told = re.search(r"(\d+)\.(\d+)", self.engine)
        return self.lite or told is None or (int(told[1]), int(told[2])) >= (2, 4)

    def _require_aliases_in(self, database: str) -> None:
        """Refuse what would be lost: before 2.4 a server looks for aliases in ``default`` alone.

        Raises:
            ConfigError: it is such a server, and another database.
        """
        if database not in ("", "default") and not self.has_2_4:
            raise ConfigError(
                f"{self.shown}: {self.engine} finds no aliases in the database {database!r}, which "
                "a push needs; use the database 'default', or Milvus 2.4 or later"
            )

    def close(self) -> None:
        """End the connection, and the server of Milvus Lite that no other writer needs."""
        client, self._client = self._client, None
        file, self._file = self._file, None
        with silence():
            if client is not None:
                client.close()
            if file is not None:
                stop_lite(file)

    @contextmanager
    def _calling(self, doing: str) -> Iterator[None]:
        with silence():
            try:
                yield
            except (MilvusException, _GRPC_ERROR) as error:
                told = self._told(error)
                raise DatabaseError(
                    f"{self.shown}: {doing} failed ({told}); {_remedy(told)}"
                ) from None

    def _told(self, error: Exception) -> str:
        """Return the first line of an error, and no secret."""
        # Where the client cannot connect, it keeps the server's word to itself.
        below = error.__cause__ if isinstance(error.__cause__, _GRPC_ERROR) else error
        details = getattr(below, "details", None)
        text = str(getattr(below, "message", "") or (details() if callable(details) else error))
        return first_line(text or type(error).__name__)


def _remedy(told: str) -> str:
    lower = told.lower()
    if "auth" in lower or "privilege" in lower or "permission" in lower:
        return f"give user:password, or the token, in {TOKEN}"
    if "json" in lower and "length" in lower:
        return "leave the longest column out of --keep, or raise common.JSONMaxLength of the server"
    if "connect" in lower or "unavailable" in lower or "timeout" in lower:
        return "see that the server runs and that the address is right"
    return "mend that and push again, which goes on where it was"
