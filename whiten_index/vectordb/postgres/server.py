"""What is to be known of a server before anything is done there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg

from whiten_index.errors import DatabaseError
from whiten_index.vectordb.postgres.connecting import shown
from whiten_index.vectordb.postgres.telling import said


@dataclass(frozen=True)
class Server:
    """What is to be known of a server.

    Attributes:
        release: of PostgreSQL.
        pgvector: its release, "" where it is not installed in the database.
        schema: of the tables.
        extension: schema that pgvector is installed in, "" where it is not.
    """

    release: str
    pgvector: str
    schema: str
    extension: str

    @property
    def halves(self) -> bool:
        """Whether pgvector keeps float16, as from 0.7 on."""
        numbers = [int(each) for each in self.pgvector.split(".")[:2] if each.isdigit()]
        return numbers >= [0, 7]


def server_of(connection: Any, schema: str | None, *, make: bool = True) -> Server:
    """Return what is to be known of a server.

    Args:
        connection: to it.
        schema: of the tables, None for the first one of the search path.
        make: whether to make pgvector where it is not installed in the database.

    Raises:
        DatabaseError: it has no such schema; or no pgvector, and cannot make it.
    """
    where = shown(connection)
    found = connection.execute(
        "SELECT current_schema()"
        if schema is None
        else "SELECT nspname FROM pg_namespace WHERE nspname = %s",
        None if schema is None else [schema],
    ).fetchone()
    if found is None or found[0] is None:
        told = "no schema of the search path exists" if schema is None else f"no schema {schema!r}"
        raise DatabaseError(f"{where}: {told}; create it, or give --option schema=NAME")
    extension = _extension(connection) or ("", "")
    if make and not extension[0]:
        extension = _made_extension(connection, where)
    release = str(connection.execute("SHOW server_version").fetchone()[0]).split()[0]
    return Server(release, extension[1], found[0], extension[0])


def _extension(connection: Any) -> tuple[str, str] | None:
    """Return the schema and the release of pgvector, None where it is not installed."""
    found: tuple[str, str] | None = connection.execute(
        "SELECT n.nspname, e.extversion FROM pg_extension e "
        "JOIN pg_namespace n ON n.oid = e.extnamespace WHERE e.extname = 'vector'"
    ).fetchone()
    return found


def _made_extension(connection: Any, where: str) -> tuple[str, str]:
    try:
        connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
    except psycopg.Error as error:
        # Another session may have made it at the same moment.
        found = _extension(connection)
        if found is not None:
            return found
        remedy = (
            "ask one who may to run CREATE EXTENSION vector in this database"
            if error.sqlstate == "42501"
            else "install pgvector on the server (https://github.com/pgvector/pgvector), then run "
            "CREATE EXTENSION vector in this database"
        )
        raise DatabaseError(
            f"{where}: the extension vector is not there and could not be made: "
            f"{said(error).split(';')[0]}; {remedy}"
        ) from error
    made = _extension(connection)
    if made is None:
        raise DatabaseError(
            f"{where}: the extension vector is not there; run CREATE EXTENSION vector"
        )
    return made
