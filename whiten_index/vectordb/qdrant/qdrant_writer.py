"""One name in Qdrant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from whiten_index.vectordb.database_writer import Layout, Neighbours, PushedTable
from whiten_index.vectordb.qdrant.building import Building
from whiten_index.vectordb.qdrant.collections import Collections
from whiten_index.vectordb.qdrant.connection import Place, Told, close_client, engine_of
from whiten_index.vectordb.qdrant.options import Options
from whiten_index.vectordb.qdrant.points import Points
from whiten_index.vectordb.row_checks import not_begun
from whiten_index.vectordb.staged_tables import Changed, StagedTables

# In the mark: the options that a collection was made with.
_OPTIONS = "made_with"


def shown(place: Place, collection: str) -> str:
    """Return where a collection is, as it may be shown; it does not look like an address."""
    return f"{place.shown}, collection {collection}"


class QdrantWriter:
    """One name in Qdrant; see ``DatabaseWriter``."""

    def __init__(self, client: Any, place: Place, name: str, options: Options) -> None:
        self.engine = engine_of(client, place)
        self.target = shown(place, name)
        self._client, self._place, self._name, self._options = client, place, name, options
        # Those of the table that is written, which may be of a push that was cut off.
        self._building = Building(client, place, options)
        self._life = StagedTables(Collections(client, Told(place)), name, self.target)
        self._layout: Layout | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        close_client(self._client, self._place)

    def published(self) -> PushedTable | None:
        """Return what the name stands for, None where there is nothing of that name.

        Raises:
            DatabaseError: it is a collection, or an alias of one, that no push made.
        """
        return self._life.published()

    def pending(self) -> PushedTable | None:
        """Return the table that a push began and did not swap in, None where there is none."""
        found = self._life.pending()
        if found is None or self._points(found.name).count() >= found.done:
            return found
        # A server that lost its latest rows is sent all of them again.
        return replace(found, done=0)

    def begin(self, pushed: PushedTable, layout: Layout) -> None:
        """Make an empty pending table, in place of any that was pending."""
        self._building = Building(self._client, self._place, self._options)

        def create(collection: str, mark: Mapping[str, Any]) -> None:
            self._building.create(collection, layout, mark)

        self._life.begin(pushed, create, **{_OPTIONS: dict(self._options.built)})
        self._layout = layout

    def resume(self, layout: Layout) -> None:
        """Take up the pending table, whose rows have this layout.

        It keeps the options that it was begun with, but for those given now.

        Raises:
            ConfigError: an option is given that only a new collection takes.
        """
        found, options = self.pending(), self._options
        if found is not None:
            options = options.resumed(self._built(found.name), shown(self._place, found.name))
        self._life.resume(found, **{_OPTIONS: dict(options.built)})
        self._building = Building(self._client, self._place, options)
        self._layout = layout

    def append(self, rows: pa.RecordBatch) -> None:
        """Add rows of the layout to the pending table, and count them as done."""
        if self._layout is None:
            raise not_begun(self.target)
        with self._life.filling(adds=len(rows)) as pushed:
            self._points(pushed.name).upsert(rows, self._layout)

    def finish(self, layout: Layout) -> None:  # noqa: ARG002 - the collection knows it
        """Let the pending pushed build its graph, and wait until it is whole.

        Raises:
            DatabaseError: it takes longer than ``index_timeout``, or fails.
        """
        with self._life.filling() as pushed:
            if not self._place.local:
                self._building.index(pushed.name)

    def swap(self) -> None:
        """Let the name stand for the pending table in one step; drop the one before."""
        self._life.swap()

    def discard(self) -> None:
        """Drop the pending table, and what a push that was cut off left."""
        self._life.discard()

    @contextmanager
    def changing(self, after: PushedTable, layout: Layout) -> Iterator[_Changing]:
        """Open the published table for changes, which are seen at once, one by one.

        Qdrant has no transactions: after an error what was changed stays, and ``published`` tells
        so by ``PushedTable.changing``.
        """
        with self._life.changing(after) as changed:
            yield _Changing(changed, self._points, layout)

    def notes(self) -> Sequence[str]:
        """Return what who pushed should know: nothing."""
        return ()

    def count(self, *, pending: bool = False) -> int:
        """Return how many rows the published or the pending pushed has."""
        return self._reading(pending=pending).count()

    def fetch(self, ids: Sequence[str | int], layout: Layout, *, pending: bool = False) -> pa.Table:
        """Return the rows with these ids, in any order, with the schema of the layout."""
        return self._reading(pending=pending).fetch(ids, layout)

    def search(
        self,
        vectors: NDArray[np.float32],
        top_k: int,
        *,
        exact: bool = False,
        pending: bool = False,
    ) -> Neighbours:
        """Return the nearest rows of queries (q, k): exactly, or by the graph."""
        return self._reading(pending=pending).search(vectors, top_k, exact=exact)

    def _points(self, collection: str) -> Points:
        return Points(self._client, self._place, self._building.options, collection)

    def _reading(self, *, pending: bool) -> Points:
        # What users see is read by the name, as they do.
        return self._points(self._life.reading(pending=True) if pending else self._name)

    def _built(self, collection: str) -> Mapping[str, str]:
        """Return the options that a collection was made with."""
        found = self._life.extra(collection, _OPTIONS)
        return found if isinstance(found, Mapping) else {}


class _Changing:
    """Changes of the published collection; see ``RowChanges``."""

    def __init__(self, changed: Changed, points: Any, layout: Layout) -> None:
        self._changed, self._points, self._layout = changed, points, layout

    def upsert(self, rows: pa.RecordBatch) -> None:
        """Put rows of the layout in place of those with their keys, or add them."""
        with self._changed.writing() as collection:
            self._points(collection).upsert(rows, self._layout)

    def delete(self, ids: Sequence[str | int]) -> None:
        """Take all rows with these ids away; those that are not there are passed over."""
        with self._changed.writing() as collection:
            self._points(collection).delete(ids, self._layout)
