"""One push of a name at a time."""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
from typing import Any

import psycopg
from psycopg import sql

from whiten_index.errors import DatabaseError

# Seconds that readers who come wait behind us, and between two tries.
_TRY, _PAUSE = 0.2, 0.3
# An automatic VACUUM makes way for who waits longer than deadlock_timeout, and not before.
_SHORT = """
    SELECT set_config('lock_timeout', (%s + CASE WHEN EXISTS (
        SELECT FROM pg_locks WHERE relation = %s AND mode = 'ShareUpdateExclusiveLock' AND granted
    ) THEN 1000 * extract(epoch FROM current_setting('deadlock_timeout')::interval)
    ELSE 0 END)::int || 'ms', true)
"""


def lock_alone(connection: Any, table: sql.Composable, oid: int, *, most: float) -> None:
    """Keep all others from reading or changing a table, until the end of the transaction.

    Who comes while we wait for others waits behind us: so we try for moments, with pauses.

    Args:
        connection: to the database, in a transaction.
        table: to lock.
        oid: of the table.
        most: seconds to try.

    Raises:
        psycopg.errors.LockNotAvailable: others held it all the time.
    """
    end = time.monotonic() + most
    order = sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE").format(table)
    while True:
        try:
            with connection.transaction():
                connection.execute(_SHORT, [int(1000 * _TRY), oid])
                connection.execute(order)
            break
        except psycopg.errors.LockNotAvailable:
            if time.monotonic() + _PAUSE + _TRY > end:
                raise
        time.sleep(_PAUSE)
    connection.execute("SELECT set_config('lock_timeout', %s, true)", [f"{int(most)}s"])


class NameLock:
    """A lock of the session: the server gives it back when the connection ends, however it ends.

    Args:
        connection: to the database.
        schema: of the table.
        name: that users query.
        target: as it may be shown.
    """

    def __init__(self, connection: Any, schema: str, name: str, target: str) -> None:
        self._connection, self._target, self._taken = connection, target, False
        told = f"whiten-index\0{schema}\0{name}".encode()
        digest = hashlib.blake2b(told, digest_size=8).digest()
        self._key = int.from_bytes(digest, "big", signed=True)

    def take(self) -> None:
        """Let no other push change the name until ``give_back``; wait ``lock_timeout`` for it.

        Raises:
            DatabaseError: another one is at it.
        """
        if self._taken:
            return
        try:
            self._connection.execute("SELECT pg_advisory_lock(%s)", [self._key])
        except psycopg.errors.LockNotAvailable:
            holder = self._holder()
            process = "" if holder is None else f" (server process {holder})"
            raise DatabaseError(
                f"another push is filling or changing {self._target}{process}; wait until it ends. "
                f"Where its machine is gone, end it with SELECT pg_terminate_backend("
                f"{holder or 'PROCESS'})"
            ) from None
        self._taken = True

    def offered(self) -> bool:
        """Take it if no other push is at it, and tell whether it is taken."""
        for wait in (0.1, 0.2, 0.3, 0.4, 0.0):
            # One that was cut off may still be on its way to the disk.
            if self._taken:
                break
            query = "SELECT pg_try_advisory_lock(%s)"
            (self._taken,) = self._connection.execute(query, [self._key]).fetchone()
            if not self._taken:
                time.sleep(wait)
        return self._taken

    def give_back(self) -> None:
        """Let others push."""
        if self._taken:
            with suppress(psycopg.Error):
                self._connection.execute("SELECT pg_advisory_unlock(%s)", [self._key])
            self._taken = False

    def _holder(self) -> int | None:
        found = self._connection.execute(
            "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1 "
            "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
            "AND (classid::bigint << 32) | objid::bigint = %s",
            [self._key],
        ).fetchone()
        return None if found is None else int(found[0])
