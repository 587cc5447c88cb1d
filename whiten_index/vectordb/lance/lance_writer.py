"""One table of LanceDB, by the name that its users query."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import lancedb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from whiten_index.corpus.batches import ID
from whiten_index.vectordb.database_writer import (
    VECTOR,
    Layout,
    Metric,
    Neighbours,
    PushedTable,
    RowChanges,
)
from whiten_index.vectordb.lance.changes import LanceChanges, with_ids
from whiten_index.vectordb.lance.filling import Filling
from whiten_index.vectordb.lance.options import DISTANCES
from whiten_index.vectordb.lance.place import Place
from whiten_index.vectordb.lance.rows import from_stored
from whiten_index.vectordb.lance.table import TableState, is_readable
from whiten_index.vectordb.lance.trial import Trial
from whiten_index.vectordb.row_checks import blocks, not_begun, padded_scores

_FETCHED_AT_ONCE = 10_000


class LanceWriter:
    """One table of LanceDB, by the name that its users query."""

    def __init__(self, place: Place) -> None:
        self.engine, self.target = f"LanceDB {lancedb.__version__}", place.target
        self._place = place
        self._filling: Filling | None = None
        self._trying: tuple[Trial, LanceChanges] | None = None
        # What the name stood for when it was asked.
        self._seen: PushedTable | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._filling = None

    def published(self) -> PushedTable | None:
        """Return what the name stands for, None where there is nothing of that name."""
        state = self._place.state(self._place.name)
        self._seen = None if state is None else state.pushed
        return self._seen

    def pending(self) -> PushedTable | None:
        """Return the table that a push began and did not swap in, None where there is none."""
        table, state = self._place.opened_state(self._place.pending)
        if table is None or state is None or state.dropped:
            return None
        with self._place.told("cannot be read"):
            if not is_readable(table):
                return None
            return replace(state.pushed, done=int(table.count_rows()))

    def begin(self, pushed: PushedTable, layout: Layout) -> None:
        """Make an empty pending table, in place of any that was pending."""
        self._filling = Filling.begin(self._place, pushed, layout)

    def resume(self, layout: Layout) -> None:
        """Take up the pending table, whose rows have this layout."""
        self._filling = Filling.resume(self._place, layout)

    def append(self, rows: pa.RecordBatch) -> None:
        """Add rows of the layout to the pending table, in one commit."""
        self._begun().append(rows)

    def finish(self, layout: Layout) -> None:
        """Look for ids that come twice, which the engine does not, and build the index."""
        self._begun().finish(layout)

    def swap(self) -> None:
        """Overwrite the table of the name with the pending rows in one commit, and index it."""
        filling = self._begun()
        state = filling.publish()
        self._seen = state.pushed
        self._place.end_swap(state)
        self._place.drop_pending(filling.lease)
        self._filling = None

    def discard(self) -> None:
        """Drop the pending table, if there is one; end a swap that was cut off.

        One that another push took over from this one is left to it.
        """
        filling, self._filling = self._filling, None
        place = self._place
        state, there = place.state(place.pending), place.state(place.name)
        if state is None:
            return
        if there is not None and not state.dropped and state.same_rows(there):
            place.end_swap(there)
        place.drop_pending(None if filling is None else filling.lease)

    @contextmanager
    def changing(self, after: PushedTable, layout: Layout) -> Iterator[RowChanges]:
        """Open the published table for changes, which are made when all of them are known."""
        trial = Trial(self._place, layout, self._seen)
        with LanceChanges(layout) as changes:
            self._trying = trial, changes
            try:
                yield changes
            finally:
                self._trying = None
                trial.end()
            self._seen = trial.make(changes, after)

    def notes(self) -> Sequence[str]:
        """Return what who pushed should know: nothing."""
        return ()

    def count(self, *, pending: bool = False) -> int:
        """Return how many rows the published or the pending pushed has."""
        table = self._table(pending=pending)
        with self._place.told("cannot be read"):
            return int(table.count_rows())

    def fetch(self, ids: Sequence[str | int], layout: Layout, *, pending: bool = False) -> pa.Table:
        """Return the rows with these ids, in any order, with the schema of the layout."""
        table = self._table(pending=pending)
        found = [layout.schema.empty_table()]
        with self._place.told("cannot be read"):
            for some in blocks(ids, _FETCHED_AT_ONCE):
                there = table.search().where(with_ids(some)).limit(None).to_arrow()
                found.append(from_stored(there, layout))
        return pa.concat_tables(found)

    def search(
        self,
        vectors: NDArray[np.float32],
        top_k: int,
        *,
        exact: bool = False,
        pending: bool = False,
    ) -> Neighbours:
        """Return the nearest rows of queries (q, k): exactly, or by the index.

        Nothing is found by cosines for a query of zeros, nor a row of zeros for any query.
        """
        table = self._table(pending=pending)
        scores, ids = list[list[float]](), list[list[str | int]]()
        with self._place.told("cannot be searched"):
            state = TableState.of(table)
            metric = Metric.COSINE if state is None else state.metric
            tuned = {} if exact else self._place.options.of_search(int(table.count_rows()))
            for vector in vectors:
                query = table.search(vector, vector_column_name=VECTOR)
                query = query.distance_type(DISTANCES[metric]).select([ID, "_distance"])
                query = query.bypass_vector_index() if exact else query
                for name, value in tuned.items():
                    query = getattr(query, name)(value)
                found = query.limit(top_k).to_arrow()
                ids.append(found[ID].to_pylist())
                scores.append((1 - found["_distance"].to_numpy()).tolist())
        return Neighbours(ids, padded_scores(scores, top_k))

    def _begun(self) -> Filling:
        if self._filling is None:
            raise not_begun(self.target)
        return self._filling

    def _table(self, *, pending: bool) -> Any:
        """Return a table as it is now: within changes, as it will be."""
        if self._trying is not None and not pending:
            trial, changes = self._trying
            return trial.tried(changes)
        return self._place.table(pending=pending)
