"""Rows in the binary format of COPY, built from whole columns: no row passes through Python.

A row is the number of its fields (int16), then each field's length (int32, -1 for null) and bytes,
all big-endian (PostgreSQL's documentation of COPY, "Binary Format").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

START = b"PGCOPY\n\xff\r\n\0" + bytes(8)
END = b"\xff\xff"
_JOINED = {"null_handling": "replace", "null_replacement": b""}
_NOTHING = pa.scalar(b"", pa.large_binary())


@dataclass(frozen=True, eq=False)
class Fixed:
    """Values that take the same number of bytes each.

    Attributes:
        parts: of a value, in their order: the type in which it is written, and one number a row,
            or several in (n, k), or the same one for all.
    """

    parts: tuple[tuple[str, Any], ...]

    @property
    def width(self) -> int:
        """Bytes of a value."""
        return sum(
            np.dtype(code).itemsize * (values.shape[1] if np.ndim(values) == 2 else 1)
            for code, values in self.parts
        )


# The second is a LargeBinaryArray, null where the value is.
Encoded: TypeAlias = "Fixed | pa.Array"


def block(columns: Sequence[tuple[Encoded, pa.Array]], rows: int) -> memoryview:
    """Return rows as COPY takes them.

    Args:
        columns: the encoded values of each column, and the column, which says what is null.
        rows: of each column.
    """
    segments: list[pa.Array] = []
    fixed: list[tuple[str, Any]] = [(">i2", len(columns))]
    for values, column in columns:
        if isinstance(values, Fixed) and not column.null_count:
            fixed += [(">i4", values.width), *values.parts]
            continue
        data = large_binary(values, column)
        fixed.append((">i4", _lengths(data)))
        segments += [_records(fixed, rows), data]
        fixed = []
    if fixed:
        segments.append(_records(fixed, rows))
    if len(segments) == 1:
        return memoryview(segments[0].buffers()[2])
    joined = pc.binary_join_element_wise(*segments, _NOTHING, **_JOINED)
    end = int(np.frombuffer(joined.buffers()[1], dtype=np.int64)[rows])
    return memoryview(joined.buffers()[2])[:end]


def large_binary(values: Encoded, column: pa.Array, *, with_length: bool = False) -> pa.Array:
    """Return values as an array of bytes, null where the column is.

    Args:
        values: of the column.
        column: says what is null.
        with_length: whether each has its length before it, and null is a length of its own.
    """
    if not isinstance(values, Fixed):
        found = values
    else:
        if with_length and not column.null_count:
            return _records([(">i4", values.width), *values.parts], len(column))
        found = _records(list(values.parts), len(column))
        if column.null_count:
            found = pc.if_else(column.is_valid(), found, pa.scalar(None, pa.large_binary()))
    if not with_length:
        return found
    lengths = _records([(">i4", _lengths(found))], len(found))
    return pc.binary_join_element_wise(lengths, found, _NOTHING, **_JOINED)


def lists(
    items: pa.Array, offsets: NDArray[np.int64], column: pa.Array, *, oid: int, has_null: bool
) -> pa.Array:
    """Return arrays of PostgreSQL, of one dimension, as an array of bytes.

    Args:
        items: of all lists, each with its length before it.
        offsets: (n + 1,) where each list begins among them.
        column: says which lists are null.
        oid: of the type of the items.
        has_null: whether an item is null.
    """
    starts = np.frombuffer(items.buffers()[1], dtype=np.int64)[items.offset :]
    places = np.ascontiguousarray(starts[offsets])
    slices = pa.Array.from_buffers(
        pa.large_binary(), len(column), [None, pa.py_buffer(places), items.buffers()[2]]
    )
    sizes = np.diff(offsets)
    heads = np.frombuffer(
        memoryview(
            _records(
                [(">i4", (sizes > 0).astype(np.int32)), (">i4", int(has_null)), (">i4", oid),
                 (">i4", sizes), (">i4", 1)],
                len(column),
            ).buffers()[2]
        ),
        dtype=np.uint8,
    ).reshape(-1, 20)  # fmt: skip
    # An empty list has no dimension, and so no size and no lower bound.
    widths = np.where(sizes > 0, 20, 12)
    kept = heads[np.arange(20) < widths[:, None]]
    ends = np.concatenate([[0], np.cumsum(widths)]).astype(np.int64)
    head = pa.Array.from_buffers(
        pa.large_binary(), len(column), [None, pa.py_buffer(ends), pa.py_buffer(kept)]
    )
    joined = pc.binary_join_element_wise(head, slices, _NOTHING, **_JOINED)
    return pc.if_else(column.is_valid(), joined, pa.scalar(None, pa.large_binary()))


def _lengths(values: pa.Array) -> NDArray[Any]:
    lengths = pc.fill_null(pc.binary_length(values), -1)
    found: NDArray[Any] = lengths.to_numpy(zero_copy_only=False)
    return found


def _records(parts: Sequence[tuple[str, Any]], rows: int) -> pa.Array:
    """Return the parts of each row one after another, as an array of bytes."""
    kind = np.dtype(
        [
            (f"f{at}", code, (values.shape[1],) if np.ndim(values) == 2 else ())
            for at, (code, values) in enumerate(parts)
        ]
    )
    made = np.empty(rows, dtype=kind)
    for at, (_, values) in enumerate(parts):
        made[f"f{at}"] = values
    ends = np.arange(rows + 1, dtype=np.int64) * kind.itemsize
    return pa.Array.from_buffers(
        pa.large_binary(), rows, [None, pa.py_buffer(ends), pa.py_buffer(made.view(np.uint8))]
    )
