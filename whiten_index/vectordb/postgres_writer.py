"""Writer for one table of PostgreSQL with pgvector.

A push fills a table ``NAME__`` and eight hexadecimal digits, and then renames it to ``NAME`` in the
transaction that drops the table before. The description of a table (``PushedTable``) is the comment
on its primary key, changed in the same transaction as the rows; a table without one is never
touched. An advisory lock of the session keeps two pushes of one name apart, so the address must
lead to the server itself, not to a pooler that shares sessions between transactions.

The new table takes over owner, grants and comments of the old one. Everything else that users added
to it or made to depend on it (columns, indexes, policies, views, foreign keys, …) would be lost:
then no row is sent, and the error names it.
"""

import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
from numpy.typing import NDArray
from psycopg import sql

from whiten_index.corpus.batches import ID
from whiten_index.errors import ConfigError, DatabaseError
from whiten_index.vectordb.database_writer import DatabaseWriter, Find, Hit, Stored
from whiten_index.vectordb.engine_options import Effort
from whiten_index.vectordb.postgres_copy import RowFormat
from whiten_index.vectordb.postgres_options import (
    EXTENSIONS,
    MOST_INDEXED,
    OPERATORS,
    VECTOR_TYPES,
    PostgresOptions,
)
from whiten_index.vectordb.postgres_server import (
    ADDITIONS,
    CARRY,
    OF_ROWS,
    TABLES,
    composed,
    connect,
    explain_error,
    find_extension,
    find_schema,
    operator_class_schema,
    shown_address,
)
from whiten_index.vectordb.pushed_table import VECTOR, Ids, Layout, PushedTable, RowsError

# Seconds that new readers wait behind an attempt to lock a table, and between two attempts. The
# last one outlasts ``deadlock_timeout``, after which an automatic VACUUM makes way.
_ATTEMPT, _PAUSE, _LAST_ATTEMPT = 0.2, 0.3, 1.5
_ADVISORY = "SELECT {}(hashtextextended(%s, 0))"
# Bytes of a table with its key, and of the index of its vectors.
_SIZES = (
    "SELECT pg_total_relation_size(t) - size, size FROM (SELECT %s::regclass AS t, "
    "coalesce(pg_relation_size(to_regclass(%s)), 0) AS size) AS sizes"
)
_COMMENT = "SELECT c IS NOT NULL, obj_description(c, 'pg_class') FROM to_regclass(%s) AS c"
# Temporary table for the rows of one batch of changes.
_STAGING = sql.Identifier("pg_temp", "whiten_index_rows")


