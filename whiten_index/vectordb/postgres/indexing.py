"""The indexes of a table that was filled: its key, its vectors, and those that users made."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import sql

from whiten_index.errors import DatabaseError
from whiten_index.vectordb.database_writer import VECTOR, Layout, Metric
from whiten_index.vectordb.postgres import catalog
from whiten_index.vectordb.postgres.catalog import Index
from whiten_index.vectordb.postgres.options import IndexKind, PostgresOptions
from whiten_index.vectordb.postgres.register import Entry
from whiten_index.vectordb.postgres.rows import TYPES

_OPERATORS = {Metric.COSINE: "cosine_ops", Metric.INNER_PRODUCT: "ip_ops"}


class Indexing:
    """Builds indexes; each in a transaction of its own, so that what is built stays.

    Args:
        connection: to the database.
        schema: of the table.
        extension: schema that pgvector is installed in.
        options: of the index.
    """

    def __init__(
        self, connection: Any, schema: str, extension: str, options: PostgresOptions
    ) -> None:
        self._connection, self._schema, self._extension = connection, schema, extension
        self._options = options

    def key(self, entry: Entry, layout: Layout) -> None:
        """Make the primary key: after the load, which is faster than before it."""
        name = f"{entry.table}p"
        if catalog.relation(self._connection, self._schema, name) is not None:
            return
        columns = sql.SQL(", ").join(map(sql.Identifier, layout.key))
        self._build(
            sql.SQL("ALTER TABLE {} ADD CONSTRAINT {} PRIMARY KEY ({})").format(
                self._table(entry), sql.Identifier(name), columns
            ),
            sql.SQL("COMMENT ON CONSTRAINT {} ON {} IS {}").format(
                sql.Identifier(name), self._table(entry), sql.Literal(entry.mark)
            ),
        )

    def vectors(self, entry: Entry, layout: Layout) -> None:
        """Make the index of the vectors, unless there is one with the same settings."""
        name, kind = f"{entry.table}v", self._options.index
        wanted = self._settings(entry.pushed.rows)
        there = self._built(name)
        if there is not None:
            if there == (kind.value, wanted):
                return
            place = sql.Identifier(self._schema, name)
            self._connection.execute(sql.SQL("DROP INDEX {}").format(place))
        if kind is IndexKind.NONE:
            return
        operators = f"{TYPES[layout.dtype]}_{_OPERATORS[layout.metric]}"
        settings = sql.SQL(", ").join(
            sql.SQL("{} = {}").format(sql.SQL(each), sql.Literal(value))
            for each, value in wanted.items()
        )
        self._build(
            sql.SQL("CREATE INDEX {} ON {} USING {} ({} {}) WITH ({})").format(
                sql.Identifier(name),
                self._table(entry),
                sql.SQL(kind.value),
                sql.Identifier(VECTOR),
                sql.Identifier(self._extension, operators),
                settings,
            )
        )

    def carry(self, theirs: Sequence[Index], entry: Entry) -> None:
        """Make the indexes again that users made on the published table.

        Raises:
            DatabaseError: one cannot be made.
        """
        for index in theirs:
            if self._twin(index, entry, set()) is not None:
                continue
            name = sql.Identifier(f"whiten_index_{secrets.token_hex(4)}")
            unique = sql.SQL("UNIQUE " if index.unique else "")
            order = sql.SQL("CREATE {}INDEX {} ON {} USING ").format(
                unique, name, self._table(entry)
            )
            try:
                # The tail is what the server itself says of the index.
                self._build(order + sql.SQL(index.tail))
            except psycopg.Error as error:
                if error.sqlstate is None:
                    raise
                raise DatabaseError(
                    f"the index {index.name!r}, which users made on the table, cannot be made on "
                    f"the new one ({error.diag.message_primary}); drop it, and push again"
                ) from error

    def carried(self, theirs: Sequence[Index], entry: Entry) -> dict[str, str]:
        """Return index of the pending table -> name of the users' index it is to take over.

        Raises:
            DatabaseError: an index was made on the published table since ``carry``.
        """
        found = dict[str, str]()
        for index in theirs:
            made = self._twin(index, entry, set(found))
            if made is None:
                raise DatabaseError(
                    f"the index {index.name!r} was made on the table while it was pushed; push "
                    "again: the rows are there, and the index will be made on them too"
                )
            found[made] = index.name
        return found

    def _twin(self, index: Index, entry: Entry, taken: set[str]) -> str | None:
        """Return the index that is as users made one: ours of the vectors too, under their name."""
        there = catalog.relation(self._connection, self._schema, entry.table)
        for each in () if there is None else catalog.indexes(self._connection, there.oid):
            same = (each.unique, each.tail) == (index.unique, index.tail)
            if same and each.name not in taken:
                return each.name
        return None

    def _settings(self, rows: int) -> dict[str, int]:
        if self._options.index is IndexKind.HNSW:
            return {"m": self._options.m, "ef_construction": self._options.ef_construction}
        return {"lists": self._options.lists_of(rows)}

    def _built(self, name: str) -> tuple[str, dict[str, int]] | None:
        """Return kind and settings of an index, None where there is none."""
        found = self._connection.execute(
            "SELECT m.amname, c.reloptions FROM pg_class c JOIN pg_am m ON m.oid = c.relam "
            "JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relname = %s",
            [self._schema, name],
        ).fetchone()
        if found is None:
            return None
        pairs = (each.split("=", 1) for each in found[1] or ())
        return found[0], {key: int(value) for key, value in pairs}

    def _build(self, *orders: sql.Composable) -> None:
        given = {
            "maintenance_work_mem": self._options.maintenance_work_mem,
            "max_parallel_maintenance_workers": self._options.max_parallel_maintenance_workers,
        }
        with self._connection.transaction():
            for name, value in given.items():
                if value is not None:
                    self._connection.execute("SELECT set_config(%s, %s, true)", [name, str(value)])
            for order in orders:
                self._connection.execute(order)

    def _table(self, entry: Entry) -> sql.Composable:
        return sql.Identifier(self._schema, entry.table)
