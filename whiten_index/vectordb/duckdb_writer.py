"""Writer of tables in a file of DuckDB, with an HNSW index of its extension ``vss``.

A push fills a table ``NAME__pending``. DuckDB does not rename a table that has an index, so
``finish`` begins a transaction that drops the table before, renames the new one to ``NAME`` and
builds its index. The index is checked in this transaction, and ``swap`` commits it. Changes of rows
end in the same way: DuckDB never takes deleted rows out of an index, and may lose their deletion if
a process is killed. So the changed rows are copied to a new table, which gets a new index.

The comment on a table is its description. The engine takes one process at a time if one of them
writes, so two pushes cannot meet.

The file may be somebody else's. So statements name its tables with their schema and are not in its
search path, where macros may have the names of functions, and connections open no other file.
"""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import duckdb_extension_vss
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from whiten_index.artifacts.atomic import discard, remove_killed, temporary_folder
from whiten_index.artifacts.files import is_file, is_folder, list_folder, resolved
from whiten_index.corpus.arrow_types import replaced_leaves
from whiten_index.corpus.batches import ID
from whiten_index.errors import ConfigError, DatabaseError
from whiten_index.vectordb.database_writer import Find, Hit, Stored
from whiten_index.vectordb.engine_options import Effort
from whiten_index.vectordb.engine_support import literal, quoted, require_no_link
from whiten_index.vectordb.file_options import DISTANCES, DuckOptions
from whiten_index.vectordb.file_writer import FileWriter
from whiten_index.vectordb.pushed_table import Ids, Layout, PushedTable

# The name by which statements read rows that are written.
_ROWS = "rows__pushed"
# A batch fills such groups, which go to the file at once, not by the log.
_GROUP_ROWS = 16_384
_FOUND = (
    "SELECT comment, sql FROM duckdb_tables() WHERE database_name = 'db' AND schema_name = 'main' "
    "AND lower(table_name) = $1 UNION ALL SELECT '', '' FROM duckdb_views() "
    "WHERE database_name = 'db' AND schema_name = 'main' AND lower(view_name) = $1"
)
# The index that a push made on a table.
_ITS_INDEX = (
    "FROM duckdb_indexes() WHERE database_name = 'db' AND schema_name = 'main' AND "
    "lower(table_name) = $1 AND (index_name = $1 || '_vector_idx' AND sql LIKE '%HNSW (vector);')"
)
# What users added to a table of some columns with an index.
_ADDED = (
    "SELECT if(comment IS NULL, 'column ', 'comment on column ') || column_name "
    "FROM duckdb_columns() WHERE database_name = 'db' AND schema_name = 'main' AND "
    "lower(table_name) = $1 AND (comment IS NOT NULL OR NOT list_contains($2, column_name)) "
    f"UNION ALL SELECT 'index ' || index_name {_ITS_INDEX} = FALSE "
    "UNION ALL SELECT 'constraint ' || constraint_text FROM duckdb_constraints() WHERE "
    "database_name = 'db' AND schema_name = 'main' AND lower(table_name) = $1"
)
# The table with an index of the name that a push gives the index of another one.
_NAME_TAKEN = (
    "SELECT table_name FROM duckdb_indexes() WHERE database_name = 'db' AND schema_name = 'main' "
    "AND lower(index_name) = $1 || '_vector_idx' AND lower(table_name) <> $1"
)
# What may compute something, in the definition of a table without its texts and quoted names.
_COMPUTED = re.compile(r"generated always|\b(check|default)\(", re.IGNORECASE)
_QUOTED = re.compile("\"(\"\"|[^\"])*\"|'(''|[^'])*'")
# Rows of an index, and bytes of its links.
_INDEX = (
    "SELECT count, list_sum([level.allocated_bytes for level in levels_stats]) "
    "FROM pragma_hnsw_index_info() WHERE table_name = ?"
)
_BLOCKS = (
    "SELECT count(DISTINCT block_id) * any_value(block_size) FROM pragma_storage_info(?), "
    "pragma_database_size() AS size WHERE persistent AND size.database_name = 'db'"
)
# The extension crashes the process if many threads search an index at once.
_ONE_SEARCH = threading.Lock()
# What one of them sets is refused to the others once the file is open.
_CONNECTING = threading.Lock()


