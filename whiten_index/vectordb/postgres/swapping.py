"""A new table in the place of the old one, with all that users gave it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psycopg import sql

from whiten_index.errors import DatabaseError
from whiten_index.vectordb.postgres import catalog
from whiten_index.vectordb.postgres.indexing import Indexing
from whiten_index.vectordb.postgres.register import Entry
from whiten_index.vectordb.postgres.settings import carry_settings

# What the name has appended for the indexes of the published table.
_KEY, _VECTORS = "_pkey", "_vector_idx"
# PostgreSQL's 63 bytes, less the longest of what is appended, for a pushed too.
LONGEST_NAME = 63 - len(_VECTORS)

Published = tuple[Entry, catalog.Relation]


class Swapping:
    """Lets a name stand for another table, within a transaction that another opened.

    Args:
        connection: to the database.
        schema: of the tables.
        name: that users query.
        indexing: knows the indexes of the pending table.
        target: as it may be shown.
    """

    def __init__(
        self, connection: Any, schema: str, name: str, indexing: Indexing, target: str
    ) -> None:
        self._connection, self._schema, self._name = connection, schema, name
        self._indexing, self._target = indexing, target

    def require_free(self, old: Published | None) -> None:
        """Refuse to fill a table that could not be swapped in.

        Raises:
            DatabaseError: a name is taken, or users added to the table what a new one would lack, or
                made something that depends on it.
        """
        if old is not None:
            self._require_plain(*old)
            return
        for name in (self._name + _KEY, self._name + _VECTORS):
            if catalog.relation(self._connection, self._schema, name) is not None:
                raise DatabaseError(
                    f"{self._target}: its index would have the name {name!r}, which is taken; "
                    "choose another --table, or rename what has it"
                )

    def users_indexes(self, of: catalog.Relation) -> list[catalog.Index]:
        """Return the indexes that users made on the published table."""
        ours = self._name + _VECTORS
        return [each for each in catalog.indexes(self._connection, of.oid) if each.name != ours]

    def swap(self, old: Published | None, entry: Entry) -> None:
        """Drop the published table, which nobody reads, and give the pending one its name.

        Args:
            old: the published table, None where there is none.
            entry: of the pending one.

        Raises:
            DatabaseError: the new table would lack what users added to the old one, or something of
                theirs depends on that.
        """
        ours = {f"{entry.table}p": self._name + _KEY, f"{entry.table}v": self._name + _VECTORS}
        carried = ours if old is None else ours | self._drop(old, entry, ours)
        self._rename("TABLE", entry.table, self._name)
        for made, name in carried.items():
            if self._relation(made) is not None:
                self._rename("INDEX", made, name)

    def carry_settings(self, old: Published, entry: Entry) -> None:
        """Give the pending table what users set of the published one.

        Raises:
            DatabaseError: the pending table is gone.
        """
        place = sql.Identifier(self._schema, entry.table)
        carry_settings(self._connection, old[1], self._require(entry), place)

    def _drop(self, old: Published, entry: Entry, ours: Mapping[str, str]) -> dict[str, str]:
        """Drop the published table when its rights have gone over to the pending one.

        Returns:
            index of the pending table -> the name of the users' index that it takes the place of.
        """
        self._require_plain(*old)
        carried = self._indexing.carried(self.users_indexes(old[1]), entry)
        self.carry_settings(old, entry)
        for made, name in {**ours, **carried}.items():
            index = self._relation(name)
            if index is not None and self._relation(made) is not None:
                there = sql.Identifier(self._schema, made)
                catalog.carry_comment(self._connection, index, there)
        place = sql.Identifier(self._schema, entry.table)
        catalog.carry_rights(self._connection, old[1], self._require(entry), place)
        gone = sql.Identifier(self._schema, self._name)
        self._connection.execute(sql.SQL("DROP TABLE {}").format(gone))
        return carried

    def _relation(self, name: str) -> catalog.Relation | None:
        return catalog.relation(self._connection, self._schema, name)

    def _require(self, entry: Entry) -> catalog.Relation:
        found = self._relation(entry.table)
        if found is None:
            raise DatabaseError(f"{self._target}: the new table was dropped; push again")
        return found

    def _require_plain(self, entry: Entry, there: catalog.Relation) -> None:
        added = catalog.additions(self._connection, there.oid, entry.columns)
        if added:
            raise DatabaseError(
                f"{self._target} has what its users added and a new table would lack: "
                f"{', '.join(added)[:400]}; drop that, push, and make it again"
            )
        found = catalog.dependents(self._connection, there.oid)
        if found:
            it = "it" if len(found) == 1 else "them"
            raise DatabaseError(
                f"{self._target} cannot be replaced, since something depends on it: drop the "
                f"{' and the '.join(found)[:400]}, push, and create {it} again"
            )

    def _rename(self, kind: str, old: str, new: str) -> None:
        order = sql.SQL("ALTER {} {} RENAME TO {}").format(
            sql.SQL(kind), sql.Identifier(self._schema, old), sql.Identifier(new)
        )
        self._connection.execute(order)
