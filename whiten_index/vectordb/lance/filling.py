"""The pending table, from its first row to the commit that publishes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import pyarrow as pa

from whiten_index.errors import DatabaseError
from whiten_index.vectordb.database_writer import Layout, PushedTable
from whiten_index.vectordb.lance.place import AT_ONCE, Place
from whiten_index.vectordb.lance.rows import as_stored, stored_schema
from whiten_index.vectordb.lance.table import TableState, is_readable, key_that_comes_twice, slices
from whiten_index.vectordb.row_checks import (
    RowsError,
    new_lease,
    not_begun,
    require_rows,
    taken_over,
)


class Filling:
    """The pending table that this push fills, as long as no other one takes it over.

    Args:
        place: of the table.
        table: a handle that sees its own commits alone, so that the engine refuses the next one
            when another push took the table over.
        state: its mark, with this push as the writer.
        layout: of its rows.
        rows: that it has.
    """

    def __init__(
        self, place: Place, table: Any, state: TableState, layout: Layout, rows: int
    ) -> None:
        self._place, self._table, self._state = place, table, state
        self._layout, self._rows = layout, rows
        self._lost = False

    @classmethod
    def begin(cls, place: Place, pushed: PushedTable, layout: Layout) -> Self:
        """Make an empty table, in place of any that was pending."""
        schema = stored_schema(layout)
        place.state(place.name)
        there = place.state(place.pending)
        named = replace(pushed, name=place.pending, done=0, changing="", lease=new_lease())
        state = TableState(named, layout.metric)
        with place.told("cannot be filled"):
            # Dropped and made anew, what another push has under way could end up in it.
            table = place.database.create_table(
                place.pending,
                schema=state.schema(schema),
                mode="create" if there is None else "overwrite",
            )
            if there is not None:
                table.optimize(cleanup_older_than=AT_ONCE)
        return cls(place, table, state, layout, 0)

    @classmethod
    def resume(cls, place: Place, layout: Layout) -> Self:
        """Take up the table that there is."""
        table, state = place.opened_state(place.pending)
        if table is None or state is None or state.dropped:
            raise not_begun(place.target)
        place.require_layout(table, layout)
        state = replace(state, pushed=replace(state.pushed, lease=new_lease()))
        with place.told("cannot be filled"):
            state.take(table)
            return cls(place, table, state, layout, int(table.count_rows()))

    @property
    def lease(self) -> str:
        """The word by which the table is this push's."""
        return self._state.pushed.lease

    def append(self, rows: pa.RecordBatch) -> None:
        """Add rows in one commit."""
        with self._mine("refuses rows"):
            require_rows(rows, self._layout)
            if len(rows):
                self._table.add(as_stored(rows, self._layout))
                self._rows += len(rows)

    def finish(self, layout: Layout) -> None:
        """Look for ids that come twice, and build the index.

        Raises:
            RowsError: there are some.
        """
        with self._mine("cannot be read"):
            self._require_files()
            twice = key_that_comes_twice(self._table, layout)
        if twice is not None:
            count, name = twice
            raise RowsError(
                f"{count:,} ids come twice, such as {name!r}; give every document an id of its own"
            )
        with self._mine("cannot be indexed"):
            self._place.index(self._table, layout.metric)

    def publish(self) -> TableState:
        """Overwrite the table of the name with these rows, and return what it holds then."""
        place = self._place
        with self._mine("cannot be overwritten"):
            self._require_files()
            there = place.state(place.name)
            pushed = replace(self._state.pushed, done=self._rows, name=place.name)
            now = replace(self._state, pushed=pushed)
            schema = now.schema(self._table.schema)
            rows = self._as_long_as_mine(slices(self._table, self._rows, schema))
            place.database.create_table(
                place.name,
                data=pa.RecordBatchReader.from_batches(schema, rows),
                mode="create" if there is None else "overwrite",
            )
        return now

    @contextmanager
    def _mine(self, what: str) -> Iterator[None]:
        """Do something with the table.

        Raises:
            DatabaseError: it is another one's, or the engine refuses.
        """
        self._require_count(self._require_mine())
        try:
            with self._place.told(what):
                yield
        except DatabaseError:
            # Where another one took it over that is why, whatever the engine says.
            self._require_mine()
            raise

    def _require_mine(self) -> Any:
        """Return the table as it is now; refuse one that another push took over.

        Raises:
            DatabaseError: it did.
        """
        # Opened anew: a handle brought up to date misses a table made again with fewer versions.
        table, state = self._place.opened_state(self._place.pending)
        there = None if state is None or state.dropped else state.pushed.lease
        if self._lost or there != self.lease:
            raise taken_over(self._place.target)
        return table

    def _require_files(self) -> None:
        """Refuse a table that was dropped while rows were under way, which made it again.

        Raises:
            DatabaseError: it lacks the rows that were there before.
        """
        if self._rows and not is_readable(self._table):
            self._place.database.drop_table(self._place.pending)
            self._lost = True
            raise taken_over(self._place.target)

    def _require_count(self, table: Any) -> None:
        """Refuse to add to rows that are others than those that this push sent.

        Raises:
            DatabaseError: there are more or fewer of them; the next push begins anew.
        """
        place = self._place
        with place.told("cannot be read"):
            there = int(table.count_rows())
        if there == self._rows:
            return
        with place.told("cannot be marked"):
            self._state.as_dropped().mark(self._table)
        raise DatabaseError(
            f"the table {place.pending} of {place.target} has {there:,} rows and this push put "
            f"{self._rows:,} there: something else writes to it; push again when that has ended: "
            "it begins anew"
        )

    def _as_long_as_mine(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        # What comes next is the commit.
        self._require_mine()
