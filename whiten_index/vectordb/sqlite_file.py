"""Connection to a file of SQLite with ``sqlite-vec``, and values of Arrow as it has them."""

import base64
import json
from pathlib import Path
from typing import Any

import apsw
import pyarrow as pa
import sqlite_vec

from whiten_index.errors import ConfigError
from whiten_index.vectordb.engine_support import quoted, require_columns
from whiten_index.vectordb.file_options import CHUNK_ROWS, CODES, SqliteOptions
from whiten_index.vectordb.json_rows import is_bytes, json_values
from whiten_index.vectordb.pushed_table import VECTOR, Layout

_CACHE_KILOBYTES = 65_536
# Columns of the views beside those of rows.
_OWN = ("rowid", "distance", "k", "code")
# Bytes of the tables behind a view: 0 of rows, keys and vectors, 1 of codes.
SIZES = (
    "SELECT tbl_name LIKE '%\\_chunks01' ESCAPE '\\', sum(pgsize) FROM dbstat "
    "JOIN sqlite_schema AS made ON made.name = dbstat.name "
    "WHERE aggregate = TRUE AND substr(tbl_name, 1, ?) = ? GROUP BY 1"
)


def connect(file: Path, options: SqliteOptions, *, make: bool) -> tuple[Any, str]:
    """Return a connection to a file, read-only unless ``make``, and the file's mode before.

    A file that is written is in mode WAL, so that readers go on.
    """
    flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
    database = apsw.Connection(str(file), flags=flags if make else apsw.SQLITE_OPEN_READONLY)
    try:
        database.set_busy_timeout(1000 * options.lock_timeout)
        database.enable_load_extension(True)
        database.load_extension(sqlite_vec.loadable_path())
        database.enable_load_extension(False)
        database.execute(f"PRAGMA cache_size = -{_CACHE_KILOBYTES}")
        mode = str(database.execute("PRAGMA journal_mode").get)
        if make:
            database.execute("PRAGMA journal_mode = WAL")
    except BaseException:
        database.close()
        raise
    return database, mode


def definitions(name: str, layout: Layout, code: str) -> list[str]:
    """Return statements that make rows, their vectors with a code, and the view of a name."""
    if layout.dtype != "float32":
        raise ConfigError(
            "sqlite-vec keeps no float16; leave --dtype out, and give --option code=bit for "
            "faster searches"
        )
    if layout.metric != "cosine":
        raise ConfigError(
            "sqlite-vec has no dot product; leave --metric out, or push an index with --similarity "
            "dot to another database"
        )
    if code not in SqliteOptions.codes(layout.k):
        raise ConfigError(
            f"--option code={code} needs vectors of 8, 16, 24, … numbers, and these have "
            f"{layout.k}; give --k, or leave it out"
        )
    require_columns(layout, "SQLite", _OWN)
    fields = [each for each in layout.schema if each.name != VECTOR]
    columns = ", ".join(f"{quoted(each.name)} {_sql_type(each.type)}" for each in fields)
    coded = code in CODES
    also = f", code {code}[{layout.k}]{' distance_metric=cosine' * (code == 'int8')}" * coded
    shown = ", ".join(f"r.{quoted(each.name)}" for each in fields)
    return [
        f'CREATE TABLE "{name}_rows" (rowid INTEGER PRIMARY KEY, {columns})',
        f'CREATE VIRTUAL TABLE "{name}_vector" USING vec0'
        f"(vector float[{layout.k}] distance_metric=cosine{also})",
        # A search takes conditions on the rowid of vec0 alone.
        f'CREATE VIEW "{name}" AS SELECT v.rowid, {shown}, v.vector, v.distance, v.k'
        f'{", v.code" * coded} FROM "{name}_vector" AS v JOIN "{name}_rows" AS r '
        "ON r.rowid = v.rowid",
    ]


def insert_vectors(name: str, code: str, row: str, vector: str) -> str:
    """Return the statement that adds a vector, with its code, in SQL."""
    coded = code in CODES
    return (
        f'INSERT INTO "{name}_vector" (rowid, vector{", code" * coded}) '
        f"SELECT {row}, {vector}{f', {CODES[code][0].format(vector)}' if coded else ''}"
    )


def repack(database: Any, name: str, code: str) -> None:
    """Write vectors anew if a third of the places in chunks is empty: ``vec0`` fills none again."""
    chunks = database.execute(f'SELECT count(*) FROM "{name}_vector_chunks"').get
    rows = database.execute(f'SELECT count(*) FROM "{name}_rows"').get
    if chunks * CHUNK_ROWS <= 1.5 * rows + CHUNK_ROWS:
        return
    made = database.execute("SELECT sql FROM sqlite_schema WHERE name = ?", (f"{name}_vector",)).get
    database.execute(f'CREATE TEMP TABLE moved AS SELECT rowid AS row, vector FROM "{name}_vector"')
    database.execute(f'DROP TABLE "{name}_vector"')
    database.execute(made)
    database.execute(f"{insert_vectors(name, code, 'row', 'vector')} FROM temp.moved")
    database.execute("DROP TABLE temp.moved")


def _sql_type(kind: pa.DataType) -> str:
    """Return the type of a column: INTEGER, REAL, BLOB, or TEXT, also for what is JSON."""
    kind = _value_type(kind)
    if pa.types.is_boolean(kind) or pa.types.is_time(kind) or pa.types.is_duration(kind):
        return "INTEGER"
    if pa.types.is_integer(kind):
        # SQLite has no numbers from 2^63 on.
        return "TEXT" if pa.types.is_uint64(kind) else "INTEGER"
    if pa.types.is_floating(kind):
        return "REAL"
    return "BLOB" if is_bytes(kind) else "TEXT"


def written_values(rows: pa.RecordBatch, name: str) -> list[Any]:
    """Return the values of a column as SQLite takes them."""
    kind = _value_type(rows.schema.field(name).type)
    if is_bytes(kind):
        found: list[Any] = rows[name].to_pylist()
        return found
    values = json_values(rows, name)
    if pa.types.is_nested(kind):
        return [None if each is None else json.dumps(each, ensure_ascii=False) for each in values]
    return [each and str(each) for each in values] if pa.types.is_uint64(kind) else values


def read_value(value: Any, kind: pa.DataType) -> Any:
    """Return the value of JSON for one that SQLite has, of a type of Arrow."""
    kind = _value_type(kind)
    if value is None:
        return None
    if is_bytes(kind):
        return base64.b64encode(value).decode()
    if pa.types.is_nested(kind):
        return json.loads(value)
    if pa.types.is_boolean(kind):
        return bool(value)
    return int(value) if pa.types.is_uint64(kind) else value


def _value_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind
