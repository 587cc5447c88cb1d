"""Checks of rows before they are sent to a database, and their vectors."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from whiten_index.corpus.batches import ID
from whiten_index.errors import DatabaseError
from whiten_index.vectordb.database_writer import VECTOR, Layout

_Item = TypeVar("_Item")
# Characters of a value or a list of columns in an error.
_SHOWN = 300


class RowsError(DatabaseError):
    """Rows that the database refuses; they would be refused again."""


def vectors_of(rows: pa.RecordBatch) -> NDArray[np.float32]:
    """Return the vectors (n, k) of rows; nothing is copied."""
    column = rows.column(rows.schema.get_field_index(VECTOR))
    width = column.type.list_size
    matrix: NDArray[np.float32] = column.flatten().to_numpy().reshape(len(rows), width)
    return matrix


def vectors_array(matrix: NDArray[Any], k: int) -> pa.FixedSizeListArray:
    """Return vectors (n, k), of float32 or float16, as a column; contiguous ones are not copied."""
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(matrix).ravel()), k)


def padded_scores(scores: Sequence[Sequence[float]], top_k: int) -> NDArray[np.float32]:
    """Return the scores (q, top_k) of the rows found for each query, NaN where there are fewer."""
    found = np.full((len(scores), top_k), np.nan, dtype=np.float32)
    for row, some in zip(found, scores, strict=True):
        row[: len(some)] = some
    return found


def blocks(items: Sequence[_Item], size: int) -> Iterator[Sequence[_Item]]:
    """Yield items in order, ``size`` at a time."""
    for first in range(0, len(items), size):
        yield items[first : first + size]


def new_lease() -> str:
    """Return a unique token by which a push knows a table that it writes."""
    return secrets.token_hex(8)


def not_begun(target: str) -> DatabaseError:
    """Return the error of a call that needs a pending pushed where there is none."""
    return DatabaseError(f"no push to {target} was begun, or it was dropped meanwhile; push again")


def taken_over(target: str) -> DatabaseError:
    """Return the error of a push whose table another push resumed, replaced or swapped in."""
    return DatabaseError(
        f"another push to {target} took this one over; run it again when that one has ended"
    )


def require_rows(rows: pa.RecordBatch, layout: Layout) -> None:
    """Refuse rows that some engines accept but change: they keep NaN, or the last of two rows.

    Raises:
        RowsError: the columns differ from those of the layout, a vector has another width or
            holds NaN or infinity, an id is missing, or two rows have one key.
    """
    if rows.schema != layout.schema:
        raise RowsError(
            f"the rows have columns {_told(rows.schema)} and the table takes {_told(layout.schema)}"
        )
    vectors = vectors_of(rows)
    # The sum is finite only if all numbers are, and takes half the time to test.
    with np.errstate(invalid="ignore", over="ignore"):
        total = vectors.sum()
    if not np.isfinite(total) and not np.isfinite(vectors).all():
        bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        raise RowsError(
            f"the vector of id {rows[ID][int(bad[0])].as_py()!r} holds NaN or infinity "
            f"({len(bad):,} of {len(rows):,} rows); encode the corpus again"
        )
    if rows[ID].null_count:
        raise RowsError(f"{rows[ID].null_count:,} rows have no id; mend the corpus")
    if layout.key == (ID,) and pc.count_distinct(rows[ID]).as_py() == len(rows):
        return
    keys = Counter(zip(*(rows[name].to_pylist() for name in layout.key), strict=True))
    twice = [key for key, count in keys.items() if count > 1]
    if twice:
        named = " and ".join(layout.key)
        raise RowsError(
            f"{len(twice):,} rows come twice, such as {named} {', '.join(map(repr, twice[0]))}; "
            "give every document an id of its own"
        )


def _told(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)[:_SHOWN]