class DuckWriter(FileWriter):
    """One table of a file of DuckDB; see ``DatabaseWriter``."""

    ids_at_once = 10_000
    begin_writing = "BEGIN"
    refusals = (duckdb.DataError, duckdb.IntegrityError, pa.ArrowInvalid)

    def __init__(self, address: str, name: str, options: DuckOptions, *, make: bool) -> None:
        self.engine, self._options = f"DuckDB {duckdb.__version__}", options
        # The new table in the transaction that swaps, on another connection.
        self._built: Stored | None = None
        super().__init__(address, name, options, make=make)

    def _open(self, file: Path, *, make: bool) -> Any:
        return connect(file, make=make)

    def close(self) -> None:
        """Close the file."""
        self._undo_swap()
        self._database.close()

    def _find(self, *, pending: bool) -> Stored | None:
        if pending and self._built is not None:
            return self._built
        name = f"{self._name}__pending" if pending else self._name
        found = self._run(_FOUND, name).fetchone()
        if found is None:
            return None
        comment, definition = found
        pushed = PushedTable.read(comment)
        if pushed is None:
            raise self._not_pushed(f"a table or view {name}")
        if _COMPUTED.search(_QUOTED.sub("", definition)):
            raise self._not_pushed(f"a default, check or generated column in table {name}")
        return Stored(replace(pushed, name=name), pending, self._database)

    def _create(self, made: PushedTable, layout: Layout) -> Stored:
        if layout.dtype != "float32":
            raise ConfigError("DuckDB keeps no float16; leave --dtype out")
        created = Stored(replace(made, name=f"{self._name}__pending"), True, self._database)
        with self._transaction():
            self._find(pending=True)
            self._database.register(_ROWS, _stored_schema(layout).empty_table())
            self._run(f"CREATE OR REPLACE TABLE {_table(created.name)} AS FROM {_ROWS}")
            self._describe(created)
        return created

    def _describe(self, stored: Stored) -> None:
        text = literal(stored.table.text)
        stored.handle.execute(f"COMMENT ON TABLE {_table(stored.name)} IS {text}")

    def _build(self, held: Stored, layout: Layout) -> None:  # noqa: ARG002
        """Begin the transaction that swaps: within it, the new table has the name and its index."""
        swapping = replace(held, handle=_indexing(self._database.cursor()))
        swapping.handle.execute("BEGIN")
        self._built = self._put(swapping)

    def _put(self, new: Stored) -> Stored:
        """Put a table in place of the published one, and index it."""
        name, chosen, metric = _table(self._name), self._options, literal(new.table.metric)
        placed, run = new.described(name=self._name), new.handle.execute
        run(f"DROP TABLE IF EXISTS {name}")
        run(f"ALTER TABLE {_table(new.name)} RENAME TO {quoted(self._name)}")
        self._describe(placed)
        if chosen.index == "hnsw":
            graph = f"M = {chosen.m}, M0 = {2 * chosen.m}"
            run(
                f"CREATE INDEX {self._name}_vector_idx ON {name} USING HNSW (vector) WITH "
                f"(metric = {metric}, {graph}, ef_construction = {chosen.ef_construction})"
            )
        return placed

    def _publish(self, held: Stored) -> None:  # noqa: ARG002
        assert self._built is not None
        self._built.handle.execute("COMMIT")
        self._undo_swap()
        self.checkpoint()

    def _undo_swap(self) -> None:
        """Close the connection that swaps, which rolls back what it did not commit."""
        if self._built is not None:
            self._built.handle.close()
            self._built = None

    def _discard(self, held: Stored | None) -> None:  # noqa: ARG002
        self._undo_swap()
        # A table of that name that no push made stays.
        with suppress(DatabaseError):
            if (found := self._find(pending=True)) is not None:
                self._run(f"DROP TABLE {_table(found.name)}")

    def _remove(self, published: Stored) -> None:
        self._run(f"DROP TABLE {_table(published.name)}")
        self.checkpoint()

    def _added(self, published: Stored) -> list[str]:
        found = self._run(_ADDED, published.name, list(published.table.columns)).fetchall()
        return [name for (name,) in found]

    def _require_replaceable(self) -> Stored | None:
        taken = self._run(_NAME_TAKEN, self._name).fetchone()
        if taken and self._options.index == "hnsw":
            raise DatabaseError(
                f"{self.target}: there is an index {self._name}_vector_idx of table {taken[0]}, "
                "whose name its own would have; drop that one, or give --option index=none"
            )
        return super()._require_replaceable()

    def _begin_changes(self) -> None:
        super()._begin_changes()
        if self._options.index == "hnsw":
            # They end with a new table.
            self._require_replaceable()
        if self._run(f"SELECT 1 {_ITS_INDEX}", self._name).fetchone():
            self._run(f"DROP INDEX db.main.{self._name}_vector_idx")

    def _end_changes(self, changed: Stored) -> None:
        if self._options.index == "hnsw":
            copy = self._require(pending=False).described(name=f"{self._name}__changed")
            self._run(f"CREATE TABLE {_table(copy.name)} AS FROM {_table(changed.name)}")
            self._put(copy)
        self._run("COMMIT")
        self.checkpoint()

    def checkpoint(self) -> None:
        """Write the log to the file."""
        self._run("CHECKPOINT db")

    def _upsert(self, stored: Stored, rows: pa.RecordBatch, layout: Layout) -> None:
        same = " AND ".join(f"old.{name} = new.{name}" for name in layout.key)
        self._database.register(_ROWS, pa.Table.from_batches([rows]).select(layout.key))
        self._run(f"DELETE FROM {_table(stored.name)} AS old USING {_ROWS} AS new WHERE {same}")
        self._insert(stored, rows, layout)

    def _insert(self, stored: Stored, rows: pa.RecordBatch, layout: Layout) -> None:
        self._database.register(_ROWS, pa.Table.from_batches([rows]).cast(_stored_schema(layout)))
        self._run(f"INSERT INTO {_table(stored.name)} BY NAME FROM {_ROWS}")

    def _delete(self, stored: Stored, ids: Ids, layout: Layout) -> None:  # noqa: ARG002
        self._run(f"DELETE FROM {_table(stored.name)} WHERE {ID} IN (SELECT unnest(?))", list(ids))

    def _count(self, stored: Stored) -> int:
        order = f"SELECT count(*) FROM {_table(stored.name)}"
        return int(stored.handle.execute(order).fetchone()[0])

    def _sizes(self, stored: Stored) -> dict[str, int]:
        (table,) = self._run(_BLOCKS, _table(stored.name)).fetchone()
        rows, links = self._run(_INDEX, stored.name).fetchone() or (0, 0)
        index = int(links) + int(rows) * 4 * stored.table.k
        return {"table": int(table or 0), "index": index}

    def _fetch(self, stored: Stored, ids: Ids, layout: Layout) -> pa.Table:
        names = ", ".join(map(quoted, layout.schema.names))
        order = f"SELECT {names} FROM {_table(stored.name)} WHERE {ID} IN (SELECT unnest(?))"
        found = stored.handle.execute(order, [list(ids)]).to_arrow_table()
        pairs = zip(found.columns, layout.schema.types, strict=True)
        columns = [_loaded(column.combine_chunks(), kind) for column, kind in pairs]
        return pa.table(columns, schema=layout.schema)

    @contextmanager
    def _searching(self, stored: Stored, *, exact: bool, effort: Effort | None) -> Iterator[Find]:
        table, reader = stored.table, stored.handle
        indexed, most, exactly = DISTANCES[table.metric]
        distance, most = (exactly, 0.0) if exact else (indexed, most)
        far = distance.format(f"vector, $1::FLOAT[{table.k}]")
        order = f"SELECT {ID}, {far} FROM {_table(table.name)} ORDER BY 2 LIMIT $2"
        settings = self._options.usual_effort(table.rows) if effort is None else effort

        def find(vectors: NDArray[np.float32], top_k: int) -> list[list[Hit]]:
            with _ONE_SEARCH:
                found = [reader.execute(order, [each, top_k]).fetchall() for each in vectors]
            return [[Hit(name, most - far) for name, far in one] for one in found]

        for name, value in settings.items():
            reader.execute(f"SET {name} = {int(value)}")
        yield find


