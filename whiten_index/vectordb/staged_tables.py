"""The life of a name's pushed tables in an engine that has aliases and no transactions.

A pushed is a collection ``NAME__`` and eight hexadecimal digits; the name is an alias of the
published one. Each says in its *mark*, which the engine keeps with it, what it holds and who writes
it. Before and after whatever a connection writes it reads the mark again: so it writes to nothing
but the table that it began or took up, and is told when another push took that one over.

That is not airtight, since no engine reads and writes in one step. Who drops a table marks it
so and looks whether the name stands for it; who swaps it in looks for that mark before and after.
Where both write at the same moment one of them sees the other: the name goes back to what it stood
for, and the swap is told to have been taken over. But a push that halts for long between two of
these steps can still drop what another one swapped in meanwhile.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from whiten_index.errors import DatabaseError
from whiten_index.vectordb.database_writer import PushedTable
from whiten_index.vectordb.row_checks import new_lease, not_begun, taken_over

# Bytes that the name of a table is longer than the name that users query.
MORE_BYTES = 10


class Engine(Protocol):
    """What the life of pushed tables asks of an engine; all of it raises DatabaseError."""

    def collections(self) -> list[str]:
        """Return the names of all collections, without those of aliases."""

    def stands_for(self, alias: str) -> str | None:
        """Return the collection that an alias stands for, None where there is no such alias."""

    def metadata(self, collection: str) -> Mapping[str, Any]:
        """Return what ``write_metadata`` wrote last, or what a collection was made with; else {}."""

    def write_metadata(self, collection: str, mark: Mapping[str, Any]) -> None:
        """Keep an object of JSON with a collection, in place of the one before."""

    def publish(self, alias: str, collection: str, *, moved: bool) -> None:
        """Let an alias stand for a collection in one step; ``moved`` where it is there already."""

    def drop(self, collection: str) -> None:
        """Drop a collection."""


@dataclass(frozen=True)
class _Mark:
    """A pushed, if it is to go, and the whole object of JSON that says so."""

    pushed: PushedTable
    told: Mapping[str, Any]

    @property
    def dropped(self) -> bool:
        return bool(self.told["dropped"])

    @property
    def replaces(self) -> list[str]:
        return list(self.told["replaces"])


class StagedTables:
    """The pushed tables of one name, and the one that this connection writes."""

    def __init__(self, engine: Engine, name: str, target: str) -> None:
        self._engine, self._name, self._target = engine, name, target
        self._held: PushedTable | None = None
        # What ``published`` told last: a push decides by it what it changes.
        self._seen: PushedTable | None = None

    def published(self) -> PushedTable | None:
        """Return what the name stands for, None where there is nothing of that name.

        Raises:
            DatabaseError: something that no push made has the name.
        """
        found = self._published()
        self._seen = None if found is None else found.pushed
        return self._seen

    def pending(self) -> PushedTable | None:
        """Return the table that a push began and did not swap in, None where there is none."""
        others = self._others()
        return next((mark.pushed for mark, gone in others if not gone), None)

    def reading(self, *, pending: bool) -> str:
        """Return the collection to read from: the pending one, or the one of the name.

        Raises:
            DatabaseError: there is none.
        """
        if pending:
            found = self._held or self.pending()
            if found is None:
                raise not_begun(self._target)
            return found.name
        published = self._published()
        if published is None:
            raise self._is_not_there()
        return published.pushed.name

    def extra(self, collection: str, name: str) -> Any:
        """Return what ``begin`` or ``resume`` was given beside the table, None for nothing."""
        return self._engine.metadata(collection).get(name)

    def begin(
        self,
        pushed: PushedTable,
        create: Callable[[str, Mapping[str, Any]], None],
        **extra: Any,
    ) -> None:
        """Make a table and hold it, in place of any that was pending.

        Args:
            pushed: to begin; name, writer and progress are set here.
            create: makes a collection of a name with a mark.
            extra: what the engine itself keeps in the mark, as JSON takes it.
        """
        self.discard()
        begun = replace(
            pushed, done=0, changing="", lease=new_lease(),
            name=f"{self._name}__{secrets.token_hex(4)}",
        )  # fmt: skip
        own = {"table": self._name, "dropped": False, "replaces": []}
        create(begun.name, {**begun.to_json(), **own, **extra})
        self._held = begun

    def resume(self, pending: PushedTable | None, **extra: Any) -> None:
        """Hold the pending pushed; whoever held it before is refused from now on.

        Raises:
            DatabaseError: it is None.
        """
        mark = None if pending is None else self._mark(pending.name)
        if pending is None or mark is None:
            raise not_begun(self._target)
        held = replace(pending, lease=new_lease())
        self._write(mark, held, **extra)
        self._held = held

    @contextmanager
    def filling(self, *, adds: int = 0) -> Iterator[PushedTable]:
        """Let what is within write to the table that is held, and count rows as done.

        Raises:
            DatabaseError: none is, or another push took it over; the mark stays as that one wrote it.
        """
        held = self._require_held()
        with self._writing(held, published=False):
            yield held
        mark = self._require_ours(held, published=False)
        if adds:
            self._held = replace(held, done=held.done + adds)
            self._write(mark, self._held)

    def swap(self) -> None:
        """Let the name stand for the table that is held; drop the one before."""
        held, before = self._require_held(), self._published()
        with self._writing(held, published=False) as mark:
            if before is not None:
                # Written where it comes true with the step itself: cut off before it, nothing is
                # said of what users see; cut off after it, what was there is not taken for pending.
                there = set(self._engine.collections())
                gone = [before.pushed.name, *before.replaces]
                self._write(mark, held, replaces=[each for each in gone if each in there])
            self._publish(held, before)
        self._held = self._seen = None
        # Not one that another push has begun meanwhile.
        self._drop(mark for mark, gone in self._others() if gone)

    def _publish(self, held: PushedTable, before: _Mark | None) -> None:
        try:
            self._engine.publish(self._name, held.name, moved=before is not None)
        except DatabaseError:
            # It may be done all the same, where the answer alone was lost.
            if self._ours(held, published=True) is None:
                raise
        mark = self._mark(held.name)
        if mark is None or mark.dropped:
            # Another push drops it at this very moment.
            if before is not None:
                self._take_back(held, before.pushed.name)
            raise taken_over(self._target)

    def _take_back(self, held: PushedTable, before: str) -> None:
        """Let the name stand again for what it stood for, unless it is another one's by now."""
        with suppress(DatabaseError):
            stands = self._engine.stands_for(self._name)
            if stands in (None, held.name):
                self._engine.publish(self._name, before, moved=stands is not None)

    def discard(self) -> None:
        """Drop the pending table, and what a push that was cut off left."""
        self._held = None
        self._drop(mark for mark, _ in self._others())

    @contextmanager
    def changing(self, after: PushedTable) -> Iterator[Changed]:
        """Say that the published table is being changed, and at the end what it holds.

        Raises:
            DatabaseError: there is none, or another push changed it since ``published`` told of it.
        """
        seen, self._seen, mark = self._seen, None, self._published()
        if mark is None:
            raise self._is_not_there()
        before = mark.pushed
        if seen not in (None, before):
            raise taken_over(self._target)
        now = before.changing_to(after, lease=new_lease())
        # A push that was cut off may have marked it before the name came to stand for it.
        self._write(mark, now, dropped=False)
        try:
            yield Changed(self, now)
            mark = self._require_ours(now, published=True)
            whole = replace(after, name=now.name, lease=now.lease, done=after.rows, changing="")
            self._write(mark, whole)
        finally:
            self._seen = None

    @contextmanager
    def _writing(self, held: PushedTable, *, published: bool) -> Iterator[_Mark]:
        """Let what is within write to a pushed of this connection's.

        Raises:
            DatabaseError: it is not, any more; what failed within may have failed for that.
        """
        mark = self._require_ours(held, published=published)
        try:
            yield mark
        except DatabaseError:
            ours = True
            with suppress(DatabaseError):
                ours = self._ours(held, published=published) is not None
            if not ours:
                raise taken_over(self._target) from None
            raise

    def _require_held(self) -> PushedTable:
        if self._held is None:
            raise not_begun(self._target)
        return self._held

    def _require_ours(self, held: PushedTable, *, published: bool) -> _Mark:
        mark = self._ours(held, published=published)
        if mark is None:
            raise taken_over(self._target)
        return mark

    def _ours(self, held: PushedTable, *, published: bool) -> _Mark | None:
        """Return the mark of a table that this connection may write, None where it may not."""
        mark = self._mark(held.name)
        if mark is None or mark.dropped or mark.pushed.lease != held.lease:
            return None
        return mark if (self._engine.stands_for(self._name) == held.name) is published else None

    def _published(self) -> _Mark | None:
        if self._name in self._engine.collections():
            raise DatabaseError(
                f"{self._target} is a collection that no push made; give --table another name, or "
                "drop it"
            )
        stands = self._engine.stands_for(self._name)
        if stands is None:
            return None
        mark = self._mark(stands)
        if mark is None:
            raise DatabaseError(
                f"{self._target} is an alias of {stands!r}, which no push made; give --table "
                "another name, or drop the alias"
            )
        return mark

    def _others(self) -> list[tuple[_Mark, bool]]:
        """Return the pushed tables of this name that it does not stand for, and if they are to go."""
        now = self._published()
        standing, replaced = (now.pushed.name, now.replaces) if now else (None, [])
        form = re.compile(re.escape(self._name) + r"__[0-9a-f]{8}")
        names = filter(form.fullmatch, sorted(self._engine.collections()))
        marks = [self._mark(each) for each in names if each != standing]
        return [(mark, mark.dropped or mark.pushed.name in replaced) for mark in marks if mark]

    def _mark(self, collection: str) -> _Mark | None:
        """Return what a push wrote of a collection, None where none did or it is gone."""
        try:
            told = self._engine.metadata(collection)
        except DatabaseError:
            if collection in self._engine.collections():
                raise
            return None
        try:
            if told["table"] != self._name or told["name"] != collection:
                return None
            mark = _Mark(PushedTable.from_json(told), told)
            return mark if isinstance(mark.dropped, bool) and mark.replaces is not None else None
        except (KeyError, TypeError, ValueError):
            return None

    def _write(self, mark: _Mark, pushed: PushedTable, **extra: Any) -> None:
        told = {**mark.told, **pushed.to_json(), **extra}
        self._engine.write_metadata(pushed.name, told)

    def _drop(self, marks: Iterator[_Mark]) -> None:
        for mark in marks:
            name = mark.pushed.name
            try:
                # Whoever writes it is refused from here on.
                self._write(mark, replace(mark.pushed, lease=""), dropped=True)
                if self._engine.stands_for(self._name) == name:
                    # Another push swapped it in at this very moment.
                    self._engine.write_metadata(name, mark.told)
                else:
                    self._engine.drop(name)
            except DatabaseError:
                if name in self._engine.collections():
                    raise

    def _is_not_there(self) -> DatabaseError:
        return DatabaseError(f"{self._target} is not there; push all rows to it first")


@dataclass(frozen=True)
class Changed:
    """The published pushed while it is changed."""

    _tables: StagedTables
    pushed: PushedTable

    @contextmanager
    def writing(self) -> Iterator[str]:
        """Give the collection to what writes to it.

        Raises:
            DatabaseError: another push changes it, or took its place.
        """
        with self._tables._writing(self.pushed, published=True):
            yield self.pushed.name
