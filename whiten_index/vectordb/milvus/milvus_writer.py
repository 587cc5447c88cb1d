"""One alias of Milvus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from whiten_index.vectordb.database_writer import Layout, Metric, Neighbours, PushedTable
from whiten_index.vectordb.milvus.building import Building
from whiten_index.vectordb.milvus.collections import Collections, properties_of
from whiten_index.vectordb.milvus.connection import Connection
from whiten_index.vectordb.milvus.options import IndexOptions, is_exact
from whiten_index.vectordb.milvus.rows import (
    STRONG,
    as_rows,
    as_table,
    chunks,
    parts,
    schema_of,
    with_ids,
)
from whiten_index.vectordb.milvus.searching import Searching
from whiten_index.vectordb.row_checks import not_begun, require_rows
from whiten_index.vectordb.staged_tables import Changed, StagedTables

_METRICS = {Metric.COSINE: "COSINE", Metric.INNER_PRODUCT: "IP"}
# In the mark: by what the index ranks, and how many rows it is built for.
_METRIC, _ROWS = "metric", "rows"


class MilvusWriter:
    """One alias and the collections behind it; see ``DatabaseWriter``.

    Ids are the primary keys; the rows of passages have ``pk``, which is ``id#number``. Kept columns
    are dynamic fields, by which users can filter (``n > 5``). A column of a name that Milvus keeps
    for itself ends in underscores.
    """

    def __init__(self, connection: Connection, name: str, options: IndexOptions) -> None:
        self.engine = connection.engine
        self.target = f"{connection.shown}, collection {name}"
        self._milvus, self._options = connection, options
        self._building = Building(connection, options)
        self._life = StagedTables(Collections(connection), name, self.target)
        self._layout: Layout | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._milvus.close()

    def published(self) -> PushedTable | None:
        """Return what the alias stands for.

        Raises:
            DatabaseError: it is a collection, or an alias of one, that no push made.
        """
        return self._life.published()

    def pending(self) -> PushedTable | None:
        """Return the table that was begun and not swapped in."""
        return self._life.pending()

    def begin(self, pushed: PushedTable, layout: Layout) -> None:
        """Make an empty collection.

        Raises:
            ConfigError: Milvus Lite cannot keep float16, or cannot build the index.
        """
        self._building.require_able(layout)

        def create(name: str, mark: Mapping[str, Any]) -> None:
            self._milvus.create_collection(
                name, schema=schema_of(layout), properties=properties_of(mark)
            )

        self._life.begin(pushed, create, **{_METRIC: _METRICS[layout.metric]})
        self._layout = layout

    def resume(self, layout: Layout) -> None:
        """Take up the pending collection.

        Raises:
            ConfigError: Milvus Lite cannot keep float16, or cannot build the index.
        """
        self._building.require_able(layout)
        self._life.resume(self._life.pending())
        self._layout = layout

    def append(self, rows: pa.RecordBatch) -> None:
        """Upsert rows, then count them as done: rows sent twice are there once."""
        if self._layout is None:
            raise not_begun(self.target)
        require_rows(rows, self._layout)
        with self._life.filling(adds=len(rows)) as pushed:
            self._upsert(pushed.name, rows, self._layout)

    def finish(self, layout: Layout) -> None:
        """Seal what was sent, build the index and load the collection."""
        with self._life.filling() as pushed:
            self._milvus.flush(pushed.name)
            self._building.build(pushed.name, _METRICS[layout.metric], pushed.rows)
            self._building.load(pushed.name)

    def swap(self) -> None:
        """Let the alias stand for the pending collection; drop the one before."""
        self._life.swap()

    def discard(self) -> None:
        """Drop all collections of this name but the one that the alias stands for."""
        self._life.discard()

    @contextmanager
    def changing(self, after: PushedTable, layout: Layout) -> Iterator[_Changes]:
        """Change rows of the published collection, which says so before and after."""
        self._reading(pending=False)
        with self._life.changing(after) as changed:
            yield _Changes(self, changed, layout)

    def notes(self) -> Sequence[str]:
        """Return what who pushed should know: nothing."""
        return ()

    def count(self, *, pending: bool = False) -> int:
        """Return how many rows there are, with all that was written."""
        name = self._reading(pending)
        counted = self._milvus.query(name, filter="", output_fields=["count(*)"], **STRONG)
        return int(counted[0]["count(*)"])

    def fetch(self, ids: Sequence[str | int], layout: Layout, *, pending: bool = False) -> pa.Table:
        """Return the rows with these ids."""
        name = self._reading(pending)
        found = list[dict[str, Any]]()
        for some in chunks(ids):
            found += self._milvus.query(name, filter=with_ids(some), output_fields=["*"], **STRONG)
        return as_table(found, layout)

    def search(
        self,
        vectors: NDArray[np.float32],
        top_k: int,
        *,
        exact: bool = False,
        pending: bool = False,
    ) -> Neighbours:
        """Return the nearest rows: by the index, or by all vectors, a page at a time."""
        name = self._reading(pending)
        kind, searching = self._building.kind(name), Searching(self._milvus, name)
        if exact and not is_exact(kind):
            return searching.by_all(vectors, top_k)
        return searching.by_index(vectors, top_k, self._options.searching(kind, top_k))

    def _reading(self, pending: bool) -> str:
        """Return the published or the pending collection, loaded."""
        name = self._life.reading(pending=pending)
        self._ready(name)
        return name

    def _ready(self, name: str) -> None:
        """Load a collection, with the index that it is to have where it has none yet."""
        if self._building.is_loaded(name):
            return
        if not self._building.kind(name):
            metric, rows = (self._life.extra(name, each) for each in (_METRIC, _ROWS))
            self._building.build(name, str(metric), int(rows))
        self._building.load(name)

    def _upsert(self, name: str, rows: pa.RecordBatch, layout: Layout) -> None:
        for part in parts(rows):
            self._milvus.upsert(name, as_rows(part, layout))

    def _delete(self, name: str, ids: Sequence[str | int]) -> None:
        for some in chunks(ids):
            self._milvus.delete(name, filter=with_ids(some))


class _Changes:
    """Changes of the rows of one collection."""

    def __init__(self, writer: MilvusWriter, changed: Changed, layout: Layout) -> None:
        self._writer, self._changed, self._layout = writer, changed, layout

    def upsert(self, rows: pa.RecordBatch) -> None:
        """Put rows in place of those with their keys."""
        require_rows(rows, self._layout)
        with self._changed.writing() as name:
            self._writer._upsert(name, rows, self._layout)

    def delete(self, ids: Sequence[str | int]) -> None:
        """Take rows away by their ids."""
        with self._changed.writing() as name:
            self._writer._delete(name, ids)
