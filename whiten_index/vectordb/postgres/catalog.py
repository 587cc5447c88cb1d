"""What the catalog of PostgreSQL tells of a table, and what of it goes over to the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import sql

from whiten_index.vectordb.database_writer import VECTOR


@dataclass(frozen=True)
class Relation:
    """Whatever has a name in a schema.

    Attributes:
        oid: by which the catalog knows it.
        kind: ``r`` for a table, ``i`` for an index, ``v`` for a view, …
        owner: its role.
        vectors: type and width of its vectors, None where it has no such column.
        mark: what the comment on its primary key says, None where there is none.
    """

    oid: int
    kind: str
    owner: str
    vectors: tuple[str, int] | None
    mark: str | None


@dataclass(frozen=True)
class Index:
    """An index of a table.

    Attributes:
        name: of the index.
        unique: whether it lets no value come twice.
        tail: what its definition says after ``USING``.
    """

    name: str
    unique: bool
    tail: str


def relation(connection: Any, schema: str, name: str) -> Relation | None:
    """Return what has a name, None where nothing has."""
    found = connection.execute(
        "SELECT c.oid, c.relkind::text, pg_get_userbyid(c.relowner), t.typname, a.atttypmod, "
        "(SELECT obj_description(k.oid, 'pg_constraint') FROM pg_constraint k "
        "WHERE k.conrelid = c.oid AND k.contype = 'p') "
        "FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = %s AND a.attnum > 0 "
        "AND NOT a.attisdropped LEFT JOIN pg_type t ON t.oid = a.atttypid "
        "WHERE n.nspname = %s AND c.relname = %s",
        [VECTOR, schema, name],
    ).fetchone()
    if found is None:
        return None
    oid, kind, owner, type_, width, mark = found
    return Relation(oid, kind, owner, None if type_ is None else (type_, width), mark)


def additions(connection: Any, oid: int, columns: Sequence[str]) -> list[str]:
    """Return what users added to a table and a new one would lack, indexes and rights apart."""
    found = connection.execute(
        """
        SELECT 'column ' || quote_ident(attname) FROM pg_attribute
            WHERE attrelid = %(oid)s AND attnum > 0 AND NOT attisdropped
            AND attname <> ALL(%(columns)s::text[])
        UNION ALL SELECT 'trigger ' || quote_ident(tgname) FROM pg_trigger
            WHERE tgrelid = %(oid)s AND NOT tgisinternal
        UNION ALL SELECT 'policy ' || quote_ident(polname) FROM pg_policy WHERE polrelid = %(oid)s
        UNION ALL SELECT 'row level security' FROM pg_class WHERE oid = %(oid)s AND relrowsecurity
        UNION ALL SELECT 'rule ' || quote_ident(rulename) FROM pg_rewrite WHERE ev_class = %(oid)s
        UNION ALL SELECT 'constraint ' || quote_ident(conname) FROM pg_constraint
            WHERE conrelid = %(oid)s AND contype NOT IN ('p', 'n')
        UNION ALL SELECT 'statistics ' || quote_ident(stxname) FROM pg_statistic_ext
            WHERE stxrelid = %(oid)s
        UNION ALL SELECT 'publication ' || quote_ident(pubname) FROM pg_publication_rel
            JOIN pg_publication p ON p.oid = prpubid WHERE prrelid = %(oid)s
        UNION ALL SELECT 'sequence ' || quote_ident(c.relname) || ' that it owns' FROM pg_depend d
            JOIN pg_class c ON c.oid = d.objid AND c.relkind = 'S'
            WHERE d.refobjid = %(oid)s AND d.refclassid = 'pg_class'::regclass
            AND d.classid = 'pg_class'::regclass AND d.deptype = 'a'
        UNION ALL SELECT 'UNLOGGED' FROM pg_class WHERE oid = %(oid)s AND relpersistence <> 'p'
        UNION ALL SELECT 'row level security of the owner' FROM pg_class
            WHERE oid = %(oid)s AND relforcerowsecurity
        UNION ALL SELECT 'access method ' || quote_ident(amname) FROM pg_class c
            JOIN pg_am m ON m.oid = c.relam WHERE c.oid = %(oid)s
            AND amname <> current_setting('default_table_access_method')
        UNION ALL SELECT 'identity of column ' || quote_ident(attname) FROM pg_attribute
            WHERE attrelid = %(oid)s AND attnum > 0 AND NOT attisdropped AND attidentity <> ''
        UNION ALL SELECT 'inheritance ' || inhrelid::regclass::text FROM pg_inherits
            WHERE %(oid)s IN (inhrelid, inhparent)
        UNION ALL SELECT 'security label of ' || provider FROM pg_seclabel
            WHERE objoid = %(oid)s AND classoid = 'pg_class'::regclass
        UNION ALL SELECT 'CLUSTER ON ' || quote_ident(c.relname) FROM pg_index
            JOIN pg_class c ON c.oid = indexrelid WHERE indrelid = %(oid)s AND indisclustered
        UNION ALL SELECT 'REPLICA IDENTITY USING INDEX ' || quote_ident(c.relname) FROM pg_index
            JOIN pg_class c ON c.oid = indexrelid WHERE indrelid = %(oid)s AND indisreplident
        UNION ALL SELECT 'tablespace of index ' || quote_ident(c.relname) FROM pg_index
            JOIN pg_class c ON c.oid = indexrelid WHERE indrelid = %(oid)s AND c.reltablespace <> 0
        UNION ALL SELECT 'statistics of index ' || quote_ident(c.relname) FROM pg_index
            JOIN pg_class c ON c.oid = indexrelid WHERE indrelid = %(oid)s AND EXISTS (
                SELECT FROM pg_attribute WHERE attrelid = c.oid AND attstattarget >= 0)
        """,
        {"oid": oid, "columns": list(columns)},
    )
    return [told for (told,) in found.fetchall()]


def dependents(connection: Any, oid: int) -> list[str]:
    """Return what keeps a table from being dropped, such as ``view public.seen``.

    That is views, foreign keys, functions and columns of its row type, …: whatever the server would
    refuse to drop the table for. Only the catalog is read, and nothing is locked.
    """
    # What is of the table itself goes with it: 'a' and 'i' of pg_depend, to any depth.
    found = connection.execute(
        """
        WITH RECURSIVE gone (class, id) AS (
            SELECT 'pg_class'::regclass::oid, %s::oid
            UNION SELECT classid, objid FROM pg_depend JOIN gone ON (refclassid, refobjid)
                = (class, id) WHERE deptype IN ('a', 'i', 'P', 'S')
        ), held AS (
            SELECT classid, objid, objsubid FROM pg_depend JOIN gone ON (refclassid, refobjid)
                = (class, id) WHERE deptype = 'n' AND (classid, objid) NOT IN (SELECT * FROM gone)
        )
        SELECT DISTINCT o.type, o.identity FROM held
        -- Of a view it is a rule within it that depends on the table.
        LEFT JOIN pg_depend of ON (of.classid, of.objid) = (held.classid, held.objid)
            AND of.deptype = 'i',
        LATERAL pg_identify_object(coalesce(of.refclassid, held.classid),
            coalesce(of.refobjid, held.objid), coalesce(of.refobjsubid, held.objsubid)) AS o
        ORDER BY 1, 2
        """,
        [oid],
    )
    return [f"{kind} {name}" for kind, name in found.fetchall()]


def indexes(connection: Any, oid: int) -> list[Index]:
    """Return the indexes of a table but those that are of a constraint."""
    found = connection.execute(
        """
        SELECT c.relname, i.indisunique, substr(pg_get_indexdef(i.indexrelid), 1 + length(
            format('CREATE %%sINDEX %%I ON %%I.%%I USING ',
                   CASE WHEN i.indisunique THEN 'UNIQUE ' ELSE '' END,
                   c.relname, n.nspname, t.relname)))
        FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
        JOIN pg_class t ON t.oid = i.indrelid JOIN pg_namespace n ON n.oid = t.relnamespace
        WHERE i.indrelid = %s AND i.indisvalid
        AND NOT EXISTS (SELECT FROM pg_constraint k WHERE k.conindid = i.indexrelid)
        ORDER BY c.oid
        """,
        [oid],
    )
    return [Index(*each) for each in found.fetchall()]


def indexed(connection: Any, oid: int) -> bool:
    """Tell whether a table has a sound index of vectors, also of what is made of them."""
    found = connection.execute(
        "SELECT FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid "
        "JOIN pg_am m ON m.oid = c.relam WHERE i.indrelid = %s AND i.indisvalid "
        "AND m.amname <> ALL('{btree,hash,gin,gist,brin,spgist}')",
        [oid],
    )
    return found.fetchone() is not None


def carry_rights(connection: Any, old: Relation, new: Relation, table: sql.Composable) -> None:
    """Give a new table the owner, rights and comments of the old one."""
    if old.owner != new.owner:
        _run(connection, "ALTER TABLE {} OWNER TO {}", table, sql.Identifier(old.owner))
    for column, role, _, _ in _rights(connection, new):
        if column is None:
            # Given by ALTER DEFAULT PRIVILEGES, and perhaps taken back from the old one.
            _run(connection, "REVOKE ALL ON {} FROM {}", table, _role(role))
    there = _columns(connection, new)
    for column, role, right, grants in _rights(connection, old):
        if column is not None and column not in there:
            continue
        # The word comes from the server, which knows no others.
        what = sql.SQL(right)
        if column is not None:
            what = sql.SQL("{} ({})").format(what, sql.Identifier(column))
        with_grants = sql.SQL(" WITH GRANT OPTION" if grants else "")
        _run(connection, "GRANT {} ON {} TO {}{}", what, table, _role(role), with_grants)
    for column, comment in _comments(connection, old):
        if column is None:
            _run(connection, "COMMENT ON TABLE {} IS {}", table, sql.Literal(comment))
        elif column in there:
            place = sql.SQL("{}.{}").format(table, sql.Identifier(column))
            _run(connection, "COMMENT ON COLUMN {} IS {}", place, sql.Literal(comment))


def carry_comment(connection: Any, old: Relation, index: sql.Composable) -> None:
    """Give a new index the comment of the old one."""
    (comment,) = connection.execute("SELECT obj_description(%s, 'pg_class')", [old.oid]).fetchone()
    if comment is not None:
        _run(connection, "COMMENT ON INDEX {} IS {}", index, sql.Literal(comment))


def _rights(connection: Any, of: Relation) -> list[tuple[str | None, str | None, str, bool]]:
    """Return column, role, right and whether it may be given on; the owner's own apart."""
    found = connection.execute(
        """
        SELECT name, CASE WHEN x.grantee = 0 THEN NULL ELSE pg_get_userbyid(x.grantee) END,
            x.privilege_type, x.is_grantable
        FROM (SELECT NULL::text AS name, relacl AS acl, relowner AS owner FROM pg_class
                  WHERE oid = %(oid)s
              UNION ALL SELECT attname::text, attacl, relowner FROM pg_attribute
                  JOIN pg_class ON pg_class.oid = attrelid
                  WHERE attrelid = %(oid)s AND attnum > 0 AND NOT attisdropped) AS every,
            LATERAL aclexplode(every.acl) AS x
        WHERE x.grantee <> every.owner
        """,
        {"oid": of.oid},
    )
    rights: list[tuple[str | None, str | None, str, bool]] = found.fetchall()
    return rights


def _comments(connection: Any, of: Relation) -> list[tuple[str | None, str]]:
    found: list[tuple[str | None, str]] = connection.execute(
        "SELECT attname::text, description FROM pg_description LEFT JOIN pg_attribute "
        "ON attrelid = objoid AND attnum = objsubid AND objsubid > 0 "
        "WHERE objoid = %s AND classoid = 'pg_class'::regclass",
        [of.oid],
    ).fetchall()
    return found


def _columns(connection: Any, of: Relation) -> set[str]:
    found = connection.execute(
        "SELECT attname FROM pg_attribute WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped",
        [of.oid],
    )
    return {name for (name,) in found.fetchall()}


def _role(name: str | None) -> sql.Composable:
    return sql.SQL("PUBLIC") if name is None else sql.Identifier(name)


def _run(connection: Any, order: str, *parts: sql.Composable) -> None:
    connection.execute(sql.SQL(order).format(*parts))
