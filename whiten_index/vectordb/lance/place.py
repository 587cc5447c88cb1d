"""A folder of LanceDB and the tables of one name in it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import lancedb

from whiten_index.errors import DatabaseError
from whiten_index.vectordb.database_writer import VECTOR, Layout, Metric
from whiten_index.vectordb.lance.options import LanceOptions, folder_of
from whiten_index.vectordb.lance.rows import stored_schema
from whiten_index.vectordb.lance.table import TableState, as_database_error
from whiten_index.vectordb.local_folders import require_own, require_there

PENDING = "__pending"
BRANCH = "whiten_index_changes"
# For what is of no use to anybody any more. The engine warns of none at all.
AT_ONCE = timedelta(milliseconds=1)


class Place:
    """The table that users query, and the one that waits to take its place.

    Attributes:
        name: of the first.
        pending: name of the second.
        target: where that is, as it may be shown.
        options: of the index.
        database: a connection of the engine's client.

    Raises:
        ConfigError: the folder has other files in it.
        DatabaseError: it cannot be opened, or is not there and ``make`` is false.
    """

    def __init__(
        self, address: str, name: str, options: LanceOptions, *, make: bool = True
    ) -> None:
        self.name, self.pending = name, name + PENDING
        self.options = options
        folder = folder_of(address)
        # Of an object store it is a URL.
        self._on_disk = "://" not in folder
        self._shown = f"lancedb://{folder}" if self._on_disk else address.rstrip("/")
        self.target = f"{self._shown}, table {name}"
        if self._on_disk:
            require_own(Path(folder), engine="LanceDB", marks=["*.lance"], address=self._shown)
            if not make:
                require_there(Path(folder), address=self._shown)
        with self.told("cannot be opened"):
            self.database = lancedb.connect(folder, storage_options=dict(options.storage) or None)

    def told(self, what: str) -> AbstractContextManager[None]:
        """Turn errors of the engine into those of a writer."""
        return as_database_error(self.target, what, on_disk=self._on_disk)

    def opened(self, name: str) -> Any | None:
        """Return a handle of a table as it is now, None where there is none."""
        with self.told("cannot be opened"):
            try:
                return self.database.open_table(name)
            except ValueError as error:
                if "not found" in str(error):
                    return None
                raise

    def table(self, *, pending: bool) -> Any:
        """Return a handle of a table that must be there.

        Raises:
            DatabaseError: it is not.
        """
        table = self.opened(self.pending if pending else self.name)
        if table is None:
            what = "no push is pending" if pending else "there is no table"
            raise DatabaseError(f"{what} at {self.target}; push it first")
        return table

    def state(self, name: str) -> TableState | None:
        """Return what a table holds, None where there is no such table.

        Raises:
            DatabaseError: no push made it.
        """
        return self.opened_state(name)[1]

    def opened_state(self, name: str) -> tuple[Any, TableState] | tuple[None, None]:
        """Return a handle of a table, and what it holds as this handle sees it.

        Raises:
            DatabaseError: no push made it.
        """
        table = self.opened(name)
        if table is None:
            return None, None
        with self.told("cannot be read"):
            state = TableState.of(table)
        if state is None:
            raise DatabaseError(
                f"{self._shown} has a table {name} that no push made; give another name with "
                "--table, or drop it yourself"
            )
        return table, state

    def require_layout(self, table: Any, layout: Layout) -> None:
        """Refuse rows that have other columns than a table.

        Raises:
            DatabaseError: they do.
        """
        with self.told("cannot be read"):
            there, wanted = (
                [(field.name, field.type) for field in each]
                for each in (table.schema, stored_schema(layout))
            )
        if there != wanted:
            raise DatabaseError(
                f"{self.target} has rows of another layout; push all rows with --full"
            )

    def index(self, table: Any, metric: Metric) -> None:
        """Build the index of a table that has none."""
        with self.told("cannot be indexed"):
            if any(VECTOR in each.columns for each in table.list_indices()):
                return
            config = self.options.config(table.count_rows(), metric)
            if config is not None:
                table.create_index(VECTOR, config=config)

    def tidy(self, table: Any) -> None:
        """Merge small files, take new rows into the index, drop old versions."""
        kept = max(timedelta(days=self.options.keep_days), AT_ONCE)
        with self.told("cannot be tidied"):
            table.optimize(cleanup_older_than=kept)

    def end_swap(self, state: TableState) -> None:
        """Do what comes after the commit by which rows were published."""
        table = self.table(pending=False)
        self.drop_branches(table)
        # Before the index is there: it would divide it anew, by the engine's own measure.
        self.tidy(table)
        self.index(table, state.metric)

    def drop_branches(self, table: Any, start: str = BRANCH) -> None:
        """Drop the branches of changes whose name begins so."""
        with self.told("cannot be tidied"):
            for name in list(table.branches.list()):
                if name.startswith(start):
                    table.branches.delete(name)

    def drop_pending(self, lease: str | None) -> None:
        """Drop the pending table; cut off midway, it is still known to be worth nothing.

        Args:
            lease: of the push that must have marked it last, None for whoever did.
        """
        table, state = self.opened_state(self.pending)
        if table is None or state is None:
            return
        if not state.dropped and lease not in (None, state.pushed.lease):
            return
        with self.told("cannot be dropped"):
            state.as_dropped().mark(table)
            self.database.drop_table(self.pending)
