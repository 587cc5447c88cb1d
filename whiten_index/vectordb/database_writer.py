"""Interface of the vector databases that rows of an index can be pushed to."""

from __future__ import annotations

import functools
import secrets
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import TypeAdapter

from whiten_index.corpus.batches import ID, PASSAGE
from whiten_index.errors import DatabaseError

VECTOR = "vector"


class VectorDtype(Enum):
    """Precision of the vectors in a database."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"


class Metric(Enum):
    """Similarity by which a database ranks; both rank vectors of unit length alike."""

    COSINE = "cosine"
    INNER_PRODUCT = "ip"


@dataclass(frozen=True)
class Layout:
    """The columns of the rows of a table.

    Attributes:
        schema: ``id`` (int64 or large_string, never null), ``vector`` (fixed-size list of k
            float32), then the kept columns; ``PASSAGE_COLUMNS`` last if rows are passages.
        dtype: precision of the vectors in the database.
        metric: similarity by which it ranks them.
    """

    schema: pa.Schema
    dtype: VectorDtype = VectorDtype.FLOAT32
    metric: Metric = Metric.COSINE

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

    The database keeps it next to the rows, as a flat JSON object.

    Attributes:
        version: of the index.
        transform: fingerprint of encoder, transform and layout. Two versions with the same one
            have the same vectors for the same texts.
        k: width of the vectors.
        dtype: precision of the vectors.
        metric: similarity by which the database ranks them.
        rows: number of rows of the whole table.
        done: number of rows written so far, in the order of the index.
        name: of the physical table or collection; the writer sets it.
        changing: versions, separated by blanks, to which an interrupted push was changing rows.
            Each row is of ``version`` or of one of these.
        lease: token of the push that writes the table. The writer sets it if the engine has no
            locks: a push that finds another token has been taken over.
        options: those that shaped the table, such as ``index=hnsw m=16``.
        query_digest: digest of encoder and transform; equals that of each ``QueryTransform``
            whose vectors fit.
        columns: of the rows, in order.
    """

    version: str
    transform: str
    k: int
    dtype: str
    rows: int
    done: int = 0
    name: str = ""
    changing: str = ""
    lease: str = ""
    options: str = ""
    query_digest: str = ""
    columns: tuple[str, ...] = ()
    metric: str = Metric.COSINE.value

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {**asdict(self), "columns": list(self.columns)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PushedTable:
        """Return the table that ``to_json`` described; unknown fields are ignored."""
        return _pushed_tables().validate_python(dict(value))

    def changing_to(self, after: PushedTable, *, lease: str = "") -> PushedTable:
        """Return the description to write before rows are changed to those of ``after``."""
        versions = dict.fromkeys([*self.changing.split(), after.version])
        return replace(self, changing=" ".join(versions), lease=lease)

    def same_vectors(self, other: PushedTable) -> bool:
        """Return whether equal rows of the two tables have equal vectors."""
        return (self.transform, self.k, self.dtype) == (other.transform, other.k, other.dtype)


@functools.cache
def _pushed_tables() -> TypeAdapter[PushedTable]:
    return TypeAdapter(PushedTable)


@dataclass(frozen=True, eq=False)
class Neighbours:
    """The nearest rows of q queries, best first.

    Attributes:
        ids: of the rows of each query.
        scores: (q, top_k) cosines, NaN where fewer rows were found.
    """

    ids: list[list[str | int]]
    scores: NDArray[np.float32]


class RowChanges(Protocol):
    """Changes of rows of a published table."""

    def upsert(self, rows: pa.RecordBatch) -> None:
        """Insert rows of the layout, replacing those with the same keys."""

    def delete(self, ids: Sequence[str | int]) -> None:
        """Delete all rows with these ids; unknown ids are ignored."""


class DatabaseWriter(ABC):
    """Connection to one table or collection, by the name that users query.

    A push calls ``begin`` to stage a new table, ``append`` to fill it block by block, ``finish`` to
    build its index and ``swap`` to publish it under the name in one step, which drops the table
    published before. ``changing`` changes rows of the published table in place. The staged table
    is called pending until it is published.

    Every method raises ``DatabaseError`` if the database cannot be reached or refuses. Its message
    says what to do and never contains a password.

    Attributes:
        engine: database and release, such as ``PostgreSQL 18.4, pgvector 0.8.5``.
        target: address and name without credentials.
    """

    engine: str
    target: str

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""

    @abstractmethod
    def published(self) -> PushedTable | None:
        """Return the published table, None if nothing has the name.

        Raises:
            DatabaseError: the name belongs to something that no push made.
        """

    @abstractmethod
    def pending(self) -> PushedTable | None:
        """Return the table that a push began and did not publish, or None."""

    @abstractmethod
    def begin(self, pushed: PushedTable, layout: Layout) -> None:
        """Create an empty pending table, replacing any other."""

    @abstractmethod
    def resume(self, layout: Layout) -> None:
        """Continue the pending table, whose rows have this layout.

        The connection that filled it before is refused from now on: its ``append``, ``finish`` and
        ``swap`` raise DatabaseError and change nothing. The same holds after another connection's
        ``begin``, ``discard`` or ``swap``. If the engine has locks, ``begin`` and ``resume`` may
        raise DatabaseError while another push runs.
        """

    @abstractmethod
    def append(self, rows: pa.RecordBatch) -> None:
        """Add rows of the layout to the pending table and count them as done.

        If it is interrupted, either all rows were added or none, or the next ``append`` of the same
        rows replaces them.
        """

    @abstractmethod
    def finish(self) -> None:
        """Build the index of the pending table, and wait until it answers.

        Raises:
            RowsError: two rows have the same key.
        """

    @abstractmethod
    def swap(self) -> None:
        """Publish the pending table under the name in one step; drop the one before."""

    @abstractmethod
    def discard(self) -> None:
        """Drop the pending table, if there is one.

        If the engine has locks, a table that another push is filling stays.
        """

    @abstractmethod
    def changing(self, after: PushedTable, layout: Layout) -> AbstractContextManager[RowChanges]:
        """Open the published table for changes, after which it is ``after``.

        If the database has transactions, an error within changes nothing. Otherwise the changes
        made so far stay, and ``published`` reports them in ``PushedTable.changing`` until all of
        them are made again (see ``changing_to``).

        Raises:
            DatabaseError: nothing is published, or another push changed or replaced it since
                ``published`` was called, or does so before the end.
        """

    def notes(self) -> Sequence[str]:
        """Return remarks on the published table for the user, such as a lost index."""
        return ()

    @abstractmethod
    def count(self, *, pending: bool = False) -> int:
        """Return the number of rows of the published or the pending table."""

    @abstractmethod
    def fetch(self, ids: Sequence[str | int], layout: Layout, *, pending: bool = False) -> pa.Table:
        """Return the rows with these ids, in any order, with the schema of the layout."""

    @abstractmethod
    def search(
        self,
        vectors: NDArray[np.float32],
        top_k: int,
        *,
        exact: bool = False,
        pending: bool = False,
    ) -> Neighbours:
        """Return the nearest rows of queries (q, k), exactly or by the index."""


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
    """Return the error of a call that needs a pending table when there is no such table."""
    return DatabaseError(f"no push to {target} was begun, or it was dropped meanwhile; push again")


def taken_over(target: str) -> DatabaseError:
    """Return the error of a push whose table another push resumed, replaced or swapped in."""
    return DatabaseError(
        f"another push to {target} took this one over; run it again when that one has ended"
    )


def require_rows(rows: pa.RecordBatch, layout: Layout) -> None:
    """Refuse rows that some engines accept but change: they keep NaN, or the last of two rows."""
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
