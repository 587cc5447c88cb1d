"""Connection to PostgreSQL, its errors without secrets, and questions to its catalog."""

import os
import re
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg import conninfo, sql

from whiten_index.errors import FILE_SECRETS, ConfigError, DatabaseError, first_line, hide_secrets
from whiten_index.paths import require_no_secret
from whiten_index.vectordb.postgres_options import EXTENSIONS, PostgresOptions

# A server has those of its release. Loads and index builds take long.
_TIMEOUTS = (
    "statement_timeout", "transaction_timeout", "idle_session_timeout",
    "idle_in_transaction_session_timeout",
)  # fmt: skip
_ISOLATE = (
    "SELECT pg_catalog.current_schema(), pg_catalog.current_setting('search_path'), "
    "pg_catalog.set_config('search_path', '', false)"
)
# Seconds of silence for statements that are quick, besides those of ``lock_timeout``.
_SILENCE = 120
# A machine that is gone is noticed within two minutes, also while it builds an index.
_ALIVE = {"keepalives_idle": 60, "keepalives_interval": 15, "tcp_user_timeout": 120_000}
_ENCODE = "write @ : / ? # % of a user as %40 %3A %2F %3F %23 %25, and set PGPASSWORD"

_OPERATOR_CLASS = (
    "SELECT n.nspname FROM pg_opclass o JOIN pg_am a ON a.oid = o.opcmethod "
    "JOIN pg_namespace n ON n.oid = o.opcnamespace WHERE a.amname = %s AND o.opcname = %s"
)

# SQLSTATE, or its class, of rows that are refused.
OF_ROWS = ("23502", "23505", "22", "54000")
# SQLSTATE, or its class of two letters -> remedy.
_REMEDIES = {
    "22": "mend the corpus, or leave the column out of --keep",
    "23505": "two rows have the same key; give every document its own id",
    "23502": "users set a column NOT NULL that has no value in some row; drop NOT NULL, or mend "
    "the corpus",
    "42703": "users changed the columns of the table; change them back, or drop it and push again",
    "42501": "connect as a role that may do this, such as the owner, or have the right granted",
    "42P07": "choose another --table, or rename what has this name",
    "53": "make room on the server's disk or in its memory, or give --option "
    "max_parallel_maintenance_workers=0 and a smaller maintenance_work_mem; run this again",
    "54000": "shorten the ids, which an index takes up to some 2,700 bytes of",
    "55P03": "others hold a lock on the table, such as a long query; nothing was changed: push "
    "again when they are done, or try longer with --option lock_timeout=SECONDS",
}


