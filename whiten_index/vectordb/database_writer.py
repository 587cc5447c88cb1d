"""Interface of the vector databases that rows can be pushed to, and what their writers share."""

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from whiten_index.artifacts.prefetch import blocks
from whiten_index.errors import ConfigError, DatabaseError, WhitenIndexError
from whiten_index.paths import cut
from whiten_index.vectordb.engine_options import Effort
from whiten_index.vectordb.pushed_table import Ids, Layout, PushedTable


class Hit(NamedTuple):
    """Row that a search found."""

    id: str | int
    score: float


# Searches with queries (q, k) for so many rows each.
Find: TypeAlias = Callable[[NDArray[np.float32], int], Sequence[Sequence[Hit]]]


@dataclass(frozen=True)
class Stored:
    """A table that a push wrote: its description, and the engine's handle."""

    table: PushedTable
    pending: bool
    handle: Any = None

    @property
    def name(self) -> str:
        """Name of the physical table."""
        return self.table.name

    def described(self, **changes: Any) -> "Stored":
        """Return it with fields of the description changed."""
        return replace(self, table=replace(self.table, **changes))


class DatabaseWriter(ABC):
    """Connection to one table or collection, by the name that users query.

    A push calls ``begin`` to stage a new table, ``append`` to fill it block by block, ``finish`` to
    build its index and ``swap`` to publish it under the name in one step, which drops the table
    published before. ``changing`` changes rows of the published table in place. The staged table
    is called pending until it is published.

    Every method raises ``DatabaseError`` if the database cannot be reached or refuses. An engine
    implements the methods with an underscore, which raise the errors of its client.
    """

    engine: str  # database and release, such as PostgreSQL 18.4, pgvector 0.8.5
    target: str  # address and name without credentials
    adds_and_counts = False  # whether the engine's `_add` counts the rows in the same step
    ids_at_once = 500  # ids of one request
    column_form = r"[^\0]+"  # of the names that the engine can give to kept columns
    exact_only = False  # whether all vectors are read by each search, as in a stand-in for tests
    # Process that builds indexes, None if it is not on this machine.
    process: int | None = None

    def __init__(self) -> None:
        # Table that is filled or changed, and the layout of its rows.
        self._held: tuple[Stored, Layout] | None = None
        # Returned by ``published``: a push decides by it what to change.
        self._seen: PushedTable | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._reporting("it could not be closed"):
            self.close()

    def published(self) -> PushedTable | None:
        """Return the published table, None if nothing has the name; refuse what no push made."""
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
        for name in layout.kept:
            if not re.fullmatch(self.column_form, name):
                raise ConfigError(
                    f"{self.engine} cannot give a column the name {cut(name)!r}; rename it in the "
                    "corpus, or leave it out of --keep"
                )
        made = replace(pushed, done=0, changing="", lease=secrets.token_hex(8))
        with self._reporting("a new table could not be made"):
            self._require_replaceable()
            self._held = self._create(made, layout), layout

    def resume(self, layout: Layout) -> None:
        """Continue the pending table, whose rows have this layout.

        The connection that filled it before is refused from now on, as it is after another
        connection's ``begin``, ``discard`` or ``swap``. If the engine has locks, ``begin`` and
        ``resume`` are refused while another push runs.
        """
        with self._reporting("the pending table could not be resumed"):
            self._require_replaceable()
            found = self._require(pending=True)
            self._held = self._take_over(found), layout

    def append(self, rows: pa.RecordBatch) -> None:
        """Add rows of the layout to the pending table and count them as done.

        Rows of an interrupted ``append`` are not there, or are replaced by the next one.
        """
        held, layout = self._require_held()
        now = held.described(done=held.table.done + len(rows))
        with self._writing(held, "rows could not be added"):
            self._add(now, rows, layout)
        if not self.adds_and_counts:
            with self._reporting("rows could not be counted"):
                self._describe(now)
        self._held = now, layout

    def finish(self) -> None:
        """Build the index of the pending table, and wait until it answers."""
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

    def remove(self) -> None:
        """Drop the published table, if there is one; refuse one that no push made."""
        with self._reporting("it could not be dropped"):
            if (found := self._find(pending=False)) is not None:
                self._remove(found)
        self._seen = None

    def upsert(self, rows: pa.RecordBatch) -> None:
        """Insert rows within ``changing``, replacing those with the same keys."""
        held, layout = self._require_held()
        with self._writing(held, "rows could not be changed"):
            self._upsert(held, rows, layout)

    def delete(self, ids: Ids) -> None:
        """Delete all rows with these ids within ``changing``; unknown ids are ignored."""
        held, layout = self._require_held()
        with self._writing(held, "rows could not be deleted"):
            for some in blocks(ids, self.ids_at_once):
                self._delete(held, some, layout)

    @contextmanager
    def changing(self, after: PushedTable, layout: Layout) -> Iterator[Self]:
        """Open the published table for changes, after which it is ``after``.

        If the database has transactions, an error within changes nothing. Otherwise the changes
        made so far stay, and ``published`` reports them in ``PushedTable.changing`` until all of
        them are made again. If another push changed the table since ``published`` was called, or
        does so before the end, this one is refused.
        """
        stored = None
        try:
            with self._reporting("it could not be changed"):
                self._begin_changes()
                before = self._require_unchanged()
                versions = dict.fromkeys([*before.table.changing.split(), after.version])
                stored = self._take_over(before.described(changing=" ".join(versions)))
            self._held = stored, layout
            yield self
            table, done = stored.table, after.rows
            now = replace(after, done=done, name=table.name, changing="", lease=table.lease)
            with self._reporting("it could not be changed"):
                self._require_lease(stored)
                self._describe(replace(stored, table=now))
                self._end_changes(stored)
            self._seen = now
        except BaseException:
            self._undo_changes(stored)
            raise
        finally:
            self._held = None

    def count(self, *, pending: bool = False) -> int:
        """Return the number of rows of the published or the pending table."""
        with self._reporting("rows could not be counted"):
            return self._count(self._require(pending=pending))

    def fetch(self, ids: Ids, layout: Layout, *, pending: bool = False) -> pa.Table:
        """Return the rows with these ids, in any order, with the schema of the layout."""
        with self._reporting("rows could not be read"):
            stored = self._require(pending=pending)
            found = [self._fetch(stored, some, layout) for some in blocks(ids, self.ids_at_once)]
        return pa.concat_tables([layout.schema.empty_table(), *found])

    def search(
        self,
        vectors: NDArray[np.float32],
        top_k: int,
        *,
        exact: bool = False,
        pending: bool = False,
    ) -> NDArray[np.float32]:
        """Return the scores (q, top_k) of the rows nearest to queries (q, k), NaN for no row."""
        scores = np.full((len(vectors), top_k), np.nan, dtype=np.float32)
        with self.searching(exact=exact, pending=pending) as find:
            for row, hits in zip(scores, find(vectors, top_k), strict=True):
                row[: len(hits)] = [hit.score for hit in hits]
        return scores

    @contextmanager
    def searching(
        self, *, exact: bool = False, pending: bool = False, effort: Effort | None = None
    ) -> Iterator[Find]:
        """Open a table for searches, which find the nearest rows of each query, the best first.

        ``effort`` has settings of the engine's searches, such as those of
        ``EngineOptions.efforts``; None for the writer's own.
        """
        with self._reporting("it could not be searched"):
            stored = self._require(pending=pending)
            with self._searching(stored, exact=exact, effort=effort) as find:
                yield find

    def sizes(self) -> dict[str, int]:
        """Return the bytes of the published ``table`` and its ``index``, as far as known."""
        with self._reporting("its size could not be read"):
            return self._sizes(self._require(pending=False))

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
    def _describe(self, stored: Stored) -> None: ...

    def _take_over(self, found: Stored) -> Stored:
        """Shut out other connections that fill or change a table."""
        taken = found.described(lease=secrets.token_hex(8))
        self._describe(taken)
        return taken

    def _add(self, held: Stored, rows: pa.RecordBatch, layout: Layout) -> None:
        """Add rows to the pending table, whose description counts them already."""
        self._upsert(held, rows, layout)

    @abstractmethod
    def _build(self, held: Stored, layout: Layout) -> None:
        """Build the index of the pending table, and wait until it is ready."""

    @abstractmethod
    def _publish(self, held: Stored) -> None:
        """Give the name to the pending table in one step; drop the table before."""

    def _added(self, published: Stored) -> list[str]:  # noqa: ARG002
        """Return what users added to a table, such as ``column note``, if the engine shows it."""
        return []

    @abstractmethod
    def _discard(self, held: Stored | None) -> None:
        """Drop the pending table, and other remains of interrupted pushes."""

    @abstractmethod
    def _remove(self, published: Stored) -> None: ...

    def _begin_changes(self) -> None:  # noqa: B027
        """Begin a transaction, if the engine has any."""

    def _end_changes(self, changed: Stored) -> None:  # noqa: B027
        """End the transaction that was begun, or tidy up the changed table."""

    def _undo_changes(self, changed: Stored | None) -> None:  # noqa: B027
        """Take back changes after an error, if the engine can; never raises."""

    @abstractmethod
    def _upsert(self, stored: Stored, rows: pa.RecordBatch, layout: Layout) -> None:
        """Add rows, or replace those with the same keys."""

    @abstractmethod
    def _delete(self, stored: Stored, ids: Ids, layout: Layout) -> None: ...

    @abstractmethod
    def _count(self, stored: Stored) -> int: ...

    def _sizes(self, stored: Stored) -> dict[str, int]:  # noqa: ARG002
        """Return the bytes of a table; a server may not say."""
        return {}

    @abstractmethod
    def _fetch(self, stored: Stored, ids: Ids, layout: Layout) -> pa.Table: ...

    @abstractmethod
    def _searching(
        self, stored: Stored, *, exact: bool, effort: Effort | None
    ) -> AbstractContextManager[Find]:
        """Open a table for searches by its index, or exact ones."""

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
            # DuckDB makes an error of its own of Ctrl-C.
            if isinstance(error.__cause__, KeyboardInterrupt):
                raise error.__cause__ from None
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

    def _require_replaceable(self) -> Stored | None:
        """Return the published table; refuse one with what users added and a new one lacks."""
        found = self._find(pending=False)
        if added := [] if found is None else self._added(found):
            raise DatabaseError(
                f"{self.target} has what its users added, or what depends on it, that a new table "
                f"would lack: {', '.join(added)[:400]}; drop that, push, and create it again"
            )
        return found

    def _require_unchanged(self) -> Stored:
        """Return the published table, if it is still the one that ``published`` returned."""
        found = self._require(pending=False)
        if self._seen not in (None, found.table):
            raise taken_over(self.target)
        return found

    def _not_pushed(self, what: str) -> DatabaseError:
        return DatabaseError(
            f"{self.target}: there is {what} that no push made; give another name with --table, "
            "or drop it yourself"
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
