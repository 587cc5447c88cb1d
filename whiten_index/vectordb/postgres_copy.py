"""Rows of Arrow to a table of PostgreSQL by binary COPY, and back.

COPY takes whole blocks that are built from columns, so no row passes through Python. A row is its
number of fields (int16), then for each field its length (int32, -1 for null) and its bytes, all
big-endian (PostgreSQL's documentation of COPY, "Binary Format").
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql
from psycopg.adapt import PyFormat, Transformer
from psycopg.copy import QueuedLibpqWriter
from psycopg.pq import Format

from whiten_index.corpus.arrow_types import replaced_leaves
from whiten_index.corpus.batches import ID
from whiten_index.errors import ConfigError, DatabaseError
from whiten_index.vectordb.engine_support import first_line
from whiten_index.vectordb.json_rows import from_objects, to_objects
from whiten_index.vectordb.pushed_table import (
    VECTOR,
    Ids,
    Layout,
    RowsError,
    vectors_of,
)

VECTOR_TYPES = {"float32": "vector", "float16": "halfvec"}
_VECTOR_CODES = {"float32": ">f4", "float16": ">f2"}
# Built and sent at once: the server takes one block while the next one is built.
_BLOCK_ROWS = 2048
_LONGEST_NAME = 63
START, END = b"PGCOPY\n\xff\r\n\0" + bytes(8), b"\xff\xff"
# Parts of a value: numpy's code, and one number a row, several in (n, k), or one for all rows.
_Parts: TypeAlias = list[tuple[str, Any]]


# Types of which COPY takes whole columns of numbers.
_NUMBERS = {
    "boolean": "u1", "smallint": ">i2", "integer": ">i4", "bigint": ">i8", "real": ">f4",
    "double precision": ">f8",
}  # fmt: skip


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
        (
            "bytea",
            pa.large_binary(),
            (is_.is_binary, is_.is_large_binary, is_.is_fixed_size_binary),
        ),
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
        vector = sql.SQL("{}({})").format(
            sql.Identifier(self.extension, VECTOR_TYPES[self.layout.dtype]),
            sql.Literal(self.layout.k),
        )
        types = {VECTOR: vector, **{name: sql.SQL(of.sql) for name, of in self.types.items()}}
        return sql.SQL(", ").join(
            sql.SQL("{} {}").format(sql.Identifier(name), types[name])
            for name in self.layout.schema.names
        )

    def copy(self, connection: Any, table: sql.Composable, rows: pa.RecordBatch) -> None:
        """Add rows to a table."""
        order = sql.SQL("COPY {} FROM STDIN (FORMAT BINARY)").format(table)
        # A thread sends while the next block is built.
        with (
            connection.cursor() as cursor,
            cursor.copy(order, writer=QueuedLibpqWriter(cursor)) as copy,
        ):
            copy.write(START)
            for block in self.blocks(rows):
                copy.write(block)
            copy.write(END)

    def blocks(self, rows: pa.RecordBatch) -> Iterator[memoryview]:
        """Yield rows as COPY takes them between ``START`` and ``END``."""
        for first in range(0, len(rows), _BLOCK_ROWS):
            yield self._block(rows.slice(first, _BLOCK_ROWS))

    def fetch(self, connection: Any, table: sql.Composable, ids: Ids) -> pa.Table:
        """Return the rows with some ids."""
        names = sql.SQL(", ").join(
            sql.SQL("{}::real[]" if name == VECTOR else "{}").format(sql.Identifier(name))
            for name in self.layout.schema.names
        )
        order = sql.SQL("SELECT {} FROM {} WHERE {} = ANY({}::{}[])")
        parts = sql.Identifier(ID), sql.Literal(list(ids)), sql.SQL(self.types[ID].sql)
        with connection.cursor(binary=True) as cursor:
            found = cursor.execute(order.format(names, table, *parts)).fetchall()
        schema = self.layout.schema
        columns = list(zip(*found, strict=True)) or [()] * len(schema)
        arrays = [self._decoded(*each) for each in zip(schema, columns, strict=True)]
        return pa.Table.from_arrays(arrays, schema=schema)

    def _block(self, rows: pa.RecordBatch) -> memoryview:
        """Return rows as COPY takes them."""
        segments: list[pa.Array] = []
        fixed: _Parts = [(">i2", rows.num_columns)]
        for name, column in zip(rows.schema.names, rows.columns, strict=True):
            code = None if name == VECTOR else _NUMBERS.get(self.types[name].sql)
            if name == VECTOR or (code is not None and not column.null_count):
                parts = (
                    self._vector_parts(rows)
                    if code is None
                    else [(code, column.to_numpy(zero_copy_only=False))]
                )
                fixed += [(">i4", _record_type(parts).itemsize), *parts]
                continue
            data = self._encoded(name, column)
            lengths = pc.fill_null(pc.binary_length(data), -1).to_numpy()
            segments += [_records([*fixed, (">i4", lengths)], len(rows)), data]
            fixed = []
        if fixed:
            segments.append(_records(fixed, len(rows)))
        nothing = pa.scalar(b"", pa.large_binary())
        joined = pc.binary_join_element_wise(
            *segments, nothing, null_handling="replace", null_replacement=b""
        )
        end = int(np.frombuffer(joined.buffers()[1], dtype=np.int64)[len(rows)])
        return memoryview(joined.buffers()[2])[:end]

    def _vector_parts(self, rows: pa.RecordBatch) -> _Parts:
        vectors = vectors_of(rows)
        half = self.layout.dtype == "float16"
        if half and np.abs(vectors).max() > np.finfo(np.float16).max:
            raise RowsError(
                "a vector has numbers beyond 65,504, which float16 cannot hold; push with "
                "--dtype float32"
            )
        return [(">i2", self.layout.k), (">i2", 0), (_VECTOR_CODES[self.layout.dtype], vectors)]

    def _encoded(self, name: str, column: pa.Array) -> pa.Array:
        """Return the values of a column as an array of bytes, null where the value is."""
        type_ = self.types[name]
        try:
            if type_.sql == "jsonb":
                return _json(name, column)
            if type_.sql in ("text", "bytea"):
                return column.cast(pa.large_binary())
            values = column.cast(type_.arrow).to_pylist()
            client = Transformer()
            client.set_dumper_types([type_.oid] * len(values), Format.BINARY)
            dumped = client.dump_sequence(values, [PyFormat.BINARY] * len(values))
            return pa.array([each and bytes(each) for each in dumped], pa.large_binary())
        except pa.ArrowInvalid as error:
            why, remedy = first_line(error), "round it to microseconds in the corpus"
        except (
            pa.ArrowNotImplementedError, OverflowError, TypeError, ValueError, psycopg.Error
        ) as error:  # fmt: skip
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


def _json(name: str, column: pa.Array) -> pa.Array:
    objects = to_objects(pa.record_batch([column], names=[name]), [name])
    texts = [
        None if each[name] is None else json.dumps(each[name], ensure_ascii=False)
        for each in objects
    ]
    # The release of the format stands before the text.
    return pa.array(
        [None if each is None else b"\1" + each.encode() for each in texts], pa.large_binary()
    )


def _record_type(parts: _Parts) -> np.dtype[Any]:
    return np.dtype(
        [
            (f"f{at}", code, values.shape[1:] if np.ndim(values) else ())
            for at, (code, values) in enumerate(parts)
        ]
    )


def _records(parts: _Parts, rows: int) -> pa.Array:
    """Return the parts of each row one after another, as an array of bytes."""
    made = np.empty(rows, dtype=_record_type(parts))
    for at, (_, values) in enumerate(parts):
        made[f"f{at}"] = values
    ends = np.arange(rows + 1, dtype=np.int64) * made.itemsize
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(made.view(np.uint8))]
    return pa.Array.from_buffers(pa.large_binary(), rows, buffers)