class _Connection(psycopg.Connection):  # type: ignore[misc]
    """A connection that gives up a server after so many seconds of silence, None for never."""

    limit: float | None = None

    def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
        return super().wait(self._bounded(gen), *args, **options)

    def _bounded(self, gen: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        last = time.monotonic()
        try:
            state = next(gen)
            while True:
                if ready := (yield state):
                    last = time.monotonic()
                elif self.limit is not None and time.monotonic() - last > self.limit:
                    self.pgconn.finish()
                    raise psycopg.OperationalError(f"no answer within {self.limit} seconds")
                state = gen.send(ready)
        except StopIteration as done:
            return done.value

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Wait for the block's statements as long as they take."""
        before, self.limit = self.limit, None
        try:
            yield
        finally:
            self.limit = before


def connect(address: str, options: PostgresOptions, *, make: bool) -> tuple[Any, str | None, str]:
    """Return a connection without transactions, its first schema, and its search path.

    The connection is read-only unless ``make``. From here on its path is empty: a function or an
    operator that a user of the database made would be called instead of the server's own where its
    argument types fit better.
    """
    for name in ("PGHOST", "PGHOSTADDR", "PGPORT", "PGSERVICE"):
        # Without an @, the colons may be those of IPv6.
        if "@" in (value := os.environ.get(name, "")):
            require_no_secret(f"postgresql://{value}", what=name)
    given = {**dict.fromkeys(_TIMEOUTS, "0"), "lock_timeout": f"{options.lock_timeout}s"}
    if not make:
        given["default_transaction_read_only"] = "on"
    try:
        given_there = conninfo.conninfo_to_dict(address)
        connection = _Connection.connect(
            address,
            **{name: value for name, value in _ALIVE.items() if name not in given_there},
            autocommit=True,
            prepare_threshold=None,
            client_encoding="UTF8",
            fallback_application_name="whiten-index",
        )
        _hide_password(connection.pgconn)
        connection.limit = options.lock_timeout + _SILENCE
        isolated: Any = connection.execute(_ISOLATE).fetchone()
        connection.execute(
            "SELECT set_config(name, %s::jsonb->>name, false) FROM pg_settings "
            "WHERE %s::jsonb ? name",
            [psycopg.types.json.Jsonb(given)] * 2,
        )
    except psycopg.ProgrammingError:
        # It may show a password.
        raise ConfigError(
            "the address of the database cannot be parsed; it is "
            f"postgresql://user@host:port/database?name=value, and in it {_ENCODE}"
        ) from None
    except psycopg.Error as error:
        _hide_password(error.pgconn)
        raise DatabaseError(_not_connected(error, address)) from None
    return connection, isolated[0], isolated[1]


def explain_error(error: Exception) -> tuple[str, str]:
    """Return the server's sentence, and a remedy."""
    resume = "run this again when that is mended, to resume"
    if not isinstance(error, psycopg.Error):
        return first_line(error), resume
    diagnosis, state = error.diag, error.sqlstate or ""
    parts = [_one_line(diagnosis.message_primary or str(error) or type(error).__name__)]
    # It names the key of a row that comes twice, or the dependents of a table.
    if diagnosis.message_detail:
        parts.append(_one_line(diagnosis.message_detail)[:500])
    if (diagnosis.context or "").startswith("COPY "):
        parts.append(first_line(diagnosis.context)[:200])
    return "; ".join(parts), _REMEDIES.get(state) or _REMEDIES.get(state[:2], resume)


def _one_line(text: str) -> str:
    """Return a text on one line, after its secrets were hidden: they may have blanks."""
    return " ".join(hide_secrets(text).split())


def shown_address(connection: Any) -> str:
    """Return the address of a server without credentials."""
    info = connection.info
    if info.host.startswith(("/", "@")):
        return f"postgresql://{info.user}@/{info.dbname}?host={info.host}"
    host = f"[{info.host}]" if ":" in info.host else info.host
    return f"postgresql://{info.user}@{host}:{info.port}/{info.dbname}"


def _hide_password(attempt: Any) -> None:
    """Hide a password, which may be one of a file, wherever it is shown from now on."""
    if attempt is not None:
        FILE_SECRETS.add(attempt.password.decode(errors="replace"))


def _not_connected(error: psycopg.Error, address: str) -> str:
    """Return reason and remedy without the role: a password may have been written in its place."""
    roles = {conninfo.conninfo_to_dict(address).get("user"), os.environ.get("PGUSER")} - {None, ""}
    # Of several hosts the password of the last is known, and each may quote its own.
    last = str(error).partition("\nMultiple connection attempts failed")[0]
    cause = _one_line(last)
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
    """Return the schema of a name."""
    query = "SELECT nspname FROM pg_namespace WHERE nspname = %s"
    found = connection.execute(query, [name]).fetchone()
    if found is None:
        raise DatabaseError(
            f"{shown_address(connection)}: no schema {name or 'of the search path'!r}; create it, "
            "or give --option schema=NAME"
        )
    return str(found[0])


def find_extension(connection: Any, schema: str | None, *, make: bool) -> tuple[str, str]:
    """Return the schema and the release of pgvector, empty if it is missing and not to be made.

    It is made in ``schema``.
    """
    query = (
        "SELECT n.nspname, e.extversion FROM pg_extension e "
        "JOIN pg_namespace n ON n.oid = e.extnamespace WHERE e.extname = 'vector'"
    )
    found = connection.execute(query).fetchone()
    if found is None and make:
        order, reason = "CREATE EXTENSION IF NOT EXISTS vector SCHEMA {}", ""
        try:
            connection.execute(composed(order, schema or ""))
        except psycopg.Error as error:
            reason = explain_error(error)[0]
        # Another session may have created it at the same moment.
        found = connection.execute(query).fetchone()
        if found is None:
            raise DatabaseError(
                f"{shown_address(connection)}: the extension vector could not be made ({reason}); "
                "install pgvector on the server, and have one who may run CREATE EXTENSION vector "
                "in this database"
            )
    return found or ("", "")


def operator_class_schema(connection: Any, index: str, operators: str) -> str:
    """Return the schema of the operator class of a kind of index that pgvector lacks."""
    found = connection.execute(_OPERATOR_CLASS, [index, operators]).fetchone()
    if found is None:
        name, type_ = EXTENSIONS[index], operators.partition("_")[0]
        raise ConfigError(
            f"{shown_address(connection)} has no extension {name} that indexes {type_}, which "
            f"--option index={index} needs; run CREATE EXTENSION {name} CASCADE in this database, "
            "or give another index or --dtype"
        )
    return str(found[0])


TABLES, ADDITIONS, CARRY = (
    Path(__file__).with_name(f"postgres_{name}.sql").read_text("utf-8")
    for name in ("tables", "additions", "carry")
)


def composed(order: str, *parts: str | Iterable[str] | sql.Composable) -> sql.Composed:
    """Return a statement in which each ``{}`` is a part: a name, names, or other SQL."""
    return sql.SQL(order).format(*map(_part, parts))


def _part(part: str | Iterable[str] | sql.Composable) -> sql.Composable:
    if isinstance(part, sql.Composable):
        return part
    return sql.SQL(", ").join(map(sql.Identifier, [part] if isinstance(part, str) else part))
