"""Writer for engines that have aliases and no transactions.

A table is a collection ``NAME__`` and eight hexadecimal digits; the name is an alias of the
published one. The *metadata* that the engine keeps with a collection says what it holds and which
push writes it. Before and after each write a connection reads the metadata again. So it writes only
to the collection that it began or resumed, and fails once another push has taken that one over.

This is not airtight, since no engine reads and writes in one step. A push that drops a collection
first marks it as dropped, and then checks whether the name points to it; a push that publishes one
checks for that mark before and after. If both write at the same moment one of them notices: the name
points back to what it was, and the push fails as taken over. But a push that pauses for long between
two of these steps can still drop what another one published meanwhile.
"""

from __future__ import annotations

import re
import secrets
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from whiten_index.errors import DatabaseError
from whiten_index.vectordb.database_writer import DatabaseWriter, Layout, PushedTable
from whiten_index.vectordb.row_checks import new_lease, not_begun, require_rows, taken_over

# Bytes that the name of a staged collection is longer than the name that users query.
MORE_BYTES = 10


@dataclass(frozen=True)
class _Collection:
    """A collection that a push wrote, as its metadata describes it."""

    pushed: PushedTable
    metadata: Mapping[str, Any]

    @property
    def dropped(self) -> bool:
        return bool(self.metadata["dropped"])

    @property
    def replaces(self) -> list[str]:
        return list(self.metadata["replaces"])


