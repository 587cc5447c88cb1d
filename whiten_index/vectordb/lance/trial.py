"""Changes of the published table: looked at on a branch, then made in the table."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from whiten_index.errors import DatabaseError
from whiten_index.vectordb.database_writer import Layout, PushedTable
from whiten_index.vectordb.lance.changes import LanceChanges
from whiten_index.vectordb.lance.place import BRANCH, Place
from whiten_index.vectordb.lance.table import TableState
from whiten_index.vectordb.row_checks import new_lease, taken_over

_SMALL_FILES = 10


class Trial:
    """What is known of the published table when changes of it begin, and where they are tried.

    Args:
        place: of the table.
        layout: of its rows.
        seen: what it held when it was asked; None where it was not.

    Raises:
        DatabaseError: there is none, its rows have another layout, or another push changed it since.
    """

    def __init__(self, place: Place, layout: Layout, seen: PushedTable | None) -> None:
        self._place, self._layout = place, layout
        table, state = place.opened_state(place.name)
        if table is None or state is None:
            raise DatabaseError(
                f"there is no table {place.target} to change; push all rows with --full"
            )
        if seen not in (None, state.pushed):
            raise taken_over(place.target)
        place.require_layout(table, layout)
        # The handle sees its own commits alone: the engine refuses them after another push's.
        self._table, self._state = table, state
        self._writer = new_lease()
        self._branch = f"{BRANCH}_{self._writer}"
        self._made = False
        # Those that pushes left which were killed.
        place.drop_branches(table)

    def tried(self, changes: LanceChanges) -> Any:
        """Return the branch on which changes were made so far."""
        table = self._table
        with self._place.told("cannot be changed"):
            if self._made and self._branch not in table.branches.list():
                raise taken_over(self._place.target)
            if changes.changed:
                self.end()
                branch = table.branches.create(self._branch)
                self._made = True
                changes.apply(branch)
                changes.changed = False
            return table.branches.checkout(self._branch) if self._made else table

    def end(self) -> None:
        """Drop the branch."""
        self._place.drop_branches(self._table, self._branch)

    def make(self, changes: LanceChanges, after: PushedTable) -> PushedTable:
        """Change the table, or leave it as it was; return what it holds then."""
        named = replace(
            after, done=after.rows, name=self._place.name, changing="", lease=self._writer
        )
        with self._place.told("cannot be changed"):
            self._make(changes, TableState(named, self._layout.metric))
        return named

    def _make(self, changes: LanceChanges, now: TableState) -> None:
        was, table = self._state.pushed, self._table
        marked = was.changing_to(now.pushed, lease=self._writer)
        # Refused where another push changed or replaced it since this handle saw it.
        replace(self._state, pushed=marked).mark(table)
        before = table.version - 1
        try:
            # Another push that goes on, though it was taken for dead, is refused from here on.
            table.restore(table.version)
            changes.apply(table)
            now.mark(table)
        except BaseException:
            with suppress(Exception):
                there = self._place.state(self._place.name)
                if there is not None and there.pushed == marked:
                    table.restore(before)
            raise
        if table.stats()["fragment_stats"]["num_small_fragments"] > _SMALL_FILES:
            self._place.tidy(table)
