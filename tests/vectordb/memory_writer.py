"""A database in memory that does as the protocol says: what a push is tested against first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from whiten_index.corpus.batches import ID
from whiten_index.errors import DatabaseError
from whiten_index.vectordb.database_writer import (
    VECTOR,
    DatabaseWriter,
    Layout,
    Neighbours,
    PushedTable,
    new_lease,
    not_begun,
    padded_scores,
    require_rows,
    taken_over,
)


@dataclass
class Table:
    """One pushed and its rows, by their key."""

    pushed: PushedTable
    layout: Layout
    rows: dict[Any, dict[str, Any]] = field(default_factory=dict)
    indexed: bool = False

    def upsert(self, rows: pa.RecordBatch) -> None:
        for row in rows.to_pylist():
            self.rows[tuple(row[name] for name in self.layout.key)] = row

    def delete(self, ids: Sequence[str | int]) -> None:
        gone = set(ids)
        self.rows = {key: row for key, row in self.rows.items() if row[ID] not in gone}


@dataclass
class Server:
    """What outlives a connection: tables by name, and the calls in their order.

    Attributes:
        transactions: whether changes that fail leave nothing behind.
        fails_after: batches that are taken until the connection breaks, None for all.
        deletes: how many ids each call took away.
        notes: what is odd about what is published.
    """

    transactions: bool = True
    published: Table | None = None
    pending: Table | None = None
    calls: list[str] = field(default_factory=list)
    fails_after: int | None = None
    deletes: list[int] = field(default_factory=list)
    notes: tuple[str, ...] = ()

    def take(self) -> None:
        """Let one batch in."""
        if self.fails_after is not None:
            if not self.fails_after:
                raise DatabaseError("the connection broke")
            self.fails_after -= 1


class MemoryWriter(DatabaseWriter):
    """A connection to a server."""

    engine, target = "memory 1.0", "memory://here/docs"

    def __init__(self, server: Server) -> None:
        self.server = server
        self._lease = ""
        self._layout: Layout | None = None
        self._seen: PushedTable | None = None

    def close(self) -> None:
        self.server.calls.append("close")

    def published(self) -> PushedTable | None:
        self._seen = self.server.published and self.server.published.pushed
        return self._seen

    def pending(self) -> PushedTable | None:
        return self.server.pending and self.server.pending.pushed

    def begin(self, pushed: PushedTable, layout: Layout) -> None:
        self.server.calls.append("begin")
        self._lease = new_lease()
        made = replace(pushed, done=0, lease=self._lease)
        self.server.pending = Table(made, layout)

    def resume(self, layout: Layout) -> None:
        table = self.server.pending
        if table is None:
            raise not_begun(self.target)
        assert table.layout == layout
        self._lease = new_lease()
        table.pushed = replace(table.pushed, lease=self._lease)
        self.server.calls.append("resume")

    def append(self, rows: pa.RecordBatch) -> None:
        table = self._mine()
        require_rows(rows, table.layout)
        self.server.take()
        table.upsert(rows)
        done = table.pushed.done + len(rows)
        table.pushed = replace(table.pushed, done=done)

    def finish(self) -> None:
        table = self._mine()
        self.server.calls.append("finish")
        table.indexed = True

    def swap(self) -> None:
        table = self._mine()
        self.server.calls.append("swap")
        self.server.published, self.server.pending = table, None
        self._lease = ""

    def discard(self) -> None:
        self.server.pending = None
        self._lease = ""

    @contextmanager
    def changing(self, after: PushedTable, layout: Layout) -> Iterator[Changes]:
        table = self.server.published
        if table is None:
            raise not_begun(self.target)
        if self._seen not in (None, table.pushed):
            raise taken_over(self.target)
        assert table.layout == layout
        was, lease = table.pushed, new_lease()
        before = dict(table.rows)
        table.pushed = was.changing_to(after, lease=lease)
        changes = Changes(self, table, lease)
        try:
            yield changes
            changes.require_mine()
        except BaseException:
            if self.server.transactions and table.pushed.lease == lease:
                table.rows, table.pushed = before, was
            raise
        self.server.calls.append("changed")
        table.pushed = self._seen = replace(after, done=after.rows)

    def notes(self) -> Sequence[str]:
        """Return what the test wants to be told."""
        return self.server.notes

    def count(self, *, pending: bool = False) -> int:
        return len(self._table(pending).rows)

    def fetch(self, ids: Sequence[str | int], layout: Layout, *, pending: bool = False) -> pa.Table:
        wanted = set(ids)
        rows = [row for row in self._table(pending).rows.values() if row[ID] in wanted]
        return pa.Table.from_pylist(rows, layout.schema)

    def search(
        self, vectors: np.ndarray, top_k: int, *, exact: bool = False, pending: bool = False
    ) -> Neighbours:
        table = self._table(pending)
        assert table.indexed or exact
        rows = list(table.rows.values())
        matrix = np.array([row[VECTOR] for row in rows], dtype=np.float32)
        scores = vectors @ matrix.reshape(len(rows), vectors.shape[1]).T
        best = np.argsort(-scores, axis=1)[:, :top_k]
        ids = [[rows[at][ID] for at in each] for each in best]
        return Neighbours(
            ids, padded_scores(np.take_along_axis(scores, best, axis=1).tolist(), top_k)
        )

    def _mine(self) -> Table:
        table = self.server.pending
        if not self._lease or table is None:
            raise not_begun(self.target)
        if table.pushed.lease != self._lease:
            raise taken_over(self.target)
        return table

    def _table(self, pending: bool) -> Table:
        table = self.server.pending if pending else self.server.published
        assert table is not None
        return table


class Changes:
    """Changes of the published table, for as long as no other connection changes it."""

    def __init__(self, writer: MemoryWriter, table: Table, lease: str) -> None:
        self._writer, self._table, self._lease = writer, table, lease

    def require_mine(self) -> None:
        server = self._writer.server
        if server.published is not self._table or self._table.pushed.lease != self._lease:
            raise taken_over(self._writer.target)

    def upsert(self, rows: pa.RecordBatch) -> None:
        self.require_mine()
        require_rows(rows, self._table.layout)
        self._writer.server.take()
        self._table.upsert(rows)

    def delete(self, ids: Sequence[str | int]) -> None:
        self.require_mine()
        self._writer.server.deletes.append(len(ids))
        self._table.delete(ids)
