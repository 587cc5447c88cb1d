"""Writer of tables in engines that have aliases and no transactions: Qdrant and Milvus.

The name that users query is an alias. It points to the published collection, whose name is the
alias, two underscores and eight hexadecimal digits; a staged one waits next to it. The metadata of
each collection, which the engine keeps, say what it holds, which push may write it (its lease), and
its number: all collections up to the number of the published one are garbage. The number is the
handle of a ``Stored``.

Before and after each write the metadata are read again, so a push that was taken over by another
one ends with an error. No engine reads and writes in one step, so this is not airtight: a push that
halts for long between two steps of dropping can drop what another one swapped in meanwhile.
"""

from __future__ import annotations

import re
import secrets
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from whiten_index.errors import DatabaseError
from whiten_index.vectordb.database_writer import DatabaseWriter, Stored, taken_over
from whiten_index.vectordb.pushed_table import Layout, PushedTable, new_lease

# Bytes by which the name of a collection is longer than the alias.
SUFFIX_BYTES = 10
# Key under which an engine keeps the metadata of a push.
METADATA_KEY = "whiten_index"


class AliasWriter(DatabaseWriter):
    """One alias and the collections behind it; see ``DatabaseWriter``.

    Changes of the published collection are visible at once, and stay after an error.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    # The engine's part.

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
    def _make(self, collection: str, layout: Layout, metadata: Mapping[str, Any]) -> None:
        """Make an empty collection."""

    @abstractmethod
    def _drop(self, collection: str) -> None:
        """Drop a collection."""

    @abstractmethod
    def _point_alias(self, collection: str, *, replaces: bool) -> None:
        """Let the alias point to a collection, in one step."""

    # The life of tables.

    def _find(self, *, pending: bool) -> Stored | None:
        if self._name in self._collections():
            raise DatabaseError(
                f"{self.target} is a collection that no push made; give --table another name, or "
                "drop it"
            )
        target = self._alias_target()
        published = None if target is None else self._read(target)
        if target is not None and published is None:
            raise DatabaseError(
                f"{self.target} is an alias of {target!r}, which no push made; give --table "
                "another name, or drop the alias"
            )
        if not pending:
            return published and replace(published, pending=False)
        least = 0 if published is None else published.handle
        newest = max(self._staged(), key=lambda each: each.handle, default=None)
        return newest if newest is not None and newest.handle > least else None

    def _create(self, made: PushedTable, layout: Layout) -> Stored:
        self._discard(None)
        published = self._find(pending=False)
        named = replace(made, name=f"{self._name}__{secrets.token_hex(SUFFIX_BYTES // 2 - 1)}")
        number = 1 if published is None else published.handle + 1
        begun = Stored(named, pending=True, handle=number)
        self._make(begun.name, layout, self._metadata_of(begun))
        return begun

    def _take_over(self, found: Stored) -> Stored:
        return self._write(found.described(lease=new_lease()))

    def _counted(self, held: Stored) -> Stored:
        return self._write(held)

    def _publish(self, held: Stored) -> None:
        before = self._find(pending=False)
        published = replace(held, pending=False)
        try:
            self._point_alias(held.name, replaces=before is not None)
        except Exception:
            # The answer alone may be lost.
            if not self._has_lease(published):
                raise
        if not self._has_lease(published):
            # Another push is dropping it at this moment.
            if before is not None:
                self._point_back(held, before)
            raise taken_over(self.target)
        with self._reporting("the old table could not be dropped"):
            # A larger number belongs to a push that began meanwhile.
            self._drop_all(each for each in self._staged() if each.handle <= held.handle)

    def _discard(self, held: Stored | None) -> None:  # noqa: ARG002
        self._drop_all(self._staged())

    def _begin_changes(self, after: PushedTable, layout: Layout) -> Stored:
        before = self._require_unchanged(layout)
        return self._write(
            replace(before, table=before.table.changing_to(after, lease=new_lease()))
        )

    def _end_changes(self, now: Stored) -> None:
        self._require_lease(now)
        self._write(now)

    # Collections and their metadata.

    def _staged(self) -> list[Stored]:
        """Return all collections of this name that the alias does not point to."""
        target = self._alias_target()
        form = re.compile(re.escape(self._name) + r"__[0-9a-f]{8}")
        names = [each for each in self._collections() if form.fullmatch(each) and each != target]
        return [found for each in names if (found := self._read(each)) is not None]

    def _read(self, name: str) -> Stored | None:
        """Return a collection, None if no push made it or it is gone."""
        try:
            metadata = self._metadata(name)
        except Exception:
            if name in self._collections():
                raise
            return None
        try:
            found = Stored(PushedTable.from_json(metadata), True, int(metadata["number"]))
            return found if (metadata["table"], found.name) == (self._name, name) else None
        except (KeyError, TypeError, ValueError):
            return None

    def _write(self, collection: Stored) -> Stored:
        self._write_metadata(collection.name, self._metadata_of(collection))
        return collection

    def _metadata_of(self, collection: Stored) -> dict[str, Any]:
        own = {"table": self._name, "number": collection.handle}
        return {**collection.table.to_json(), **own}

    def _drop_all(self, collections: Iterable[Stored]) -> None:
        for each in collections:
            try:
                # From here on its writer is refused, also by a swap at this moment.
                self._write(each.described(lease=""))
                if self._alias_target() != each.name:
                    self._drop(each.name)
            except Exception:
                if each.name in self._collections():
                    raise

    def _point_back(self, held: Stored, before: Stored) -> None:
        with suppress(Exception):
            target = self._alias_target()
            if target in (None, held.name):
                self._point_alias(before.name, replaces=target is not None)

    def _has_lease(self, stored: Stored) -> bool:
        found = self._read(stored.name)
        if found is None or found.table.lease != stored.table.lease:
            return False
        return (self._alias_target() != stored.name) is stored.pending
