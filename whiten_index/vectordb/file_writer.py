"""Writer of tables in one file, by an engine with SQL and transactions: DuckDB and SQLite."""

import os
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from whiten_index.errors import ConfigError, first_line
from whiten_index.vectordb.database_writer import DatabaseWriter, Stored
from whiten_index.vectordb.engine_options import EngineOptions
from whiten_index.vectordb.engine_support import advice, require_engine_file
from whiten_index.vectordb.pushed_table import Layout, PushedTable, RowsError


class FileWriter(DatabaseWriter):
    """One table of a file; see ``DatabaseWriter``.

    The description of a table is changed in the same transaction as its rows.
    """

    adds_and_counts = True
    begin_writing: ClassVar[str]  # statement
    refusals: ClassVar[tuple[type[Exception], ...]]  # errors that rows cause

    def __init__(self, address: str, name: str, options: EngineOptions, *, make: bool) -> None:
        super().__init__()
        # Both engines take names in any case for the same.
        self._name, self.process = name.lower(), os.getpid()
        file, shown = require_engine_file(address, type(options), make=make)
        self.target = f"{shown}, table {name}"
        with self._reporting("it could not be opened"):
            self._database = self._open(file, make=make)

    @abstractmethod
    def _open(self, file: Path, *, make: bool) -> Any:
        """Return a connection to a file, read-only unless ``make``."""

    @abstractmethod
    def _insert(self, stored: Stored, rows: pa.RecordBatch, layout: Layout) -> None:
        """Add rows whose keys are not there."""

    def begin(self, pushed: PushedTable, layout: Layout) -> None:
        """Create an empty pending table, replacing any other."""
        # Both engines ignore the case of ASCII, in names of columns too.
        seen = set[bytes]()
        for name in layout.schema.names:
            if (lower := name.encode().lower()) in seen:
                raise ConfigError(
                    f"{self.target}: the name of column {name!r} differs from another by case "
                    "alone; rename it in the corpus, or leave it out of --keep"
                )
            seen.add(lower)
        super().begin(pushed, layout)

    def _explain(self, error: Exception) -> tuple[str, str]:
        reason = first_line(error)
        if isinstance(error, self.refusals):
            raise RowsError(
                f"{self.target}: rows are refused ({reason}); mend the corpus, or leave the column "
                "out of --keep"
            ) from None
        return reason, advice(reason)

    def _add(self, held: Stored, rows: pa.RecordBatch, layout: Layout) -> None:
        with self._transaction(held):
            self._insert(held, rows, layout)
            self._describe(held)

    def _begin_changes(self) -> None:
        self._run(self.begin_writing)

    def _undo_changes(self, changed: Stored | None) -> None:  # noqa: ARG002
        with suppress(Exception):
            self._run("ROLLBACK")

    def _run(self, order: str, *values: Any) -> Any:
        return self._database.execute(order, values)

    @contextmanager
    def _transaction(self, stored: Stored | None = None) -> Iterator[None]:
        """Open a transaction; refuse it if another push took over the table."""
        self._run(self.begin_writing)
        try:
            if stored is not None:
                self._require_lease(stored)
            yield
            self._run("COMMIT")
        except BaseException:
            self._undo_changes(None)
            raise
