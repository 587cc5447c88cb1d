"""Writer of tables in engines that have aliases and no transactions: Qdrant and Milvus.

The name that users query is an alias. It points to the published collection, whose name is the
alias, two underscores and eight hexadecimal digits; a staged one waits next to it. The metadata of
each collection, which the engine keeps, say what it holds, and which push may write it (its lease).

Before and after each write the metadata are read again, so a push that was taken over by another
one ends with an error. No engine reads and writes in one step, so this is not airtight: a push that
halts for long between two steps of dropping can drop what another one swapped in meanwhile.
"""

import re
import secrets
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from whiten_index.artifacts.atomic import remove_path
from whiten_index.artifacts.files import list_folder
from whiten_index.vectordb.database_writer import DatabaseWriter, Stored, taken_over
from whiten_index.vectordb.engine_options import SUFFIX_BYTES
from whiten_index.vectordb.pushed_table import Layout, PushedTable


class AliasWriter(DatabaseWriter):
    """One alias and the collections behind it; see ``DatabaseWriter``.

    Changes of the published collection are visible at once, and stay after an error.
    """

    # Folder in which an engine without a server has a folder of each collection.
    _collections_folder: Path | None = None

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name, self._form = name, re.escape(name) + "__[0-9a-f]{8}"

    # The engine's part.

    @abstractmethod
    def _collections(self) -> Sequence[str]:
        """Return the names of all collections, without aliases."""

    @abstractmethod
    def _alias_target(self) -> str | None:
        """Return the collection that the alias points to, None if there is no alias."""

    @abstractmethod
    def _aliases_of(self, collection: str) -> Sequence[str]:
        """Return all aliases that point to a collection, also those of users."""

    @abstractmethod
    def _metadata(self, collection: str) -> Any:
        """Return the description of a collection, None if it has none; another may be no text."""

    @abstractmethod
    def _make(self, collection: str, layout: Layout, description: str) -> None: ...

    @abstractmethod
    def _drop(self, collection: str) -> None: ...

    @abstractmethod
    def _point_alias(self, collection: str | None, *, replaces: bool) -> None:
        """Let the alias point to a collection, in one step; None drops it."""

    # The life of tables.

    def _find(self, *, pending: bool) -> Stored | None:
        target = self._alias_target()
        published = None if target is None else self._read(target)
        if published is None and (target is not None or self._name in self._collections()):
            what = "a collection" if target is None else f"an alias of {target!r}"
            raise self._not_pushed(what)
        if not pending:
            return published and replace(published, pending=False)
        # One that was replaced, by a push that was cut off before it dropped it, is whole too.
        staged = (each for each in self._staged() if each.table.lease and not each.table.changing)
        return next(staged, None)

    def _create(self, made: PushedTable, layout: Layout) -> Stored:
        self._discard(None)
        name = f"{self._name}__{secrets.token_hex(SUFFIX_BYTES // 2 - 1)}"
        named = replace(made, name=name)
        self._make(name, layout, named.text)
        return Stored(named, pending=True)

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
                with suppress(Exception):
                    target = self._alias_target()
                    if target in (None, held.name):
                        self._point_alias(before.name, replaces=target is not None)
            raise taken_over(self.target)
        with self._reporting("the old table could not be dropped"):
            self._drop_all([] if before is None else [before])

    def _discard(self, held: Stored | None) -> None:  # noqa: ARG002
        self._drop_all(self._staged())
        if self._collections_folder is None:
            return
        there = self._collections()
        for each in list_folder(self._collections_folder):
            # A killed engine leaves folders that it does not list.
            if re.fullmatch(self._form, each.name) and each.name not in there:
                remove_path(each)

    def _remove(self, published: Stored) -> None:
        self._point_alias(None, replaces=True)
        self._drop_all([published])

    # Collections and their metadata.

    def _staged(self) -> list[Stored]:
        """Return all collections of this name that no alias points to."""
        found = map(self._read, self._collections())
        return [each for each in found if each is not None and not self._aliases_of(each.name)]

    def _read(self, name: str) -> Stored | None:
        """Return a collection of this alias, None if no push made it or it is gone."""
        if not re.fullmatch(self._form, name):
            return None
        try:
            found = PushedTable.read(self._metadata(name))
        except Exception:
            if name in self._collections():
                raise
            return None
        return None if found is None or found.name != name else Stored(found, pending=True)

    def _drop_all(self, collections: Iterable[Stored]) -> None:
        for each in collections:
            try:
                # From here on its writer is refused, also by a swap at this moment.
                self._describe(each.described(lease=""))
                if not self._aliases_of(each.name):
                    self._drop(each.name)
            except Exception:
                if each.name in self._collections():
                    raise

    def _has_lease(self, stored: Stored) -> bool:
        found = self._read(stored.name)
        if found is None or found.table.lease != stored.table.lease:
            return False
        return (self._alias_target() != stored.name) is stored.pending
