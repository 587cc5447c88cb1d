"""What a database of vectors must be able to do, to be filled with the rows of an index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from enum import Enum
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from whiten_index.corpus.batches import ID, PASSAGE

VECTOR = "vector"


class VectorDtype(Enum):
    """How precisely a database keeps a number of a vector."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"


class Metric(Enum):
    """By what a database ranks vectors of unit length, which both rank the same."""

    COSINE = "cosine"
    INNER_PRODUCT = "ip"


@dataclass(frozen=True)
class Layout:
    """The columns of the rows that a table, collection … takes.

    Attributes:
        schema: ``id`` (int64 or large_string, never null), ``vector`` (fixed-size list of k
            float32), then the kept columns, ``PASSAGE_COLUMNS`` last where rows are passages.
        dtype: in which the database keeps the vectors.
        metric: by which it ranks them.
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
        """Names of the columns by which no two rows are the same."""
        return (ID, PASSAGE) if PASSAGE in self.schema.names else (ID,)

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of the columns beside id and vector."""
        return tuple(name for name in self.schema.names if name not in (ID, VECTOR))


@dataclass(frozen=True)
class PushedTable:
    """What one physical table or collection holds: a version of an index, by one transform.

    It is kept in the database itself, beside the rows, as a flat object of JSON.

    Attributes:
        version: of the index that the rows are of.
        transform: fingerprint of the transform, k and dtype: where it is the same, a row that did
            not change has the same vector.
        k: width of the vectors.
        dtype: in which they are kept.
        rows: it has when it is whole.
        done: rows that are in it, the first ones in the order of the index.
        name: of the physical table or collection; the writer gives it.
        changing: versions that rows were being changed to when changes were cut off, blanks
            between them, so that rows are of ``version`` or of any of these; empty where none was.
        writer: of the push that writes it, a word of its own; the writer gives it where the engine
            has no locks, so that a push that another took over is told.
        options: those of the writer that shaped its table, such as ``index=hnsw m=16``.
        query_digest: of encoder and transform, that of each ``QueryTransform`` whose vectors fit;
            empty where an earlier release wrote it.
        columns: of the rows, in order; empty where an earlier release wrote it.
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

    def to_json(self) -> dict[str, Any]:
        """Return it as an object of JSON."""
        return {**asdict(self), "columns": list(self.columns)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PushedTable:
        """Return what ``to_json`` gave; fields of later releases are passed over.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        version, transform, dtype, name = (
            str(value[each]) for each in ("version", "transform", "dtype", "name")
        )
        k, rows, done = (int(value[each]) for each in ("k", "rows", "done"))
        later = ("changing", "lease", "options", "query_digest")
        changing, lease, options, query_digest = (str(value.get(each, "")) for each in later)
        columns = tuple(str(each) for each in value.get("columns", ()))
        return cls(
            version, transform, k, dtype, rows, done, name,
            changing, lease, options, query_digest, columns,
        )  # fmt: skip

    def changing_to(self, after: PushedTable, *, lease: str = "") -> PushedTable:
        """Return what is written of it before rows are changed: what was cut off before stays."""
        versions = dict.fromkeys([*self.changing.split(), after.version])
        return replace(self, changing=" ".join(versions), lease=lease)

    def same_vectors(self, other: PushedTable) -> bool:
        """Tell whether rows of both that are the same have the same vectors."""
        return (self.transform, self.k, self.dtype) == (other.transform, other.k, other.dtype)


@dataclass(frozen=True, eq=False)
class Found:
    """The nearest rows of q queries, best first.

    Attributes:
        ids: of the rows of each query.
        scores: (q, top_k) cosines, NaN beyond the rows that there are.
    """

    ids: list[list[str | int]]
    scores: NDArray[np.float32]


class DatabaseWriter(Protocol):
    """One table or collection, by the name that its users query; a context that closes.

    Its life: ``begin`` makes a new pushed beside what the name stands for, ``append`` fills it
    block by block, ``finish`` builds its index, ``swap`` lets the name stand for it in one step
    and drops what it stood for before. ``changing`` changes rows of what the name stands for.
    Every method raises ``DatabaseError`` where the database cannot be reached or refuses, with what to
    do and never with a password.

    Attributes:
        engine: the database and its release, such as ``PostgreSQL 18.4, pgvector 0.8.5``.
        target: where that is and the name, as may be shown: no password, no token.
    """

    engine: str
    target: str

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def published(self) -> PushedTable | None:
        """Return what the name stands for, None where there is nothing of that name.

        Raises:
            DatabaseError: something that no push made has the name.
        """

    def pending(self) -> PushedTable | None:
        """Return the table that a push began and did not swap in, None where there is none."""

    def begin(self, pushed: PushedTable, layout: Layout) -> None:
        """Make an empty pending table, in place of any that was pending."""

    def resume(self, layout: Layout) -> None:
        """Take up the pending table, whose rows have this layout.

        Whoever began it, or took it up before, is refused from now on: ``append``, ``finish`` and
        ``swap`` of that connection raise DatabaseError and change nothing. So it is after ``begin``,
        and after another one's ``discard`` or ``swap``. Where the engine has locks, ``resume`` and
        ``begin`` may raise DatabaseError instead while another push is at it.
        """

    def append(self, rows: pa.RecordBatch) -> None:
        """Add rows of the layout to the pending table, and count them as done.

        Cut off at any moment, it has added all or nothing, or the next ``append`` of the same rows
        replaces what was added.
        """

    def finish(self, layout: Layout) -> None:
        """Build the index of the pending table, and wait until it answers.

        Raises:
            RowsError: two rows have one key; sent again they are refused again.
        """

    def swap(self) -> None:
        """Let the name stand for the pending table in one step; drop the one before."""

    def discard(self) -> None:
        """Drop the pending table, if there is one.

        Where the engine has locks, one that another push is filling is left to it.
        """

    def changing(self, after: PushedTable, layout: Layout) -> AbstractContextManager[Changing]:
        """Open the published table for changes; ``after`` is what it holds at the end.

        Where the database has transactions, an error within changes nothing. Elsewhere what was
        changed stays, and from before the first change until after the last ``published`` tells
        by ``PushedTable.changing`` that rows are of either version (see ``changing_to``); doing all
        of it again ends with the same rows.

        Raises:
            DatabaseError: nothing is published, or another push changed or replaced it since
                ``published`` was asked here, or does so before the end.
        """

    def notes(self) -> Sequence[str]:
        """Return what who pushed should know of what the name stands for, such as a lost index."""

    def count(self, *, pending: bool = False) -> int:
        """Return how many rows the published or the pending pushed has."""

    def fetch(self, ids: Sequence[str | int], layout: Layout, *, pending: bool = False) -> pa.Table:
        """Return the rows with these ids, in any order, with the schema of the layout."""

    def search(
        self,
        vectors: NDArray[np.float32],
        top_k: int,
        *,
        exact: bool = False,
        pending: bool = False,
    ) -> Found:
        """Return the nearest rows of queries (q, k): exactly, or by the index."""


class Changing(Protocol):
    """Changes of rows of a published table."""

    def upsert(self, rows: pa.RecordBatch) -> None:
        """Put rows of the layout in place of those with their keys, or add them."""

    def delete(self, ids: Sequence[str | int]) -> None:
        """Take all rows with these ids away; those that are not there are passed over."""
