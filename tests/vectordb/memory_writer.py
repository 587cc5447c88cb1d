"""A database in memory that does as the interface says: what a push is tested against first."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from whiten_index.corpus.batches import ID
from whiten_index.errors import DatabaseError
from whiten_index.vectordb.database_writer import DatabaseWriter, Find, Hit, Stored
from whiten_index.vectordb.pushed_table import VECTOR, Layout, PushedTable


@dataclass
class Table:
    """One pushed and its rows, by their key."""

    pushed: PushedTable
    layout: Layout
    rows: dict[Any, dict[str, Any]] = field(default_factory=dict)
    indexed: bool = False


@dataclass
class Server:
    """What outlives a connection: the tables.

    Attributes:
        transactions: whether changes that fail leave nothing behind.
        fails_after: batches that are taken until the connection breaks, None for all.
        connections: those that are open.
    """

    transactions: bool = True
    published: Table | None = None
    pending: Table | None = None
    fails_after: int | None = None
    connections: int = 0

    def take(self) -> None:
        """Let one batch in."""
        if self.fails_after is not None:
            if not self.fails_after:
                raise DatabaseError("the connection broke")
            self.fails_after -= 1


class MemoryWriter(DatabaseWriter):
    """A connection to a server; the handle of a ``Stored`` is its table."""

    engine, target = "memory 1.0", "memory://here/docs"

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.server = server
        server.connections += 1
        self._before: tuple[Table, PushedTable, dict[Any, Any]] | None = None

    def close(self) -> None:
        self.server.connections -= 1

    def _explain(self, error: Exception) -> tuple[str, str]:
        return str(error), "mend the test"

    def finish_short(self) -> None:
        """Do as ``finish`` does, and lose a row."""
        assert self.server.pending is not None
        self.server.pending.indexed = True
        self.server.pending.rows.popitem()

    def _find(self, *, pending: bool) -> Stored | None:
        table = self.server.pending if pending else self.server.published
        return None if table is None else Stored(table.pushed, pending, table)

    def _has_lease(self, stored: Stored) -> bool:
        found = self._find(pending=stored.pending)
        return found is not None and found.table.lease == stored.table.lease

    def _create(self, made: PushedTable, layout: Layout) -> Stored:
        self.server.pending = Table(made, layout)
        return Stored(made, True, self.server.pending)

    def _describe(self, stored: Stored) -> None:
        stored.handle.pushed = stored.table

    def _build(self, held: Stored, layout: Layout) -> None:
        held.handle.indexed = True

    def _publish(self, held: Stored) -> None:
        self.server.published, self.server.pending = held.handle, None

    def _discard(self, held: Stored | None) -> None:
        self.server.pending = None

    def _remove(self, published: Stored) -> None:
        self.server.published = None

    def _begin_changes(self) -> None:
        table = self.server.published
        self._before = table and (table, table.pushed, dict(table.rows))

    def _undo_changes(self, changed: Stored | None) -> None:
        if self.server.transactions and changed and self._before and self._has_lease(changed):
            table, table.pushed, table.rows = self._before
        self._before = None

    def _upsert(self, stored: Stored, rows: pa.RecordBatch, layout: Layout) -> None:
        self.server.take()
        for row in rows.to_pylist():
            stored.handle.rows[tuple(row[name] for name in layout.key)] = row

    def _delete(self, stored: Stored, ids: Sequence[str | int], layout: Layout) -> None:
        gone, rows = set(ids), stored.handle.rows
        stored.handle.rows = {key: row for key, row in rows.items() if row[ID] not in gone}

    def _count(self, stored: Stored) -> int:
        return len(stored.handle.rows)

    def _fetch(self, stored: Stored, ids: Sequence[str | int], layout: Layout) -> pa.Table:
        wanted = set(ids)
        rows = [row for row in stored.handle.rows.values() if row[ID] in wanted]
        return pa.Table.from_pylist(rows, layout.schema)

    @contextmanager
    def _searching(
        self, stored: Stored, *, exact: bool, effort: Mapping[str, int] | None
    ) -> Iterator[Find]:
        assert stored.handle.indexed or exact
        rows = list(stored.handle.rows.values())
        matrix = np.array([row[VECTOR] for row in rows], dtype=np.float32)

        def find(vectors: np.ndarray, top_k: int) -> list[list[Hit]]:
            scores = vectors @ matrix.reshape(-1, vectors.shape[1]).T
            best = np.argsort(-scores, axis=1)[:, :top_k]
            return [
                [Hit(rows[at][ID], float(one[at])) for at in near]
                for near, one in zip(best, scores, strict=True)
            ]

        yield find
