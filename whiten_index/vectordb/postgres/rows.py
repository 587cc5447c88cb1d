"""Rows of a layout to a table of PostgreSQL, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
from psycopg import sql
from psycopg.copy import QueuedLibpqWriter

from whiten_index.corpus.batches import ID
from whiten_index.errors import ConfigError, DatabaseError
from whiten_index.vectordb.database_writer import VECTOR, Layout, VectorDtype
from whiten_index.vectordb.option_values import first_line
from whiten_index.vectordb.postgres.blocks import END, START, Encoded, Fixed, block
from whiten_index.vectordb.postgres.kinds import Kind, encoded, kind_of
from whiten_index.vectordb.postgres.naming import beside_values
from whiten_index.vectordb.row_checks import RowsError, blocks, vectors_array, vectors_of

# Built and sent at once: the server takes one block while the next one is built.
_BLOCK_ROWS = 2048
_LONGEST_NAME = 63
_SYSTEM_COLUMNS = ("ctid", "tableoid", "xmin", "xmax", "cmin", "cmax")
# Ids handed over in one statement.
SOME_IDS = 10_000
_CODES = {VectorDtype.FLOAT32: ">f4", VectorDtype.FLOAT16: ">f2"}
TYPES = {VectorDtype.FLOAT32: "vector", VectorDtype.FLOAT16: "halfvec"}


@dataclass(frozen=True)
class RowFormat:
    """How rows of a layout are kept in a table.

    Attributes:
        layout: of the rows.
        extension: schema that pgvector is installed in.
    """

    layout: Layout
    extension: str

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        """Column beside the vectors -> how it is kept.

        Raises:
            ConfigError: PostgreSQL cannot name a column so.
            RowsError: it has nothing for the type of one.
        """
        for name in self.layout.schema.names:
            if name in _SYSTEM_COLUMNS:
                raise ConfigError(
                    f"PostgreSQL has a column {name!r} of its own in every table; rename it in the "
                    "corpus, or leave it out of --keep"
                )
            if not 0 < len(name.encode()) <= _LONGEST_NAME or "\0" in name:
                raise ConfigError(
                    f"PostgreSQL cannot name a column {name!r}: names are of 1 to {_LONGEST_NAME} "
                    "bytes; rename it in the corpus, or leave it out of --keep"
                )
        return {
            field.name: kind_of(field.name, field.type)
            for field in self.layout.schema
            if field.name != VECTOR
        }

    @property
    def vector_type(self) -> sql.Composable:
        """The type of the vectors."""
        name = sql.Identifier(self.extension, TYPES[self.layout.dtype])
        return sql.SQL("{}({})").format(name, sql.Literal(self.layout.k))

    def definition(self) -> sql.Composable:
        """Return the columns of a table, as CREATE TABLE takes them."""
        made = []
        for name in self.layout.schema.names:
            kind = self.vector_type if name == VECTOR else sql.SQL(self.kinds[name].sql)
            never = name == VECTOR or name in self.layout.key
            column = [sql.Identifier(name), kind]
            if never:
                named = sql.Identifier(f"{name}_not_null")
                column.append(sql.SQL("CONSTRAINT {} NOT NULL").format(named))
            made.append(sql.SQL(" ").join(column))
        return sql.SQL(", ").join(made)

    def names(self) -> sql.Composable:
        """Return the names of the columns, in their order."""
        return sql.SQL(", ").join(map(sql.Identifier, self.layout.schema.names))

    def copy(self, cursor: Any, table: sql.Composable, rows: pa.RecordBatch) -> None:
        """Add rows to a table.

        Raises:
            DatabaseError: a value cannot be kept as it is.
        """
        order = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT BINARY)").format(table, self.names())
        # A thread sends while the next block is built. No more waits for it than the rows given,
        # and never more than 128 MB: the client queues 1,024 pieces of 128 kB.
        with cursor.copy(order, writer=QueuedLibpqWriter(cursor)) as copy:
            copy.write(START)
            for made in self.blocks(rows):
                copy.write(made)
            copy.write(END)

    def blocks(self, rows: pa.RecordBatch) -> Iterator[memoryview]:
        """Yield rows in the binary format of COPY, without its start and end."""
        for first in range(0, len(rows), _BLOCK_ROWS):
            some = rows.slice(first, _BLOCK_ROWS)
            columns = zip(some.schema.names, some.columns, strict=True)
            yield block([(self._encoded(name, some), each) for name, each in columns], len(some))

    def _encoded(self, name: str, rows: pa.RecordBatch) -> Encoded:
        column = rows.column(rows.schema.get_field_index(name))
        if name != VECTOR:
            return encoded(name, self.kinds[name], column)
        vectors = vectors_of(rows)
        half = self.layout.dtype is VectorDtype.FLOAT16
        if half and np.abs(vectors).max() > np.finfo(np.float16).max:
            raise RowsError(
                "a vector has numbers beyond 65,504, which float16 cannot hold; push with "
                "--dtype float32"
            )
        return Fixed(((">i2", vectors.shape[1]), (">i2", 0), (_CODES[self.layout.dtype], vectors)))

    def fetch(self, connection: Any, table: sql.Composable, ids: Sequence[str | int]) -> pa.Table:
        """Return the rows with some ids.

        Raises:
            DatabaseError: users put in a column what no push puts there.
        """
        schema = self.layout.schema
        with connection.cursor(binary=True) as cursor:
            for name in ("date", "time", "timestamp", "timestamptz"):
                cursor.adapters.register_loader(name, _Number)
            cursor.adapters.register_loader("interval", _Interval)
            query = sql.SQL("SELECT {} FROM {} WHERE {} = ANY(%s::{}[])").format(
                beside_values(connection, self.names()),
                beside_values(connection, table),
                sql.Identifier(ID),
                sql.SQL(self.kinds[ID].sql),
            )
            found = list[tuple[Any, ...]]()
            for some in blocks(ids, SOME_IDS):
                found += cursor.execute(query, [list(some)]).fetchall()
        columns = list(zip(*found, strict=True)) or [()] * len(schema)
        arrays = [
            self._decoded(field, values) for field, values in zip(schema, columns, strict=True)
        ]
        return pa.Table.from_arrays(arrays, schema=schema)

    def _decoded(self, field: pa.Field, values: Sequence[Any]) -> pa.Array:
        try:
            return self._as_sent(field, values)
        except (pa.ArrowException, ArithmeticError, AttributeError, LookupError, TypeError,
                ValueError) as error:  # fmt: skip
            raise DatabaseError(
                f"column {field.name!r} of the table has values or a type that no push put there "
                f"({first_line(error)}); change it back, or push all rows with --full"
            ) from error

    def _as_sent(self, field: pa.Field, values: Sequence[Any]) -> pa.Array:
        if field.name != VECTOR:
            return self.kinds[field.name].decode(values, field.type)
        code = np.dtype(_CODES[self.layout.dtype])
        width = 4 + code.itemsize * self.layout.k
        made = np.frombuffer(b"".join(values), dtype=np.uint8).reshape(len(values), width)
        vectors = np.ascontiguousarray(made[:, 4:]).view(code).astype(np.float32)
        return vectors_array(vectors, self.layout.k)


class _Number:
    """Gives dates and times as the numbers they are: Python knows years 1 to 9999 alone."""

    format = psycopg.pq.Format.BINARY

    def __init__(self, oid: int, context: Any = None) -> None: ...

    def load(self, data: Any) -> int:
        return int.from_bytes(bytes(data), "big", signed=True)


class _Interval(_Number):
    """Gives an interval in microseconds; a day has 24 hours and a month 30 days."""

    def load(self, data: Any) -> int:
        raw = bytes(data)
        micro, days, months = (
            int.from_bytes(raw[start:end], "big", signed=True)
            for start, end in ((0, 8), (8, 12), (12, 16))
        )
        return micro + (days + 30 * months) * 86_400_000_000
