"""Names of tables, and in statements that values are given to."""

from __future__ import annotations

from typing import Any

from psycopg import sql

from whiten_index.errors import ConfigError


def beside_values(connection: Any, part: sql.Composable) -> sql.Composable:
    """Return a part of a statement as it stands where values are given: with ``%`` doubled.

    The client takes a ``%`` there for the place of a value, also in the name of a column.
    """
    return sql.SQL(part.as_string(connection).replace("%", "%%"))


def require_one_name(name: str) -> None:
    """Refuse what its writer meant otherwise: a schema and a table, or a name without blanks.

    Raises:
        ConfigError: it has a dot, or a blank at an end.
    """
    schema, dot, table = name.partition(".")
    if dot:
        named = f"give --option schema={schema} --table {table}, or " if schema and table else ""
        raise ConfigError(
            f"--table takes one name, and {name[:80]!r} has a dot: {named}choose one without"
        )
    if name != name.strip():
        raise ConfigError(
            f"the name {name[:80]!r} begins or ends with a blank; give --table without it"
        )
