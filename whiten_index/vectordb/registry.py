"""Databases by the scheme of their address, and their clients."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from whiten_index.address import Address
from whiten_index.errors import ConfigError
from whiten_index.paths import cut, require_no_secret
from whiten_index.vectordb.database_writer import DatabaseWriter
from whiten_index.vectordb.engine_options import EngineOptions
from whiten_index.vectordb.secrets import require_no_secrets


@dataclass(frozen=True)
class _Kind:
    """Database that rows can be pushed to.

    Attributes:
        writer: module and class of its writer.
        extra: that installs the client.
        client: module of the client.
        options: module and class of its options, which need no client.
        example: addresses.
    """

    writer: str
    extra: str
    client: str
    options: str
    example: str


_POSTGRES = _Kind(
    "postgres_writer:PostgresWriter",
    "postgres",
    "psycopg",
    "engine_options:PostgresOptions",
    "postgresql://user@host/database",
)
_QDRANT = _Kind(
    "qdrant_writer:QdrantWriter",
    "qdrant",
    "qdrant_client",
    "engine_options:QdrantOptions",
    "qdrant://host:6333 or qdrant:///folder",
)
_LANCEDB = _Kind(
    "lance_writer:LanceWriter",
    "lancedb",
    "lancedb",
    "engine_options:LanceOptions",
    "lancedb:///folder or lancedb+s3://bucket/prefix",
)
_MILVUS = _Kind(
    "milvus_writer:MilvusWriter",
    "milvus",
    "pymilvus",
    "engine_options:MilvusOptions",
    "milvus://host:19530 or milvus:///file.db",
)
_KINDS = {
    "postgresql": _POSTGRES,
    "postgres": _POSTGRES,
    "qdrant": _QDRANT,
    "qdrant+https": _QDRANT,
    "lancedb": _LANCEDB,
    "lancedb+s3": _LANCEDB,
    "lancedb+gs": _LANCEDB,
    "lancedb+az": _LANCEDB,
    "milvus": _MILVUS,
    "milvus+https": _MILVUS,
}
_TLS = "with TLS qdrant+https:// or milvus+https://, in PostgreSQL's address sslmode"
# Scheme -> schemes that may be meant.
_MEANT = {
    "http": ("qdrant", "milvus"),
    "https": ("qdrant+https", "milvus+https"),
    "qdrants": ("qdrant+https",),
    "milvuss": ("milvus+https",),
    "s3": ("lancedb+s3",),
    "gs": ("lancedb+gs",),
    "az": ("lancedb+az",),
    "pg": ("postgresql",),
    "pgsql": ("postgresql",),
    "pgvector": ("postgresql",),
    "psql": ("postgresql",),
}
_FILES = ".parquet, .arrow or .npy"


def open_writer(
    address: str, name: str, *, options: Mapping[str, str] | None = None, make: bool = True
) -> DatabaseWriter:
    """Connect to a table or collection, which need not exist.

    Args:
        address: URL of the database, without credentials; its client reads these from the
            environment.
        name: of the table or collection that users query.
        options: of the database's index and load, as ``--option NAME=VALUE`` gives them.
        make: whether to create what rows need: the folder or file of an engine without a server,
            the extension ``vector`` of PostgreSQL. If false, nothing is written.

    Raises:
        ConfigError: the address names no known database or holds a secret, its client is not
            installed, or the name or an option cannot be used.
        DatabaseError: the database cannot be reached, or refuses; or its folder or file is missing
            and not to be created.
    """
    kind = require_address(address)
    require_no_secrets(address, options or {})
    require_client(address)
    writer: DatabaseWriter = _load(kind.writer)(address, name, dict(options or {}), make=make)
    return writer


def require_address(address: str) -> _Kind:
    """Refuse an address of an unknown database; its client need not be installed.

    Raises:
        ConfigError: with the known ones, and a suggestion; or the address holds a secret.
    """
    require_no_secret(address, what="the address")
    scheme, slashes, _ = address.partition("://")
    kind = _KINDS.get(scheme.lower()) if slashes else None
    if kind is not None:
        return kind
    # Without slashes, it may be a connection string with a password.
    hidden = not address or (not slashes and re.search(r"[@:=\s]", address))
    named = "the address given is of" if hidden else f"{cut(address)} is the address of"
    examples = list(dict.fromkeys(each.example for each in _KINDS.values()))
    advice = _suggestion(address) or (
        f"give one of {', '.join(examples)} ({_TLS}), or a file that ends in {_FILES}"
    )
    schemes = ", ".join(f"{each.partition('://')[0]}://" for each in examples)
    raise ConfigError(f"{named} no database that rows can be pushed to ({schemes}); {advice}")


def _suggestion(address: str) -> str:
    """Return a suggestion for an address of no database, without secrets; "" if there is none."""
    scheme, slashes, rest = address.partition("://")
    if not slashes:
        known = address.partition(":")[0].lower()
        return f"after {known}: two slashes are missing" if known in _KINDS else ""
    name = scheme.lower()
    if name == "file" or re.search(r"\.(parquet|arrow|npy)$", re.split("[?#]", rest)[0], re.I):
        return (
            f"a file is given by its path alone, is written on this machine, and ends in {_FILES}"
        )
    # The driver, where another library's address names one.
    plain = name.partition("+")[0]
    meant = _MEANT.get(name) or ([plain] if _KINDS.get(plain) is _POSTGRES else None)
    meant = meant or difflib.get_close_matches(name, _KINDS, n=1, cutoff=0.75)
    addresses = [str(Address(f"{each}://{rest}")) for each in meant]
    return f"did you mean {' or '.join(addresses)}?" if addresses else ""


def require_client(address: str) -> None:
    """Refuse an address whose client is not installed, or cannot be loaded.

    Raises:
        ConfigError: with the command that installs it; or the database is unknown.
    """
    kind = require_address(address)
    try:
        importlib.import_module(kind.client)
    except Exception as error:
        # A broken client raises errors of any kind.
        raise _unusable(kind, error) from error
    try:
        # Another release of the client may lack what the writer imports.
        _load(kind.writer)
    except ImportError as error:
        raise _unusable(kind, error) from error


def _unusable(kind: _Kind, error: Exception) -> ConfigError:
    lacking = isinstance(error, ImportError)
    told = "is not installed" if lacking else "cannot be loaded"
    return ConfigError(
        f"the client of this database {told} ({type(error).__name__}: {error}); run pip "
        f"install {'' if lacking else '--force-reinstall '}'whiten-index[{kind.extra}]'"
    )


def _load(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"whiten_index.vectordb.{module}"), name)


def require_options(address: str, options: Mapping[str, str]) -> None:
    """Refuse options that a database does not have, without its client.

    Raises:
        ConfigError: one is unknown, or out of its bounds; or the address is of no database.
    """
    _load(require_address(address).options).parse(options)


def shaping_options(address: str, options: Mapping[str, str]) -> dict[str, str]:
    """Return those of the options that a table is made with, defaults included.

    The others belong to a connection, to the store and its keys, to searches or to waiting.
    """
    kind = _KINDS.get(address.partition("://")[0].lower())
    if kind is None:
        return dict(options)
    chosen: type[EngineOptions] = _load(kind.options)
    return chosen.parse(options).shaping()
