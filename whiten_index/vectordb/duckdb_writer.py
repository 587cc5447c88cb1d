"""Writer of tables in a file of DuckDB, with an HNSW index of its extension ``vss``.

A push fills a table ``NAME__pending``. One transaction drops the table before, renames the new one
to ``NAME`` and builds its index, because DuckDB does not rename a table that has one. ``finish``
begins this transaction, so that the index is checked in it, and ``swap`` commits it. Changes of
rows end in the same way: DuckDB never takes deleted rows out of a table with an index, nor out of
the index, and may lose their deletion if a process is killed. So the rows are copied to a new
table, whose index is built in the transaction that changes them.

The comment on a table is its description. The engine takes one process at a time if one of them
writes, so two pushes cannot meet; readers share a file.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from whiten_index.corpus.batches import ID
from whiten_index.errors import ConfigError
from whiten_index.vectordb.database_writer import Find, Hit, Sizes, Stored
from whiten_index.vectordb.duckdb_file import (
    ONE_SEARCH,
    as_stored,
    from_stored,
    ids_table,
    opened,
    reading_rows,
    stored_schema,
)
from whiten_index.vectordb.engine_support import literal, quoted, require_columns
from whiten_index.vectordb.file_options import DISTANCES, DuckOptions
from whiten_index.vectordb.file_writer import FileWriter
from whiten_index.vectordb.pushed_table import Ids, Layout, PushedTable

_TABLE = (
    "SELECT comment FROM duckdb_tables() WHERE database_name = 'db' AND schema_name = 'main' "
    "AND lower(table_name) = lower($1) UNION ALL SELECT NULL FROM duckdb_views() "
    "WHERE database_name = 'db' AND schema_name = 'main' AND lower(view_name) = lower($1)"
)
# Rows of the index, and bytes of its links.
_INDEX = (
    "SELECT count, list_sum([level.allocated_bytes for level in levels_stats]) "
    "FROM pragma_hnsw_index_info() WHERE catalog_name = 'db' AND lower(table_name) = lower($1)"
)
_INDEXES = (
    "SELECT 1 FROM duckdb_indexes() WHERE database_name = 'db' AND schema_name = 'main' "
    "AND lower(index_name) = lower($1)"
)
_BLOCKS = (
    "SELECT count(DISTINCT block_id) * any_value(block_size) FROM pragma_storage_info($1), "
    "pragma_database_size() AS size WHERE persistent AND size.database_name = 'db'"
)


class DuckWriter(FileWriter):
    """One table of a file of DuckDB; see ``DatabaseWriter``."""

    ids_at_once = 10_000
    begin_writing = "BEGIN"
    refusals = (duckdb.DataError, duckdb.IntegrityError)

    def __init__(self, address: str, name: str, options: DuckOptions, *, make: bool = True) -> None:
        self.engine = f"DuckDB {duckdb.__version__}"
        self._options, self._pending_name = options, f"{name}__pending"
        self._index = quoted(f"{name}_vector_idx")
        self._built: Stored | None = None
        self._opened = ExitStack()
        # Whether the table that is changed has an index.
        self._indexed = False
        super().__init__(address, name, options, make=make)

    def _open(self, file: Path, *, make: bool) -> Any:
        connect = self._opened.enter_context(opened(file, make=make))
        # Within the transaction that swaps, the table before is read by another connection.
        self._others = connect()
        return connect()

    def close(self) -> None:
        """Close the file."""
        self._undo()
        self._others.close()
        self._database.close()
        self._opened.close()

    def _find(self, *, pending: bool) -> Stored | None:
        if pending and self._built is not None:
            return self._built
        name, reader = self._pending_name if pending else self._name, self._database
        if self._built is not None:
            reader = self._others
        found = reader.execute(_TABLE, [name]).fetchone()
        if found is None:
            return None
        if (pushed := PushedTable.read(found[0])) is None:
            raise self._not_pushed(f"a table or view {name}")
        return Stored(replace(pushed, name=name), pending, reader)

    def _create(self, made: PushedTable, layout: Layout) -> Stored:
        if layout.dtype != "float32":
            raise ConfigError("DuckDB keeps no float16; leave --dtype out")
        require_columns(layout, "DuckDB")
        self._undo()
        for pending in (False, True):
            self._find(pending=pending)
        name = self._pending_name
        created = Stored(replace(made, name=name), True, self._database)
        with self._transaction():
            self._run(f"DROP TABLE IF EXISTS {quoted(name)}")
            with reading_rows(self._database, stored_schema(layout).empty_table()) as rows:
                self._run(f"CREATE TABLE {quoted(name)} AS FROM {rows}")
            self._describe(created)
        return created

    def _describe(self, stored: Stored) -> None:
        self._run(f"COMMENT ON TABLE {quoted(stored.name)} IS {literal(stored.table.text)}")

    def _take_over(self, found: Stored) -> Stored:
        if found.pending:
            self._undo()
            found = self._require(pending=True)
        return super()._take_over(found)

    def _build(self, held: Stored, layout: Layout) -> None:  # noqa: ARG002
        """Begin the transaction that swaps: within it, the new table has the name and its index."""
        self._undo()
        # Nothing but the table of a push is dropped.
        self._find(pending=False)
        self._run("BEGIN")
        try:
            built = self._replace(held, index=self._options.index == "hnsw")
        except BaseException:
            self._undo_changes(None)
            raise
        self._built = built

    def _replace(self, new: Stored, *, index: bool) -> Stored:
        """Put a table in place of the published one, and index it."""
        name, chosen, metric = quoted(self._name), self._options, new.table.metric
        self._run(f"DROP TABLE IF EXISTS {name}")
        self._run(f"ALTER TABLE {quoted(new.name)} RENAME TO {name}")
        placed = new.described(name=self._name)
        self._describe(placed)
        if index:
            of_graph = f"M = {chosen.m}, M0 = {2 * chosen.m}"
            self._run(
                f"CREATE INDEX {self._index} ON {name} USING HNSW (vector) WITH (metric = "
                f"{literal(metric)}, {of_graph}, ef_construction = {chosen.ef_construction})"
            )
        return placed

    def _publish(self, held: Stored) -> None:  # noqa: ARG002
        self._run("COMMIT")
        self._built = None
        self._checkpoint()

    def _discard(self, held: Stored | None) -> None:  # noqa: ARG002
        self._undo()
        if (found := self._find(pending=True)) is not None:
            self._remove(found)

    def _remove(self, published: Stored) -> None:
        self._undo()
        self._run(f"DROP TABLE {quoted(published.name)}")
        self._checkpoint()

    def _begin_changes(self) -> None:
        self._undo()
        super()._begin_changes()
        self._indexed = self._run(_INDEXES, f"{self._name}_vector_idx").fetchone() is not None
        self._run(f"DROP INDEX IF EXISTS {self._index}")

    def _end_changes(self, changed: Stored) -> None:
        if self._indexed:
            copy = self._require(pending=False).described(name=f"{self._name}__changed")
            self._run(f"CREATE TABLE {quoted(copy.name)} AS FROM {quoted(changed.name)}")
            self._replace(copy, index=True)
        self._run("COMMIT")
        self._checkpoint()

    def _upsert(self, stored: Stored, rows: pa.RecordBatch, layout: Layout) -> None:
        same = " AND ".join(f"old.{name} = new.{name}" for name in layout.key)
        with reading_rows(self._database, as_stored(rows, layout).select(layout.key)) as new:
            self._run(f"DELETE FROM {quoted(stored.name)} AS old USING {new} AS new WHERE {same}")
        self._insert(stored, rows, layout)

    def _insert(self, stored: Stored, rows: pa.RecordBatch, layout: Layout) -> None:
        with reading_rows(self._database, as_stored(rows, layout)) as new:
            self._run(f"INSERT INTO {quoted(stored.name)} FROM {new}")

    def _delete(self, stored: Stored, ids: Ids, layout: Layout) -> None:
        with reading_rows(self._database, ids_table(ids, layout)) as gone:
            self._run(f"DELETE FROM {quoted(stored.name)} WHERE {ID} IN (FROM {gone})")

    def _count(self, stored: Stored) -> int:
        order = f"SELECT count(*) FROM {quoted(stored.name)}"
        return int(stored.handle.execute(order).fetchone()[0])

    def _sizes(self, stored: Stored) -> Sizes:
        (table,) = stored.handle.execute(_BLOCKS, [stored.name]).fetchone()
        rows, links = stored.handle.execute(_INDEX, [stored.name]).fetchone() or (0, 0)
        return Sizes(int(table or 0), int(links) + int(rows) * 4 * stored.table.k)

    def _fetch(self, stored: Stored, ids: Ids, layout: Layout) -> pa.Table:
        with reading_rows(stored.handle, ids_table(ids, layout)) as wanted:
            order = f"FROM {quoted(stored.name)} WHERE {ID} IN (FROM {wanted})"
            return from_stored(stored.handle.execute(order).to_arrow_table(), layout)

    @contextmanager
    def _searching(
        self, stored: Stored, *, exact: bool, effort: Mapping[str, int] | None
    ) -> Iterator[Find]:
        table, reader = stored.table, stored.handle
        distance, most, exactly = DISTANCES[table.metric]
        if exact:
            distance, most = exactly, 0.0
        far = distance.format(f"vector, $1::FLOAT[{table.k}]")
        order = f"SELECT {ID}, {far} FROM {quoted(table.name)} ORDER BY 2 LIMIT $2"
        effort = self._options.usual_effort(table.rows) if effort is None else effort
        settings = {} if exact else effort

        def find(vectors: NDArray[np.float32], top_k: int) -> list[list[Hit]]:
            with nullcontext() if exact else ONE_SEARCH:
                found = [reader.execute(order, [each, top_k]).fetchall() for each in vectors]
            return [[Hit(name, most - far) for name, far in one] for one in found]

        for name, value in settings.items():
            reader.execute(f"SET {name} = {int(value)}")
        try:
            yield find
        finally:
            for name in settings:
                reader.execute(f"RESET {name}")

    def _undo(self) -> None:
        """Roll back the transaction that swaps, if it was begun."""
        if self._built is not None:
            self._built = None
            self._undo_changes(None)

    def _checkpoint(self) -> None:
        """Write the log to the file; the engine does so too when the file is closed."""
        with suppress(duckdb.Error):
            self._run("CHECKPOINT")
