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

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
from numpy.typing import NDArray
from psycopg import sql

from whiten_index.corpus.batches import ID
from whiten_index.errors import ConfigError, DatabaseError
from whiten_index.vectordb.database_writer import DatabaseWriter, Stored, taken_over
from whiten_index.vectordb.engine_options import PostgresOptions
from whiten_index.vectordb.engine_support import require_name
from whiten_index.vectordb.postgres_catalog import Catalog, Facts
from whiten_index.vectordb.postgres_connection import OF_ROWS, connect, explain_error, shown_address
from whiten_index.vectordb.postgres_copy import IDS_AT_ONCE, VECTOR_TYPES, RowFormat
from whiten_index.vectordb.pushed_table import VECTOR, Ids, Layout, PushedTable, RowsError, blocks

# The widest vectors that an index of pgvector takes.
_MOST_INDEXED = {"float32": 2000, "float16": 4000}
# PostgreSQL's 63 bytes, less the longest ending of the name of an index.
_LONGEST_NAME = 52
# pgvector's operator class and operator, and the score of distance 0.
_OPERATORS = {
    "cosine": ("cosine_ops", "<=>", 1.0),
    "ip": ("ip_ops", "<#>", 0.0),
}
# Seconds that new readers wait behind an attempt to lock a table, and between two attempts. The
# last one outlasts ``deadlock_timeout``, after which an automatic VACUUM makes way.
_ATTEMPT, _PAUSE, _LAST_ATTEMPT = 0.2, 0.3, 1.5
_ADVISORY = "SELECT {}(hashtextextended(%s, 0))"
# Temporary table for the rows of one batch of changes.
_STAGING = sql.Identifier("whiten_index_rows")


