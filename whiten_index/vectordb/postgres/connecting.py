"""A connection by an address as libpq takes it, and what of it may be shown."""

from __future__ import annotations

import os
import re
from typing import Any

import psycopg
from psycopg import conninfo

from whiten_index.address import hide_secrets
from whiten_index.errors import ConfigError, DatabaseError
from whiten_index.vectordb.postgres.telling import said

# Of them a server has those of its release.
_ENDLESS = (
    "statement_timeout", "transaction_timeout", "idle_session_timeout",
    "idle_in_transaction_session_timeout",
)  # fmt: skip
_ENCODE = "write @ : / ? # % of a user as %40 %3A %2F %3F %23 %25, and set PGPASSWORD"

# What a server says of a stranger, and what libpq says of a server that asks for a password.
_ANSWERED = re.compile("FATAL|authentication|no password supplied|no pg_hba.conf entry")
_QUOTED_ROLE = re.compile(r'((?:role|user) ")[^"]*(")')
# The first that is found says what to do.
_REFUSED = (
    ("no pg_hba.conf entry|pg_hba.conf rejects", "have the server's pg_hba.conf let in this host, "
     "user and database, with or without TLS as sslmode in the address asks"),
    ("password|[aA]uthentication",
     "give the user in the address, and the password in PGPASSWORD or ~/.pgpass"),
    ('database "[^"]*" does not exist', "name another database in the address, or create it"),
    ("role .*(does not exist|not permitted)", "name another user in the address or PGUSER, or have "
     "that one made, with LOGIN"),
    ("too many|remaining connection slots", "end other connections, or try again later"),
    ("starting up|shutting down|recovery|not accepting", "try again when it has ended"),
    ("", "see to what the server says"),
)  # fmt: skip
_UNREACHED = (
    (
        r"invalid \w+ (value|number)",
        "write the parameters in the address and the PG* variables as libpq takes them",
    ),
    ("SSL|certificate", "give sslmode, sslrootcert, … in the address as libpq takes them"),
    ("", "look at host and port in the address, and whether the server runs"),
)


def open_connection(address: str, *, lock_timeout: int, read_only: bool = False) -> Any:
    """Return a connection of psycopg, every statement a transaction of its own.

    Args:
        address: a URL as libpq takes it; all its parameters are handed on as they are.
        lock_timeout: seconds that a statement waits for a lock.
        read_only: whether the server is told to let this session write nothing.

    Raises:
        ConfigError: it cannot be parsed.
        DatabaseError: nothing answers there, or it does not let us in.
    """
    _require_address(address)
    try:
        connection = psycopg.connect(
            address,
            autocommit=True,
            prepare_threshold=None,
            client_encoding="UTF8",
            fallback_application_name="whiten-index",
        )
    except psycopg.Error as error:
        raise DatabaseError(_not_connected(error, address)) from None
    try:
        # Loads and builds of an index take long; who waits for us or is waited for does not.
        connection.execute(
            "SELECT set_config(name, CASE name WHEN 'lock_timeout' THEN %s "
            "WHEN 'default_transaction_read_only' THEN 'on' ELSE '0' END, false) "
            "FROM pg_settings WHERE name = ANY(%s)",
            [
                f"{lock_timeout}s",
                ["lock_timeout", *_ENDLESS, *["default_transaction_read_only"] * read_only],
            ],
        )
    except psycopg.Error as error:
        where = shown(connection)
        connection.close()
        raise DatabaseError(f"PostgreSQL at {where} cannot be used: {said(error)}") from None
    return connection


def shown(connection: Any) -> str:
    """Return where a connection leads, without a password."""
    info = connection.info
    if info.host.startswith(("/", "@")):
        return f"postgresql://{info.user}@/{info.dbname}?host={info.host}"
    host = f"[{info.host}]" if ":" in info.host else info.host
    return f"postgresql://{info.user}@{host}:{info.port}/{info.dbname}"


def _require_address(address: str) -> None:
    """Refuse an address that libpq cannot parse.

    Raises:
        ConfigError: without any part of the address.
    """
    try:
        conninfo.conninfo_to_dict(address)
    except psycopg.Error as error:
        known = re.match(r"invalid URI query parameter: \"(\w+)\"", str(error))
        why = f" (libpq knows no parameter {known[1]!r})" if known else ""
        raise ConfigError(
            f"the address of the database cannot be parsed{why}; it is "
            f"postgresql://user@host:port/database?name=value, and in it {_ENCODE}"
        ) from None


def _not_connected(error: psycopg.Error, address: str) -> str:
    """Return where and why there is no connection, and what to do; the role is not named.

    A password may have been written in its place.
    """
    where = f"PostgreSQL at {_asked(error, address)}"
    told = hide_secrets(str(error))
    for each in _roles(error, address):
        # In the server's own language it stands between other words.
        told = re.sub(rf"([\"'«»„“”])(\s?){re.escape(each)}(?=\s?[\"'«»„“”])", r"\1\2…", told)
    told = _one_line(_QUOTED_ROLE.sub(r"\1…\2", told))
    # Who mixes up parameters may have written a password there.
    told = re.sub(r'(invalid \w+ (?:value|number)): ".*"', r"\1", told)
    # libpq says in words, and only there, what the server answered to a stranger.
    if _ANSWERED.search(told):
        # Before it the address stands.
        answer = told.rpartition("FATAL")[2]
        remedy = next(remedy for form, remedy in _REFUSED if re.search(form, answer))
        return f"{where} refuses the connection: {told}; {remedy}"
    remedy = next(remedy for form, remedy in _UNREACHED if re.search(form, told))
    return f"{where} cannot be reached: {told}; {remedy}"


def _asked(error: psycopg.Error, address: str) -> str:
    """Return where a connection was asked for, without role and password."""
    given, asked = conninfo.conninfo_to_dict(address), error.pgconn
    host, port, database = (
        (of.decode(errors="replace") if of else "") or str(given.get(name) or "")
        for name, of in (
            ("host", asked and asked.host),
            ("port", asked and asked.port),
            ("dbname", asked and asked.db),
        )
    )
    if not given.get("dbname") and database in _roles(error, address):
        # By default it is called as the role is.
        database = "…"
    # One that is none may be a password before a host that was forgotten.
    port = port if re.fullmatch(r"(\d{1,5}(,|$))*", port) else "…"
    if host.startswith(("/", "@")):
        told = f"postgresql:///{database}?host={host}"
    else:
        told = f"postgresql://{host}{port and ':'}{port}/{database}"
    return hide_secrets(told)


def _one_line(told: str) -> str:
    """Return what libpq says in several lines as one, without the questions that it asks."""
    found = ""
    for line in told.splitlines():
        # "Is the server running on that host …?": what we say to do asks it, too.
        if not line.strip() or re.match(r"\t.*[?？]\s*$", line):
            continue
        between = " " if found.endswith((":", ",", ";")) else "; "
        found += f"{between if found else ''}{' '.join(line.split()).rstrip('.')}"
    return found


def _roles(error: psycopg.Error, address: str) -> set[str]:
    """Return the names under which a connection was asked for."""
    given = conninfo.conninfo_to_dict(address).get("user")
    asked = None if error.pgconn is None else error.pgconn.user
    found = {
        str(given or ""),
        os.environ.get("PGUSER", ""),
        (asked or b"").decode(errors="replace"),
    }
    return found - {""}
