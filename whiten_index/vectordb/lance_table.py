"""Tables of LanceDB: what they hold, the types of their columns, and changes of their rows."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from whiten_index.corpus.batches import ID, PASSAGE
from whiten_index.vectordb.database_writer import (
    VECTOR,
    Layout,
    Metric,
    PushedTable,
    RowChanges,
    VectorDtype,
)
from whiten_index.vectordb.engine_support import first_line, reporting
from whiten_index.vectordb.row_checks import (
    blocks,
    new_lease,
    require_rows,
    vectors_array,
    vectors_of,
)

_METADATA_KEY = "whiten_index"
# Ids in one condition: some hundred kilobytes of text to parse.
_IDS_AT_ONCE = 10_000
_SLICE_ROWS = 16_384


@dataclass(frozen=True)
class TableMetadata:
    """What a table holds. It is kept with the field ``id``, so in the same commit as the rows.

    Attributes:
        table: what a push wrote; its lease is empty once the table is being dropped.
        metric: by which rows are ranked.
    """

    table: PushedTable
    metric: Metric

    @classmethod
    def read(cls, table: Any) -> TableMetadata | None:
        """Return the metadata of a table as its handle sees it, None if no push made it."""
        schema = table.schema
        metadata = schema.field(ID).metadata if ID in schema.names else None
        try:
            value = json.loads((metadata or {})[_METADATA_KEY.encode()])
            return cls(PushedTable.from_json(value), Metric(value["metric"]))
        except (KeyError, TypeError, ValueError):
            return None

    def write(self, table: Any) -> None:
        """Write the metadata of a table, in its own commit.

        The engine refuses it if another push wrote them since this handle saw them.
        """
        table.update_field_metadata({"path": ID, "metadata": self._json()})

    def take(self, table: Any) -> TableMetadata:
        """Write the metadata with a new lease, and make the engine refuse commits under way.

        A commit is not made on top of a ``restore`` that its writer has not seen.
        """
        taken = self.changed(lease=new_lease())
        taken.write(table)
        table.restore(table.version)
        return taken

    def in_schema(self, schema: pa.Schema) -> pa.Schema:
        """Return a schema with these metadata."""
        number = schema.get_field_index(ID)
        return schema.set(number, schema.field(ID).with_metadata(self._json()))

    def changed(self, **fields: Any) -> TableMetadata:
        """Return these metadata with some fields of the table changed."""
        return replace(self, table=replace(self.table, **fields))

    def same_rows(self, other: TableMetadata) -> bool:
        """Return whether both are of the same rows, wherever these are."""
        one, two = (each.changed(name="", done=0, lease="") for each in (self, other))
        return one == two

    def _json(self) -> dict[str, str]:
        value = {**self.table.to_json(), "metric": self.metric.value}
        return {_METADATA_KEY: json.dumps(value)}


def stored_schema(layout: Layout) -> pa.Schema:
    """Return the columns of a table: those of the layout, but for types that LanceDB cannot keep.

    An id that is a ``large_string`` becomes a ``string``, of which the engine has indexes. A list
    of fixed size of other things than numbers, which crashes the engine, becomes a list.
    """
    number = pa.float16() if layout.dtype is VectorDtype.FLOAT16 else pa.float32()

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
    if layout.dtype is VectorDtype.FLOAT16:
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


def is_readable(table: Any) -> bool:
    """Return whether the files of the rows are there.

    A commit that was under way when its table was dropped leaves a table without them.
    """
    try:
        table.head(1)
    except (RuntimeError, OSError, ValueError) as error:
        if "not found" in str(error).lower():
            return False
        raise
    return True


def with_ids(ids: Sequence[str | int]) -> Iterator[str]:
    """Yield conditions, in SQL, that a row has one of some ids."""
    for some in blocks(ids, _IDS_AT_ONCE):
        yield f"{ID} IN ({', '.join(map(_literal, some))})"


def _literal(value: str | int) -> str:
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value)


def _temporary_advice(error: Exception) -> tuple[str, str]:
    return first_line(error), (
        "make room in that temporary folder, or name another with the variable TMPDIR, and push "
        "again"
    )


class LanceChanges(RowChanges):
    """Rows to put and ids to delete; rows wait in a temporary file.

    Args:
        layout: of the rows.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._begin()

    def _begin(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by ``close``
        self._stream = pa.ipc.new_stream(self._file, stored_schema(self._layout))
        self._deleted = set[str | int]()
        # Id -> its passages that were put, 0 alone if rows are no passages.
        self._put = defaultdict[str | int, set[int]](set)

    def close(self) -> None:
        """Drop the temporary file."""
        # The disk may be full, and what is not written is of no use.
        with suppress(OSError):
            self._file.close()

    def upsert(self, rows: pa.RecordBatch) -> None:
        """Add rows, or replace those with the same keys."""
        require_rows(rows, self._layout)
        with reporting(tempfile.gettempdir(), "changes cannot wait there", _temporary_advice):
            self._stream.write_batch(as_stored(rows, self._layout))
        passages = PASSAGE in self._layout.key
        numbers = rows[PASSAGE].to_pylist() if passages else [0] * len(rows)
        for name, number in zip(rows[ID].to_pylist(), numbers, strict=True):
            self._put[name].add(number)

    def delete(self, ids: Sequence[str | int]) -> None:
        """Delete all rows with these ids but those that are put; missing ones are ignored."""
        self._deleted.update(ids)

    def apply(self, table: Any) -> None:
        """Change a table by what was said since the last call.

        One commit puts all rows, so that no reader misses a row that stays; the next ones delete.
        """
        self._stream.close()
        self._file.seek(0)
        if self._put:
            merge = table.merge_insert(list(self._layout.key))
            merge.when_matched_update_all().when_not_matched_insert_all().execute(
                pa.ipc.open_stream(self._file)
            )
        for condition in self._conditions():
            table.delete(condition)
        self.close()
        self._begin()

    def _conditions(self) -> Iterator[str]:
        ids_by_passages = defaultdict[tuple[int, ...], list[str | int]](list)
        for name in self._deleted:
            ids_by_passages[tuple(sorted(self._put.get(name, ())))].append(name)
        if PASSAGE not in self._layout.key:
            ids_by_passages.pop((0,), None)
        for passages, ids in ids_by_passages.items():
            kept = f" AND {PASSAGE} NOT IN ({', '.join(map(str, passages))})" if passages else ""
            for condition in with_ids(ids):
                yield condition + kept
