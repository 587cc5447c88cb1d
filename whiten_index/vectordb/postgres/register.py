"""What each table of ours holds: one table of JSON beside them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from psycopg import sql
from psycopg.types.json import Jsonb

from whiten_index.errors import DatabaseError
from whiten_index.vectordb.database_writer import Layout, Metric, PushedTable, VectorDtype
from whiten_index.vectordb.postgres.naming import beside_values

REGISTER = "whiten_index_tables"
_LOCK = "whiten-index makes its register"


@dataclass(frozen=True)
class Entry:
    """A pushed, and what else is to be known of its table.

    Attributes:
        pushed: whose name is that of the table.
        metric: that its index is of.
        columns: that a push made; others were added by its users.
        oid: by which the catalog knows the table, 0 before it is published.
        made: the name that it was made with, which the comment on its primary key tells too: a
            database that was restored gives another oid.
    """

    pushed: PushedTable
    metric: Metric
    columns: tuple[str, ...]
    oid: int
    made: str

    @classmethod
    def of(cls, pushed: PushedTable, layout: Layout) -> Entry:
        """Return the entry of a new table."""
        columns = tuple(layout.schema.names)
        named = replace(pushed, columns=columns)
        return cls(named, layout.metric, columns, 0, pushed.name)

    @property
    def mark(self) -> str:
        """Comment on the primary key of the table."""
        return f"whiten-index {self.made}"

    @property
    def table(self) -> str:
        """Name of the table."""
        return self.pushed.name


class Register:
    """The entries of one name, in transactions of the connection's.

    Args:
        connection: to the database.
        schema: of the tables and the register.
        name: that users query.
    """

    def __init__(self, connection: Any, schema: str, name: str) -> None:
        self._connection, self._schema, self._name = connection, schema, name
        self._table = sql.Identifier(schema, REGISTER)

    def make(self) -> None:
        """Make the register where there is none."""
        if self._is_there():
            return
        # IF NOT EXISTS alone fails where two make it at once.
        self._connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", [_LOCK])
        self._connection.execute(
            sql.SQL(
                "CREATE TABLE IF NOT EXISTS {} (name text NOT NULL, pending boolean NOT NULL, "
                "pushed jsonb NOT NULL, PRIMARY KEY (name, pending))"
            ).format(self._table)
        )

    def read(self, *, pending: bool) -> Entry | None:
        """Return the entry of the published or the pending table, None where there is none.

        Raises:
            DatabaseError: it is none of this release.
        """
        if not self._is_there():
            return None
        query = sql.SQL("SELECT pushed FROM {} WHERE name = %s AND pending = %s")
        found = self._execute(query, [self._name, pending]).fetchone()
        if found is None:
            return None
        try:
            return self._entry(found[0], pending=pending)
        except (KeyError, TypeError, ValueError) as error:
            raise DatabaseError(self._unreadable(error, pending=pending)) from error

    def _entry(self, told: Any, *, pending: bool) -> Entry:
        """Return an entry as it is kept.

        Raises:
            KeyError, TypeError, ValueError: it is none, or names a table that no push makes.
        """
        pushed, columns = PushedTable.from_json(told), tuple(map(str, told["columns"]))
        VectorDtype(pushed.dtype)
        form = re.escape(self._name) + r"__[0-9a-f]{8}"
        made = str(told["made"])
        if not re.fullmatch(form, made) or pushed.name != (made if pending else self._name):
            raise ValueError(f"table {pushed.name[:80]!r}")
        return Entry(pushed, Metric(told["metric"]), columns, int(told["oid"]), made)

    def _unreadable(self, error: Exception, *, pending: bool) -> str:
        """Return what is wrong with an entry, and what to do."""
        why = f"it lacks {error}" if isinstance(error, KeyError) else f"{error}"
        order = sql.SQL("DELETE FROM {} WHERE name = {} AND {}pending").format(
            self._table, sql.Literal(self._name), sql.SQL("" if pending else "NOT ")
        )
        then = (
            f"a table {self._name}__ with eight digits, if there is one, is worth nothing then"
            if pending
            else f"the table {self._name!r} is told to be no push's then: drop it too, or give "
            "--table another name"
        )
        return (
            f"the entry of {self._name!r} in {REGISTER} cannot be read ({why}): another release, "
            "earlier or later, wrote it, or it was changed by hand; push with that release, or "
            f"delete that row of it: {order.as_string(self._connection)}; {then}"
        )

    def write(self, entry: Entry, *, pending: bool) -> None:
        """Put an entry in the place of what there was."""
        told = entry.pushed.to_json()
        told |= {"metric": entry.metric.value, "columns": list(entry.columns)}
        told |= {"oid": entry.oid, "made": entry.made}
        self._execute(
            sql.SQL(
                "INSERT INTO {} VALUES (%s, %s, %s) ON CONFLICT (name, pending) "
                "DO UPDATE SET pushed = EXCLUDED.pushed"
            ),
            [self._name, pending, Jsonb(told)],
        )

    def remove(self, *, pending: bool) -> None:
        """Take an entry away."""
        self._execute(
            sql.SQL("DELETE FROM {} WHERE name = %s AND pending = %s"), [self._name, pending]
        )

    def advance(self, entry: Entry, rows: int) -> Entry:
        """Open a transaction, count rows of the pending table as done, and return its entry.

        All in one message to the server. One that crashes loses the last batches with their count,
        and they are sent again; the swap waits for the disk.

        Raises:
            DatabaseError: another push changed it since it was read.
        """
        done = entry.pushed.done
        order = sql.SQL(
            "BEGIN; SET LOCAL synchronous_commit = off; "
            "UPDATE {} SET pushed = jsonb_set(pushed, '{{done}}', to_jsonb({}::bigint))"
            " WHERE name = {} AND pending AND pushed->>'name' = {}"
            " AND (pushed->>'done')::bigint = {}"
        ).format(self._table, *map(sql.Literal, (done + rows, self._name, entry.table, done)))
        found = self._connection.execute(order)
        while found.nextset():
            pass
        if found.rowcount != 1:
            raise DatabaseError(
                f"another push took over {self._name!r}; let one of them end, and push again"
            )
        return replace(entry, pushed=replace(entry.pushed, done=done + rows))

    def _is_there(self) -> bool:
        found = self._connection.execute(
            "SELECT 1 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname = %s AND c.relname = %s",
            [self._schema, REGISTER],
        )
        return found.fetchone() is not None

    def _execute(self, query: sql.SQL, values: list[Any]) -> Any:
        table = beside_values(self._connection, self._table)
        return self._connection.execute(query.format(table), values)