def connect(file: Path, *, make: bool) -> Any:
    """Return a connection to a file, ``db``, with the extension; read-only unless ``make``."""
    (folder,) = duckdb_extension_vss.__path__
    extension = Path(folder) / f"extensions/v{duckdb.__version__}/vss.duckdb_extension"
    if not is_file(extension):
        raise ConfigError(
            f"the extension vss of DuckDB {duckdb.__version__} is not installed; run pip install "
            "'whiten-index[duckdb]', which brings both in releases that fit"
        )
    spilled = Path(f"{resolved(file)}.tmp")
    require_no_link(spilled)
    if make:
        _make(resolved(file))
    with _CONNECTING:
        return _connected(file, spilled, extension, make=make)


def _connected(file: Path, spilled: Path, extension: Path, *, make: bool) -> Any:
    # Connections of one process share the file by this name, and an index in memory.
    database = duckdb.connect(f":memory:{file}")
    # As for a file that is opened by itself; for memory, DuckDB takes the working folder.
    ((before,),) = database.execute("SELECT current_setting('temp_directory')").fetchall()
    if before != str(spilled):
        database.execute(f"SET temp_directory = {literal(str(spilled))}")
    # Before the file is opened, whose log may have changes of an index.
    database.execute(f"LOAD {literal(str(extension))}")
    kind = f"ROW_GROUP_SIZE {_GROUP_ROWS}" if make else "READ_ONLY"
    database.execute(f"ATTACH IF NOT EXISTS {literal(str(file))} AS db (TYPE duckdb, {kind})")
    database.execute("SET enable_external_access = false")
    if make and before != str(spilled) and is_folder(spilled):
        # Of a push that was killed: nobody else has the file open.
        for each in list_folder(spilled, "duckdb_temp_*"):
            discard(each)
    return _indexing(database)