class CollectionWriter(DatabaseWriter):
    """Writer for an engine with collections and aliases, without transactions.

    A subclass provides the engine's own calls; all of them raise DatabaseError.

    Args:
        name: alias that users query.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._staged: PushedTable | None = None
        self._layout: Layout | None = None
        # Result of the last ``published``, on which a push bases its changes.
        self._seen: PushedTable | None = None

    # Calls of the engine.

    @abstractmethod
    def collections(self) -> list[str]:
        """Return the names of all collections, without aliases."""

    @abstractmethod
    def alias_target(self) -> str | None:
        """Return the collection that the name is an alias of, None if there is no such alias."""

    @abstractmethod
    def point_alias(self, collection: str, *, moved: bool) -> None:
        """Let the name be an alias of a collection, in one step.

        Args:
            collection: the new target.
            moved: whether the alias exists.
        """

    @abstractmethod
    def read_metadata(self, collection: str) -> Mapping[str, Any]:
        """Return the JSON object kept with a collection, {} if there is none."""

    @abstractmethod
    def write_metadata(self, collection: str, metadata: Mapping[str, Any]) -> None:
        """Replace the JSON object kept with a collection."""

    @abstractmethod
    def create_collection(
        self, collection: str, layout: Layout, metadata: Mapping[str, Any]
    ) -> None:
        """Create an empty collection for rows of a layout."""

    @abstractmethod
    def drop_collection(self, collection: str) -> None:
        """Drop a collection."""

    @abstractmethod
    def upsert_rows(self, collection: str, rows: pa.RecordBatch, layout: Layout) -> None:
        """Insert rows into a collection, replacing those with the same keys."""

    @abstractmethod
    def delete_rows(self, collection: str, ids: Sequence[str | int], layout: Layout) -> None:
        """Delete the rows with these ids from a collection."""

    @abstractmethod
    def build_index(self, collection: str, layout: Layout, rows: int) -> None:
        """Build the index of a collection, and wait until it answers."""

    def extra_metadata(self, layout: Layout) -> Mapping[str, Any]:  # noqa: ARG002
        """Return what the engine adds to the metadata of a collection that it begins."""
        return {}

    # The writer, by these calls.

    def published(self) -> PushedTable | None:
        """Return the published table, None if nothing has the name.

        Raises:
            DatabaseError: the name belongs to something that no push made.
        """
        found = self._published()
        self._seen = None if found is None else found.pushed
        return self._seen

    def pending(self) -> PushedTable | None:
        """Return the table that a push began and did not publish, None if there is none."""
        return next((each.pushed for each, obsolete in self._others() if not obsolete), None)

    def begin(self, pushed: PushedTable, layout: Layout) -> None:
        """Create an empty collection, replacing any that was pending."""
        self.discard()
        begun = replace(
            pushed, done=0, changing="", lease=new_lease(),
            name=f"{self._name}__{secrets.token_hex(4)}",
        )  # fmt: skip
        own = {"table": self._name, "dropped": False, "replaces": []}
        metadata = {**begun.to_json(), **own, **self.extra_metadata(layout)}
        self.create_collection(begun.name, layout, metadata)
        self._staged, self._layout = begun, layout

    def resume(self, layout: Layout) -> None:
        """Continue the pending collection; the connection that filled it is refused from now on.

        Raises:
            DatabaseError: there is none.
        """
        pending = self.pending()
        found = None if pending is None else self._read(pending.name)
        if pending is None or found is None:
            raise not_begun(self.target)
        staged = replace(pending, lease=new_lease())
        self._write(found, staged, **self.extra_metadata(layout))
        self._staged, self._layout = staged, layout

    def append(self, rows: pa.RecordBatch) -> None:
        """Upsert rows, then count them as done: rows sent twice are there once."""
        staged, layout = self._require_staged()
        require_rows(rows, layout)
        with self._writing(staged, published=False):
            self.upsert_rows(staged.name, rows, layout)
        found = self._require_ours(staged, published=False)
        self._staged = replace(staged, done=staged.done + len(rows))
        self._write(found, self._staged)

    def finish(self, layout: Layout) -> None:
        """Build the index of the pending collection, and wait until it answers."""
        staged, _ = self._require_staged()
        with self._writing(staged, published=False):
            self.build_index(staged.name, layout, staged.rows)
        self._require_ours(staged, published=False)

    def swap(self) -> None:
        """Let the name be an alias of the pending collection; drop the one before."""
        staged, before = self._require_staged()[0], self._published()
        with self._writing(staged, published=False) as found:
            if before is not None:
                # Written before the alias moves and true only once it has: an interrupted swap
                # claims nothing about what users see, nor does the old table become pending.
                there = set(self.collections())
                gone = [before.pushed.name, *before.replaces]
                self._write(found, staged, replaces=[each for each in gone if each in there])
            self._publish(staged, before)
        self._staged = self._seen = None
        # Not a collection that another push began meanwhile.
        self._drop(each for each, obsolete in self._others() if obsolete)

    def discard(self) -> None:
        """Drop the pending collection, and those that interrupted pushes left."""
        self._staged = None
        self._drop(each for each, _ in self._others())

    @contextmanager
    def changing(self, after: PushedTable, layout: Layout) -> Iterator[CollectionChanges]:
        """Open the published collection for changes, which users see at once, one by one.

        After an error the changes made so far stay, and ``published`` reports them in
        ``PushedTable.changing``.

        Raises:
            DatabaseError: nothing is published, or another push changed it since ``published``.
        """
        seen, self._seen, found = self._seen, None, self._published()
        if found is None:
            raise self._missing()
        if seen not in (None, found.pushed):
            raise taken_over(self.target)
        now = found.pushed.changing_to(after, lease=new_lease())
        # An interrupted push may have marked it as dropped before the alias pointed to it.
        self._write(found, now, dropped=False)
        try:
            yield CollectionChanges(self, now, layout)
            found = self._require_ours(now, published=True)
            whole = replace(after, name=now.name, lease=now.lease, done=after.rows, changing="")
            self._write(found, whole)
        finally:
            self._seen = None

    def collection(self, *, pending: bool) -> str:
        """Return the name of the pending or the published collection.

        Raises:
            DatabaseError: there is none.
        """
        if pending:
            staged = self._staged or self.pending()
            if staged is None:
                raise not_begun(self.target)
            return staged.name
        published = self._published()
        if published is None:
            raise self._missing()
        return published.pushed.name

    def _publish(self, staged: PushedTable, before: _Collection | None) -> None:
        try:
            self.point_alias(staged.name, moved=before is not None)
        except DatabaseError:
            # It may have succeeded if only the answer was lost.
            if self._ours(staged, published=True) is None:
                raise
        found = self._read(staged.name)
        if found is None or found.dropped:
            # Another push drops it at this moment.
            if before is not None:
                self._take_back(staged, before.pushed.name)
            raise taken_over(self.target)

    def _take_back(self, staged: PushedTable, before: str) -> None:
        """Let the name point to its former collection, unless another push moved it."""
        with suppress(DatabaseError):
            target = self.alias_target()
            if target in (None, staged.name):
                self.point_alias(before, moved=target is not None)

    @contextmanager
    def _writing(self, pushed: PushedTable, *, published: bool) -> Iterator[_Collection]:
        """Write to a collection of this connection.

        Raises:
            DatabaseError: another push took it over, which may be why the write failed.
        """
        found = self._require_ours(pushed, published=published)
        try:
            yield found
        except DatabaseError:
            ours = True
            with suppress(DatabaseError):
                ours = self._ours(pushed, published=published) is not None
            if not ours:
                raise taken_over(self.target) from None
            raise

    def _require_staged(self) -> tuple[PushedTable, Layout]:
        if self._staged is None or self._layout is None:
            raise not_begun(self.target)
        return self._staged, self._layout

    def _require_ours(self, pushed: PushedTable, *, published: bool) -> _Collection:
        found = self._ours(pushed, published=published)
        if found is None:
            raise taken_over(self.target)
        return found

    def _ours(self, pushed: PushedTable, *, published: bool) -> _Collection | None:
        """Return a collection that this connection may write, None if it may not."""
        found = self._read(pushed.name)
        if found is None or found.dropped or found.pushed.lease != pushed.lease:
            return None
        return found if (self.alias_target() == pushed.name) is published else None

    def _published(self) -> _Collection | None:
        if self._name in self.collections():
            raise DatabaseError(
                f"{self.target} is a collection that no push made; give --table another name, or "
                "drop it"
            )
        target = self.alias_target()
        if target is None:
            return None
        found = self._read(target)
        if found is None:
            raise DatabaseError(
                f"{self.target} is an alias of {target!r}, which no push made; give --table "
                "another name, or drop the alias"
            )
        return found

    def _others(self) -> list[tuple[_Collection, bool]]:
        """Return the unpublished collections of this name, and whether each is obsolete."""
        now = self._published()
        current, replaced = (now.pushed.name, now.replaces) if now else (None, [])
        form = re.compile(re.escape(self._name) + r"__[0-9a-f]{8}")
        names = filter(form.fullmatch, sorted(self.collections()))
        found = [self._read(each) for each in names if each != current]
        return [(each, each.dropped or each.pushed.name in replaced) for each in found if each]

    def _read(self, collection: str) -> _Collection | None:
        """Return a collection, None if it is gone or no push wrote it."""
        try:
            metadata = self.read_metadata(collection)
        except DatabaseError:
            if collection in self.collections():
                raise
            return None
        try:
            if metadata["table"] != self._name or metadata["name"] != collection:
                return None
            found = _Collection(PushedTable.from_json(metadata), metadata)
            return found if isinstance(found.dropped, bool) and found.replaces is not None else None
        except (KeyError, TypeError, ValueError):
            return None

    def _write(self, found: _Collection, pushed: PushedTable, **extra: Any) -> None:
        self.write_metadata(pushed.name, {**found.metadata, **pushed.to_json(), **extra})

    def _drop(self, collections: Iterator[_Collection]) -> None:
        for each in collections:
            name = each.pushed.name
            try:
                # From here on, the connection that writes it is refused.
                self._write(each, replace(each.pushed, lease=""), dropped=True)
                if self.alias_target() == name:
                    # Another push published it at this moment.
                    self.write_metadata(name, each.metadata)
                else:
                    self.drop_collection(name)
            except DatabaseError:
                if name in self.collections():
                    raise

    def _missing(self) -> DatabaseError:
        return DatabaseError(f"{self.target} is not there; push all rows to it first")


@dataclass(frozen=True)
class CollectionChanges:
    """Changes of a published collection; each fails if another push took the collection over."""

    _writer: CollectionWriter
    _pushed: PushedTable
    _layout: Layout

    def upsert(self, rows: pa.RecordBatch) -> None:
        """Insert rows of the layout, replacing those with the same keys."""
        require_rows(rows, self._layout)
        with self._writer._writing(self._pushed, published=True):
            self._writer.upsert_rows(self._pushed.name, rows, self._layout)

    def delete(self, ids: Sequence[str | int]) -> None:
        """Delete all rows with these ids; unknown ids are ignored."""
        with self._writer._writing(self._pushed, published=True):
            self._writer.delete_rows(self._pushed.name, ids, self._layout)
