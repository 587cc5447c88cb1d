"""Tables that pushes wrote, as the catalog of PostgreSQL describes them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from psycopg import sql

from whiten_index.errors import DatabaseError
from whiten_index.vectordb.database_writer import Stored
from whiten_index.vectordb.postgres_connection import find_extension, find_schema, shown_address
from whiten_index.vectordb.postgres_copy import VECTOR_TYPES
from whiten_index.vectordb.pushed_table import VECTOR, PushedTable

_TABLES = """
    SELECT c.relname, c.relkind = 'r', c.oid, pg_get_userbyid(c.relowner),
        pg_has_role(c.relowner, 'USAGE'), t.typname, a.atttypmod, k.conname,
        obj_description(k.oid, 'pg_constraint'), col_description(c.oid, a.attnum)
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = %(vector)s AND NOT a.attisdropped
    LEFT JOIN pg_type t ON t.oid = a.atttypid
    LEFT JOIN pg_constraint k ON k.conrelid = c.oid AND k.contype = 'p'
    WHERE n.nspname = %(schema)s
        AND (c.relname = %(name)s OR starts_with(c.relname, %(name)s || '__'))
"""
_ADDITIONS = """
    SELECT 'column ' || quote_ident(attname) FROM pg_attribute WHERE attrelid = %(oid)s
        AND attnum > 0 AND NOT attisdropped AND attname <> ALL(%(columns)s::text[])
    UNION SELECT 'row level security' FROM pg_class WHERE oid = %(oid)s
        AND (relrowsecurity OR relforcerowsecurity)
    UNION SELECT 'inheritance of ' || inhparent::regclass FROM pg_inherits WHERE inhrelid = %(oid)s
    UNION SELECT pg_describe_object(d.classid, d.objid, d.objsubid)
        FROM pg_class c LEFT JOIN pg_type t ON t.oid = c.reltype
        JOIN pg_depend d ON d.deptype IN ('n', 'a') AND (
            (d.refclassid, d.refobjid) = ('pg_class'::regclass, c.oid)
            OR d.refclassid = 'pg_type'::regclass AND d.refobjid IN (t.oid, t.typarray))
        LEFT JOIN pg_constraint k ON d.classid = 'pg_constraint'::regclass AND k.oid = d.objid
        LEFT JOIN pg_class i ON d.classid = 'pg_class'::regclass AND i.oid = d.objid
        WHERE c.oid = %(oid)s AND (k.conrelid IS DISTINCT FROM c.oid OR k.contype NOT IN ('p', 'n'))
            AND i.relname IS DISTINCT FROM %(index)s
    ORDER BY 1
"""
_GRANTS = """
    SELECT name, CASE WHEN x.grantee = 0 THEN NULL ELSE pg_get_userbyid(x.grantee) END,
        x.privilege_type, x.is_grantable
    FROM (SELECT NULL::text AS name, relacl AS acl, relowner AS owner FROM pg_class
              WHERE oid = %(oid)s
          UNION ALL SELECT attname::text, attacl, relowner FROM pg_attribute
              JOIN pg_class ON pg_class.oid = attrelid
              WHERE attrelid = %(oid)s AND attnum > 0 AND NOT attisdropped) AS every,
        LATERAL aclexplode(every.acl) AS x
    WHERE x.grantee <> every.owner
"""
_COMMENTS = """
    SELECT attname::text, description FROM pg_description
    LEFT JOIN pg_attribute ON attrelid = objoid AND attnum = objsubid AND objsubid > 0
    WHERE objoid = %(oid)s AND classoid = 'pg_class'::regclass
