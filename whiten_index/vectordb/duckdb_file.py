"""Connection to a file of DuckDB with its extension ``vss``, and rows of Arrow as it has them."""

import importlib.util
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from whiten_index.artifacts.files import exists, size_of
from whiten_index.corpus.arrow_types import replaced_leaves
from whiten_index.corpus.batches import ID
from whiten_index.errors import ConfigError, DatabaseError, first_line
from whiten_index.vectordb.engine_support import ONE_AT_A_TIME, literal
from whiten_index.vectordb.pushed_table import Ids, Layout, RowsError

# Groups of rows that one batch fills go to the file at once, not by the log.
_GROUP_ROWS = 16_384


@dataclass
class _Opened:
    """A file that this process has open.

    It is opened once: a process loses its locks of a file as soon as it closes it anywhere.
    """

    database: Any
    writes: bool
    cursors: int = 0


# The extension crashes the process if many threads search an index at once.
ONE_SEARCH = threading.Lock()
_OPENED: dict[Path, _Opened] = {}
_LOCK = threading.Lock()


@contextmanager
def opened(file: Path, *, make: bool) -> Iterator[Callable[[], Any]]:
    """Open a file, read-only unless ``make``; yield a function that connects to it.

    Raises:
        DatabaseError: this process has it open already, and one of both writes.
    """
    place = file.resolve()
    with _LOCK:
        found = _OPENED.get(place)
        if found is None:
            found = _OPENED[place] = _Opened(_attach(place, make=make), make)
        elif make:
            raise DatabaseError(f"this process has {file} open; {ONE_AT_A_TIME}")
        found.cursors += 1
    try:
        yield partial(_cursor, found.database)
    finally:
        with _LOCK:
            found.cursors -= 1
            if not found.cursors:
                del _OPENED[place]
                found.database.close()


def _cursor(database: Any) -> Any:
    cursor = database.cursor()
    cursor.execute("USE db; SET hnsw_enable_experimental_persistence = true")
    return cursor


def _attach(file: Path, *, make: bool) -> Any:
    if make and exists(file) and not size_of(file):
        # DuckDB, cut off before it wrote anything, refuses it.
        file.unlink()
    database = duckdb.connect(config={"autoinstall_known_extensions": "false"})
    kind = f"ROW_GROUP_SIZE {_GROUP_ROWS}" if make else "READ_ONLY"
    try:
        # Before the file is opened, whose log may have changes of an index.
        _load_extension(database)
        database.execute(f"ATTACH {literal(str(file))} AS db (TYPE duckdb, {kind})")
    except BaseException:
        database.close()
        raise
    return database


def _load_extension(connection: Any) -> None:
    """Load ``vss`` of the package that brings it, or as the user installed it in DuckDB."""
    package = importlib.util.find_spec("duckdb_extension_vss")
    folders = [] if package is None else package.submodule_search_locations or []
    inside = f"extensions/v{duckdb.__version__}/vss.duckdb_extension"
    found = [file for each in folders if exists(file := Path(each) / inside)]
    try:
        connection.execute(f"LOAD {literal(str(found[0]))}" if found else "LOAD vss")
    except duckdb.Error as error:
        raise ConfigError(
            f"the extension vss of DuckDB {duckdb.__version__} cannot be loaded "
            f"({first_line(error)}); run pip install 'whiten-index[duckdb]', which brings both in "
            "releases that fit, or INSTALL vss in DuckDB"
        ) from None


@contextmanager
def reading_rows(connection: Any, rows: pa.Table) -> Iterator[str]:
    """Yield the name by which statements of a connection read rows."""
    connection.register("pushed_rows", rows)
    try:
        yield "pushed_rows"
    finally:
        connection.unregister("pushed_rows")


def _numbers(leaf: pa.DataType) -> pa.DataType:
    """Return the type of Arrow that holds a plain type, without loss, as DuckDB does."""
    return pa.int64() if pa.types.is_duration(leaf) else leaf


def _stored(leaf: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(leaf) and leaf.tz:
        return pa.timestamp("us", leaf.tz)
    if pa.types.is_decimal256(leaf) and leaf.precision <= 38:
        return pa.decimal128(leaf.precision, leaf.scale)
    return pa.float32() if pa.types.is_float16(leaf) else _numbers(leaf)


def stored_schema(layout: Layout) -> pa.Schema:
    """Return the columns of a table: durations are numbers of their unit."""
    kinds = [pa.field(each.name, replaced_leaves(each.type, _stored)) for each in layout.schema]
    return pa.schema(kinds)


def as_stored(rows: pa.RecordBatch, layout: Layout) -> pa.Table:
    """Return rows of the layout as a table takes them; nothing is copied where types are alike."""
    columns, schema = [], stored_schema(layout)
    for field in schema:
        column = rows[field.name]
        try:
            if column.type != field.type:
                column = column.view(replaced_leaves(column.type, _numbers)).cast(field.type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise RowsError(
                f"column {field.name!r} ({column.type}) holds {first_line(error)}, which DuckDB "
                "cannot keep; leave it out of --keep, or mend the corpus"
            ) from error
        columns.append(column)
    return pa.table(columns, schema=schema)


def from_stored(found: pa.Table, layout: Layout) -> pa.Table:
    """Return rows of a table as the layout has them."""
    columns = [_loaded(found[each.name].combine_chunks(), each.type) for each in layout.schema]
    return pa.table(columns, schema=layout.schema)


def _loaded(column: pa.Array, kind: pa.DataType) -> pa.Array:
    try:
        return column.cast(replaced_leaves(kind, _numbers)).view(kind)
    except pa.ArrowNotImplementedError:
        return pa.array(column.to_pylist(), kind)


def ids_table(ids: Ids, layout: Layout) -> pa.Table:
    """Return ids as a table of one column."""
    return pa.table({ID: pa.array(ids, layout.schema.field(ID).type)})
