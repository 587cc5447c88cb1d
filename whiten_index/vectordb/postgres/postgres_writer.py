"""One table of PostgreSQL, by the name that its users query."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import numpy as np
import psycopg
import pyarrow as pa
from numpy.typing import NDArray
from psycopg import sql

from whiten_index.errors import ConfigError, DatabaseError
from whiten_index.vectordb.database_writer import Layout, Neighbours, PushedTable, VectorDtype
from whiten_index.vectordb.postgres import catalog
from whiten_index.vectordb.postgres.changes import Changes
from whiten_index.vectordb.postgres.connecting import shown
from whiten_index.vectordb.postgres.indexing import Indexing
from whiten_index.vectordb.postgres.locking import NameLock, lock_alone
from whiten_index.vectordb.postgres.options import IndexKind, PostgresOptions
from whiten_index.vectordb.postgres.register import Entry, Register
from whiten_index.vectordb.postgres.rights import Doing, lacking
from whiten_index.vectordb.postgres.rows import TYPES, RowFormat
from whiten_index.vectordb.postgres.searching import search
from whiten_index.vectordb.postgres.server import Server
from whiten_index.vectordb.postgres.swapping import Swapping
from whiten_index.vectordb.postgres.telling import lack_of, telling
from whiten_index.vectordb.row_checks import not_begun, require_rows

# Candidates that HNSW looks at by pgvector's own default.
_EF_SEARCH = 40
# Methods that a role may call which no more than reads: the register alone, or the rows too.
_READING = {
    **dict.fromkeys(("published", "notes"), Doing.ASK),
    **dict.fromkeys(("count", "fetch", "search"), Doing.READ),
}

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Method = Callable[Concatenate["PostgresWriter", _P], _R]


def _told(method: _Method[_P, _R]) -> _Method[_P, _R]:
    """Turn errors of the client into those of a writer."""
    doing = _READING.get(method.__name__, Doing.FILL)

    @functools.wraps(method)
    def called(self: PostgresWriter, /, *args: _P.args, **named: _P.kwargs) -> _R:
        with telling(self.target, lambda: self._lacks(doing)):
            return method(self, *args, **named)

    return called


class PostgresWriter:
    """One table, by the name that its users query (``whiten_index.vectordb.database_writer.DatabaseWriter``).

    Args:
        connection: of psycopg, of which it is the only user; every statement is a transaction.
        name: that users query.
        options: of the index and the load.
        server: what is to be known of it.
        pushes: whether whoever opened it means to push; else a role is told no rights for that.
    """

    def __init__(
        self,
        connection: Any,
        name: str,
        options: PostgresOptions,
        server: Server,
        *,
        pushes: bool = True,
    ) -> None:
        with_vectors = f", pgvector {server.pgvector}" if server.pgvector else " without pgvector"
        self.engine = f"PostgreSQL {server.release}{with_vectors}"
        self._pushes = pushes
        qualified = sql.Identifier(server.schema, name).as_string(connection)
        self.target = f"{shown(connection)}, table {qualified}"
        self._connection, self._name, self._options = connection, name, options
        self._server = server
        self._register = Register(connection, server.schema, name)
        self._indexing = Indexing(connection, server.schema, server.extension, options)
        self._swapping = Swapping(connection, server.schema, name, self._indexing, self.target)
        self._filling: tuple[Entry, RowFormat] | None = None
        self._seen: PushedTable | None = None
        self._lock = NameLock(connection, server.schema, name, self.target)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()

    @_told
    def published(self) -> PushedTable | None:
        """Return what the name stands for.

        Raises:
            DatabaseError: something that no push made has the name.
        """
        found = self._published()
        self._seen = None if found is None else found[0].pushed
        return self._seen

    @_told
    def pending(self) -> PushedTable | None:
        """Return the table that a push began and did not swap in.

        Where there is one, no other push can go on with it from now on.

        Raises:
            DatabaseError: another push is at it.
        """
        if self._waiting() is None:
            return None
        # One that was cut off may still be on its way to the disk: it is waited for.
        self._lock.take()
        found = self._waiting()
        return None if found is None else found.pushed

    @_told
    def begin(self, pushed: PushedTable, layout: Layout) -> None:
        """Make an empty pending table, in place of any that was pending.

        Raises:
            ConfigError: the vectors are too wide, or a column's name too long.
            DatabaseError: the table has what a new one would lack, or its names are taken.
        """
        self._options.require_width(layout)
        if layout.dtype is VectorDtype.FLOAT16 and not self._server.halves:
            raise ConfigError(
                f"pgvector {self._server.pgvector} has no float16; run ALTER EXTENSION vector "
                "UPDATE to 0.7 or later, or push with --dtype float32"
            )
        rows = RowFormat(layout, self._server.extension)
        columns = rows.definition()
        self._lock.take()
        old = self._published()
        self._require_rights()
        self._swapping.require_free(old)
        named = replace(pushed, done=0, name=f"{self._name}__{secrets.token_hex(4)}")
        entry = Entry.of(named, layout)
        with self._connection.transaction():
            self._register.make()
            self._drop_pending()
            self._run(sql.SQL("CREATE TABLE {} ({})").format(self._table(entry), columns))
            if old is not None:
                self._swapping.carry_settings(old, entry)
            self._register.write(entry, pending=True)
        self._filling = entry, rows

    @_told
    def resume(self, layout: Layout) -> None:
        """Take up the pending table, whose rows have this layout.

        Raises:
            DatabaseError: there is none, or its rows have another layout; or the published table has
                what a new one would lack.
        """
        self._lock.take()
        entry = self._pending()
        self._require_layout(entry, layout)
        # What was added since it was begun: most of the rows may be yet to come.
        self._swapping.require_free(self._published())
        self._filling = entry, RowFormat(layout, self._server.extension)

    @_told
    def append(self, rows: pa.RecordBatch) -> None:
        """Add rows to the pending table and count them as done, in one transaction.

        Raises:
            DatabaseError: a row or a value cannot be kept; nothing of the batch is there.
        """
        if self._filling is None:
            raise not_begun(self.target)
        entry, form = self._filling
        require_rows(rows, form.layout)
        if not len(rows):
            return
        try:
            after = self._register.advance(entry, len(rows))
            with self._connection.cursor() as cursor:
                form.copy(cursor, self._table(entry), rows)
            self._connection.commit()
        except BaseException:
            with suppress(psycopg.Error):
                self._connection.rollback()
            raise
        self._filling = after, form

    @_told
    def finish(self, layout: Layout) -> None:
        """Build the indexes of the pending table that are not there yet.

        Raises:
            DatabaseError: two rows have one key, or an index that users made cannot be made again.
        """
        self._lock.take()
        entry = self._pending()
        self._require_layout(entry, layout)
        old = self._published()
        self._indexing.key(entry, layout)
        self._indexing.vectors(entry, layout)
        if old is not None:
            self._indexing.carry(self._swapping.users_indexes(old[1]), entry)
        self._run(sql.SQL("ANALYZE {}").format(self._table(entry)))

    @_told
    def swap(self) -> None:
        """Let the name stand for the pending table in one transaction.

        The owner, the rights and the comments of the table before go over to it. Who reads that
        table is waited for, ``lock_timeout`` long.

        Raises:
            DatabaseError: others hold a lock on the table or depend on it; it is as it was, and the
                pending pushed too.
        """
        self._lock.take()
        entry = self._pending()
        with self._connection.transaction():
            old = self._published()
            if old is not None:
                # From here on nobody reads or changes it; who does so now is waited for.
                place = sql.Identifier(self._server.schema, self._name)
                most = self._options.lock_timeout
                lock_alone(self._connection, place, old[1].oid, most=most)
                old = self._published()
            self._swapping.swap(old, entry)
            there = self._relation(self._name)
            now = replace(
                entry,
                pushed=replace(entry.pushed, name=self._name),
                oid=0 if there is None else there.oid,
            )
            self._register.remove(pending=True)
            self._register.write(now, pending=False)
        self._filling, self._seen = None, now.pushed
        self._lock.give_back()

    @_told
    def discard(self) -> None:
        """Drop the pending table, if there is one; that of a push at work is left to it."""
        if self._register.read(pending=True) is None or not self._lock.offered():
            return
        with self._connection.transaction():
            self._drop_pending()
        self._filling = None
        self._lock.give_back()

    @contextmanager
    def changing(self, after: PushedTable, layout: Layout) -> Iterator[Changes]:
        """Open the published table for changes, all in one transaction.

        Raises:
            DatabaseError: there is none, its rows have another layout, or another push changed it
                since it was looked at.
        """
        with telling(self.target, lambda: self._lacks(Doing.CHANGE)):
            self._lock.take()
            try:
                with self._connection.transaction():
                    entry = self._entry(pending=False)
                    self._require_layout(entry, layout)
                    if self._seen not in (None, entry.pushed):
                        raise DatabaseError(
                            f"another push changed {self.target} meanwhile; push again"
                        )
                    form = RowFormat(layout, self._server.extension)
                    lacks = self._lacks(Doing.CHANGE)
                    yield Changes(self._connection, self._table(entry), form, self.target, lacks)
                    # The register keeps what columns there are but once.
                    now = replace(after, done=after.rows, name=entry.table, columns=entry.columns)
                    self._register.write(replace(entry, pushed=now), pending=False)
                self._seen = now
            finally:
                self._lock.give_back()

    @_told
    def notes(self) -> list[str]:
        """Return that the name needs its quotes in SQL, and that an index was dropped."""
        found = list[str]()
        quoted = self._connection.execute("SELECT quote_ident(%s)", [self._name]).fetchone()[0]
        if quoted != self._name:
            found.append(f"in SQL this name needs its quotes: {quoted}")
        there = self._published()
        if (
            there is not None
            and self._options.index is not IndexKind.NONE
            and not catalog.indexed(self._connection, there[1].oid)
        ):
            found.append(
                "the table has no index of its vectors, so every search looks at all rows; push "
                "with --full to have one built, or give --option index=none if that is meant"
            )
        return found

    @_told
    def count(self, *, pending: bool = False) -> int:
        """Return how many rows the published or the pending pushed has."""
        table = self._table(self._entry(pending=pending))
        found = self._run(sql.SQL("SELECT count(*) FROM {}").format(table)).fetchone()
        return int(found[0])

    @_told
    def fetch(self, ids: Sequence[str | int], layout: Layout, *, pending: bool = False) -> pa.Table:
        """Return the rows with these ids, in any order, with the schema of the layout."""
        entry = self._entry(pending=pending)
        self._require_layout(entry, layout)
        form = RowFormat(layout, self._server.extension)
        return form.fetch(self._connection, self._table(entry), ids)

    @_told
    def search(
        self,
        vectors: NDArray[np.float32],
        top_k: int,
        *,
        exact: bool = False,
        pending: bool = False,
    ) -> Neighbours:
        """Return the nearest rows of queries (q, k): by looking at all, or by the index."""
        entry = self._entry(pending=pending)
        settings = {"enable_indexscan": "off"}
        if not exact:
            rows = entry.pushed.rows
            settings = {
                "enable_seqscan": "off",
                "ivfflat.probes": str(self._options.probes_of(rows)),
            }
            # Unless it is given, it is what users of the database have who do not set it.
            wide = self._options.ef_search or (top_k if top_k > _EF_SEARCH else None)
            if wide is not None:
                settings["hnsw.ef_search"] = str(min(wide, 1000))
            if self._options.index is IndexKind.NONE:
                settings = {}
        return search(
            self._connection,
            self._table(entry),
            entry,
            vectors,
            top_k,
            settings=settings,
            extension=self._server.extension,
        )

    def _lacks(self, doing: Doing) -> str:
        every = [doing, Doing.FILL] if self._pushes and doing in _READING.values() else [doing]
        told = [
            lacking(
                self._connection, schema=self._server.schema, extension=self._server.extension,
                name=self._name, doing=each,
            )
            for each in every
        ]  # fmt: skip
        # Of one that cannot even read, what it lacks to push is told as well.
        return "; and to push: ".join(told) if all(told) else told[0]

    def _require_rights(self) -> None:
        """Refuse to fill a table that this role could not swap in.

        Raises:
            DatabaseError: it lacks rights, which are named.
        """
        lacks = self._lacks(Doing.FILL)
        if lacks:
            raise DatabaseError(f"{self.target}: permission denied; {lack_of(lacks)}")

    def _run(self, order: sql.Composable) -> Any:
        return self._connection.execute(order)

    def _table(self, entry: Entry) -> sql.Composable:
        return sql.Identifier(self._server.schema, entry.table)

    def _published(self) -> tuple[Entry, catalog.Relation] | None:
        with self._snapshot():
            there = self._relation(self._name)
            if there is None:
                return None
            entry = self._register.read(pending=False)
        if entry is not None and there.kind == "r":
            made = entry.pushed
            ours = there.oid == entry.oid or there.mark == entry.mark
            if ours and there.vectors == (TYPES[VectorDtype(made.dtype)], made.k):
                return entry, there
        raise DatabaseError(
            f"{self.target} is there, and no push made it as it is; choose another --table, or "
            "drop it"
        )

    def _waiting(self) -> Entry | None:
        entry = self._register.read(pending=True)
        there = None if entry is None else self._relation(entry.table)
        if entry is not None and there is not None and there.kind != "r":
            raise DatabaseError(f"{self.target}: {entry.table!r} is no table of a push; rename it")
        return None if there is None else entry

    def _pending(self) -> Entry:
        entry = self._waiting()
        if entry is None:
            raise not_begun(self.target)
        return entry

    def _entry(self, *, pending: bool) -> Entry:
        if pending:
            return self._pending()
        found = self._published()
        if found is None:
            raise DatabaseError(f"{self.target} is not there; push again")
        return found[0]

    def _require_layout(self, entry: Entry, layout: Layout) -> None:
        made = entry.pushed
        mine = tuple(layout.schema.names), layout.k, layout.dtype.value, layout.metric
        if (entry.columns, made.k, made.dtype, entry.metric) != mine:
            raise DatabaseError(
                f"{self.target} has rows of another layout (k = {made.k}, {made.dtype}, columns "
                f"{', '.join(entry.columns)[:200]}); push all rows with --full"
            )

    def _drop_pending(self) -> None:
        entry = self._waiting()
        if entry is not None:
            self._run(sql.SQL("DROP TABLE {}").format(self._table(entry)))
        self._register.remove(pending=True)

    def _relation(self, name: str) -> catalog.Relation | None:
        return catalog.relation(self._connection, self._server.schema, name)

    @contextmanager
    def _snapshot(self) -> Iterator[None]:
        """Let catalog and register be read as of one moment, where no transaction does so."""
        if self._connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            yield
            return
        with self._connection.transaction():
            self._run(sql.SQL("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
            yield
