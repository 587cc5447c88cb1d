"""Writer of tables in engines that have aliases and no transactions: Qdrant and Milvus.

The name that users query is an alias. It points to the published collection, whose name is the
alias, two underscores and eight hexadecimal digits; a staged one waits next to it. The metadata of
each collection, which the engine keeps, say what it holds, which push may write it (its lease), and
its number: all collections up to the number of the published one are garbage.

Before and after each write the metadata are read again, so a push that was taken over by another
one ends with an error. No engine reads and writes in one step, so this is not airtight: a push that
halts for long between two steps of dropping can drop what another one swapped in meanwhile.
"""

from __future__ import annotations

import re
import secrets
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from whiten_index.errors import DatabaseError
from whiten_index.vectordb.database_writer import (
    DatabaseWriter,
    Layout,
    Neighbours,
    PushedTable,
    RowChanges,
    new_lease,
    not_begun,
    require_rows,
    taken_over,
)

# Bytes by which the name of a collection is longer than the alias.
SUFFIX_BYTES = 10
# Key under which an engine keeps the metadata of a push.
METADATA_KEY = "whiten_index"


@dataclass(frozen=True)
class _Collection:
    """A collection that a push made."""

    table: PushedTable
    number: int

    @property
    def name(self) -> str:
        return self.table.name