class PostgresWriter(DatabaseWriter):
    """One table, by the name that users query; see ``DatabaseWriter``."""

    adds_and_counts = True
    ids_at_once = 10_000

    def __init__(self, address: str, name: str, options: PostgresOptions, *, make: bool) -> None:
        super().__init__()
        self._options, self._name, self._locked = options, name, False
        self._connection, first, self._users_path = connect(address, options, make=make)
        self.target = shown_address(self._connection)
        info = self._connection.info
        if info.host.startswith("/") or info.hostaddr in ("127.0.0.1", "::1"):
            # The server may be in a container, where numbers name other processes.
            with suppress(OSError):
                command = Path(f"/proc/{info.backend_pid}/cmdline").read_bytes()
                self.process = info.backend_pid if command.startswith(b"postgres:") else None
        try:
            with self._reporting("it could not be opened"):
                self._schema = find_schema(self._connection, options.schema_name or first)
                self._extension, pgvector = find_extension(self._connection, first, make=make)
        except BaseException:
            self.close()
            raise
        release = str(info.parameter_status("server_version")).split()[0]
        extension = f", pgvector {pgvector}" if pgvector else " without pgvector"
        self.engine = f"PostgreSQL {release}{extension}"
        self.target += f", table {self._text(name)}"
        self._lock_name = [f"whiten-index {self._schema} {name}"]

    def close(self) -> None:
        """Close the connection, which also ends the lock."""
        self._connection.close()

    def _explain(self, error: Exception) -> tuple[str, str]:
        reason, remedy = explain_error(error)
        if (getattr(error, "sqlstate", None) or "").startswith(OF_ROWS):
            raise RowsError(f"{self.target}: {reason}; {remedy}") from None
        return reason, remedy

    def _find(self, *, pending: bool) -> Stored | None:
        found = self._look(pending=pending)
        if pending and found is not None:
            # Keep other pushes from it. The last commit of an interrupted one may come yet.
            self._lock()
            return self._look(pending=True)
        return found

    def _look(self, *, pending: bool) -> Stored | None:
        """Return the published or the pending table; refuse one of the name that no push made."""
        given = {"schema": self._schema, "name": self._name, "vector": VECTOR}
        form = re.escape(self._name) + "__[0-9a-f]{8}" * pending
        rows = self._connection.execute(TABLES, given).fetchall()
        there = [_stored(row, pending=pending) for row in rows if re.fullmatch(form, row[0])]
        found = next(filter(None, there), None)
        if there and found is None and not pending:
            raise DatabaseError(
                f"{self.target} is there, and no push made it as it is; choose another --table, "
                "or drop it"
            )
        return found

    def _create(self, made: PushedTable, layout: Layout) -> Stored:
        k, chosen = layout.k, self._options
        type_ = chosen.indexed_type(layout.dtype)
        if chosen.index in ("hnsw", "ivfflat") and k > (most := MOST_INDEXED[type_]):
            halves = type_ == "vector" and k <= MOST_INDEXED["halfvec"]
            narrow = "--dtype float16, --option code=bit or " if halves else ""
            raise ConfigError(
                f"an index of pgvector takes {most:,} numbers of {type_} and these vectors have "
                f"{k:,}; push fewer with --k, or give {narrow}--option index=none"
            )
        # Before any row is sent.
        self._indexed(layout)
        columns = self._format(layout).definition()
        name = f"{self._name}__{secrets.token_hex(4)}"
        stored = Stored(replace(made, name=name), pending=True)
        with self._connection.transaction():
            self._drop_pending()
            # A vacuum would hold up each batch, which is counted under the same lock.
            order = "CREATE TABLE {} ({}) WITH (autovacuum_enabled = off)"
            self._execute(order, self._place(name), columns)
            self._describe(stored)
        return stored

    def _describe(self, stored: Stored) -> None:
        """Write the description of a table: to its primary key, or before that to its vectors."""
        place, text = self._place(stored.name), sql.Literal(stored.table.text)
        if stored.handle is None:
            self._execute("COMMENT ON COLUMN {}.{} IS {}", place, VECTOR, text)
        else:
            self._execute("COMMENT ON CONSTRAINT {} ON {} IS {}", stored.handle, place, text)

    def _require_replaceable(self) -> Stored | None:
        self._lock()
        return super()._require_replaceable()

    def _added(self, published: Stored) -> list[str]:
        # Fails unless this role owns the table, as the swap would.
        self._describe(published)
        columns, index = list(published.table.columns), f"{self._name}_vector_idx"
        given = {"old": self._text(published.name), "columns": columns, "index": index}
        return [name for (name,) in self._connection.execute(ADDITIONS, given).fetchall()]

    def _add(self, held: Stored, rows: pa.RecordBatch, layout: Layout) -> None:
        with self._connection.transaction():
            # A server that crashes loses the last batches with their count; they are sent again.
            self._execute("SET LOCAL synchronous_commit = off")
            self._format(layout).copy(self._connection, self._place(held.name), rows)
            self._describe(held)

    def _build(self, held: Stored, layout: Layout) -> None:  # noqa: ARG002
        """Build the indexes of the pending table that do not exist yet."""
        table = self._require(pending=True)
        place = self._place(table.name)
        if table.handle is None:
            # After the load, which is faster than before it.
            key = f"{table.name}p"
            with self._building():
                order = "ALTER TABLE {} ADD CONSTRAINT {} PRIMARY KEY ({})"
                self._execute(order, place, key, layout.key)
                self._execute("COMMENT ON COLUMN {}.{} IS NULL", place, VECTOR)
                self._describe(replace(table, handle=key))
        # An index that an interrupted push built with other options is made again.
        name, form = f"{table.name}v", self._index_form(table.table, layout)
        with self._building():
            found: Any = self._connection.execute(_COMMENT, [self._text(name)]).fetchone()
            exists, known = found
            if exists and known != form:
                self._execute("DROP INDEX {}", self._place(name))
            if form is not None and known != form:
                self._execute("CREATE INDEX {} ON {} {}", name, place, sql.SQL(form))
                self._execute("COMMENT ON INDEX {} IS {}", self._place(name), sql.Literal(form))
        self._execute("ALTER TABLE {} RESET (autovacuum_enabled)", place)
        with self._connection.patient():
            self._execute("ANALYZE {}", place)

    def _index_form(self, pushed: PushedTable, layout: Layout) -> str | None:
        """Return the SQL of kind, expression and parameters of the index; None for no index."""
        if self._options.index == "none":
            return None
        expression, operators = self._indexed(layout)
        settings = [
            sql.SQL("{} = {}").format(sql.SQL(each), sql.Literal(value))
            for each, value in self._options.index_params(pushed.rows).items()
        ]
        form = composed("USING {} ({} {})", self._options.index, expression, operators)
        if settings:
            form += composed(" WITH ({})", sql.SQL(", ").join(settings))
        return str(form.as_string(self._connection))

    def _publish(self, held: Stored) -> None:  # noqa: ARG002
        """Publish the pending table in one transaction; wait ``lock_timeout`` for readers."""
        new = self._require(pending=True)
        with self._connection.transaction():
            if self._look(pending=False) is not None:
                self._lock_alone()
            if (old := self._require_replaceable()) is not None:
                place = self._text(new.name)
                given = {"old": self._text(old.name), "new": place, "place": place}
                for _, order in self._connection.execute(CARRY, given).fetchall():
                    self._connection.execute(order)
                self._execute("DROP TABLE {}", self._place(self._name))
            for order, ending, name in (
                ("ALTER TABLE {} RENAME TO {}", "", ""),
                ("ALTER INDEX {} RENAME TO {}", "p", "_pkey"),
                ("ALTER INDEX IF EXISTS {} RENAME TO {}", "v", "_vector_idx"),
            ):
                self._execute(order, self._place(new.name + ending), self._name + name)
            published = new.described(name=self._name)
            self._describe(replace(published, handle=f"{self._name}_pkey"))
        self._unlock()

    def _discard(self, held: Stored | None) -> None:  # noqa: ARG002
        """Drop the pending table, unless another push is filling it."""
        if self._look(pending=True) is None:
            return
        try:
            # The session of an interrupted push may still be ending.
            self._lock(seconds=1)
        except DatabaseError:
            return
        with self._connection.transaction():
            self._drop_pending()
        self._unlock()

    def _remove(self, published: Stored) -> None:
        self._execute("DROP TABLE {}", self._place(published.name))

    def _begin_changes(self) -> None:
        self._lock()
        # Ended by the methods below.
        self._execute("BEGIN")

    def _end_changes(self, changed: Stored) -> None:  # noqa: ARG002
        self._execute("COMMIT")
        self._unlock()

    def _undo_changes(self, changed: Stored | None) -> None:  # noqa: ARG002
        with suppress(psycopg.Error):
            self._execute("ROLLBACK")
        self._unlock()

    def _upsert(self, stored: Stored, rows: pa.RecordBatch, layout: Layout) -> None:
        form, names = self._format(layout), layout.schema.names
        others = [sql.Identifier(name) for name in names if name not in layout.key]
        put = sql.SQL(", ").join(sql.SQL("{0} = EXCLUDED.{0}").format(each) for each in others)
        order = "CREATE TEMPORARY TABLE IF NOT EXISTS {} ({}) ON COMMIT DROP"
        self._execute(order, _STAGING, form.definition())
        self._execute("TRUNCATE {}", _STAGING)
        form.copy(self._connection, _STAGING, rows)
        order = "INSERT INTO {} ({}) SELECT {} FROM {} ON CONFLICT ({}) DO UPDATE SET {}"
        with self._on_users_path():
            self._execute(order, self._place(stored.name), names, names, _STAGING, layout.key, put)

    def _delete(self, stored: Stored, ids: Ids, layout: Layout) -> None:
        gone = "pg_catalog.unnest({}::{}[]) AS gone(id)"
        order = f"DELETE FROM {{}} AS t USING {gone} WHERE t.{{}} = gone.id"
        place, type_ = self._place(stored.name), sql.SQL(self._format(layout).types[ID].sql)
        with self._on_users_path():
            self._execute(order, place, sql.Literal(list(ids)), type_, ID)

    def _count(self, stored: Stored) -> int:
        place = self._place(stored.name)
        with self._connection.patient():
            return int(self._execute("SELECT count(*) FROM {}", place).fetchone()[0])

    def _sizes(self, stored: Stored) -> dict[str, int]:
        names = [self._text(stored.name), self._text(f"{stored.name}_vector_idx")]
        found: Any = self._connection.execute(_SIZES, names).fetchone()
        return dict(zip(("table", "index"), map(int, found), strict=True))

    def _fetch(self, stored: Stored, ids: Ids, layout: Layout) -> pa.Table:
        with self._connection.patient():
            return self._format(layout).fetch(self._connection, self._place(stored.name), ids)

    @contextmanager
    def _searching(self, stored: Stored, *, exact: bool, effort: Effort | None) -> Iterator[Find]:
        table, chosen, most = stored.table, self._options, OPERATORS[stored.table.metric][2]
        settings = dict[str, Any](chosen.usual_effort(table.rows) if effort is None else effort)
        candidates = [settings.pop("candidates")] if "candidates" in settings else []
        if exact:
            settings, candidates = {"enable_indexscan": "off"}, []
            chosen = PostgresOptions.parse({"index": "none"})
        elif chosen.index != "none":
            settings["enable_seqscan"] = "off"
        order = chosen.search_sql(self._text(table.name), table, self._quoted(self._extension))

        def find(vectors: NDArray[np.float32], top_k: int) -> list[list[Hit]]:
            found, cursor = list[list[Hit]](), psycopg.RawCursor(self._connection)
            for vector in vectors.tolist():
                given = [str(vector), top_k, *(max(top_k, each) for each in candidates)]
                rows = cursor.execute(order, given, prepare=True).fetchall()
                # A vector of zeros has no cosine and comes last, if at all.
                found.append([Hit(name, most - one) for name, one in rows if one == one])
            return found

        # Rolled back, so that no setting outlives the searches.
        with self._connection.patient(), self._connection.transaction(force_rollback=True):
            self._set(settings)
            yield find

    def _indexed(self, layout: Layout) -> tuple[sql.Composable, sql.Composable]:
        """Return the expression that is indexed, and its operator class."""
        schema, index = self._extension, self._options.index
        expression, operators, _ = self._options.indexed(
            layout.k, layout.dtype, layout.metric, self._quoted(schema)
        )
        if index in EXTENSIONS:
            schema = operator_class_schema(self._connection, index, operators)
        # Made of nothing but numbers, the words of pgvector and a quoted name.
        return sql.SQL(expression), sql.Identifier(schema, operators)

    def _quoted(self, schema: str) -> str:
        return f"{sql.Identifier(schema).as_string(self._connection)}."

    def _place(self, table: str) -> sql.Identifier:
        return sql.Identifier(self._schema, table)

    def _text(self, table: str) -> str:
        return str(self._place(table).as_string(self._connection))

    def _execute(self, order: str, *parts: str | Iterable[str] | sql.Composable) -> Any:
        return self._connection.execute(composed(order, *parts))

    def _format(self, layout: Layout) -> RowFormat:
        return RowFormat(layout, self._extension)

    @contextmanager
    def _building(self) -> Iterator[None]:
        """Open a transaction with the settings for building an index."""
        names = {"maintenance_work_mem", "max_parallel_maintenance_workers"}
        with self._connection.transaction():
            self._set(self._options.model_dump(include=names, exclude_none=True))
            with self._connection.patient():
                yield

    def _lock_alone(self) -> None:
        """Keep all others from the published table until the transaction ends."""
        # New readers wait behind an attempt to lock it, so it is short, and repeated.
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

    @contextmanager
    def _on_users_path(self) -> Iterator[None]:
        """Set the search path that triggers of the table may need, behind the server's own."""
        path = f"pg_catalog, {self._users_path}".rstrip(", ")
        self._set({"search_path": path})
        with self._connection.patient():
            yield
        self._set({"search_path": ""})

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

    def _drop_pending(self) -> None:
        while (table := self._look(pending=True)) is not None:
            self._execute("DROP TABLE {}", self._place(table.name))


def _stored(row: Sequence[Any], *, pending: bool) -> Stored | None:
    """Return a table, whose handle is the name of its key, None if no push wrote it as it is."""
    name, kind, type_, width, key, of_key, of_vectors = row
    # A copy by CREATE TABLE … LIKE has the comments of columns, not that of the key.
    pushed = PushedTable.read(of_key or (of_vectors if pending else None))
    if pushed is None or (kind, pushed.name) != ("r", name):
        return None
    # A published table may have the name of a pending one, but not of its key.
    if pending and key not in (None, f"{name}p"):
        return None
    made = VECTOR_TYPES.get(pushed.dtype), pushed.k
    return Stored(pushed, pending, key) if made == (type_, width) else None
