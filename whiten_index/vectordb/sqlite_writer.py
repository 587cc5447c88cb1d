"""Writer of tables in a file of SQLite, with vectors in ``vec0`` of its extension ``sqlite-vec``.

``vec0`` keeps chunks of vectors, and of shorter codes, that searches read whole. A push fills a
view ``NAME__`` and eight hexadecimal digits, and behind it ``…_rows``, a table, and ``…_vector``.
Users query the views ``NAME``, of rows with their vectors, and ``NAME_rows``, of rows alone. A swap
makes both anew in one transaction. Only the second has rows whose vector is zeros, by which
``vec0`` would lose others.

Descriptions are in a table of the file. The lease in it is read within each transaction. While
rows are written, readers go on (mode WAL); at the end the file has the mode it had before.
"""

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import apsw
import numpy as np
import pyarrow as pa
import sqlite_vec
from numpy.typing import NDArray

from whiten_index.corpus.batches import ID
from whiten_index.vectordb.database_writer import Find, Hit, Sizes, Stored
from whiten_index.vectordb.engine_support import quoted
from whiten_index.vectordb.file_options import CODES, SqliteOptions
from whiten_index.vectordb.file_writer import FileWriter
from whiten_index.vectordb.json_rows import table_of
from whiten_index.vectordb.pushed_table import VECTOR, Ids, Layout, PushedTable, vectors_of
from whiten_index.vectordb.sqlite_file import (
    SIZES,
    connect,
    definitions,
    insert_vectors,
    read_value,
    repack,
    written_values,
)

_DESCRIPTIONS = "whiten_index_tables"
# The most rows that a search of vec0 returns.
_MOST_FOUND = 4096


