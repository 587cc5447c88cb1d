"""Rows of Arrow to a table of PostgreSQL by binary COPY, and back."""

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from psycopg import sql

from whiten_index.artifacts.prefetch import ahead
from whiten_index.corpus.arrow_types import replaced_leaves
from whiten_index.corpus.batches import ID
from whiten_index.errors import ConfigError, DatabaseError, first_line
from whiten_index.vectordb.json_rows import from_objects, is_bytes, to_objects
from whiten_index.vectordb.postgres_options import VECTOR_TYPES
from whiten_index.vectordb.postgres_server import composed
from whiten_index.vectordb.pushed_table import VECTOR, Ids, Layout, RowsError

_LONGEST_NAME = 63
_BLOCK_BYTES = 1 << 22
# Before and after the rows.
_SIGNATURE, _END = b"PGCOPY\n\xff\r\n\0" + bytes(8), b"\xff\xff"


@dataclass(frozen=True)
class ColumnType:
    """Type of a column in PostgreSQL."""

    sql: str
    oid: int
    arrow: pa.DataType


def column_type(name: str, type_: pa.DataType) -> ColumnType:
    """Return the type of a column: an array for a list of plain values, jsonb for other nesting."""
    tests = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    is_list = any(test(type_) for test in tests)
    leaf = _leaf_type(type_.value_type if is_list else type_)
    if leaf is None:
        if pa.types.is_nested(type_):
            return ColumnType("jsonb", 0, type_)
        raise RowsError(
            f"column {name!r} has the type {type_}, which PostgreSQL has nothing for; leave it out "
            "of --keep, or change it in the corpus"
        )
    sql_name, arrow = leaf
    info = psycopg.adapters.types[sql_name.partition("(")[0]]
    if is_list:
        arrow = replaced_leaves(type_, lambda _: leaf[1])
        return ColumnType(f"{sql_name}[]", info.array_oid, arrow)
    return ColumnType(sql_name, info.oid, arrow)


def _leaf_type(type_: pa.DataType) -> tuple[str, pa.DataType] | None:
    """Return the type of plain values in SQL, and the one of Arrow that they come back in."""
    is_ = pa.types
    if is_.is_timestamp(type_):
        zoned = ("timestamptz", pa.timestamp("us", "UTC"))
        return zoned if type_.tz else ("timestamp", pa.timestamp("us"))
    known: list[tuple[str, pa.DataType, tuple[Callable[[pa.DataType], bool], ...]]] = [
        ("text", type_, (is_.is_null,)),
        ("text", pa.large_string(), (is_.is_string, is_.is_large_string)),
        ("boolean", type_, (is_.is_boolean,)),
        ("numeric(20,0)", pa.decimal128(20, 0), (is_.is_uint64,)),
        ("bigint", type_, (is_.is_int64, is_.is_uint32)),
        ("integer", type_, (is_.is_int32, is_.is_uint16)),
        ("smallint", type_, (is_.is_integer,)),
        ("double precision", type_, (is_.is_float64,)),
        ("real", pa.float32(), (is_.is_floating,)),
        ("numeric({0.precision},{0.scale})", type_, (is_.is_decimal,)),
        ("bytea", pa.large_binary(), (is_bytes,)),
        ("date", pa.date32(), (is_.is_date,)),
        ("time", pa.time64("us"), (is_.is_time,)),
        ("interval", pa.duration("us"), (is_.is_duration,)),
    ]
    found = ((name.format(type_), arrow) for name, arrow, of in known if any(f(type_) for f in of))
    return next(found, None)


