"""Rows of a push as a collection of Milvus has them, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pymilvus import DataType, MilvusClient

from whiten_index.corpus.batches import ID, PASSAGE
from whiten_index.vectordb.database_writer import VECTOR, Layout, VectorDtype
from whiten_index.vectordb.json_rows import from_objects, to_objects
from whiten_index.vectordb.row_checks import RowsError, blocks, vectors_array, vectors_of

_PRIMARY = "pk"
# Names that the client or Milvus Lite keep for themselves.
_RESERVED = (_PRIMARY, "$meta", "_seq", "_partition", "count(*)")
_LONGEST_TEXT = 65_535
# A server takes 64 MB at once; JSON and base64 are longer than the columns of Arrow.
_SENT_BYTES = 16 << 20
_IDS_AT_ONCE = 500
# What was written is read.
STRONG = {"consistency_level": "Strong"}


def schema_of(layout: Layout) -> Any:
    """Return the schema of a collection: the primary key, the vector, and dynamic fields."""
    schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=True)
    text = {"datatype": DataType.VARCHAR, "max_length": _LONGEST_TEXT}
    whole = pa.types.is_integer(layout.schema.field(ID).type)
    passages = PASSAGE in layout.schema.names
    if passages:
        schema.add_field(_PRIMARY, is_primary=True, **text)
    kind = {"datatype": DataType.INT64} if whole else text
    schema.add_field(ID, is_primary=not passages, **kind)
    half = layout.dtype is VectorDtype.FLOAT16
    vector = DataType.FLOAT16_VECTOR if half else DataType.FLOAT_VECTOR
    schema.add_field(VECTOR, vector, dim=layout.k)
    return schema


def _fields(layout: Layout) -> dict[str, str]:
    """Return kept column -> dynamic field."""
    taken, found = set(layout.schema.names), dict[str, str]()
    for name in layout.kept:
        field = name
        while field in _RESERVED or (field != name and field in taken):
            field += "_"
        taken.add(field)
        found[name] = field
    return found


def as_rows(rows: pa.RecordBatch, layout: Layout) -> list[dict[str, Any]]:
    """Return rows as the client takes them.

    Raises:
        RowsError: an id is longer than Milvus keeps.
    """
    fields, ids = _fields(layout), rows[ID].to_pylist()
    half = layout.dtype is VectorDtype.FLOAT16
    vectors = vectors_of(rows).astype(np.float16 if half else np.float32, copy=False)
    objects = to_objects(rows, layout.kept) if fields else [{}] * len(rows)
    keys = ids
    if PASSAGE in layout.schema.names:
        numbers = rows[PASSAGE].to_pylist()
        keys = [f"{name}#{number}" for name, number in zip(ids, numbers, strict=True)]
    for key in keys:
        if isinstance(key, str) and len(key) > _LONGEST_TEXT // 4:
            _require_short(key)
    made = [
        {ID: name, VECTOR: vector, **{fields[each]: value for each, value in kept.items()}}
        for name, vector, kept in zip(ids, vectors, objects, strict=True)
    ]
    if keys is not ids:
        for row, key in zip(made, keys, strict=True):
            row[_PRIMARY] = key
    return made


def _require_short(key: str) -> None:
    if (size := len(key.encode())) > _LONGEST_TEXT:
        raise RowsError(
            f"the id {key[:40]!r}… has {size:,} bytes and Milvus keeps {_LONGEST_TEXT:,}; give the "
            "document a shorter one"
        )


def parts(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield rows in parts that a server takes at once."""
    if rows.nbytes <= _SENT_BYTES or len(rows) < 2:
        if len(rows):
            yield rows
        return
    half = len(rows) // 2
    yield from parts(rows.slice(0, half))
    yield from parts(rows.slice(half))


def as_table(found: Sequence[Mapping[str, Any]], layout: Layout) -> pa.Table:
    """Return rows that the client gave, with the schema of the layout."""
    fields = _fields(layout)
    objects = [{name: row.get(field) for name, field in fields.items()} for row in found]
    kept = from_objects(objects, pa.schema([layout.schema.field(name) for name in layout.kept]))
    vectors = as_matrix([row[VECTOR] for row in found], layout.k)
    columns = {
        ID: pa.array([row[ID] for row in found], layout.schema.field(ID).type),
        VECTOR: vectors_array(vectors, layout.k),
    }
    arrays = [columns.get(name, kept[name] if name in fields else None)
              for name in layout.schema.names]  # fmt: skip
    return pa.table(arrays, schema=layout.schema)


def as_matrix(vectors: Sequence[Any], k: int) -> NDArray[np.float32]:
    """Return vectors (n, k) as the client gives them: lists of numbers, or bytes of halves."""
    plain = [each[0] if len(each) == 1 and isinstance(each[0], bytes) else each for each in vectors]
    if plain and isinstance(plain[0], bytes):
        halves = np.frombuffer(b"".join(plain), dtype=np.float16)
        return halves.astype(np.float32).reshape(-1, k)
    return np.array(plain, dtype=np.float32).reshape(-1, k)


def chunks(ids: Sequence[str | int]) -> Iterator[Sequence[str | int]]:
    """Return ids, as many at a time as one filter names."""
    return blocks(ids, _IDS_AT_ONCE)


def with_ids(ids: Sequence[str | int]) -> str:
    """Return the filter of rows with some ids."""
    return with_keys(ID, ids)


def with_keys(field: str, keys: Sequence[str | int]) -> str:
    """Return the filter of rows that have one of some values in a field."""
    return f"{field} in [{', '.join(map(quoted, keys))}]"


_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"})


def quoted(value: str | int) -> str:
    """Return a value as it is written in a filter."""
    return f'"{value.translate(_ESCAPES)}"' if isinstance(value, str) else str(value)
