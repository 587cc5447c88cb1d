"""Tables of LanceDB: what they hold, and the types of their columns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from whiten_index.corpus.batches import ID
from whiten_index.vectordb.pushed_table import (
    VECTOR,
    Ids,
    Layout,
    PushedTable,
    blocks,
    new_lease,
    vectors_array,
    vectors_of,
)

_METADATA_KEY = "whiten_index"
# Ids in one condition: some hundred kilobytes of text to parse.
_IDS_AT_ONCE = 10_000
_SLICE_ROWS = 16_384


def read_metadata(table: Any) -> PushedTable | None:
    """Return what a table holds, as its handle sees it, None if no push made it.

    This is kept with the field ``id``, so in the same commit as the rows. Its lease is empty once
    the table is being dropped.
    """
    schema = table.schema
    metadata = schema.field(ID).metadata if ID in schema.names else None
    try:
        return PushedTable.from_json(json.loads((metadata or {})[_METADATA_KEY.encode()]))
    except (KeyError, TypeError, ValueError):
        return None


def write_metadata(table: Any, pushed: PushedTable) -> None:
    """Write what a table holds, in a separate commit.

    The engine refuses it if another push wrote this since the handle saw it.
    """
    table.update_field_metadata({"path": ID, "metadata": _metadata(pushed)})


def take_over(table: Any, pushed: PushedTable) -> PushedTable:
    """Write what a table holds with a new lease, and make the engine refuse commits under way.

    A commit is not made on top of a ``restore`` that its writer has not seen.
    """
    taken = replace(pushed, lease=new_lease())
    write_metadata(table, taken)
    table.restore(table.version)
    return taken


def with_metadata(schema: pa.Schema, pushed: PushedTable) -> pa.Schema:
    """Return a schema that says what a table holds."""
    number = schema.get_field_index(ID)
    return schema.set(number, schema.field(ID).with_metadata(_metadata(pushed)))


def has_files(table: Any) -> bool:
    """Return whether the files of the rows exist.

    A commit that was under way when its table was dropped leaves a table without them.
    """
    try:
        table.head(1)
    except (RuntimeError, OSError, ValueError) as error:
        if "not found" in str(error).lower():
            return False
        raise
    return True


def _metadata(pushed: PushedTable) -> dict[str, str]:
    return {_METADATA_KEY: json.dumps(pushed.to_json())}


def stored_schema(layout: Layout) -> pa.Schema:
    """Return the columns of a table: those of the layout, but for types that LanceDB cannot keep.

    An id that is a ``large_string`` becomes a ``string``, of which the engine has indexes. A list
    of fixed size of other things than numbers, which crashes the engine, becomes a list.
    """
    number = pa.float16() if layout.dtype == "float16" else pa.float32()

    def stored(field: pa.Field) -> pa.DataType:
        kind = field.type
        if field.name == VECTOR:
            return pa.list_(number, layout.k)
        if field.name == ID:
            return kind if pa.types.is_integer(kind) else pa.string()
        if pa.types.is_fixed_size_list(kind) and not pa.types.is_primitive(kind.value_type):
            return pa.list_(kind.value_type)
        return kind

    return pa.schema([pa.field(each.name, stored(each)) for each in layout.schema])


def as_stored(rows: pa.RecordBatch, layout: Layout) -> pa.RecordBatch:
    """Return rows of the layout as a table takes them; single-precision vectors are not copied."""
    schema = stored_schema(layout)
    arrays = [
        column if column.type == field.type or field.name == VECTOR else column.cast(field.type)
        for column, field in zip(rows.columns, schema, strict=True)
    ]
    if layout.dtype == "float16":
        halves = vectors_of(rows).astype(np.float16)
        arrays[schema.get_field_index(VECTOR)] = vectors_array(halves, layout.k)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def from_stored(table: pa.Table, layout: Layout) -> pa.Table:
    """Return rows of a table as those of the layout."""
    flat = table[VECTOR].combine_chunks().flatten().to_numpy()
    vectors = vectors_array(np.asarray(flat, dtype=np.float32), layout.k)
    columns = [
        vectors if field.name == VECTOR else table[field.name].cast(field.type)
        for field in layout.schema
    ]
    return pa.table(columns, schema=layout.schema)


def read_slices(table: Any, rows: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield all rows in order; one scan of the whole table reads far ahead, into memory."""
    for first in range(0, rows, _SLICE_ROWS):
        for batch in table.search().offset(first).limit(_SLICE_ROWS).to_batches():
            yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)


def with_ids(ids: Ids) -> Iterator[str]:
    """Yield conditions, in SQL, that a row has one of some ids."""
    for some in blocks(ids, _IDS_AT_ONCE):
        yield f"{ID} IN ({', '.join(map(_literal, some))})"


def _literal(value: str | int) -> str:
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value)
