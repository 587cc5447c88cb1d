"""Tables of PostgreSQL with pgvector.

A pushed is a table ``NAME__`` and eight hexadecimal digits; the published one is ``NAME``. What
they hold is told by the table ``whiten_index_tables`` of the same schema, changed in the same
transactions as the rows. One push of a name at a time: a lock of the session says so, so the
address must lead to the server itself, not to a pooler that shares sessions between transactions.

A new table takes over the owner, rights and comments of the one before, the indexes that users made
on it, and what they set of it: tablespace, parameters, replica identity, and of columns storage,
compression, statistics, NOT NULL and default. What else users added to it (columns, triggers,
policies, …), or made to depend on it (views, foreign keys, functions, columns of its row type),
cannot be taken over: then no row is sent, and an error names it. The type of a column is always
that of the corpus.

A table is taken for one of ours by its number in the catalog or, in a database that was restored,
by the comment on its primary key; one that users made under the name is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from whiten_index.errors import ConfigError

if TYPE_CHECKING:
    from whiten_index.vectordb.postgres.postgres_writer import PostgresWriter

__all__ = ["connect"]


def connect(
    address: str, name: str, options: Mapping[str, str], *, make: bool = True
) -> PostgresWriter:
    """Connect to a table, which need not be there yet.

    Args:
        address: URL as libpq takes it, with any of its parameters (``sslmode``, ``sslrootcert``,
            ``host`` of a socket, ``service``, …); PG* variables and ~/.pgpass are read as ever.
        name: of the table: one identifier, which may have any characters.
        options: those of ``PostgresOptions``.
        make: whether to make the extension ``vector`` where it is not there; else the session is
            one that the server lets read alone.

    Raises:
        ConfigError: the address cannot be parsed, or the name or an option not be used.
        DatabaseError: the server cannot be reached or lets us not in, or lacks the schema or, where it
            is to be made, pgvector.
    """
    # The client is loaded here, so that options are read without it.
    from whiten_index.vectordb.postgres.connecting import open_connection, shown
    from whiten_index.vectordb.postgres.naming import require_one_name
    from whiten_index.vectordb.postgres.options import PostgresOptions
    from whiten_index.vectordb.postgres.postgres_writer import PostgresWriter
    from whiten_index.vectordb.postgres.register import REGISTER
    from whiten_index.vectordb.postgres.server import server_of
    from whiten_index.vectordb.postgres.swapping import LONGEST_NAME
    from whiten_index.vectordb.postgres.telling import telling

    parsed = PostgresOptions.parse(options)
    require_one_name(name)
    if not 0 < len(name.encode()) <= LONGEST_NAME or "\0" in name or name == REGISTER:
        raise ConfigError(
            f"PostgreSQL cannot have a table of the name {name[:80]!r} here: names are of 1 to "
            f"{LONGEST_NAME} bytes (of PostgreSQL's 63; a push needs the rest), and not "
            f"{REGISTER}; choose another --table"
        )
    connection = open_connection(address, lock_timeout=parsed.lock_timeout, read_only=not make)
    try:
        with telling(shown(connection)):
            server = server_of(connection, parsed.schema, make=make)
            return PostgresWriter(connection, name, parsed, server, pushes=make)
    except BaseException:
        connection.close()
        raise