class AliasWriter(DatabaseWriter):
    """One alias and the collections behind it; see ``DatabaseWriter``.

    Changes of the published collection are visible at once. After an error, what was changed stays,
    and ``published`` says so by ``PushedTable.changing``.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._held: _Collection | None = None
        self._layout: Layout | None = None
        # Returned by ``published``: a push decides by it what to change.
        self._seen: PushedTable | None = None

    # The engine's part.

    @abstractmethod
    def explain(self, error: Exception) -> tuple[str, str]:
        """Return the reason of an error of the client, without secrets, and what to do."""

    @abstractmethod
    def _collections(self) -> Sequence[str]:
        """Return the names of all collections, without aliases."""

    @abstractmethod
    def _alias_target(self) -> str | None:
        """Return the collection that the alias points to, None if there is no alias."""

    @abstractmethod
    def _metadata(self, collection: str) -> Mapping[str, Any]:
        """Return the metadata of a collection, {} if it has none."""

    @abstractmethod
    def _write_metadata(self, collection: str, metadata: Mapping[str, Any]) -> None:
        """Replace the metadata of a collection."""

    @abstractmethod
    def _create(self, collection: str, layout: Layout, metadata: Mapping[str, Any]) -> None:
        """Make an empty collection."""

    @abstractmethod
    def _drop(self, collection: str) -> None:
        """Drop a collection."""

    @abstractmethod
    def _point_alias(self, collection: str, *, replaces: bool) -> None:
        """Let the alias point to a collection, in one step."""

    @abstractmethod
    def _upsert(self, collection: str, rows: pa.RecordBatch, layout: Layout) -> None:
        """Add rows, or replace those with the same keys."""

    @abstractmethod
    def _delete(self, collection: str, ids: Sequence[str | int], layout: Layout) -> None:
        """Delete all rows with some ids."""

    @abstractmethod
    def _build(self, pushed: PushedTable, layout: Layout) -> None:
        """Build the index of a filled collection, and wait until it is ready."""

    @abstractmethod
    def _count(self, collection: str) -> int: ...

    @abstractmethod
    def _fetch(self, collection: str, ids: Sequence[str | int], layout: Layout) -> pa.Table: ...

    @abstractmethod
    def _search(
        self, collection: str, vectors: NDArray[np.float32], top_k: int, *, exact: bool
    ) -> Neighbours: ...

    # The life of tables.

    def published(self) -> PushedTable | None:
        """Return what the alias points to, None if there is nothing of that name."""
        found = self._published()
        self._seen = None if found is None else found.table
        return self._seen

    def pending(self) -> PushedTable | None:
        """Return the staged table of an earlier push, else None."""
        found = self._pending()
        return None if found is None else found.table

    def begin(self, pushed: PushedTable, layout: Layout) -> None:
        """Make an empty staged table in place of any other one."""
        self.discard()
        published = self._published()
        made = replace(
            pushed, done=0, changing="", lease=new_lease(),
            name=f"{self._name}__{secrets.token_hex(SUFFIX_BYTES // 2 - 1)}",
        )  # fmt: skip
        begun = _Collection(made, 1 if published is None else published.number + 1)
        self._create(made.name, layout, self._written(begun))
        self._held, self._layout = begun, layout

    def resume(self, layout: Layout) -> None:
        """Take over the staged table; a push that held it before is refused from now on."""
        found = self._pending()
        if found is None:
            raise not_begun(self.target)
        self._held, self._layout = self._write(found, lease=new_lease()), layout

    def append(self, rows: pa.RecordBatch) -> None:
        """Add rows to the staged table, then count them; rows that are sent twice are kept once."""
        held, layout = self._require_held()
        require_rows(rows, layout)
        with self._writing(held):
            self._upsert(held.name, rows, layout)
        self._held = self._write(held, done=held.table.done + len(rows))

    def finish(self) -> None:
        """Build the index of the staged table, and wait until it is ready."""
        held, layout = self._require_held()
        with self._writing(held):
            self._build(held.table, layout)

    def swap(self) -> None:
        """Let the alias point to the staged table in one step; drop the one before."""
        (held, _), before = self._require_held(), self._published()
        self._require_lease(held)
        try:
            self._point_alias(held.name, replaces=before is not None)
        except DatabaseError:
            # The answer alone may be lost.
            if not self._has_lease(held, published=True):
                raise
        if not self._has_lease(held, published=True):
            # Another push is dropping it at this moment.
            if before is not None:
                self._point_back(held, before)
            raise taken_over(self.target)
        self._held = self._seen = None
        # A larger number belongs to a push that began meanwhile.
        self._drop_all(each for each in self._staged() if each.number <= held.number)

    def discard(self) -> None:
        """Drop the staged table, and what an interrupted push left."""
        self._held = None
        self._drop_all(self._staged())

    @contextmanager
    def changing(self, after: PushedTable, layout: Layout) -> Iterator[_Changes]:
        """Open the published table for changes; ``after`` is what it holds at the end."""
        seen, self._seen = self._seen, None
        before = self._require_published()
        if seen not in (None, before.table):
            raise taken_over(self.target)
        marked = before.table.changing_to(after, lease=new_lease())
        now = self._write(before, changing=marked.changing, lease=marked.lease)
        yield _Changes(self, now, layout)
        self._require_lease(now, published=True)
        whole = replace(after, name=now.name, lease=marked.lease, done=after.rows, changing="")
        self._write(replace(now, table=whole))

    def count(self, *, pending: bool = False) -> int:
        """Return the number of rows of the published or the staged table."""
        return self._count(self._readable(pending=pending))

    def fetch(self, ids: Sequence[str | int], layout: Layout, *, pending: bool = False) -> pa.Table:
        """Return the rows with these ids, in any order."""
        return self._fetch(self._readable(pending=pending), ids, layout)

    def search(
        self,
        vectors: NDArray[np.float32],
        top_k: int,
        *,
        exact: bool = False,
        pending: bool = False,
    ) -> Neighbours:
        """Return the nearest rows of queries (q, k): exactly, or by the index."""
        return self._search(self._readable(pending=pending), vectors, top_k, exact=exact)

    # Collections and their metadata.

    def _readable(self, *, pending: bool) -> str:
        if not pending:
            return self._require_published().name
        found = self._held or self._pending()
        if found is None:
            raise not_begun(self.target)
        return found.name

    def _require_held(self) -> tuple[_Collection, Layout]:
        if self._held is None or self._layout is None:
            raise not_begun(self.target)
        return self._held, self._layout

    def _require_published(self) -> _Collection:
        found = self._published()
        if found is None:
            raise DatabaseError(f"{self.target} is not there; push all rows to it first")
        return found

    def _published(self) -> _Collection | None:
        if self._name in self._collections():
            raise DatabaseError(
                f"{self.target} is a collection that no push made; give --table another name, or "
                "drop it"
            )
        target = self._alias_target()
        found = None if target is None else self._read(target)
        if target is not None and found is None:
            raise DatabaseError(
                f"{self.target} is an alias of {target!r}, which no push made; give --table "
                "another name, or drop the alias"
            )
        return found

    def _pending(self) -> _Collection | None:
        published, staged = self._published(), self._staged()
        least = 0 if published is None else published.number
        newest = max(staged, key=lambda each: each.number, default=None)
        return newest if newest is not None and newest.number > least else None

    def _staged(self) -> list[_Collection]:
        """Return all collections of this name that the alias does not point to."""
        target = self._alias_target()
        form = re.compile(re.escape(self._name) + r"__[0-9a-f]{8}")
        names = [each for each in self._collections() if form.fullmatch(each) and each != target]
        return [found for each in names if (found := self._read(each)) is not None]

    def _read(self, name: str) -> _Collection | None:
        """Return a collection, None if no push made it or it is gone."""
        try:
            metadata = self._metadata(name)
        except DatabaseError:
            if name in self._collections():
                raise
            return None
        try:
            found = _Collection(PushedTable.from_json(metadata), int(metadata["number"]))
            return found if (metadata["table"], found.name) == (self._name, name) else None
        except (KeyError, TypeError, ValueError):
            return None

    def _write(self, collection: _Collection, **changes: Any) -> _Collection:
        """Write the metadata of a collection with some fields changed, and return it."""
        changed = replace(collection, table=replace(collection.table, **changes))
        self._write_metadata(changed.name, self._written(changed))
        return changed

    def _written(self, collection: _Collection) -> dict[str, Any]:
        own = {"table": self._name, "number": collection.number}
        return {**collection.table.to_json(), **own}

    def _drop_all(self, collections: Iterable[_Collection]) -> None:
        for each in collections:
            try:
                # From here on its writer is refused, also by a swap at this moment.
                self._write(each, lease="")
                if self._alias_target() != each.name:
                    self._drop(each.name)
            except DatabaseError:
                if each.name in self._collections():
                    raise

    def _point_back(self, held: _Collection, before: _Collection) -> None:
        with suppress(DatabaseError):
            target = self._alias_target()
            if target in (None, held.name):
                self._point_alias(before.name, replaces=target is not None)

    # Leases.

    @contextmanager
    def _writing(self, held: _Collection, *, published: bool = False) -> Iterator[None]:
        """Write to a collection, whose lease must be ours before and after."""
        self._require_lease(held, published=published)
        try:
            yield
        except DatabaseError:
            ours = True
            with suppress(DatabaseError):
                ours = self._has_lease(held, published=published)
            if not ours:
                raise taken_over(self.target) from None
            raise
        self._require_lease(held, published=published)

    def _require_lease(self, held: _Collection, *, published: bool = False) -> None:
        if not self._has_lease(held, published=published):
            raise taken_over(self.target)

    def _has_lease(self, held: _Collection, *, published: bool) -> bool:
        found = self._read(held.name)
        if found is None or found.table.lease != held.table.lease:
            return False
        return (self._alias_target() == held.name) is published


class _Changes(RowChanges):
    """Changes of the published collection."""

    def __init__(self, writer: AliasWriter, collection: _Collection, layout: Layout) -> None:
        self._writer, self._collection, self._layout = writer, collection, layout

    def upsert(self, rows: pa.RecordBatch) -> None:
        """Add rows, or replace those with the same keys."""
        require_rows(rows, self._layout)
        with self._writer._writing(self._collection, published=True):
            self._writer._upsert(self._collection.name, rows, self._layout)

    def delete(self, ids: Sequence[str | int]) -> None:
        """Delete all rows with these ids; missing ones are ignored."""
        with self._writer._writing(self._collection, published=True):
            self._writer._delete(self._collection.name, ids, self._layout)
