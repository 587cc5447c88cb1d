"""Changes of rows of a published table, within a transaction that another opened."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import pyarrow as pa
from psycopg import sql

from whiten_index.corpus.batches import ID
from whiten_index.vectordb.postgres.naming import beside_values
from whiten_index.vectordb.postgres.rows import SOME_IDS, RowFormat
from whiten_index.vectordb.postgres.telling import telling
from whiten_index.vectordb.row_checks import blocks, require_rows


class Changes:
    """Changes of rows (``whiten_index.vectordb.database_writer.RowChanges``).

    Args:
        connection: in a transaction.
        table: that is changed.
        rows: how they are kept.
        target: as it may be shown.
        lacks: statements that give the rights that the role lacks to change rows.
    """

    def __init__(
        self,
        connection: Any,
        table: sql.Composable,
        rows: RowFormat,
        target: str,
        lacks: str,
    ) -> None:
        self._connection, self._table, self._rows = connection, table, rows
        self._target, self._lacks = target, lacks
        self._staging: sql.Composable | None = None

    def upsert(self, rows: pa.RecordBatch) -> None:
        """Put rows in place of those with their keys, or add them.

        Raises:
            DatabaseError: a row or a value cannot be kept.
        """
        layout = self._rows.layout
        require_rows(rows, layout)
        if not len(rows):
            return
        key = sql.SQL(", ").join(map(sql.Identifier, layout.key))
        others = [name for name in layout.schema.names if name not in layout.key]
        put = sql.SQL(", ").join(
            sql.SQL("{0} = EXCLUDED.{0}").format(sql.Identifier(name)) for name in others
        )
        with self._told(), self._connection.cursor() as cursor:
            staging = self._staged(cursor)
            self._rows.copy(cursor, staging, rows)
            cursor.execute(
                sql.SQL(
                    "INSERT INTO {table} ({names}) SELECT {names} FROM {staging} "
                    "ON CONFLICT ({key}) DO UPDATE SET {put}"
                ).format(
                    table=self._table, names=self._rows.names(), staging=staging, key=key, put=put
                )
            )

    def delete(self, ids: Sequence[str | int]) -> None:
        """Take all rows with these ids away."""
        kind = sql.SQL(self._rows.kinds[ID].sql)
        order = sql.SQL(
            "DELETE FROM {table} AS t USING unnest(%s::{kind}[]) AS gone(id) WHERE t.{id} = gone.id"
        ).format(
            table=beside_values(self._connection, self._table), kind=kind, id=sql.Identifier(ID)
        )
        with self._told():
            for some in blocks(ids, SOME_IDS):
                self._connection.execute(order, [list(some)])

    def _told(self) -> AbstractContextManager[None]:
        # Asked before: a transaction that failed answers nothing.
        return telling(self._target, lambda: self._lacks)

    def _staged(self, cursor: Any) -> sql.Composable:
        """Return an empty table for the rows of one batch."""
        if self._staging is not None:
            cursor.execute(sql.SQL("TRUNCATE {}").format(self._staging))
            return self._staging
        made = sql.Identifier("pg_temp", f"whiten_index_{secrets.token_hex(4)}")
        cursor.execute(
            sql.SQL("CREATE TEMPORARY TABLE {} ({}) ON COMMIT DROP").format(
                made, self._rows.definition()
            )
        )
        self._staging = made
        return made
