"""Writer of tables in a file of SQLite, with vectors in ``vec0`` of its extension ``sqlite-vec``.

``vec0`` keeps chunks of vectors, and of their bits, that searches read whole. A push fills a view
``NAME__`` and eight hexadecimal digits, and behind it ``…_rows``, a table, and ``…_vector``. Users
query the views ``NAME``, of rows with their vectors, and ``NAME_rows``, of rows alone. A swap
replaces both in one transaction. Only the second has rows whose vector is zeros, by which
``vec0`` would lose others.

Descriptions are in a table of the file. The lease in it is read within each transaction. While
rows are written, readers go on (mode WAL); at the end the file has the mode it had before. A note
among the descriptions says so meanwhile, for the push after one that is killed.
"""

import json
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import apsw
import numpy as np
import pyarrow as pa
import sqlite_vec
from numpy.typing import NDArray

from whiten_index.artifacts.limits import LINE_BYTES
from whiten_index.corpus.batches import ID
from whiten_index.errors import ConfigError
from whiten_index.vectordb.database_writer import Find, Hit, Stored
from whiten_index.vectordb.engine_options import Effort
from whiten_index.vectordb.engine_support import quoted
from whiten_index.vectordb.file_options import SqliteOptions
from whiten_index.vectordb.file_writer import FileWriter
from whiten_index.vectordb.json_rows import json_values, table_of
from whiten_index.vectordb.pushed_table import VECTOR, Ids, Layout, PushedTable, vectors_of

_DESCRIPTIONS = "whiten_index_tables"
_DESCRIPTIONS_MADE = f"CREATE TABLE {_DESCRIPTIONS} (name, pending, description)"
_DESCRIBED = f"FROM {_DESCRIPTIONS} WHERE name = ? AND pending = ?"
# In place of a table's name and state: the file is in the mode WAL for a push alone.
_NOTE = ("", "mode")
_CACHE_KILOBYTES = 65_536
# Rows of a chunk of vectors in vec0.
_CHUNK_ROWS = 1024
# The end of a view.
_JOINED = "FROM {0}_vector AS v JOIN {0}_rows AS r ON r.rowid = v.rowid"
# Indexes and triggers but one, of a table and of views, and two views that were replaced.
_MADE_ON = (
    "SELECT type, name FROM sqlite_schema WHERE type IN ('index', 'trigger') AND name <> ?1 AND "
    "lower(tbl_name) IN (?2, ?3, ?4, ?5) OR lower(name) IN (?4, ?5) AND sql NOT IN (?6, ?7)"
)
# Bytes of the tables behind a view: 0 of rows, keys and vectors, 1 of codes.
_SIZES = (
    "SELECT tbl_name LIKE '%\\_chunks01' ESCAPE '\\', sum(pgsize) FROM dbstat "
    "JOIN sqlite_schema AS made ON made.name = dbstat.name "
    "WHERE aggregate = TRUE AND substr(tbl_name, 1, ?) = ? GROUP BY 1"
)