class SqliteWriter(FileWriter):
    """One table of a file of SQLite; see ``DatabaseWriter``."""

    begin_writing = "BEGIN IMMEDIATE"
    refusals = (apsw.ConstraintError, apsw.TooBigError, apsw.MismatchError)

    def __init__(
        self, address: str, name: str, options: SqliteOptions, *, make: bool = True
    ) -> None:
        self._options, self._mode_before = options, ""
        self.engine = f"SQLite {apsw.sqlite_lib_version()}, sqlite-vec {sqlite_vec.__version__}"
        super().__init__(address, name, options, make=make)

    def _open(self, file: Path, *, make: bool) -> Any:
        database, self._mode_before = connect(file, self._options, make=make)
        return database

    def close(self) -> None:
        """Close the file."""
        with suppress(apsw.Error):
            self._database.set_busy_timeout(0)
            # Refused while others read.
            self._run(f"PRAGMA journal_mode = {self._mode_before}")
        self._database.close()

    def _find(self, *, pending: bool) -> Stored | None:
        there = self._objects(self._name, f"{self._name}_rows")
        pushed = None
        if self._objects(_DESCRIPTIONS):
            order = f"SELECT description FROM {_DESCRIPTIONS} WHERE name = ? AND pending = ?"
            row = self._run(order, self._name, pending).fetchone()
            pushed = PushedTable.read(row and row[0])
        if pushed is not None and not re.fullmatch(f"{self._name}__[0-9a-f]{{8}}", pushed.name):
            pushed = None
        if not pending and there and (pushed is None or there != self._views(pushed.name)):
            raise self._not_pushed(f"a table or view {min(there)}")
        if pushed is None or not (there or pending):
            return None
        made = self._objects(f"{pushed.name}_vector").get(f"{pushed.name}_vector", "")
        code = next((each for each in CODES if f"code {each}[" in made), "float32")
        return Stored(pushed, pending, SqliteOptions.parse({"code": code}))

    def _objects(self, *names: str) -> dict[str, str]:
        """Return the tables and views of some names, with the SQL that made them."""
        many = ", ".join("?" * len(names))
        order = f"SELECT name, sql FROM sqlite_schema WHERE name COLLATE NOCASE IN ({many})"
        return dict(self._run(order, *names).fetchall())

    def _views(self, name: str) -> dict[str, str]:
        """Return the names that users query, with the SQL that makes them."""
        places = {self._name: name, f"{self._name}_rows": f"{name}_rows"}
        return {
            each: f"CREATE VIEW {quoted(each)} AS SELECT * FROM {quoted(of)}"
            for each, of in places.items()
        }

    def _create(self, made: PushedTable, layout: Layout) -> Stored:
        name = f"{self._name}__{secrets.token_hex(4)}"
        created = Stored(replace(made, name=name), True, self._options)
        orders = definitions(name, layout, self._options.code)
        with self._transaction():
            self._find(pending=False)
            self._run(
                f"CREATE TABLE IF NOT EXISTS {_DESCRIPTIONS} (name TEXT COLLATE NOCASE, "
                "pending INTEGER, description TEXT, PRIMARY KEY (name, pending))"
            )
            self._drop(self._find(pending=True))
            for order in orders:
                self._run(order)
            self._describe(created)
        return created

    def _describe(self, stored: Stored) -> None:
        order = f"INSERT OR REPLACE INTO {_DESCRIPTIONS} VALUES (?, ?, ?)"
        self._run(order, self._name, stored.pending, stored.table.text)

    def _has_lease(self, stored: Stored) -> bool:
        found = self._find(pending=stored.pending)
        one, two = (each and (each.name, each.table.lease) for each in (found, stored))
        return one == two

    def _build(self, held: Stored, layout: Layout) -> None:
        with self._transaction(held):
            key = ", ".join(map(quoted, layout.key))
            index, rows = quoted(f"{held.name}_key"), quoted(f"{held.name}_rows")
            self._run(f"CREATE UNIQUE INDEX IF NOT EXISTS {index} ON {rows} ({key})")

    def _publish(self, held: Stored) -> None:
        with self._transaction(held):
            self._drop(self._find(pending=False))
            for order in self._views(held.name).values():
                self._run(order)
            self._drop(held, objects=False)
            self._describe(replace(held, pending=False))

    def _drop(self, stored: Stored | None, *, objects: bool = True) -> None:
        """Drop the description of a table, and its objects."""
        if stored is None:
            return
        order = f"DELETE FROM {_DESCRIPTIONS} WHERE name = ? AND pending = ?"
        self._run(order, self._name, stored.pending)
        if objects:
            views = [] if stored.pending else list(self._views(stored.name))
            for each in (*views, stored.name):
                self._run(f"DROP VIEW IF EXISTS {quoted(each)}")
            for end in ("_vector", "_rows"):
                self._run(f"DROP TABLE IF EXISTS {quoted(stored.name + end)}")

    def _discard(self, held: Stored | None) -> None:
        if self._find(pending=True) is None:
            return
        with self._transaction():
            if held is None or self._has_lease(held):
                self._drop(self._find(pending=True))

    def _remove(self, published: Stored) -> None:
        with self._transaction():
            self._drop(published)

    def _end_changes(self, changed: Stored) -> None:
        repack(self._database, changed.name, changed.handle.code)
        self._run("COMMIT")

    def _upsert(self, stored: Stored, rows: pa.RecordBatch, layout: Layout) -> None:
        keys = zip(*(rows[name].to_pylist() for name in layout.key), strict=True)
        self._delete_keys(stored, list(keys), layout.key)
        self._insert(stored, rows, layout)

    def _insert(self, stored: Stored, rows: pa.RecordBatch, layout: Layout) -> None:
        name, vectors = stored.name, vectors_of(rows)
        first = self._run(f'SELECT coalesce(max(rowid), 0) + 1 FROM "{name}_rows"').get
        columns = [written_values(rows, each) for each in layout.schema.names if each != VECTOR]
        slots = ", ".join("?" * (1 + len(columns)))
        numbered = zip(range(first, first + len(rows)), *columns, strict=True)
        self._database.executemany(f'INSERT INTO "{name}_rows" VALUES ({slots})', numbered)
        size, whole = 4 * layout.k, vectors.astype("<f4", copy=False).data.cast("B")
        places = np.flatnonzero(vectors.any(axis=1)).tolist()
        self._database.executemany(
            insert_vectors(name, stored.handle.code, "?1", "?2"),
            ((first + at, whole[at * size : (at + 1) * size]) for at in places),
        )

    def _delete(self, stored: Stored, ids: Ids, layout: Layout) -> None:  # noqa: ARG002
        self._delete_keys(stored, [(each,) for each in ids], (ID,))

    def _delete_keys(
        self, stored: Stored, keys: Sequence[tuple[Any, ...]], names: Sequence[str]
    ) -> None:
        same = " AND ".join(f"{name} = ?" for name in names)
        rows, vectors = (quoted(stored.name + end) for end in ("_rows", "_vector"))
        gone = f"DELETE FROM {vectors} WHERE rowid IN (SELECT rowid FROM {rows} WHERE {same})"
        for order in (gone, f"DELETE FROM {rows} WHERE {same}"):
            self._database.executemany(order, keys)

    def _count(self, stored: Stored) -> int:
        return super()._count(stored.described(name=f"{stored.name}_rows"))

    def _sizes(self, stored: Stored) -> Sizes:
        sizes = dict(self._run(SIZES, len(stored.name), stored.name).fetchall())
        return Sizes(int(sizes.get(0, 0)), int(sizes.get(1, 0)))

    def _fetch(self, stored: Stored, ids: Ids, layout: Layout) -> pa.Table:
        fields = [each for each in layout.schema if each.name != VECTOR]
        shown = ", ".join(f"r.{quoted(each.name)}" for each in fields)
        slots = ", ".join("?" * len(ids))
        order = (
            f'SELECT {shown}, v.vector FROM "{stored.name}_rows" AS r LEFT JOIN '
            f'"{stored.name}_vector" AS v ON v.rowid = r.rowid WHERE r.id IN ({slots})'
        )
        objects, zeros = [], bytes(4 * layout.k)
        numbers = bytearray()
        for *values, vector in self._run(order, *ids):
            pairs = zip(fields, values, strict=True)
            objects.append({each.name: read_value(value, each.type) for each, value in pairs})
            numbers += vector or zeros
        vectors = np.frombuffer(numbers, dtype="<f4").reshape(-1, layout.k)
        return table_of(objects, vectors, layout)

    @contextmanager
    def _searching(
        self, stored: Stored, *, exact: bool, effort: Mapping[str, int] | None
    ) -> Iterator[Find]:
        options, place = stored.handle, quoted(stored.name)
        exactly = SqliteOptions().search_sql(place)
        order = exactly if exact else options.search_sql(place)
        usual = options.usual_effort(stored.table.rows)
        candidates = (usual if effort is None else effort).get("candidates", 0)
        # More rows than a search of vec0 returns.
        scan = f"SELECT id, vec_distance_cosine(vector, :query) AS distance FROM {place} ORDER BY 2"

        def find(vectors: NDArray[np.float32], top_k: int) -> list[list[Hit]]:
            asked = order if top_k <= _MOST_FOUND else f"{scan} LIMIT :k"
            given = {"k": top_k, "candidates": min(_MOST_FOUND, max(top_k, candidates))}
            found = [
                self._database.execute(asked, {"query": each.tobytes(), **given}).fetchall()
                for each in vectors.astype("<f4", copy=False)
            ]
            # A query of zeros has no distances.
            return [[Hit(name, 1 - far) for name, far in one if far is not None] for one in found]

        yield find
