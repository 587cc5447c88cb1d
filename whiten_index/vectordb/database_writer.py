"""Interface of the vector databases that rows can be pushed to, and what their writers share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from whiten_index.errors import DatabaseError, WhitenIndexError
from whiten_index.vectordb.pushed_table import Ids, Layout, PushedTable, new_lease, require_rows

# Characters of a list of columns in an error.
_SHOWN = 300


@dataclass(frozen=True)
class Stored:
    """A table that a push wrote, as a writer works with it.

    Attributes:
        table: description.
        pending: whether it is staged, not published.
        handle: of the engine.
    """

    table: PushedTable
    pending: bool
    handle: Any = None

    @property
    def name(self) -> str:
        """Name of the physical table."""
        return self.table.name

    def described(self, **changes: Any) -> Stored:
        """Return it with fields of the description changed."""
        return replace(self, table=replace(self.table, **changes))


class RowChanges:
    """Changes of rows of a published table."""

    def __init__(self, writer: DatabaseWriter, stored: Stored, layout: Layout) -> None:
        self._writer, self._stored, self._layout = writer, stored, layout

    def upsert(self, rows: pa.RecordBatch) -> None:
        """Insert rows of the layout, replacing those with the same keys."""
        require_rows(rows, self._layout)
        with self._writer._writing(self._stored, "rows could not be changed"):
            self._writer._upsert(self._stored, rows, self._layout)

    def delete(self, ids: Ids) -> None:
        """Delete all rows with these ids; unknown ids are ignored."""
        with self._writer._writing(self._stored, "rows could not be deleted"):
            self._writer._delete(self._stored, ids, self._layout)


class DatabaseWriter(ABC):
    """Connection to one table or collection, by the name that users query.

    A push calls ``begin`` to stage a new table, ``append`` to fill it block by block, ``finish`` to
    build its index and ``swap`` to publish it under the name in one step, which drops the table
    published before. ``changing`` changes rows of the published table in place. The staged table
    is called pending until it is published.

    Every method raises ``DatabaseError`` if the database cannot be reached or refuses. Its message
    says what to do and never contains a password.

    An engine implements the methods with an underscore. These raise the errors of its client.

    Attributes:
        engine: database and release, such as ``PostgreSQL 18.4, pgvector 0.8.5``.
        target: address and name without credentials.
    """

    engine: str
    target: str

    def __init__(self) -> None:
        self._held: tuple[Stored, Layout] | None = None
        # Returned by ``published``: a push decides by it what to change.
        self._seen: PushedTable | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def published(self) -> PushedTable | None:
        """Return the published table, None if nothing has the name.

        Raises:
            DatabaseError: the name belongs to something that no push made.
        """
        with self._reporting("it could not be read"):
            found = self._find(pending=False)
        self._seen = None if found is None else found.table
        return self._seen

    def pending(self) -> PushedTable | None:
        """Return the table that a push began and did not publish, or None."""
        with self._reporting("it could not be read"):
            found = self._find(pending=True)
        return None if found is None else found.table

    def begin(self, pushed: PushedTable, layout: Layout) -> None:
        """Create an empty pending table, replacing any other."""
        made = replace(pushed, done=0, changing="", lease=new_lease())
        with self._reporting("a new table could not be made"):
            self._held = self._create(made, layout), layout

    def resume(self, layout: Layout) -> None:
        """Continue the pending table, whose rows have this layout.

        The connection that filled it before is refused from now on: its ``append``, ``finish`` and
        ``swap`` raise DatabaseError and change nothing. The same holds after another connection's
        ``begin``, ``discard`` or ``swap``. If the engine has locks, ``begin`` and ``resume`` may
        raise DatabaseError while another push runs.
        """
        with self._reporting("the pending table could not be resumed"):
            found = self._require(pending=True)
            self._require_layout(found, layout)
            self._held = self._take_over(found), layout

    def append(self, rows: pa.RecordBatch) -> None:
        """Add rows of the layout to the pending table and count them as done.

        If it is interrupted, either all rows were added or none, or the next ``append`` of the same
        rows replaces them.
        """
        held, layout = self._require_held()
        require_rows(rows, layout)
        with self._writing(held, "rows could not be added"):
            self._add(held, rows, layout)
        with self._reporting("rows could not be counted"):
            self._held = self._counted(held.described(done=held.table.done + len(rows))), layout

    def finish(self) -> None:
        """Build the index of the pending table, and wait until it answers.

        Raises:
            RowsError: two rows have the same key.
        """
        held, layout = self._require_held()
        with self._writing(held, "the index could not be built"):
            self._build(held, layout)

    def swap(self) -> None:
        """Publish the pending table under the name in one step; drop the one before."""
        held, _ = self._require_held()
        with self._reporting("the new table could not be swapped in"):
            self._require_lease(held)
            self._publish(held)
        self._held = self._seen = None

    def discard(self) -> None:
        """Drop the pending table, if there is one.

        If the engine has locks, a table that another push is filling stays.
        """
        held, self._held = self._held, None
        with self._reporting("the pending table could not be dropped"):
            self._discard(None if held is None else held[0])

    @contextmanager
    def changing(self, after: PushedTable, layout: Layout) -> Iterator[RowChanges]:
        """Open the published table for changes, after which it is ``after``.

        If the database has transactions, an error within changes nothing. Otherwise the changes
        made so far stay, and ``published`` reports them in ``PushedTable.changing`` until all of
        them are made again (see ``changing_to``).

        Raises:
            DatabaseError: nothing is published, or another push changed or replaced it since
                ``published`` was called, or does so before the end.
        """
        try:
            with self._reporting("it could not be changed"):
                stored = self._begin_changes(after, layout)
            yield RowChanges(self, stored, layout)
            now = replace(
                after, done=after.rows, name=stored.name, changing="", lease=stored.table.lease
            )
            with self._reporting("it could not be changed"):
                self._end_changes(replace(stored, table=now))
            self._seen = now
        except BaseException:
            self._undo_changes()
            raise

    def count(self, *, pending: bool = False) -> int:
        """Return the number of rows of the published or the pending table."""
        with self._reporting("rows could not be counted"):
            return self._count(self._require(pending=pending))

    def fetch(self, ids: Ids, layout: Layout, *, pending: bool = False) -> pa.Table:
        """Return the rows with these ids, in any order, with the schema of the layout."""
        with self._reporting("rows could not be read"):
            return self._fetch(self._require(pending=pending), ids, layout)

    def search(
        self,
        vectors: NDArray[np.float32],
        top_k: int,
        *,
        exact: bool = False,
        pending: bool = False,
    ) -> NDArray[np.float32]:
        """Return the cosines (q, top_k) of the rows nearest to queries (q, k), best first.

        They are found exactly or by the index; NaN fills up if fewer rows are found.
        """
        with self._reporting("it could not be searched"):
            found = self._search(self._require(pending=pending), vectors, top_k, exact=exact)
        scores = np.full((len(vectors), top_k), np.nan, dtype=np.float32)
        for row, some in zip(scores, found, strict=True):
            row[: len(some)] = some
        return scores

    def notes(self) -> Sequence[str]:
        """Return remarks on the published table for the user, such as a lost index."""
        return ()

    # The engine's part.

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""

    @abstractmethod
    def _explain(self, error: Exception) -> tuple[str, str]:
        """Return the reason of an error of the client, without secrets, and what to do."""

    @abstractmethod
    def _find(self, *, pending: bool) -> Stored | None:
        """Return the published or the pending table; refuse one that no push made."""

    @abstractmethod
    def _create(self, made: PushedTable, layout: Layout) -> Stored:
        """Create an empty pending table, and name it."""

    @abstractmethod
    def _take_over(self, found: Stored) -> Stored:
        """Shut out the connection that fills a pending table."""

    def _add(self, held: Stored, rows: pa.RecordBatch, layout: Layout) -> None:
        """Add rows to the pending table."""
        self._upsert(held, rows, layout)

    def _counted(self, held: Stored) -> Stored:
        """Write down the number of rows that are done, if ``_add`` did not."""
        return held

    @abstractmethod
    def _build(self, held: Stored, layout: Layout) -> None:
        """Build the index of the pending table, and wait until it is ready."""

    @abstractmethod
    def _publish(self, held: Stored) -> None:
        """Give the name to the pending table in one step; drop the table before."""

    @abstractmethod
    def _discard(self, held: Stored | None) -> None:
        """Drop the pending table, and other remains of interrupted pushes."""

    @abstractmethod
    def _begin_changes(self, after: PushedTable, layout: Layout) -> Stored:
        """Return the published table (see ``_require_unchanged``), marked as changing."""

    @abstractmethod
    def _end_changes(self, now: Stored) -> None:
        """Write the description of the changed table."""

    def _undo_changes(self) -> None:  # noqa: B027
        """Take back changes after an error, if the engine can; never raises."""

    @abstractmethod
    def _upsert(self, stored: Stored, rows: pa.RecordBatch, layout: Layout) -> None:
        """Add rows, or replace those with the same keys."""

    @abstractmethod
    def _delete(self, stored: Stored, ids: Ids, layout: Layout) -> None:
        """Delete all rows with some ids."""

    @abstractmethod
    def _count(self, stored: Stored) -> int: ...

    @abstractmethod
    def _fetch(self, stored: Stored, ids: Ids, layout: Layout) -> pa.Table: ...

    @abstractmethod
    def _search(
        self, stored: Stored, vectors: NDArray[np.float32], top_k: int, *, exact: bool
    ) -> Sequence[Sequence[float]]:
        """Return the scores of the rows found for each query."""

    def _has_lease(self, stored: Stored) -> bool:  # noqa: ARG002
        """Return whether no other push took over a table; an engine with locks need not ask."""
        return True

    # For the engines.

    @contextmanager
    def _reporting(self, doing: str) -> Iterator[None]:
        """Raise ``DatabaseError`` in place of any error of the engine's client."""
        try:
            yield
        except (WhitenIndexError, MemoryError):
            raise
        except Exception as error:
            # Clients raise errors of several libraries, which have no base in common.
            reason, advice = self._explain(error)
            # The error itself may show a secret.
            raise DatabaseError(f"{self.target}: {doing} ({reason}); {advice}") from None

    @contextmanager
    def _writing(self, stored: Stored, doing: str) -> Iterator[None]:
        """Write to a table, whose lease must be ours before and after."""
        self._require_lease(stored)
        try:
            with self._reporting(doing):
                yield
        except DatabaseError:
            ours = True
            with suppress(DatabaseError), self._reporting(doing):
                ours = self._has_lease(stored)
            if not ours:
                raise taken_over(self.target) from None
            raise
        self._require_lease(stored)

    def _require_lease(self, stored: Stored) -> None:
        with self._reporting("it could not be read"):
            ours = self._has_lease(stored)
        if not ours:
            raise taken_over(self.target)

    def _require_held(self) -> tuple[Stored, Layout]:
        if self._held is None:
            raise self._not_begun()
        return self._held

    def _require(self, *, pending: bool) -> Stored:
        found = self._find(pending=pending)
        if found is None and pending:
            raise self._not_begun()
        if found is None:
            raise DatabaseError(f"{self.target} is not there; push all rows to it first")
        return found

    def _require_unchanged(self, layout: Layout) -> Stored:
        """Return the published table, if it is still the one that ``published`` returned."""
        found = self._require(pending=False)
        if self._seen not in (None, found.table):
            raise taken_over(self.target)
        self._require_layout(found, layout)
        return found

    def _require_layout(self, stored: Stored, layout: Layout) -> None:
        made = stored.table
        mine = tuple(layout.schema.names), layout.k, layout.dtype, layout.metric
        if (made.columns, made.k, made.dtype, made.metric) != mine:
            raise DatabaseError(
                f"{self.target} has rows of another layout (k = {made.k}, {made.dtype}, columns "
                f"{', '.join(made.columns)[:_SHOWN]}); push all rows with --full"
            )

    def _not_begun(self) -> DatabaseError:
        return DatabaseError(
            f"no push to {self.target} was begun, or it was dropped meanwhile; push again"
        )


def taken_over(target: str) -> DatabaseError:
    """Return the error of a push whose table another push resumed, replaced or swapped in."""
    return DatabaseError(
        f"another push to {target} took this one over; run it again when that one has ended"
    )
