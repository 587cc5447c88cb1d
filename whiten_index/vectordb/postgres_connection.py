"""Connection to PostgreSQL, and its errors as those of a writer, without secrets."""

from __future__ import annotations

import os
import re
from typing import Any

import psycopg
from psycopg import conninfo

from whiten_index.address import hide_secrets
from whiten_index.errors import ConfigError, DatabaseError
from whiten_index.vectordb.engine_options import PostgresOptions
from whiten_index.vectordb.engine_support import first_line

# A server has those of its release. Loads and index builds take long.
_TIMEOUTS = (
    "statement_timeout", "transaction_timeout", "idle_session_timeout",
    "idle_in_transaction_session_timeout",
)  # fmt: skip
_ENCODE = "write @ : / ? # % of a user as %40 %3A %2F %3F %23 %25, and set PGPASSWORD"

# SQLSTATE, or its class, of rows that are refused.
OF_ROWS = ("23502", "23505", "22", "54000")
_RESUME = "push again when that is mended: it goes on where it was"
# SQLSTATE, or its class of two letters -> remedy.
_REMEDIES = {
    "3F000": "create the schema, or give --option schema=NAME",
    "23505": "two rows have the same key; give every document its own id",
    "23502": "users set a column NOT NULL that has no value in some row; drop NOT NULL, or mend "
    "the corpus",
    "42703": "users changed the columns of the table; change them back, or drop it and push again",
    "42501": "connect as a role that may do this, or have an owner grant the right",
    "42P07": "choose another --table, or rename what has this name",
    "22021": "mend the corpus, or leave the column out of --keep",
    "22P05": "a text has a NUL character, or one that the database's encoding lacks; mend the "
    "corpus, or use a database with the encoding UTF8",
    "53100": f"make room on the server's disk (or, if shared memory is named, give --option "
    f"max_parallel_maintenance_workers=0); {_RESUME}",
    "53200": f"the server is out of memory; give a smaller --option maintenance_work_mem; "
    f"{_RESUME}",
    "54000": "shorten the ids, which an index takes up to some 2,700 bytes of",
    "55P03": "others hold a lock on the table, such as a long query; nothing was changed: push "
    "again when they are done, or try longer with --option lock_timeout=SECONDS",
    "57P": f"the server was stopped; {_RESUME}",
    "08": _RESUME,
}


def connect(address: str, options: PostgresOptions, *, make: bool) -> Any:
    """Return a connection without transactions, read-only unless ``make``."""
    try:
        conninfo.conninfo_to_dict(address)
    except psycopg.Error as error:
        known = re.match(r"invalid URI query parameter: \"(\w+)\"", str(error))
        why = f" (libpq knows no parameter {known[1]!r})" if known else ""
        raise ConfigError(
            f"the address of the database cannot be parsed{why}; it is "
            f"postgresql://user@host:port/database?name=value, and in it {_ENCODE}"
        ) from None
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
    given = {**dict.fromkeys(_TIMEOUTS, "0"), "lock_timeout": f"{options.lock_timeout}s"}
    if not make:
        given["default_transaction_read_only"] = "on"
    connection.execute(
        "SELECT set_config(name, %s::jsonb->>name, false) FROM pg_settings WHERE %s::jsonb ? name",
        [psycopg.types.json.Jsonb(given)] * 2,
    )
    return connection


def explain_error(error: Exception) -> tuple[str, str]:
    """Return the server's sentence, and a remedy."""
    if not isinstance(error, psycopg.Error):
        return first_line(error), _RESUME
    diagnosis, state = error.diag, error.sqlstate or ""
    first = (diagnosis.message_primary or str(error) or type(error).__name__).strip()
    parts = [" ".join(first.split())]
    # It names the key of a row that comes twice, or the dependents of a table.
    if diagnosis.message_detail:
        parts.append(" ".join(diagnosis.message_detail.split())[:500])
    if (diagnosis.context or "").startswith("COPY "):
        parts.append(str(diagnosis.context).splitlines()[0][:200])
    remedies = (_REMEDIES[state[:n]] for n in (5, 3, 2) if state[:n] in _REMEDIES)
    # The client's own error has no state: the connection is gone.
    return "; ".join(parts), next(remedies, _RESUME if not state else "see the server's log")


def shown_address(connection: Any) -> str:
    """Return the address of a server without credentials."""
    info = connection.info
    if info.host.startswith(("/", "@")):
        return f"postgresql://{info.user}@/{info.dbname}?host={info.host}"
    host = f"[{info.host}]" if ":" in info.host else info.host
    return f"postgresql://{info.user}@{host}:{info.port}/{info.dbname}"


def _not_connected(error: psycopg.Error, address: str) -> str:
    """Return the reason and a remedy.

    The role is never named: a password may have been written in its place.
    """
    roles = {conninfo.conninfo_to_dict(address).get("user"), os.environ.get("PGUSER")} - {None, ""}
    cause = hide_secrets(" ".join(str(error).split()))
    for role in map(str, roles):
        cause = re.sub(rf"(?<!\w){re.escape(role)}(?!\w)", "…", cause)
    cause = re.sub(r'((?:role|user) ")[^"]*(")', r"\1…\2", cause)
    cause = re.sub(r'(invalid \w+ (?:value|number)): ".*"', r"\1", cause)
    if re.search("FATAL|password|[aA]uthentication", cause):
        return (
            f"PostgreSQL refuses the connection: {cause}; check user and database in the address, "
            "the password in PGPASSWORD or ~/.pgpass, and the server's pg_hba.conf"
        )
    return (
        f"PostgreSQL cannot be reached: {cause}; check that the server runs, and check host, port "
        "and parameters in the address and the PG* variables"
    )


def find_schema(connection: Any, name: str | None) -> str:
    """Return the schema of a name, by default the first of the search path."""
    query = "SELECT nspname FROM pg_namespace WHERE nspname = coalesce(%s, current_schema())"
    found = connection.execute(query, [name]).fetchone()
    if found is None:
        cause = "no schema of the search path exists" if name is None else f"no schema {name!r}"
        raise DatabaseError(
            f"{shown_address(connection)}: {cause}; create it, or give --option schema=NAME"
        )
    return str(found[0])


def find_extension(connection: Any, *, make: bool) -> tuple[str, str]:
    """Return the schema and the release of pgvector, empty if it is missing and not to be made."""
    query = (
        "SELECT n.nspname, e.extversion FROM pg_extension e "
        "JOIN pg_namespace n ON n.oid = e.extnamespace WHERE e.extname = 'vector'"
    )
    found, why = connection.execute(query).fetchone(), ""
    if found is None and make:
        try:
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        except psycopg.Error as error:
            why = f" and could not be made: {explain_error(error)[0]}"
        # Another session may have created it at the same moment.
        found = connection.execute(query).fetchone()
        if found is None:
            raise DatabaseError(
                f"{shown_address(connection)}: the extension vector is not there{why}; install "
                "pgvector on the server, and have one who may run CREATE EXTENSION vector in this "
                "database"
            )
    return found or ("", "")
