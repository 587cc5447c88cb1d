"""Writer for one table of PostgreSQL with pgvector.

A push fills a table ``NAME__`` and eight hexadecimal digits, and then renames it to ``NAME`` in the
transaction that drops the table before. The description of a table (``PushedTable``) is the comment
on its primary key, changed in the same transaction as the rows; a table without one is never
touched. An advisory lock of the session keeps two pushes of one name apart, so the address must
lead to the server itself, not to a pooler that shares sessions between transactions.

The new table takes over owner, grants and comments of the old one. Everything else that users added
to it or made to depend on it (columns, indexes, triggers, policies, views, foreign keys, …) would
be lost: then no row is sent, and the error names it.
"""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np
import psycopg
import pyarrow as pa
from numpy.typing import NDArray
from psycopg import sql

from whiten_index.corpus.batches import ID
from whiten_index.errors import ConfigError, DatabaseError
from whiten_index.vectordb.database_writer import (
    VECTOR,
    DatabaseWriter,
    Layout,
    Metric,
    Neighbours,
    PushedTable,
    VectorDtype,
    blocks,
    not_begun,
    padded_scores,
    require_rows,
    taken_over,
)
from whiten_index.vectordb.engine_options import PostgresOptions
from whiten_index.vectordb.engine_support import require_name
from whiten_index.vectordb.postgres_catalog import Catalog, StoredTable
from whiten_index.vectordb.postgres_connection import connect, translated_errors
from whiten_index.vectordb.postgres_copy import IDS_AT_ONCE, VECTOR_TYPES, RowFormat

# The widest vectors that pgvector keeps, and that its indexes take.
_MOST_KEPT = 16_000
_MOST_INDEXED = {VectorDtype.FLOAT32: 2000, VectorDtype.FLOAT16: 4000}
# PostgreSQL's 63 bytes, less the longest ending of the name of an index.
_LONGEST_NAME = 52
# pgvector's operator class and operator, and the score of distance 0.
_OPERATORS = {
    Metric.COSINE: ("cosine_ops", "<=>", 1.0),
    Metric.INNER_PRODUCT: ("ip_ops", "<#>", 0.0),
}
# Seconds that new readers wait behind an attempt to lock a table, and between two attempts. The
# last one outlasts ``deadlock_timeout``, after which an automatic VACUUM makes way.
_ATTEMPT, _PAUSE, _LAST_ATTEMPT = 0.2, 0.3, 1.5
_ADVISORY = "SELECT {}(hashtextextended(%s, 0))"

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _translated(method: _Method) -> _Method:
    """Raise errors of the client as those of a writer."""

    @functools.wraps(method)
    def called(self: PostgresWriter, *args: Any, **named: Any) -> Any:
        with translated_errors(self.target):
            return method(self, *args, **named)

    return cast(_Method, called)


