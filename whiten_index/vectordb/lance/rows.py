"""Rows as LanceDB keeps them, and back."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from whiten_index.corpus.batches import ID
from whiten_index.errors import ConfigError
from whiten_index.vectordb.database_writer import VECTOR, Layout, VectorDtype
from whiten_index.vectordb.row_checks import RowsError, vectors_array, vectors_of

# Columns that the engine has of its own.
_RESERVED = ("_rowid", "_rowaddr", "_rowoffset", "_distance")
_RESERVED_START = "_row_"
# Its language of filters has no such literal: it reads a minus before a number that is too large.
_LEAST_ID = -(2**63)


def stored_schema(layout: Layout) -> pa.Schema:
    """Return the columns of the table: those of the layout, but for what the engine cannot keep.

    An id is a ``string``, of which the engine has indexes, where it is a ``large_string``; a vector
    a list of halves where the layout says so; a list of fixed size of other things than numbers,
    at which the engine breaks down, a list.

    Raises:
        ConfigError: the engine takes no column of such a name.
    """
    for name in layout.kept:
        if (
            not name
            or set(name) & set(".`")
            or name in _RESERVED
            or name.startswith(_RESERVED_START)
        ):
            raise ConfigError(
                f"LanceDB takes no column called {name!r} (none with . or `, nor any of its own); "
                "rename it in the corpus, or leave it out of --keep"
            )
    number = pa.float16() if layout.dtype is VectorDtype.FLOAT16 else pa.float32()

    def stored(field: pa.Field) -> pa.Field:
        if field.name == VECTOR:
            return pa.field(VECTOR, pa.list_(number, layout.k))
        if field.name == ID and not pa.types.is_integer(field.type):
            return pa.field(ID, pa.string())
        return pa.field(field.name, _kept(field.type))

    return pa.schema([stored(field) for field in layout.schema])


def as_stored(rows: pa.RecordBatch, layout: Layout) -> pa.RecordBatch:
    """Return rows of the layout as the table takes them; single vectors are not copied.

    Raises:
        RowsError: a number is too large for float16, or an id cannot be looked for.
    """
    ids = rows.column(ID)
    if pa.types.is_integer(ids.type) and pc.min(ids).as_py() == _LEAST_ID:
        raise RowsError(
            f"LanceDB cannot look for the id {_LEAST_ID}, the least of 64 bits; give that document "
            "another one"
        )
    schema = stored_schema(layout)
    arrays = [
        column if column.type == field.type else column.cast(field.type)
        for column, field in zip(rows.columns, schema, strict=True)
        if field.name != VECTOR
    ]
    vectors = rows[VECTOR]
    if layout.dtype is VectorDtype.FLOAT16:
        numbers = vectors_of(rows)
        if len(rows) and np.abs(numbers).max() > np.finfo(np.float16).max:
            raise RowsError(
                "a vector has numbers beyond 65,504, which float16 cannot hold; push with "
                "--dtype float32"
            )
        vectors = vectors_array(numbers.astype(np.float16), layout.k)
    arrays.insert(schema.get_field_index(VECTOR), vectors)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def from_stored(table: pa.Table, layout: Layout) -> pa.Table:
    """Return rows of the table as those of the layout."""
    flat = table[VECTOR].combine_chunks().flatten().to_numpy()
    vectors = vectors_array(np.asarray(flat, dtype=np.float32), layout.k)
    columns = [
        vectors if field.name == VECTOR else table[field.name].cast(field.type)
        for field in layout.schema
    ]
    return pa.table(columns, schema=layout.schema)


def _kept(kind: pa.DataType) -> pa.DataType:
    """Return the type of the table for that of a kept column."""
    if pa.types.is_fixed_size_list(kind):
        inside = _kept(kind.value_type)
        plain = pa.types.is_integer(inside) or pa.types.is_floating(inside)
        return pa.list_(inside, kind.list_size) if plain else pa.list_(inside)
    if pa.types.is_large_list(kind):
        return pa.large_list(_kept(kind.value_type))
    if pa.types.is_list(kind):
        return pa.list_(_kept(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(each.name, _kept(each.type), each.nullable) for each in kind])
    if pa.types.is_map(kind):
        return pa.map_(_kept(kind.key_type), _kept(kind.item_type))
    return kind
