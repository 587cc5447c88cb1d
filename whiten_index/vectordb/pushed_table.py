"""Rows that are pushed: their layout, the description of a table of them, and their checks."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter

from whiten_index.artifacts.limits import LINE_BYTES
from whiten_index.corpus.batches import ID, PASSAGE
from whiten_index.errors import DatabaseError

VECTOR = "vector"
METADATA = "whiten_index"  # key of the description of a table
VectorDtype: TypeAlias = Literal["float32", "float16"]
# Both rank vectors of unit length alike; others keep their length for ip.
Metric: TypeAlias = Literal["cosine", "ip"]
Ids: TypeAlias = Sequence[str | int]

_MOST_HALF = float(np.finfo(np.float16).max)
# A description may be anybody's.
_Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class RowsError(DatabaseError):
    """Rows that the database refuses; they would be refused again."""


@dataclass(frozen=True)
class Layout:
    """The columns of the rows of a table.

    They are ``id`` (int64 or large_string, never null), ``vector`` (fixed-size list of k float32),
    then the kept ones; ``PASSAGE_COLUMNS`` last if rows are passages.
    """

    schema: pa.Schema
    dtype: VectorDtype = "float32"  # precision of the vectors in the database
    metric: Metric = "cosine"  # similarity by which it ranks them

    @property
    def k(self) -> int:
        """Width of the vectors."""
        return int(self.schema.field(VECTOR).type.list_size)

    @property
    def key(self) -> tuple[str, ...]:
        """Names of the columns that are unique together."""
        return (ID, PASSAGE) if PASSAGE in self.schema.names else (ID,)

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of the columns other than id and vector."""
        return tuple(name for name in self.schema.names if name not in (ID, VECTOR))


@dataclass(frozen=True)
class PushedTable:
    """Description of a table or collection that a push wrote: a version of an index.

    The database keeps it next to the rows, as a flat JSON object; unknown fields are ignored.
    """

    version: str  # of the index
    # Fingerprint of encoder, transform and layout: of equal ones, equal texts have equal vectors.
    transform: str
    k: int  # width of the vectors
    dtype: str  # precision of the vectors
    rows: _Count  # of the whole table
    done: _Count = 0  # rows written so far, in the order of the index
    name: str = ""  # of the physical table or collection; the writer sets it
    # Versions, separated by blanks, to which an interrupted push was changing rows. Each row is of
    # `version` or of one of these.
    changing: str = ""
    # Token of the push that writes the table. The writer sets it if the engine has no locks: a
    # push that finds another token has been taken over.
    lease: str = ""
    query_digest: str = ""  # of encoder and transform, that of each `QueryTransform` that fits
    columns: tuple[str, ...] = ()  # of the rows, in order
    metric: str = "cosine"  # similarity by which the database ranks the vectors

    @property
    def text(self) -> str:
        """Description as the database keeps it."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str | bytes | None) -> "PushedTable | None":
        """Return the table of a description, None if no push wrote this text."""
        if text is not None and len(text) > LINE_BYTES:
            return None
        try:
            return _DESCRIPTION.validate_json(text or "")
        except ValueError:
            return None


_DESCRIPTION = TypeAdapter(PushedTable)


def vectors_of(rows: pa.RecordBatch) -> NDArray[np.float32]:
    """Return the vectors (n, k) of rows; nothing is copied."""
    column = rows.column(rows.schema.get_field_index(VECTOR))
    width = column.type.list_size
    matrix: NDArray[np.float32] = column.flatten().to_numpy().reshape(len(rows), width)
    return matrix


def vectors_array(matrix: NDArray[Any], k: int) -> pa.FixedSizeListArray:
    """Return vectors (n, k), of float32 or float16, as a column; contiguous ones are not copied."""
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(matrix).ravel()), k)


def require_fitting(vectors: NDArray[np.floating], dtype: VectorDtype) -> None:
    """Refuse vectors (n, k) of which the type makes infinity."""
    if dtype == "float16" and np.abs(vectors).max(initial=0) > _MOST_HALF:
        raise RowsError(
            "a vector has numbers beyond 65,504, which float16 cannot hold; push with "
            "--dtype float32"
        )


def with_vectors(
    rows: pa.Table | pa.RecordBatch, vectors: NDArray[Any], schema: pa.Schema
) -> pa.Table:
    """Return rows with these vectors (n, k), and their other columns cast to a schema."""
    column = vectors_array(vectors, vectors.shape[1])
    columns = [
        column if each.name == VECTOR else rows[each.name].cast(each.type) for each in schema
    ]
    return pa.table(columns, schema=schema)