class SqliteWriter(FileWriter):
    """One table of a file of SQLite; see ``DatabaseWriter``."""

    # The views have columns of their own.
    column_form = r"(?i:(?!(?:rowid|distance|k|code)$)[^\0]+)"
    begin_writing = "BEGIN IMMEDIATE"
    refusals = (apsw.ConstraintError, apsw.TooBigError, apsw.MismatchError)

    def __init__(self, address: str, name: str, options: SqliteOptions, *, make: bool) -> None:
        # Whether the file has the table of descriptions.
        self._options, self._describes = options, False
        self.engine = f"SQLite {apsw.sqlite_lib_version()}, sqlite-vec {sqlite_vec.__version__}"
        super().__init__(address, name, options, make=make)

    def _open(self, file: Path, *, make: bool) -> Any:
        database = connect(file, make=make)
        database.set_busy_timeout(1000 * self._options.lock_timeout)
        return database

    def _log_ahead(self) -> None:
        """Let readers go on while rows are written."""
        if self._run("PRAGMA journal_mode").get != "wal":
            with self._transaction():
                self._run(f"DELETE {_DESCRIBED}", *_NOTE)
                self._run(f"INSERT INTO {_DESCRIPTIONS} VALUES (?, ?, NULL)", *_NOTE)
            self._run("PRAGMA journal_mode = WAL")
        self._describes = True

    def close(self) -> None:
        """Close the file."""
        with suppress(apsw.Error):
            self._database.set_busy_timeout(0)
            if self._describes and self._run(f"SELECT count(*) {_DESCRIBED}", *_NOTE).get:
                # Refused while others read.
                self._run("PRAGMA journal_mode = DELETE")
                self._run(f"DELETE {_DESCRIBED}", *_NOTE)
        self._database.close()

    def _find(self, *, pending: bool) -> Stored | None:
        views = (self._name, f"{self._name}_rows")
        order = "SELECT lower(name), sql FROM sqlite_schema WHERE lower(name) IN (?, ?, ?)"
        there = dict(self._run(order, _DESCRIPTIONS, *views))
        pushed = None
        if there.get(_DESCRIPTIONS, _DESCRIPTIONS_MADE) != _DESCRIPTIONS_MADE:
            raise self._not_pushed(f"a table or view {_DESCRIPTIONS}")
        self._describes = _DESCRIPTIONS in there
        if self._describes:
            # Somebody else's may be of any type and length.
            fits = f"typeof(description) = 'text' AND octet_length(description) <= {LINE_BYTES}"
            order = f"SELECT iif({fits}, description, '') {_DESCRIBED} LIMIT 1"
            pushed = PushedTable.read(self._run(order, self._name, pending).get)
        form = f"{self._name}__[0-9a-f]{{8}}"
        if pushed is None or not re.fullmatch(form, pushed.name) or self._is_gone(pushed.name):
            if not pending and (taken := there.keys() & {*views}):
                raise self._not_pushed(f"a table or view {min(taken)}")
            return None
        if not self._is_whole(pushed.name):
            raise self._not_pushed(f"tables or a view {pushed.name}")
        order = "SELECT count(*) FROM pragma_table_info(?) WHERE name = 'code'"
        return Stored(pushed, pending, bool(self._run(order, pushed.name).get))

    def _is_gone(self, name: str) -> bool:
        """Return whether users dropped a view and its tables."""
        order = "SELECT count(*) FROM sqlite_schema WHERE name IN (?, ?, ?)"
        return not self._run(order, name, f"{name}_rows", f"{name}_vector").get

    def _is_whole(self, name: str) -> bool:
        """Return whether a view and its tables are such as a push makes: others may have no end."""
        order = (
            "SELECT count(*) FROM sqlite_schema AS t WHERE type = 'table' AND name IN (?, ?) AND "
            # Generated columns, whose values may be of any length.
            "NOT EXISTS (SELECT 1 FROM pragma_table_xinfo(t.name) WHERE hidden > 1)"
        )
        if self._run(order, f"{name}_rows", f"{name}_vector").get != 2:
            return False
        order = "SELECT sql FROM sqlite_schema WHERE type = 'view' AND name = ?"
        kept, joined = r'(, r\."(""|[^"])*")*', re.escape(_JOINED.format(name))
        own = rf"{kept}, v\.vector, v\.distance, v\.k(, v\.code)? {joined}"
        view = str(self._run(order, name).get)
        return bool(re.fullmatch(rf"CREATE VIEW {name} AS SELECT v\.rowid{own}", view))

    def _create(self, made: PushedTable, layout: Layout) -> Stored:
        name, coded = f"{self._name}__{secrets.token_hex(4)}", self._options.code == "bit"
        orders = definitions(name, layout, coded=coded)
        created = Stored(replace(made, name=name), True, coded)
        with self._transaction():
            self._find(pending=False)
            self._run(_DESCRIPTIONS_MADE.replace("TABLE", "TABLE IF NOT EXISTS"))
        self._log_ahead()
        with self._transaction():
            self._drop(self._find(pending=True))
            for order in orders:
                self._run(order)
            self._describe(created)
        return created

    def _describe(self, stored: Stored) -> None:
        self._forget(stored)
        order = f"INSERT INTO {_DESCRIPTIONS} VALUES (?, ?, ?)"
        self._run(order, self._name, stored.pending, stored.table.text)

    def _forget(self, stored: Stored) -> None:
        self._run(f"DELETE {_DESCRIBED}", self._name, stored.pending)

    def _has_lease(self, stored: Stored) -> bool:
        found = self._find(pending=stored.pending)
        one, two = (each and (each.name, each.table.lease) for each in (found, stored))
        return one == two

    def _take_over(self, found: Stored) -> Stored:
        self._log_ahead()
        return super()._take_over(found)

    def _begin_changes(self) -> None:
        if self._find(pending=False) is not None:
            self._log_ahead()
        super()._begin_changes()

    def _build(self, held: Stored, layout: Layout) -> None:
        name, key = held.name, ", ".join(layout.key)
        with self._transaction(held):
            self._run(f"CREATE UNIQUE INDEX IF NOT EXISTS {name}_key ON {name}_rows ({key})")

    def _publish(self, held: Stored) -> None:
        with self._transaction(held):
            self._drop(self._require_replaceable())
            for order in self._views(held.name):
                self._run(order)
            self._forget(held)
            self._describe(replace(held, pending=False))

    def _views(self, name: str) -> list[str]:
        """Return statements that make what users query."""
        return [
            f"CREATE VIEW {quoted(self._name + end)} AS SELECT * FROM {name}{end}"
            for end in ("", "_rows")
        ]

    def _added(self, published: Stored) -> list[str]:
        name, own = published.name, {"rowid", *published.table.columns}
        columns = self._run("SELECT name FROM pragma_table_info(?)", f"{name}_rows")
        added = [f"column {each}" for (each,) in columns if each not in own]
        views = (name, self._name, f"{self._name}_rows")
        given = (f"{name}_key", f"{name}_rows", *views, *self._views(name))
        found = self._run(_MADE_ON, *given)
        return added + [f"{kind} {each}" for kind, each in found]

    def _drop(self, stored: Stored | None) -> None:
        """Drop a table: its description, its views, and what is behind them."""
        if stored is None:
            return
        self._forget(stored)
        views = [] if stored.pending else [quoted(self._name), quoted(f"{self._name}_rows")]
        for view in (*views, stored.name):
            self._run(f"DROP VIEW IF EXISTS {view}")
        for end in ("_vector", "_rows"):
            self._run(f"DROP TABLE IF EXISTS {stored.name}{end}")

    def _discard(self, held: Stored | None) -> None:
        with self._transaction():
            if held is None or self._has_lease(held):
                self._drop(self._find(pending=True))
        with self._transaction():
            if (published := self._find(pending=False)) is not None:
                # Users may have dropped them.
                for order in self._views(published.name):
                    self._run(order.replace("VIEW", "VIEW IF NOT EXISTS", 1))

    def _remove(self, published: Stored) -> None:
        with self._transaction():
            self._drop(published)

    def _end_changes(self, changed: Stored) -> None:
        self._repack(changed)
        self._run("COMMIT")

    def _repack(self, stored: Stored) -> None:
        """Rewrite the vectors if a third of the chunks is empty: vec0 fills no place again."""
        name = f"{stored.name}_vector"
        chunks = self._run(f"SELECT count(*) FROM {name}_chunks").get
        if chunks * _CHUNK_ROWS <= 1.5 * self._count(stored) + _CHUNK_ROWS:
            return
        made = self._run("SELECT sql FROM sqlite_schema WHERE name = ?", name).get
        self._run(f"CREATE TEMP TABLE moved AS SELECT rowid AS row, vector FROM {name}")
        self._run(f"DROP TABLE {name}")
        self._run(made)
        again = insert_vectors(stored.name, "row", "vector", coded=stored.handle)
        self._run(f"{again} FROM temp.moved")
        self._run("DROP TABLE temp.moved")

    def _upsert(self, stored: Stored, rows: pa.RecordBatch, layout: Layout) -> None:
        keys = zip(*(rows[name].to_pylist() for name in layout.key), strict=True)
        self._delete_keys(stored, layout.key, list(keys))
        self._insert(stored, rows, layout)

    def _delete(self, stored: Stored, ids: Ids, layout: Layout) -> None:  # noqa: ARG002
        self._delete_keys(stored, (ID,), [(each,) for each in ids])

    def _delete_keys(
        self, stored: Stored, names: tuple[str, ...], keys: list[tuple[Any, ...]]
    ) -> None:
        same = " AND ".join(f"{name} = ?" for name in names)
        order = f"SELECT rowid FROM {stored.name}_rows WHERE {same}"
        # vec0 reads all rows for any other condition than its rowid.
        gone = self._database.executemany(order, keys).fetchall()
        for end in ("_vector", "_rows"):
            self._database.executemany(f"DELETE FROM {stored.name}{end} WHERE rowid = ?", gone)

    def _insert(self, stored: Stored, rows: pa.RecordBatch, layout: Layout) -> None:
        vectors = vectors_of(rows).astype("<f4", copy=False)
        first = self._run(f"SELECT coalesce(max(rowid), 0) + 1 FROM {stored.name}_rows").get
        own = [name for name in layout.schema.names if name != VECTOR]
        columns = [map(_to_sql, json_values(rows, name)) for name in own]
        names = ["rowid", *map(quoted, own)]
        slots = ", ".join("?" * len(names))
        numbered = zip(range(first, first + len(rows)), *columns, strict=True)
        self._database.executemany(
            f"INSERT INTO {stored.name}_rows ({', '.join(names)}) VALUES ({slots})", numbered
        )
        shown = vectors.any(axis=1)
        packed = vectors[shown].view(f"V{4 * layout.k}").ravel().tolist()
        self._database.executemany(
            insert_vectors(stored.name, "?1", "?2", coded=stored.handle),
            zip((first + np.flatnonzero(shown)).tolist(), packed, strict=True),
        )

    def _count(self, stored: Stored) -> int:
        return int(self._run(f"SELECT count(*) FROM {stored.name}_rows").get)

    def _sizes(self, stored: Stored) -> dict[str, int]:
        sizes = dict(self._run(_SIZES, len(stored.name), stored.name).fetchall())
        return {"table": int(sizes.get(0, 0)), "index": int(sizes.get(1, 0))}

    def _fetch(self, stored: Stored, ids: Ids, layout: Layout) -> pa.Table:
        fields = [each for each in layout.schema if each.name != VECTOR]
        shown = ", ".join(f"r.{quoted(each.name)}" for each in fields)
        slots = ", ".join("?" * len(ids))
        order = (
            f"SELECT {shown}, v.vector FROM {stored.name}_rows AS r LEFT JOIN "
            f"{stored.name}_vector AS v ON v.rowid = r.rowid WHERE r.id IN ({slots})"
        )
        objects, numbers = [], bytearray()
        for *values, vector in self._run(order, *ids):
            pairs = zip(fields, values, strict=True)
            objects.append({each.name: _from_sql(value, each.type) for each, value in pairs})
            numbers += vector or bytes(4 * layout.k)
        vectors = np.frombuffer(numbers, dtype="<f4").reshape(-1, layout.k)
        return table_of(objects, vectors, layout)

    @contextmanager
    def _searching(self, stored: Stored, *, exact: bool, effort: Effort | None) -> Iterator[Find]:
        options = SqliteOptions(code="bit" if stored.handle and not exact else "float32")
        settings = options.usual_effort(stored.table.rows) if effort is None else effort
        order = options.search_sql(stored.name)

        def find(vectors: NDArray[np.float32], top_k: int) -> list[list[Hit]]:
            given = {"k": top_k, "candidates": max(top_k, settings.get("candidates", 0))}
            found = [
                self._database.execute(order, {"query": each.data, **given}).fetchall()
                for each in np.ascontiguousarray(vectors, "<f4")
            ]
            # A query of zeros has no distances.
            return [[Hit(name, 1 - far) for name, far in one if far is not None] for one in found]

        yield find


