"""Connection to PostgreSQL, and its errors as those of a writer, without secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import conninfo

from whiten_index.address import hide_secrets
from whiten_index.errors import ConfigError, DatabaseError
from whiten_index.vectordb.engine_options import PostgresOptions
from whiten_index.vectordb.row_checks import RowsError

# A server has those of its release. Loads and index builds take long.
_TIMEOUTS = (
    "statement_timeout", "transaction_timeout", "idle_session_timeout",
    "idle_in_transaction_session_timeout",
)  # fmt: skip
_ENCODE = "write @ : / ? # % of a user as %40 %3A %2F %3F %23 %25, and set PGPASSWORD"

_LOGIN = "give the user in the address, and the password in PGPASSWORD or ~/.pgpass"
# Of a connection that is refused: the first match is the remedy.
_REFUSED = (
    ("no pg_hba.conf entry|pg_hba.conf rejects", "have the server's pg_hba.conf let in this host, "
     "user and database, with or without TLS as sslmode in the address asks"),
    ("password|[aA]uthentication", _LOGIN),
    ('database "[^"]*" does not exist', "name another database in the address, or create it"),
    ("role .*(does not exist|not permitted)", "name another user in the address or PGUSER, or have "
     "that one made, with LOGIN"),
    ("FATAL", "see to what the server says"),
    (r"invalid \w+ (value|number)", "write the parameters in the address and the PG* variables as "
     "libpq takes them"),
    ("SSL|certificate", "give sslmode, sslrootcert, … in the address as libpq takes them"),
    ("", "look at host and port in the address, and whether the server runs"),
)  # fmt: skip

# SQLSTATE, or its class, of rows that are refused.
_OF_ROWS = ("23502", "23505", "22", "54000")
_RESUME = "push again when that is mended: it goes on where it was"
# SQLSTATE, or its class of two letters -> remedy.
_REMEDIES = {
    "28": _LOGIN,
    "3D000": "create the database, or name another in the address",
    "3F000": "create the schema, or give --option schema=NAME",
    "23505": "two rows have one key; give every document an id of its own",
    "23502": "users set a column NOT NULL that has no value in some row; drop NOT NULL, or mend "
    "the corpus",
    "42703": "users changed the columns of the table; change them back, or drop it and push again",
    "42501": "connect as a role that may do this, or have an owner grant the right",
    "42P07": "choose another --table, or rename what has this name",
    "22021": "mend the corpus, or leave the column out of --keep",
    "22P05": "a text has a NUL character, or one that the database's encoding lacks; mend the "
    "corpus, or use a database with the encoding UTF8",
    "22008": "a date or time is out of PostgreSQL's range; leave the column out of --keep",
    "22003": "a number is out of the column's range; push with --dtype float32, or mend the corpus",
    "25006": "connect to the primary server",
    "2BP01": "drop what depends on the table, push again and create it again; the table is as it "
    "was",
    "53100": f"make room on the server's disk (or, if shared memory is named, give --option "
    f"max_parallel_maintenance_workers=0); {_RESUME}",
    "53200": f"the server is out of memory; give a smaller --option maintenance_work_mem; "
    f"{_RESUME}",
    "53300": "the server has no connection left; end others, or try again later",
    "54000": "shorten the ids, which an index takes up to some 2,700 bytes of",
    "55P03": "others hold a lock on the table, such as a long query; nothing was changed: push "
    "again when they are done, or try longer with --option lock_timeout=SECONDS",
    "57P": f"the server was stopped; {_RESUME}",
    "57014": "something cancelled the statement; push again",
    "08": _RESUME,
}


@dataclass(frozen=True)
class Server:
    """Connection to a server, with each statement in a transaction of its own.

    Attributes:
        connection: of psycopg.
        shown: address without credentials.
        release: of PostgreSQL.
        pgvector: its release, "" if it is not installed in the database.
        schema: of the tables.
        extension: schema that pgvector is installed in, "" if it is not.
    """

    connection: Any
    shown: str
    release: str
    pgvector: str
    schema: str
    extension: str

    @property
    def engine(self) -> str:
        """Releases of PostgreSQL and pgvector."""
        pgvector = f", pgvector {self.pgvector}" if self.pgvector else " without pgvector"
        return f"PostgreSQL {self.release}{pgvector}"

    @classmethod
    def connect(cls, address: str, options: PostgresOptions, *, make: bool) -> Server:
        """Connect to a server.

        Args:
            address: URL as libpq takes it.
            options: name the schema and how long to wait for a lock.
            make: whether to create pgvector if it is missing; if false, the session is read-only.

        Raises:
            ConfigError: the address cannot be parsed.
            DatabaseError: nothing answers there, or the server refuses or lacks schema or pgvector.
        """
        connection = _opened(address)
        try:
            shown = _shown(connection)
            with translated_errors(shown):
                given = {
                    **dict.fromkeys(_TIMEOUTS, "0"),
                    "lock_timeout": f"{options.lock_timeout}s",
                }
                if not make:
                    given["default_transaction_read_only"] = "on"
                connection.execute(
                    "SELECT set_config(name, %s::jsonb->>name, false) FROM pg_settings "
                    "WHERE %s::jsonb ? name",
                    [psycopg.types.json.Jsonb(given)] * 2,
                )
                schema = _schema(connection, shown, options.schema_name)
                extension, pgvector = _extension(connection) or ("", "")
                if make and not extension:
                    extension, pgvector = _created_extension(connection, shown)
            release = str(connection.info.parameter_status("server_version")).split()[0]
            return cls(connection, shown, release, pgvector, schema, extension)
        except BaseException:
            connection.close()
            raise


@contextmanager
def translated_errors(target: str) -> Iterator[None]:
    """Raise errors of the client and the server as those of a writer.

    Raises:
        DatabaseError: with the server's sentence and a remedy; ``RowsError`` if the server refuses
            the rows.
    """
    try:
        yield
    except psycopg.Error as error:
        refused = (error.sqlstate or "").startswith(_OF_ROWS)
        raise (RowsError if refused else DatabaseError)(
            f"{target}: {describe_error(error)}"
        ) from error


def describe_error(error: psycopg.Error) -> str:
    """Return the server's sentence, and a remedy."""
    diagnosis, state = error.diag, error.sqlstate or ""
    first = (diagnosis.message_primary or str(error) or type(error).__name__).strip()
    parts = [" ".join(first.split())]
    # It names the key of a row that comes twice, or the dependents of a table.
    if diagnosis.message_detail:
        parts.append("(" + " ".join(diagnosis.message_detail.split())[:500] + ")")
    if (diagnosis.context or "").startswith("COPY "):
        parts.append(f"({str(diagnosis.context).splitlines()[0][:200]})")
    remedy = next((_REMEDIES[state[:n]] for n in (5, 3, 2) if state[:n] in _REMEDIES), None)
    if not state and isinstance(error, psycopg.OperationalError):
        # The client's own error: the connection is gone.
        remedy = _RESUME
    return " ".join(parts) + (f"; {remedy}" if remedy else "")