def _make(file: Path) -> None:
    """Put a new file in its place whole: killed while it makes one, DuckDB cannot open it."""
    remove_killed(file.parent, file)
    if not is_file(file):
        with temporary_folder(file) as folder:
            new = folder / file.name
            duckdb.connect(new).close()
            # Another push may have made it meanwhile.
            with suppress(FileExistsError):
                file.hardlink_to(new)


def _indexing(connection: Any) -> Any:
    """Let a connection write indexes to the file."""
    connection.execute("SET hnsw_enable_experimental_persistence = true")
    return connection


def _table(name: str) -> str:
    """Return how statements name a table of the file."""
    return f"db.main.{quoted(name)}"


def _stored_schema(layout: Layout) -> pa.Schema:
    """Return the columns of a table, of types whose values DuckDB keeps as they are.

    It has no float16, of durations it loses the unit, and times with a zone it cuts to
    microseconds; Arrow refuses to.
    """

    def stored(leaf: pa.DataType) -> pa.DataType:
        if pa.types.is_duration(leaf):
            return pa.int64()
        if pa.types.is_timestamp(leaf) and leaf.tz:
            return pa.timestamp("us", leaf.tz)
        return pa.float32() if pa.types.is_float16(leaf) else leaf

    fields = [pa.field(each.name, replaced_leaves(each.type, stored)) for each in layout.schema]
    return pa.schema(fields)


def _loaded(column: pa.Array, kind: pa.DataType) -> pa.Array:
    try:
        return column.cast(kind)
    except pa.ArrowNotImplementedError:
        # Arrow casts nothing to a type of nulls alone.
        return pa.array(column.to_pylist(), kind)