class PostgresWriter(DatabaseWriter):
    """One table, by the name that users query; see ``DatabaseWriter``."""

    def __init__(
        self, address: str, name: str, options: Mapping[str, str], *, make: bool = True
    ) -> None:
        self._options = PostgresOptions.parse(options)
        require_name(
            name, r"[^.\x00\s]([^.\x00]*[^.\x00\s])?", engine="PostgreSQL", longest=_LONGEST_NAME,
            rule="no dot, and no blank at either end; --option schema=NAME names the schema",
        )  # fmt: skip
        self._connection, self._name = connect(address, self._options, make=make), name
        try:
            self._catalog = Catalog(self._connection, name, self._options.schema_name, make=make)
        except BaseException:
            self.close()
            raise
        release = str(self._connection.info.parameter_status("server_version")).split()[0]
        pgvector = self._catalog.pgvector
        extension = f", pgvector {pgvector}" if pgvector else " without pgvector"
        self.engine, self.target = f"PostgreSQL {release}{extension}", self._catalog.target
        self._place, self._execute = self._catalog.place, self._catalog.execute
        self._locked = False
        self._filling: tuple[StoredTable, RowFormat] | None = None
        # Result of the last ``published``, on which a push bases its changes.
        self._seen: PushedTable | None = None

    def close(self) -> None:
        """Close the connection, which also ends the lock."""
        self._connection.close()

    @_translated
    def published(self) -> PushedTable | None:
        """Return the published table, None if nothing has the name."""
        found = self._catalog.published()
        self._seen = None if found is None else found.pushed
        return self._seen

    @_translated
    def pending(self) -> PushedTable | None:
        """Return the pending table, and keep other pushes from it."""
        if self._catalog.pending() is None:
            return None
        # The last commit of an interrupted push may still be on its way.
        self._lock()
        found = self._catalog.pending()
        return None if found is None else found.pushed

    @_translated
    def begin(self, pushed: PushedTable, layout: Layout) -> None:
        """Create an empty pending table, if the published one can be replaced."""
        self._require_width(layout)
        halves = [int(each) for each in self._catalog.pgvector.split(".")[:2] if each.isdigit()]
        if layout.dtype is VectorDtype.FLOAT16 and halves < [0, 7]:
            raise ConfigError(
                f"pgvector {self._catalog.pgvector} has no float16; run ALTER EXTENSION vector "
                "UPDATE to 0.7 or later, or push with --dtype float32"
            )
        rows = RowFormat(layout, self._catalog.extension)
        columns = rows.definition()
        self._lock()
        self._catalog.require_replaceable(self._catalog.published())
        name = f"{self._name}__{secrets.token_hex(4)}"
        names = tuple(layout.schema.names)
        table = StoredTable(replace(pushed, done=0, name=name, columns=names))
        with self._connection.transaction():
            self._drop_pending()
            # A vacuum would hold up each batch, which is counted under the same lock.
            order = "CREATE TABLE {} ({}) WITH (autovacuum_enabled = off)"
            self._execute(order, self._place(name), columns)
            self._catalog.describe(table)
        self._filling = table, rows

    @_translated
    def resume(self, layout: Layout) -> None:
        """Continue the pending table, whose rows have this layout."""
        self._lock()
        table = self._pending(layout)
        # Users may have added something since it was begun.
        self._catalog.require_replaceable(self._catalog.published())
        self._filling = table, RowFormat(layout, self._catalog.extension)

    @_translated
    def append(self, rows: pa.RecordBatch) -> None:
        """Add rows to the pending table and count them as done, in one transaction."""
        table, form = self._require_filling()
        require_rows(rows, form.layout)
        if not len(rows):
            return
        place, done = self._place(table.pushed.name), table.pushed.done + len(rows)
        with self._connection.transaction():
            # A server that crashes loses the last batches with their count; they are sent again.
            self._execute("SET LOCAL synchronous_commit = off")
            self._execute("LOCK TABLE {} IN SHARE UPDATE EXCLUSIVE MODE", place)
            there = self._catalog.pending()
            if there is None or there.pushed != table.pushed:
                raise taken_over(self.target)
            with self._connection.cursor() as cursor:
                form.copy(cursor, place, rows)
            table = replace(table, pushed=replace(table.pushed, done=done))
            self._catalog.describe(table)
        self._filling = table, form

    @_translated
    def finish(self) -> None:
        """Build the indexes of the pending table that are not there yet."""
        self._lock()
        layout = self._require_filling()[1].layout
        table = self._pending(layout)
        place = self._place(table.pushed.name)
        if table.key is None:
            # After the load, which is faster than before it.
            key, columns = f"{table.pushed.name}p", map(sql.Identifier, layout.key)
            with self._building():
                self._execute(
                    "ALTER TABLE {} ADD CONSTRAINT {} PRIMARY KEY ({})",
                    place, sql.Identifier(key), sql.SQL(", ").join(columns),
                )  # fmt: skip
                self._execute("COMMENT ON COLUMN {}.{} IS NULL", place, sql.Identifier(VECTOR))
                self._catalog.describe(replace(table, key=key))
        self._build_vector_index(table, layout)
        self._execute("ALTER TABLE {} RESET (autovacuum_enabled)", place)
        self._execute("ANALYZE {}", place)

    @_translated
    def swap(self) -> None:
        """Publish the pending table in one transaction; wait ``lock_timeout`` for readers."""
        self._lock()
        new, old = self._pending(), self._catalog.published()
        with self._connection.transaction():
            if old is not None:
                self._lock_alone()
                old = self._catalog.published()
            self._catalog.require_replaceable(old)
            if old is not None:
                self._catalog.carry_access(old, new)
                self._execute("DROP TABLE {}", self._place(self._name))
            for order, ending, name in (
                ("ALTER TABLE {} RENAME TO {}", "", ""),
                ("ALTER INDEX {} RENAME TO {}", "p", "_pkey"),
                ("ALTER INDEX IF EXISTS {} RENAME TO {}", "v", "_vector_idx"),
            ):
                there = self._place(new.pushed.name + ending)
                self._execute(order, there, sql.Identifier(self._name + name))
            now = replace(new.pushed, name=self._name)
            self._catalog.describe(replace(new, pushed=now, key=f"{self._name}_pkey"))
        self._filling, self._seen = None, now
        self._unlock()

    @_translated
    def discard(self) -> None:
        """Drop the pending table, unless another push is filling it."""
        if self._catalog.pending() is None:
            return
        try:
            # The session of an interrupted push may still be ending.
            self._lock(seconds=1)
        except DatabaseError:
            return
        with self._connection.transaction():
            self._drop_pending()
        self._filling = None
        self._unlock()

    @contextmanager
    def changing(self, after: PushedTable, layout: Layout) -> Iterator[PostgresChanges]:
        """Open the published table for changes, all in one transaction."""
        with translated_errors(self.target):
            self._lock()
            try:
                with self._connection.transaction():
                    table = self._table(pending=False)
                    table.require_layout(layout, self.target)
                    self._catalog.require_owned(table)
                    if self._seen not in (None, table.pushed):
                        raise DatabaseError(
                            f"another push changed {self.target} meanwhile; push again"
                        )
                    form = RowFormat(layout, self._catalog.extension)
                    yield PostgresChanges(self._connection, self._place(self._name), form)
                    now = replace(
                        after, done=after.rows, name=self._name, columns=table.pushed.columns
                    )
                    self._catalog.describe(replace(table, pushed=now))
                self._seen = now
            finally:
                self._unlock()

    @_translated
    def notes(self) -> list[str]:
        """Return that the name needs quotes in SQL, and that the index was dropped."""
        found = list[str]()
        query = "SELECT quote_ident(%s)"
        (quoted,) = self._connection.execute(query, [self._name]).fetchone()
        if quoted != self._name:
            found.append(f"in SQL this name needs its quotes: {quoted}")
        table = self._catalog.published()
        indexed = self._options.index != "none"
        if table is not None and indexed and not self._catalog.has_vector_index(table):
            found.append(
                "the table has no index of its vectors, so every search looks at all rows; push "
                "with --full to have one built, or give --option index=none if that is meant"
            )
        return found

    @_translated
    def count(self, *, pending: bool = False) -> int:
        """Return the number of rows of the published or the pending table."""
        place = self._place(self._table(pending=pending).pushed.name)
        return int(self._execute("SELECT count(*) FROM {}", place).fetchone()[0])

    @_translated
    def fetch(self, ids: Sequence[str | int], layout: Layout, *, pending: bool = False) -> pa.Table:
        """Return the rows with these ids, in any order, with the schema of the layout."""
        table = self._table(pending=pending)
        table.require_layout(layout, self.target)
        form = RowFormat(layout, self._catalog.extension)
        return form.fetch(self._connection, self._place(table.pushed.name), ids)

    @_translated
    def search(
        self,
        vectors: NDArray[np.float32],
        top_k: int,
        *,
        exact: bool = False,
        pending: bool = False,
    ) -> Neighbours:
        """Return the nearest rows of queries (q, k), exactly or by the index."""
        table = self._table(pending=pending)
        settings: dict[str, Any] = {"enable_indexscan": "off"}
        if not exact:
            params = self._options.search_params(table.pushed.rows, top_k)
            settings = {} if self._options.index == "none" else {"enable_seqscan": "off", **params}
        _, operator, most = _OPERATORS[Metric(table.pushed.metric)]
        extension = self._catalog.extension
        type_ = sql.Identifier(extension, VECTOR_TYPES[VectorDtype(table.pushed.dtype)])
        ids, scores = list[list[str | int]](), list[list[float]]()
        # Rolled back, so that no setting outlives the searches.
        with self._connection.transaction(force_rollback=True):
            for name, value in settings.items():
                self._connection.execute("SELECT set_config(%s, %s, true)", [name, str(value)])
            for vector in vectors.tolist():
                distance = sql.SQL("{} OPERATOR({}.{}) {}::{}").format(
                    sql.Identifier(VECTOR), sql.Identifier(extension), sql.SQL(operator),
                    sql.Literal("[" + ",".join(map(repr, vector)) + "]"), type_,
                )  # fmt: skip
                found = self._execute(
                    "SELECT {}, {} FROM {} ORDER BY {} LIMIT {}",
                    sql.Identifier(ID), distance, self._place(table.pushed.name), distance,
                    sql.Literal(top_k),
                ).fetchall()  # fmt: skip
                # A vector of zeros has no cosine and comes last, if at all.
                near = [(name, far) for name, far in found if far == far]
                ids.append([name for name, _ in near])
                scores.append([most - far for _, far in near])
        return Neighbours(ids, padded_scores(scores, top_k))

    def _build_vector_index(self, table: StoredTable, layout: Layout) -> None:
        if self._options.index == "none":
            return
        operators = f"{VECTOR_TYPES[layout.dtype]}_{_OPERATORS[layout.metric][0]}"
        settings = [
            sql.SQL("{} = {}").format(sql.SQL(each), sql.Literal(value))
            for each, value in self._options.index_params(table.pushed.rows).items()
        ]
        with self._building():
            self._execute(
                "CREATE INDEX IF NOT EXISTS {} ON {} USING {} ({} {}) WITH ({})",
                sql.Identifier(f"{table.pushed.name}v"), self._place(table.pushed.name),
                sql.SQL(self._options.index), sql.Identifier(VECTOR),
                sql.Identifier(self._catalog.extension, operators), sql.SQL(", ").join(settings),
            )  # fmt: skip

    def _require_width(self, layout: Layout) -> None:
        """Refuse vectors that are too wide to keep or to index, before any is sent."""
        k, dtype, most = layout.k, layout.dtype, _MOST_INDEXED[layout.dtype]
        if k > _MOST_KEPT:
            raise ConfigError(
                f"pgvector keeps vectors of {_MOST_KEPT:,} numbers and these have {k:,}; push "
                "fewer with --k"
            )
        if self._options.index != "none" and k > most:
            narrow = dtype is VectorDtype.FLOAT32 and k <= _MOST_INDEXED[VectorDtype.FLOAT16]
            raise ConfigError(
                f"an index of pgvector takes {most:,} numbers of {dtype.value} and these vectors "
                f"have {k:,}; push fewer with --k, or give "
                f"{'--dtype float16 or ' if narrow else ''}--option index=none"
            )

    @contextmanager
    def _building(self) -> Iterator[None]:
        """Open a transaction with the settings for building an index."""
        workers = self._options.max_parallel_maintenance_workers
        given = {
            "maintenance_work_mem": self._options.maintenance_work_mem,
            "max_parallel_maintenance_workers": None if workers is None else str(workers),
        }
        with self._connection.transaction():
            for name, value in given.items():
                if value is not None:
                    self._connection.execute("SELECT set_config(%s, %s, true)", [name, value])
            yield

    def _lock_alone(self) -> None:
        """Keep all others from the published table until the transaction ends.

        New readers wait behind an attempt to lock it, so it is short, and repeated.
        """
        end = time.monotonic() + self._options.lock_timeout
        order = "LOCK TABLE {} IN ACCESS EXCLUSIVE MODE"
        while True:
            last = time.monotonic() + _PAUSE > end
            try:
                with self._connection.transaction():
                    self._set_lock_timeout(_LAST_ATTEMPT if last else _ATTEMPT)
                    self._execute(order, self._place(self._name))
                break
            except psycopg.errors.LockNotAvailable:
                if last:
                    raise
            time.sleep(_PAUSE)
        self._set_lock_timeout(self._options.lock_timeout)

    def _set_lock_timeout(self, seconds: float) -> None:
        """Set how long statements wait for locks until the transaction ends."""
        milliseconds = f"{round(1000 * seconds)}ms"
        self._connection.execute("SELECT set_config('lock_timeout', %s, true)", [milliseconds])

    def _lock(self, seconds: float | None = None) -> None:
        """Keep other pushes from the name until ``_unlock`` or the end of the session."""
        if self._locked:
            return
        try:
            with self._connection.transaction():
                self._set_lock_timeout(seconds or self._options.lock_timeout)
                self._connection.execute(_ADVISORY.format("pg_advisory_lock"), self._lock_name)
        except psycopg.errors.LockNotAvailable:
            raise DatabaseError(
                f"another push is filling or changing {self.target}; wait until it ends. If its "
                "machine is gone, end its session (whiten-index in pg_stat_activity) with SELECT "
                "pg_terminate_backend(PID)"
            ) from None
        self._locked = True

    def _unlock(self) -> None:
        if self._locked:
            with suppress(psycopg.Error):
                self._connection.execute(_ADVISORY.format("pg_advisory_unlock"), self._lock_name)
            self._locked = False

    @property
    def _lock_name(self) -> list[str]:
        return [f"whiten-index {self._catalog.schema} {self._name}"]

    def _table(self, *, pending: bool) -> StoredTable:
        if pending:
            return self._pending()
        found = self._catalog.published()
        if found is None:
            raise DatabaseError(f"{self.target} is not there; push again")
        return found

    def _pending(self, layout: Layout | None = None) -> StoredTable:
        table = self._catalog.pending()
        if table is None:
            raise not_begun(self.target)
        if layout is not None:
            table.require_layout(layout, self.target)
        return table

    def _require_filling(self) -> tuple[StoredTable, RowFormat]:
        if self._filling is None:
            raise not_begun(self.target)
        return self._filling

    def _drop_pending(self) -> None:
        while (table := self._catalog.pending()) is not None:
            self._execute("DROP TABLE {}", self._place(table.pushed.name))