def _opened(address: str) -> Any:
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
        return psycopg.connect(
            address,
            autocommit=True,
            prepare_threshold=None,
            client_encoding="UTF8",
            fallback_application_name="whiten-index",
        )
    except psycopg.Error as error:
        raise DatabaseError(_not_connected(error, address)) from None


def _shown(connection: Any) -> str:
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
    told = hide_secrets(" ".join(str(error).split()))
    for role in map(str, roles):
        told = re.sub(rf"(?<!\w){re.escape(role)}(?!\w)", "…", told)
    told = re.sub(r'((?:role|user) ")[^"]*(")', r"\1…\2", told)
    told = re.sub(r'(invalid \w+ (?:value|number)): ".*"', r"\1", told)
    _, answered, answer = told.rpartition("FATAL")
    # The address stands before the answer.
    remedy = next(remedy for form, remedy in _REFUSED if re.search(form, answered + answer))
    refused = answered or remedy == _LOGIN
    verb = "refuses the connection" if refused else "cannot be reached"
    return f"PostgreSQL {verb}: {told}; {remedy}"


def _schema(connection: Any, shown: str, name: str | None) -> str:
    query = "SELECT nspname FROM pg_namespace WHERE nspname = coalesce(%s, current_schema())"
    found = connection.execute(query, [name]).fetchone()
    if found is None:
        told = "no schema of the search path exists" if name is None else f"no schema {name!r}"
        raise DatabaseError(f"{shown}: {told}; create it, or give --option schema=NAME")
    return str(found[0])


def _extension(connection: Any) -> tuple[str, str] | None:
    """Return the schema and the release of pgvector, None if it is not installed."""
    found: tuple[str, str] | None = connection.execute(
        "SELECT n.nspname, e.extversion FROM pg_extension e "
        "JOIN pg_namespace n ON n.oid = e.extnamespace WHERE e.extname = 'vector'"
    ).fetchone()
    return found


def _created_extension(connection: Any, shown: str) -> tuple[str, str]:
    why, remedy = "", "run CREATE EXTENSION vector in this database"
    try:
        connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
    except psycopg.Error as error:
        why = f" and could not be made: {describe_error(error).split(';')[0]}"
        remedy = (
            f"ask one who may to {remedy}"
            if error.sqlstate == "42501"
            else "install pgvector on the server (https://github.com/pgvector/pgvector), then "
            f"{remedy}"
        )
    # Another session may have created it at the same moment.
    found = _extension(connection)
    if found is None:
        raise DatabaseError(f"{shown}: the extension vector is not there{why}; {remedy}")
    return found
