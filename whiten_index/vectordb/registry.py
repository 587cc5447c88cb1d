"""Which database an address names, and the client that it needs."""

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
    """A database that rows can be pushed to.

    Attributes:
        writer: module and name of what connects.
        extra: that installs the client.
        client: name by which that is imported.
        options: module and name of the class of its options, which needs no client.
        example: addresses.
    """

    writer: str
    extra: str
    client: str
    options: str
    example: str


_POSTGRES = _Kind(
    "postgres:connect",
    "postgres",
    "psycopg",
    "postgres.options:PostgresOptions",
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
# Scheme -> those that may be meant by it.
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
# Where a server listens unless it was told otherwise.
_PORTS = {"5432": "postgresql", "6333": "qdrant", "6334": "qdrant", "19530": "milvus"}
_INDEX = "index"
_FILES = ".parquet, .arrow or .npy"
# A file by its ending, of whatever kind.
_A_FILE = re.compile(r"[^:@=?\s]*[^:@=?\s/.]\.[A-Za-z]\w{0,8}")


def open_writer(
    address: str, name: str, *, options: Mapping[str, str] | None = None, make: bool = True
) -> DatabaseWriter:
    """Connect to a table or collection, which need not be there yet.

    Args:
        address: URL of the database, without credentials; its client reads these from the
            environment.
        name: of the table or collection that users query.
        options: of the database's index and load, as ``--option NAME=VALUE`` gives them.
        make: whether to make what rows need: the folder or file of an engine without a server, the
            extension ``vector`` of PostgreSQL. Else nothing is made or written, and the writer is
            for reading alone: a server that lacks it has nothing published.

    Raises:
        ConfigError: the address names no database known here or holds a secret, its client is not
            installed, or the name or an option cannot be used.
        DatabaseError: the database cannot be reached, or refuses; or there is no such folder or file,
            and none is to be made.
    """
    kind = require_address(address)
    require_no_secrets(address, options or {})
    require_client(address)
    writer: DatabaseWriter = _load(kind.writer)(address, name, dict(options or {}), make=make)
    return writer


def require_address(address: str) -> _Kind:
    """Refuse an address of no database known here; its client need not be installed.

    Raises:
        ConfigError: with those known, and what may be meant; or it holds a secret.
    """
    require_no_secret(address, what="the address")
    scheme, slashes, _ = address.partition("://")
    kind = _KINDS.get(scheme.lower()) if slashes else None
    if kind is None:
        # Without slashes, it may be a connection string with a password.
        hidden = not slashes and not _with_slashes(address) and re.search(r"[@:=\s]", address)
        told = "…" if hidden else cut(address)
        named = "the address given is of" if told in ("", "…") else f"{told} is the address of"
        meant = _meant(address)
        examples = list(dict.fromkeys(each.example for each in _KINDS.values()))
        schemes = ", ".join(f"{each.partition('://')[0]}://" for each in examples)
        raise ConfigError(
            f"{named} no database that rows can be pushed to ({schemes}); {meant}"
            if meant
            else f"{named} no database that rows can be pushed to; give one of "
            f"{', '.join(examples)} ({_TLS}), or a file that ends in {_FILES}"
        )
    return kind


def _meant(address: str) -> str:
    """Return what may be meant by an address of no database, without any secret; else nothing."""
    scheme, slashes, rest = address.partition("://")
    if not slashes:
        return _meant_without_slashes(address)
    name = scheme.lower()
    if name == "file" or re.search(r"\.(parquet|arrow|npy)$", re.split("[?#]", rest)[0], re.I):
        return (
            f"a file is given by its path alone, is written on this machine, and ends in {_FILES}"
        )
    # The driver, where another library's address names one.
    plain = name.partition("+")[0]
    meant = _MEANT.get(name) or ([plain] if _KINDS.get(plain) is _POSTGRES else None)
    meant = meant or difflib.get_close_matches(name, _KINDS, n=1, cutoff=0.75)
    told = [str(Address(f"{each}://{rest}")) for each in meant]
    return f"did you mean {' or '.join(told)}?" if told else ""


def _meant_without_slashes(address: str) -> str:
    scheme = re.match(r"([a-z0-9+]+):/?(?!\d)", address, re.IGNORECASE)
    if scheme and scheme[1].lower() in _KINDS:
        meant = _with_slashes(address) or f"{scheme[1]}://…"
        return f"after {scheme[1]}: two slashes are missing; did you mean {meant}?"
    place = re.fullmatch(r"[\w.-]+:(\d+)(/[\w.-]*)?", address)
    if place and place[1] in _PORTS:
        return f"did you mean {_PORTS[place[1]]}://{address}?"
    return f"a file ends in {_FILES}" if _A_FILE.fullmatch(address) else ""


def _with_slashes(address: str) -> str:
    """Return an address of a folder with the two slashes that it lacks, "" where it is another."""
    found = re.fullmatch(r"(qdrant|lancedb|milvus):(/[^/@?#:;=\s][^@?#:;=\s]*)", address)
    return f"{found[1]}://{found[2]}" if found else ""


def require_client(address: str) -> None:
    """Refuse an address whose client is not installed, or cannot be loaded.

    Raises:
        ConfigError: with the command that installs it; or the address is of no database known here.
    """
    kind = require_address(address)
    try:
        importlib.import_module(kind.client)
    except Exception as error:
        # A client whose parts do not fit together fails in ways of its own.
        raise _unusable(kind, error) from error
    try:
        # What it takes of the client may be lacking in another release.
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
    chosen = _load(kind.options)
    if issubclass(chosen, EngineOptions):
        found: dict[str, str] = chosen.parse(options).shaping()
        return found
    of = importlib.import_module(chosen.__module__)
    another = options.get("index", of.DEFAULTS["index"]) != of.DEFAULTS["index"]
    every = {**({} if another else of.DEFAULTS), **options}
    return {name: value for name, value in every.items() if name in of.SHAPING}
