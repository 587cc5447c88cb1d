"""Databases by the scheme of their address.

Addresses and options hold no secrets, and are read without the database's client.
"""

import importlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from whiten_index.artifacts.files import reading
from whiten_index.errors import ConfigError, StorageError, remedy_for
from whiten_index.paths import cut, require_no_secret
from whiten_index.vectordb.engine_options import (
    EngineOptions,
    LanceOptions,
    MilvusOptions,
    QdrantOptions,
)
from whiten_index.vectordb.file_options import DuckOptions, SqliteOptions
from whiten_index.vectordb.postgres_options import PostgresOptions

if TYPE_CHECKING:
    from whiten_index.vectordb.database_writer import DatabaseWriter

_ENGINES = (
    PostgresOptions, QdrantOptions, LanceOptions, MilvusOptions, DuckOptions, SqliteOptions,
)  # fmt: skip
_BY_SCHEME: dict[str, type[EngineOptions]] = {
    scheme: each for each in _ENGINES for scheme in each.schemes
}
_FORMS = (
    f"{', '.join(each.example for each in _ENGINES)} (with TLS qdrant+https:// or milvus+https://, "
    "in PostgreSQL's address sslmode), or a file that ends in .parquet, .arrow or .npy"
)

_SETTING = (
    r"(?:search_path|role|statement_timeout|lock_timeout|idle_in_transaction_session_timeout)"
)
_POSTGRES_SETTINGS = re.compile(rf"(?:\s*-c\s*{_SETTING}=[\w$\",.-]+)+\s*")


def open_writer(
    address: str, name: str, *, options: Mapping[str, str] | None = None, make: bool = True
) -> "DatabaseWriter":
    """Connect to a table or collection, which need not exist.

    Unless ``make``, nothing is written: neither the folder or file of an engine without a server,
    nor the extension ``vector`` of PostgreSQL.
    """
    made, given = require_client(address), _engine(address)
    parsed = given.parse(options or {})
    form, longest, rule = given.name
    if not re.fullmatch(form, name) or len(name.encode()) > longest:
        raise ConfigError(
            f"{given.engine} cannot give a table the name {cut(name)!r}; use 1 to {longest} bytes, "
            f"{rule}"
        )
    writer: DatabaseWriter = made(address, name, parsed, make=make)
    return writer


def require_database(address: str, options: Mapping[str, str]) -> EngineOptions:
    """Return the options of the database of an address; its client need not be installed."""
    engine = _engine(address)
    _require_plain_address(address, engine.parameters)
    if engine is not PostgresOptions:
        _require_url(address, engine)
    return engine.parse(options)


def require_client(address: str) -> Any:
    """Return the class of the writer of a database."""
    engine = _engine(address)
    module, _, name = engine.writer.partition(":")
    try:
        with reading(f"the client {engine.client}"):
            importlib.import_module(engine.client)
            return getattr(importlib.import_module(f"whiten_index.vectordb.{module}"), name)
    except StorageError:
        raise
    except Exception as error:
        # A broken client raises errors of any kind, and another release may lack a name.
        missing = isinstance(error, ImportError)
        raise ConfigError(
            f"the client of this database {'is not installed' if missing else 'cannot be loaded'} "
            f"({type(error).__name__}: {error}); run pip install "
            f"{'' if missing else '--force-reinstall '}'whiten-index[{engine.extra}]'"
        ) from error


def _engine(address: str) -> type[EngineOptions]:
    require_no_secret(address, what="the address")
    scheme, slashes, _ = address.partition("://")
    if slashes and scheme.lower() in _BY_SCHEME:
        return _BY_SCHEME[scheme.lower()]
    # Without slashes, it may be a connection string with a password.
    hidden = not address or (not slashes and re.search(r"[@:=\s]", address))
    named = "the address given is of" if hidden else f"{cut(address, most=300)} is the address of"
    raise ConfigError(f"{named} no database that rows can be pushed to; give one of {_FORMS}")


def _require_plain_address(address: str, parameters: frozenset[str]) -> None:
    """Refuse names and parameters that are not known to be no secrets."""
    scheme, _, rest = address.partition("://")
    place, _, query = rest.partition("?")
    # A folder or a prefix of an object store may have any name.
    named = place.partition("/")[0] if scheme.lower().startswith("lancedb") else place
    if not place.startswith("/") and re.search(r"[=;\s]", unquote(named)):
        raise _secret(f"something in the address ({scheme}://…)", address)
    for each in filter(None, query.split("&")):
        name, _, value = map(unquote, each.partition("="))
        # libpq reads more parameters from a value with =, and hosts alone have colons.
        odd = {"host": "[=@]", "hostaddr": "[=@]", "application_name": "[:=@]"}.get(
            name, r"[:=@\s]"
        )
        if name == "options":
            plain = _POSTGRES_SETTINGS.fullmatch(value) is not None
        else:
            plain = not re.search(odd, value)
        if name not in parameters or not value or not plain:
            # One without a value may be a token.
            shown = f" {name}" if re.fullmatch("[a-z_]+", name) and value else ""
            raise _secret(f"a parameter{shown} of the address ({scheme}://…)", address)


def _require_url(address: str, engine: type[EngineOptions]) -> None:
    """Refuse what is no URL, and what Python would take for a fragment of one."""
    try:
        urlsplit(address)
    except ValueError:
        raise ConfigError(f"the address of {engine.engine} is one of {engine.example}") from None
    # Python cuts off what follows #, and drops the others.
    if odd := re.search(r"[#\x00-\x1f\x7f]", address):
        raise ConfigError(
            f"the address of {engine.engine} has {odd[0]!r} in it; write it as %{ord(odd[0]):02X}"
        )


def _secret(what: str, address: str) -> ConfigError:
    return ConfigError(
        f"{what} is, or may be, a secret and would be stored and shown; leave it out, and "
        f"{remedy_for(address)}"
    )