class PostgresWriter(DatabaseWriter):
    """One table, by the name that users query; see ``DatabaseWriter``."""

    def __init__(
        self, address: str, name: str, options: Mapping[str, str], *, make: bool = True
    ) -> None:
        super().__init__()
        self._options = PostgresOptions.parse(options)
        require_name(
            name, r"[^.\x00\s]([^.\x00]*[^.\x00\s])?", engine="PostgreSQL", longest=_LONGEST_NAME,
            rule="no dot, and no blank at either end; --option schema=NAME names the schema",
        )  # fmt: skip
        self._connection, self._name = connect(address, self._options, make=make), name
        self.target, self._locked = shown_address(self._connection), False
        try:
            with self._reporting("it could not be opened"):
                schema = self._options.schema_name
                self._catalog = Catalog(self._connection, name, schema, make=make)
        except BaseException:
            self.close()
            raise
        release = str(self._connection.info.parameter_status("server_version")).split()[0]
        pgvector = self._catalog.pgvector
        extension = f", pgvector {pgvector}" if pgvector else " without pgvector"
        self.engine, self.target = f"PostgreSQL {release}{extension}", self._catalog.target
        self._place, self._execute = self._catalog.place, self._catalog.execute

    def close(self) -> None:
        """Close the connection, which also ends the lock."""
        self._connection.close()

    def notes(self) -> list[str]:
        """Return that the name needs quotes in SQL, and that the index was dropped."""
        with self._reporting("it could not be read"):
            query = "SELECT quote_ident(%s)"
            (quoted,) = self._connection.execute(query, [self._name]).fetchone()
            table = self._catalog.published()
            lost = table is not None and not self._catalog.has_vector_index(table)
        found = [f"in SQL this name needs its quotes: {quoted}"] if quoted != self._name else []
        if lost and self._options.index != "none":
            found.append(
                "the table has no index of its vectors, so every search looks at all rows; push "
                "with --full to have one built, or give --option index=none if that is meant"
            )
        return found

    def _explain(self, error: Exception) -> tuple[str, str]:
        reason, remedy = explain_error(error)
        if (getattr(error, "sqlstate", None) or "").startswith(OF_ROWS):
            raise RowsError(f"{self.target}: {reason}; {remedy}") from None
        return reason, remedy

    def _find(self, *, pending: bool) -> Stored | None:
        if not pending:
            return self._catalog.published()
        if self._catalog.pending() is None:
            return None
        # Keep other pushes from it. The last commit of an interrupted one may still be on its way.
        self._lock()
        return self._catalog.pending()

    def _create(self, made: PushedTable, layout: Layout) -> Stored:
        self._require_width(layout)
        columns = self._format(layout).definition()
        self._lock()
        self._catalog.require_replaceable(self._catalog.published())
        name = f"{self._name}__{secrets.token_hex(4)}"
        stored = Stored(replace(made, name=name), pending=True, handle=Facts())
        with self._connection.transaction():
            self._drop_pending()
            # A vacuum would hold up each batch, which is counted under the same lock.
            order = "CREATE TABLE {} ({}) WITH (autovacuum_enabled = off)"
            self._execute(order, self._place(name), columns)
            self._catalog.describe(stored)
        return stored

    def _take_over(self, found: Stored) -> Stored:
        # Users may have added something since it was begun.
        self._catalog.require_replaceable(self._catalog.published())
        return found

    def _add(self, held: Stored, rows: pa.RecordBatch, layout: Layout) -> None:
        if not len(rows):
            return
        place = self._place(held.name)
        with self._connection.transaction(), self._connection.cursor() as cursor:
            # A server that crashes loses the last batches with their count; they are sent again.
            self._execute("SET LOCAL synchronous_commit = off")
            self._execute("LOCK TABLE {} IN SHARE UPDATE EXCLUSIVE MODE", place)
            there = self._catalog.pending()
            if there is None or there.table != held.table:
                raise taken_over(self.target)
            self._format(layout).copy(cursor, place, rows)
            self._catalog.describe(held.described(done=held.table.done + len(rows)))

    def _build(self, held: Stored, layout: Layout) -> None:  # noqa: ARG002
        """Build the indexes of the pending table that do not exist yet."""
        self._lock()
        table = self._require(pending=True)
        self._require_layout(table, layout)
        place = self._place(table.name)
        if table.handle.key is None:
            # After the load, which is faster than before it.
            key, columns = f"{table.name}p", map(sql.Identifier, layout.key)
            with self._building():
                self._execute(
                    "ALTER TABLE {} ADD CONSTRAINT {} PRIMARY KEY ({})",
                    place, sql.Identifier(key), sql.SQL(", ").join(columns),
                )  # fmt: skip
                self._execute("COMMENT ON COLUMN {}.{} IS NULL", place, sql.Identifier(VECTOR))
                self._catalog.describe(replace(table, handle=table.handle._replace(key=key)))
        if self._options.index != "none":
            self._build_vector_index(table, layout)
        self._execute("ALTER TABLE {} RESET (autovacuum_enabled)", place)
        self._execute("ANALYZE {}", place)

    def _publish(self, held: Stored) -> None:  # noqa: ARG002
        """Publish the pending table in one transaction; wait ``lock_timeout`` for readers."""
        self._lock()
        new, old = self._require(pending=True), self._catalog.published()
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
                there = self._place(new.name + ending)
                self._execute(order, there, sql.Identifier(self._name + name))
            facts = new.handle._replace(key=f"{self._name}_pkey")
            self._catalog.describe(replace(new.described(name=self._name), handle=facts))
        self._unlock()

    def _discard(self, held: Stored | None) -> None:  # noqa: ARG002
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
        self._unlock()

    def _begin_changes(self, after: PushedTable, layout: Layout) -> Stored:  # noqa: ARG002
        self._lock()
        # Ended by the methods below.
        self._connection.execute("BEGIN")
        table = self._require_unchanged(layout)
        self._catalog.require_owned(table)
        return table

    def _end_changes(self, now: Stored) -> None:
        self._catalog.describe(now)
        self._connection.execute("COMMIT")
        self._unlock()

    def _undo_changes(self) -> None:
        with suppress(psycopg.Error):
            self._connection.execute("ROLLBACK")
        self._unlock()

    def _upsert(self, stored: Stored, rows: pa.RecordBatch, layout: Layout) -> None:
        if not len(rows):
            return
        form = self._format(layout)
        others = [name for name in layout.schema.names if name not in layout.key]
        put = [sql.SQL("{0} = EXCLUDED.{0}").format(sql.Identifier(each)) for each in others]
        with self._connection.cursor() as cursor:
            self._execute(
                "CREATE TEMPORARY TABLE IF NOT EXISTS {} ({}) ON COMMIT DROP",
                _STAGING, form.definition(),
            )  # fmt: skip
            self._execute("TRUNCATE {}", _STAGING)
            form.copy(cursor, _STAGING, rows)
            self._execute(
                "INSERT INTO {} ({}) SELECT {} FROM {} ON CONFLICT ({}) DO UPDATE SET {}",
                self._place(stored.name), form.names(), form.names(), _STAGING,
                sql.SQL(", ").join(map(sql.Identifier, layout.key)), sql.SQL(", ").join(put),
            )  # fmt: skip

    def _delete(self, stored: Stored, ids: Ids, layout: Layout) -> None:
        type_ = sql.SQL(self._format(layout).types[ID].sql)
        for some in blocks(ids, IDS_AT_ONCE):
            self._execute(
                "DELETE FROM {} AS t USING unnest({}::{}[]) AS gone(id) WHERE t.{} = gone.id",
                self._place(stored.name), sql.Literal(list(some)), type_, sql.Identifier(ID),
            )  # fmt: skip

    def _count(self, stored: Stored) -> int:
        place = self._place(stored.name)
        return int(self._execute("SELECT count(*) FROM {}", place).fetchone()[0])

    def _fetch(self, stored: Stored, ids: Ids, layout: Layout) -> pa.Table:
        self._require_layout(stored, layout)
        return self._format(layout).fetch(self._connection, self._place(stored.name), ids)

    def _search(
        self, stored: Stored, vectors: NDArray[np.float32], top_k: int, *, exact: bool
    ) -> Sequence[Sequence[float]]:
        table = stored.table
        settings: dict[str, Any] = {"enable_indexscan": "off"}
        if not exact:
            params = self._options.search_params(table.rows, top_k)
            settings = {} if self._options.index == "none" else {"enable_seqscan": "off", **params}
        _, operator, most = _OPERATORS[table.metric]
        extension = self._catalog.extension
        type_ = sql.Identifier(extension, VECTOR_TYPES[table.dtype])
        scores = list[list[float]]()
        # Rolled back, so that no setting outlives the searches.
        with self._connection.transaction(force_rollback=True):
            self._set(settings)
            for vector in vectors.tolist():
                distance = sql.SQL("{} OPERATOR({}.{}) {}::{}").format(
                    sql.Identifier(VECTOR), sql.Identifier(extension), sql.SQL(operator),
                    sql.Literal("[" + ",".join(map(repr, vector)) + "]"), type_,
                )  # fmt: skip
                found = self._execute(
                    "SELECT {} FROM {} ORDER BY {} LIMIT {}",
                    distance, self._place(stored.name), distance, sql.Literal(top_k),
                ).fetchall()  # fmt: skip
                # A vector of zeros has no cosine and comes last, if at all.
                scores.append([most - far for (far,) in found if far == far])
        return scores

    def _format(self, layout: Layout) -> RowFormat:
        return RowFormat(layout, self._catalog.extension)

    def _build_vector_index(self, table: Stored, layout: Layout) -> None:
        operators = f"{VECTOR_TYPES[layout.dtype]}_{_OPERATORS[layout.metric][0]}"
        settings = [
            sql.SQL("{} = {}").format(sql.SQL(each), sql.Literal(value))
            for each, value in self._options.index_params(table.table.rows).items()
        ]
        with self._building():
            self._execute(
                "CREATE INDEX IF NOT EXISTS {} ON {} USING {} ({} {}) WITH ({})",
                sql.Identifier(f"{table.name}v"), self._place(table.name),
                sql.SQL(self._options.index), sql.Identifier(VECTOR),
                sql.Identifier(self._catalog.extension, operators), sql.SQL(", ").join(settings),
            )  # fmt: skip

    def _require_width(self, layout: Layout) -> None:
        """Refuse vectors that are too wide to index, before any is sent."""
        k, dtype, most = layout.k, layout.dtype, _MOST_INDEXED[layout.dtype]
        if self._options.index != "none" and k > most:
            narrow = dtype == "float32" and k <= _MOST_INDEXED["float16"]
            raise ConfigError(
                f"an index of pgvector takes {most:,} numbers of {dtype} and these vectors "
                f"have {k:,}; push fewer with --k, or give "
                f"{'--dtype float16 or ' if narrow else ''}--option index=none"
            )

    @contextmanager
    def _building(self) -> Iterator[None]:
        """Open a transaction with the settings for building an index."""
        given = self._options.model_dump(
            include={"maintenance_work_mem", "max_parallel_maintenance_workers"}, exclude_none=True
        )
        with self._connection.transaction():
            self._set(given)
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
                    self._wait_for_locks(_LAST_ATTEMPT if last else _ATTEMPT)
                    self._execute(order, self._place(self._name))
                break
            except psycopg.errors.LockNotAvailable:
                if last:
                    raise
            time.sleep(_PAUSE)
        self._wait_for_locks(self._options.lock_timeout)

    def _wait_for_locks(self, seconds: float) -> None:
        self._set({"lock_timeout": f"{round(1000 * seconds)}ms"})

    def _set(self, settings: Mapping[str, Any]) -> None:
        """Change settings of the server until the transaction ends."""
        for name, value in settings.items():
            self._connection.execute("SELECT set_config(%s, %s, true)", [name, str(value)])

    def _lock(self, seconds: float | None = None) -> None:
        """Keep other pushes from the name until ``_unlock`` or the end of the session."""
        if self._locked:
            return
        try:
            with self._connection.transaction():
                self._wait_for_locks(seconds or self._options.lock_timeout)
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

    def _drop_pending(self) -> None:
        while (table := self._catalog.pending()) is not None:
            self._execute("DROP TABLE {}", self._place(table.name))