@dataclass(frozen=True)
class RowFormat:
    """Rows of a layout as a table of PostgreSQL has them."""

    layout: Layout
    extension: str

    @cached_property
    def types(self) -> dict[str, ColumnType]:
        """Type of each column other than the vectors."""
        for name in self.layout.schema.names:
            if not 0 < len(name.encode()) <= _LONGEST_NAME:
                raise ConfigError(
                    f"PostgreSQL cannot name a column {name!r}: names are of 1 to {_LONGEST_NAME} "
                    "bytes; rename it in the corpus, or leave it out of --keep"
                )
        return {
            field.name: column_type(field.name, field.type)
            for field in self.layout.schema
            if field.name != VECTOR
        }

    def definition(self) -> sql.Composable:
        """Return the columns as CREATE TABLE takes them."""
        of_vectors = sql.Identifier(self.extension, VECTOR_TYPES[self.layout.dtype])
        types = {name: sql.SQL(of.sql) for name, of in self.types.items()}
        types[VECTOR] = composed("{}({})", of_vectors, sql.Literal(self.layout.k))
        names = self.layout.schema.names
        return sql.SQL(", ").join(composed("{} {}", name, types[name]) for name in names)

    def copy(self, connection: Any, table: sql.Composable, rows: pa.RecordBatch) -> None:
        """Add rows to a table in blocks of PostgreSQL's binary format, each made one ahead.

        The format is that of https://www.postgresql.org/docs/current/sql-copy.html.
        """
        order = composed("COPY {} FROM STDIN (FORMAT BINARY)", table)
        client = psycopg.adapt.Transformer(connection)
        step = max(1, _BLOCK_BYTES * len(rows) // max(rows.nbytes, 1))

        def block(first: int) -> pa.Buffer:
            return self._block(rows.slice(first, step), client)

        with (
            connection.cursor().copy(order) as copy,
            closing(ahead(range(0, len(rows), step), block)) as made,
        ):
            copy.write(_SIGNATURE)
            for each in made:
                copy.write(memoryview(each))
            copy.write(_END)

    def fetch(self, connection: Any, table: sql.Composable, ids: Ids) -> pa.Table:
        """Return the rows with some ids."""
        schema = self.layout.schema
        names = sql.SQL(", ").join(
            composed("{}::real[]" if name == VECTOR else "{}", name) for name in schema.names
        )
        given = ID, sql.Literal(list(ids)), sql.SQL(self.types[ID].sql)
        order = composed("SELECT {} FROM {} WHERE {} = ANY({}::{}[])", names, table, *given)
        with connection.cursor(binary=True) as cursor:
            found = cursor.execute(order).fetchall()
        columns = list(zip(*found, strict=True)) or [()] * len(schema)
        arrays = [self._decoded(*each) for each in zip(schema, columns, strict=True)]
        return pa.Table.from_arrays(arrays, schema=schema)

    def _block(self, rows: pa.RecordBatch, client: Any) -> pa.Buffer:
        """Return rows: of each the number of its fields, and of each field its size and bytes."""
        parts = [pa.scalar(len(rows.schema).to_bytes(2), pa.large_binary())]
        for name in rows.schema.names:
            if name == VECTOR:
                parts.append(self._vectors(rows[name]))
            else:
                values = self._encoded(name, rows[name], client)
                sizes = pc.fill_null(pc.binary_length(values), -1).to_numpy()
                parts += _as_binary(sizes.astype(">i4")), values
        separator = pa.scalar(b"", pa.large_binary())
        joined = pc.binary_join_element_wise(*parts, separator, null_handling="replace")
        return joined.buffers()[2]

    def _vectors(self, rows: pa.Array) -> pa.Array:
        """Return fields as pgvector takes them: size, width, a zero, and numbers, big-endian."""
        number = np.dtype(self.layout.dtype).newbyteorder(">")
        head = [("size", ">i4"), ("width", ">i2"), ("zero", ">i2")]
        sent = np.zeros(len(rows), [*head, ("numbers", number, self.layout.k)])
        sent["size"], sent["width"] = sent.itemsize - 4, self.layout.k
        sent["numbers"] = rows.flatten().to_numpy().reshape(len(rows), self.layout.k)
        return _as_binary(sent)

    def _encoded(self, name: str, column: pa.Array, client: Any) -> pa.Array:
        """Return the values of a column as the server takes them."""
        type_, binary = self.types[name], pa.large_binary()
        try:
            if type_.sql in ("text", "bytea"):
                return column.cast(binary)
            if type_.sql == "jsonb":
                objects = to_objects(pa.record_batch([column], names=[name]), [name])
                texts = (json.dumps(each[name], ensure_ascii=False).encode() for each in objects)
                # The release of the format stands before the text.
                return pa.array([None if t == b"null" else b"\1" + t for t in texts], binary)
            values = column.cast(type_.arrow).to_pylist()
            client.set_dumper_types([type_.oid] * len(values), psycopg.pq.Format.BINARY)
            formats = [psycopg.adapt.PyFormat.BINARY] * len(values)
            return pa.array(client.dump_sequence(values, formats), binary)
        except pa.ArrowInvalid as error:
            why, remedy = first_line(error), "round it to microseconds in the corpus"
        except (pa.ArrowNotImplementedError, OverflowError, TypeError, ValueError) as error:
            why, remedy = first_line(error), "mend the corpus"
        raise RowsError(
            f"column {name!r} ({column.type}) holds what PostgreSQL cannot keep as it is: {why}; "
            f"{remedy}, or leave it out of --keep"
        )

    def _decoded(self, field: pa.Field, values: Sequence[Any]) -> pa.Array:
        try:
            if field.name == VECTOR:
                return pa.array(values, field.type)
            type_ = self.types[field.name]
            if type_.sql == "jsonb":
                objects = [{field.name: each} for each in values]
                return from_objects(objects, pa.schema([field]))[field.name].combine_chunks()
            return pa.array(values, type_.arrow).cast(field.type)
        except (pa.ArrowNotImplementedError, ArithmeticError, TypeError, ValueError) as error:
            raise DatabaseError(
                f"column {field.name!r} of the table has values or a type that no push put there "
                f"({first_line(error)}); change it back, or push all rows with --full"
            ) from error


def _as_binary(items: NDArray[Any]) -> pa.Array:
    """Return the bytes of each item of an array."""
    kind, data = pa.binary(items.itemsize), pa.py_buffer(np.ascontiguousarray(items))
    return pa.Array.from_buffers(kind, len(items), [None, data]).cast(pa.large_binary())