"""


class Facts(NamedTuple):
    """Facts of a table of a push, the handle of its ``Stored``; ``key`` names its primary key."""

    oid: int = 0
    key: str | None = None
    owner: str = ""
    owned: bool = True


class Catalog:
    """The published and the pending table of one name, in a schema of a server.

    Attributes:
        connection: of psycopg.
        schema: of the tables.
        extension: schema that pgvector is installed in, "" if it is not.
        pgvector: its release.
        target: address and name, for errors.
    """

    def __init__(self, connection: Any, name: str, schema: str | None, *, make: bool) -> None:
        self.connection, self._name = connection, name
        self.schema = find_schema(connection, schema)
        self.extension, self.pgvector = find_extension(connection, make=make)
        qualified = sql.Identifier(self.schema, name).as_string(connection)
        self.target = f"{shown_address(connection)}, table {qualified}"

    def place(self, table: str) -> sql.Identifier:
        """Return the qualified name of a table or an index."""
        return sql.Identifier(self.schema, table)

    def execute(self, order: str, *parts: sql.Composable) -> Any:
        """Execute a statement in which each ``{}`` is a part."""
        return self.connection.execute(sql.SQL(order).format(*parts))

    def published(self) -> Stored | None:
        """Return the table of the name, or None."""
        for row in self._rows():
            if row[0] == self._name:
                # A copy by CREATE TABLE … LIKE has the comments of columns, not that of the key.
                found = self._stored(row, row[8], pending=False)
                if found is None:
                    raise DatabaseError(
                        f"{self.target} is there, and no push made it as it is; choose another "
                        "--table, or drop it"
                    )
                return found
        return None

    def pending(self) -> Stored | None:
        """Return the table that a push began and did not publish, or None."""
        form = re.escape(self._name) + "__[0-9a-f]{8}"
        rows = [row for row in self._rows() if re.fullmatch(form, row[0])]
        found = (self._stored(row, row[8] or row[9], pending=True) for row in rows)
        return next(filter(None, found), None)

    def describe(self, stored: Stored) -> None:
        """Write the description of a table: to its primary key, or before that to its vectors."""
        described = json.dumps({"table": self._name, **stored.table.to_json()})
        place, text = self.place(stored.name), sql.Literal(described)
        if stored.handle.key is None:
            self.execute("COMMENT ON COLUMN {}.{} IS {}", place, sql.Identifier(VECTOR), text)
        else:
            key = sql.Identifier(stored.handle.key)
            self.execute("COMMENT ON CONSTRAINT {} ON {} IS {}", key, place, text)

    def require_replaceable(self, old: Stored | None) -> None:
        """Refuse to replace a table, before any row is sent."""
        found = self.connection.execute(
            "SELECT format('GRANT %%s ON SCHEMA %%I TO %%I', r, %(schema)s::text, current_user) "
            "FROM unnest('{USAGE,CREATE}'::text[]) AS r "
            "WHERE NOT has_schema_privilege(%(schema)s, r)",
            {"schema": self.schema},
        )
        lacking = [order for (order,) in found.fetchall()]
        if old is not None and not old.handle.owned:
            lacking.append(self._ownership(old))
        if lacking:
            raise self._lacking(lacking)
        added = [] if old is None else self._additions(old)
        if added:
            raise DatabaseError(
                f"{self.target} has what its users added, or what depends on it, and a new table "
                f"would lack: {', '.join(added)[:400]}; drop that, push, and create it again"
            )

    def require_owned(self, table: Stored) -> None:
        """Refuse to change rows of a table of another role."""
        if not table.handle.owned:
            raise self._lacking([self._ownership(table)])

    def carry_access(self, old: Stored, new: Stored) -> None:
        """Give the new table the owner, the grants and the comments of the old one."""
        table = self.place(new.name)
        if old.handle.owner != new.handle.owner:
            owner = sql.Identifier(old.handle.owner)
            self.execute("ALTER TABLE {} OWNER TO {}", table, owner)
        for column, role, _, _ in self._of(new, _GRANTS):
            if column is None:
                # By ALTER DEFAULT PRIVILEGES; the old table may not have it any more.
                self.execute("REVOKE ALL ON {} FROM {}", table, _role(role))
        for column, role, right, grantable in self._of(old, _GRANTS):
            if column is None or column in new.table.columns:
                what = sql.SQL(right)
                if column is not None:
                    what = sql.SQL("{} ({})").format(what, sql.Identifier(column))
                option = sql.SQL(" WITH GRANT OPTION" if grantable else "")
                self.execute("GRANT {} ON {} TO {}{}", what, table, _role(role), option)
        for column, comment in self._of(old, _COMMENTS):
            if column is None:
                self.execute("COMMENT ON TABLE {} IS {}", table, sql.Literal(comment))
            elif column in new.table.columns:
                place = sql.SQL("{}.{}").format(table, sql.Identifier(column))
                self.execute("COMMENT ON COLUMN {} IS {}", place, sql.Literal(comment))

    def has_vector_index(self, table: Stored) -> bool:
        """Return whether a table has a valid index of vectors, or of an expression of them."""
        found = self.connection.execute(
            "SELECT FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid "
            "JOIN pg_am m ON m.oid = c.relam WHERE i.indrelid = %s AND i.indisvalid "
            "AND m.amname <> ALL('{btree,hash,gin,gist,brin,spgist}')",
            [table.handle.oid],
        )
        return found.fetchone() is not None

    def _rows(self) -> list[tuple[Any, ...]]:
        given = {"schema": self.schema, "name": self._name, "vector": VECTOR}
        rows: list[tuple[Any, ...]] = self.connection.execute(_TABLES, given).fetchall()
        return rows

    def _stored(self, row: Sequence[Any], description: str, *, pending: bool) -> Stored | None:
        """Return a table, None if no push wrote it as it is."""
        name, is_table, oid, owner, owned, type_, width, key, *_ = row
        try:
            described = json.loads(description or "")
            pushed = PushedTable.from_json(described)
            made = VECTOR_TYPES[pushed.dtype], pushed.k
        except (KeyError, TypeError, ValueError):
            return None
        if not is_table or described.get("table") != self._name or made != (type_, width):
            return None
        return Stored(replace(pushed, name=name), pending, Facts(oid, key, owner, owned))

    def _lacking(self, statements: Sequence[str]) -> DatabaseError:
        return DatabaseError(
            f"{self.target}: permission denied; this role lacks rights: connect as another one, or "
            f"have an owner run {'; '.join(statements)}"
        )

    def _ownership(self, table: Stored) -> str:
        (order,) = self.connection.execute(
            "SELECT format('ALTER TABLE %%I.%%I OWNER TO %%I (or push as %%I, who owns it, or as a "
            "member of that role)', %s::text, %s::text, current_user, %s::text)",
            [self.schema, table.name, table.handle.owner],
        ).fetchone()
        return str(order)

    def _additions(self, table: Stored) -> list[str]:
        columns, index = list(table.table.columns), f"{self._name}_vector_idx"
        given = {"oid": table.handle.oid, "columns": columns, "index": index}
        return [addition for (addition,) in self.connection.execute(_ADDITIONS, given).fetchall()]

    def _of(self, table: Stored, query: str) -> list[tuple[Any, ...]]:
        given = {"oid": table.handle.oid}
        found: list[tuple[Any, ...]] = self.connection.execute(query, given).fetchall()
        return found


def _role(name: str | None) -> sql.Composable:
    return sql.SQL("PUBLIC") if name is None else sql.Identifier(name)