def connect(file: Path, *, make: bool) -> Any:
    """Return a connection to a file with the extension, read-only unless ``make``."""
    flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
    database = apsw.Connection(str(file), flags=flags if make else apsw.SQLITE_OPEN_READONLY)
    database.enable_load_extension(True)
    database.load_extension(sqlite_vec.loadable_path())
    database.enable_load_extension(False)
    # The file may be somebody else's.
    database.config(apsw.SQLITE_DBCONFIG_ENABLE_TRIGGER, 0)
    database.execute(f"PRAGMA cache_size = -{_CACHE_KILOBYTES}")
    return database


def definitions(name: str, layout: Layout, *, coded: bool) -> list[str]:
    """Return statements that make rows, their vectors, with bits if ``coded``, and their view."""
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
    if coded and layout.k % 8:
        raise ConfigError(
            "--option code=bit needs vectors of 8, 16, 24, … numbers, and these have "
            f"{layout.k}; give --k, or leave it out"
        )
    kept = [quoted(each) for each in layout.schema.names if each != VECTOR]
    code = f", code bit[{layout.k}]" * coded
    shown = [*(f"r.{each}" for each in kept), "v.vector", "v.distance", "v.k", *["v.code"] * coded]
    return [
        f"CREATE TABLE {name}_rows (rowid INTEGER PRIMARY KEY, {', '.join(kept)})",
        f"CREATE VIRTUAL TABLE {name}_vector USING vec0"
        f"(vector float[{layout.k}] distance_metric=cosine{code})",
        # A search takes conditions on the rowid of vec0 alone.
        f"CREATE VIEW {name} AS SELECT v.rowid, {', '.join(shown)} {_JOINED.format(name)}",
    ]


def insert_vectors(name: str, row: str, vector: str, *, coded: bool) -> str:
    """Return the statement that adds a vector, with its bits if ``coded``, in SQL."""
    columns, bits = (", code", f", vec_quantize_binary({vector})") if coded else ("", "")
    return f"INSERT INTO {name}_vector (rowid, vector{columns}) SELECT {row}, {vector}{bits}"


def _to_sql(value: Any) -> Any:
    """Return a value of JSON as SQLite takes it, which has no nested ones, and 64 bits signed."""
    nested = isinstance(value, (list, dict)) or (isinstance(value, int) and value >= 1 << 63)
    return json.dumps(value, ensure_ascii=False) if nested else value


def _from_sql(value: Any, kind: pa.DataType) -> Any:
    """Return the value of JSON that SQLite has in place of one of a type of Arrow."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if value is not None and pa.types.is_boolean(kind):
        return bool(value)
    nested = pa.types.is_nested(kind) or pa.types.is_integer(kind)
    return json.loads(value) if nested and isinstance(value, str) else value