@dataclass
class PostgresChanges:
    """Changes of rows of a table, in a transaction that is open."""

    _connection: Any
    _table: sql.Composable
    _rows: RowFormat
    _staging: sql.Identifier | None = None

    def upsert(self, rows: pa.RecordBatch) -> None:
        """Insert rows of the layout, replacing those with the same keys."""
        layout = self._rows.layout
        require_rows(rows, layout)
        if not len(rows):
            return
        with self._connection.cursor() as cursor:
            staging = self._empty_staging(cursor)
            self._rows.copy(cursor, staging, rows)
            others = [name for name in layout.schema.names if name not in layout.key]
            put = [sql.SQL("{0} = EXCLUDED.{0}").format(sql.Identifier(each)) for each in others]
            cursor.execute(
                sql.SQL(
                    "INSERT INTO {table} ({names}) SELECT {names} FROM {staging} "
                    "ON CONFLICT ({key}) DO UPDATE SET {put}"
                ).format(
                    table=self._table,
                    names=self._rows.names(),
                    staging=staging,
                    key=sql.SQL(", ").join(map(sql.Identifier, layout.key)),
                    put=sql.SQL(", ").join(put),
                )
            )

    def delete(self, ids: Sequence[str | int]) -> None:
        """Delete all rows with these ids; unknown ids are ignored."""
        order = sql.SQL(
            "DELETE FROM {} AS t USING unnest({}::{}[]) AS gone(id) WHERE t.{} = gone.id"
        )
        type_ = sql.SQL(self._rows.types[ID].sql)
        for some in blocks(ids, IDS_AT_ONCE):
            parts = self._table, sql.Literal(list(some)), type_, sql.Identifier(ID)
            self._connection.execute(order.format(*parts))

    def _empty_staging(self, cursor: Any) -> sql.Identifier:
        """Return an empty temporary table for the rows of one batch."""
        if self._staging is not None:
            cursor.execute(sql.SQL("TRUNCATE {}").format(self._staging))
            return self._staging
        self._staging = sql.Identifier("pg_temp", f"whiten_index_{secrets.token_hex(4)}")
        cursor.execute(
            sql.SQL("CREATE TEMPORARY TABLE {} ({}) ON COMMIT DROP").format(
                self._staging, self._rows.definition()
            )
        )
        return self._staging
