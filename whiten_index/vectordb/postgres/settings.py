"""What users set of a table, of how PostgreSQL keeps it, and what goes over to the next one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from psycopg import sql

from whiten_index.vectordb.postgres.catalog import Relation

_STORAGES = {"p": "PLAIN", "e": "EXTERNAL", "m": "MAIN", "x": "EXTENDED"}
_COMPRESSIONS = {"p": "pglz", "l": "lz4", "": "default"}
_IDENTITIES = {"d": "DEFAULT", "f": "FULL", "n": "NOTHING"}


@dataclass(frozen=True)
class _Column:
    storage: str
    compression: str
    target: int
    never: bool
    default: str | None
    options: tuple[str, ...]


@dataclass(frozen=True)
class _Settings:
    tablespace: str
    identity: str
    options: tuple[str, ...]
    toast: tuple[str, ...]
    columns: dict[str, _Column] = field(default_factory=dict)


def carry_settings(connection: Any, old: Relation, new: Relation, table: sql.Composable) -> None:
    """Give a new table what users set of the old one, of the columns that both have.

    That is tablespace, parameters, replica identity, and of each column storage, compression,
    statistics, NOT NULL and default. Before the load, since storage is that of rows to come; and
    again before the swap, for what was set since.
    """
    was, now = _settings(connection, old), _settings(connection, new)
    for order in (*_of_table(was, now), *_of_columns(was, now)):
        connection.execute(sql.SQL("ALTER TABLE {} ").format(table) + order)


def _of_table(was: _Settings, now: _Settings) -> Iterator[sql.Composable]:
    if was.tablespace != now.tablespace:
        yield sql.SQL("SET TABLESPACE {}").format(sql.Identifier(was.tablespace))
    if set(was.options) - set(now.options):
        yield sql.SQL("SET ({})").format(_parameters(was.options))
    if set(was.toast) - set(now.toast):
        yield sql.SQL("SET ({})").format(_parameters(was.toast, "toast"))
    if was.identity != now.identity and was.identity in _IDENTITIES:
        yield sql.SQL("REPLICA IDENTITY " + _IDENTITIES[was.identity])


def _of_columns(was: _Settings, now: _Settings) -> Iterator[sql.Composable]:
    for name in now.columns:
        one, two = was.columns.get(name), now.columns[name]
        if one is None or one == two:
            continue
        column = sql.SQL("ALTER COLUMN {} ").format(sql.Identifier(name))
        if one.storage != two.storage:
            yield column + sql.SQL(f"SET STORAGE {_STORAGES[one.storage]}")
        if one.compression != two.compression:
            yield column + sql.SQL(f"SET COMPRESSION {_COMPRESSIONS[one.compression]}")
        if one.target != two.target:
            yield column + sql.SQL("SET STATISTICS {}").format(sql.Literal(one.target))
        if set(one.options) - set(two.options):
            yield column + sql.SQL("SET ({})").format(_parameters(one.options))
        if one.default is not None and one.default != two.default:
            # The words are those of the server itself.
            yield column + sql.SQL("SET DEFAULT ") + sql.SQL(one.default)
        if one.never and not two.never:
            yield column + sql.SQL("SET NOT NULL")


def _parameters(options: tuple[str, ...], *space: str) -> sql.Composable:
    pairs = (each.split("=", 1) for each in options)
    return sql.SQL(", ").join(
        sql.SQL("{} = {}").format(sql.Identifier(*space, name), sql.Literal(value))
        for name, value in pairs
    )


def _settings(connection: Any, of: Relation) -> _Settings:
    tablespace, identity, options, toast = connection.execute(
        """
        SELECT coalesce(s.spcname, d.spcname), c.relreplident::text, c.reloptions, t.reloptions
        FROM pg_class c LEFT JOIN pg_tablespace s ON s.oid = c.reltablespace
        LEFT JOIN pg_class t ON t.oid = c.reltoastrelid, pg_tablespace d
        WHERE c.oid = %s AND d.oid = (
            SELECT dattablespace FROM pg_database WHERE datname = current_database())
        """,
        [of.oid],
    ).fetchone()
    # Columns of the catalog that a release lacks are null so.
    rows = connection.execute(
        """
        SELECT a.attname, a.attstorage::text, coalesce(to_jsonb(a)->>'attcompression', ''),
            coalesce(a.attstattarget, -1)::int, a.attnotnull, pg_get_expr(d.adbin, d.adrelid),
            a.attoptions
        FROM pg_attribute a
        LEFT JOIN pg_attrdef d ON (d.adrelid, d.adnum) = (a.attrelid, a.attnum)
        WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped
        """,
        [of.oid],
    ).fetchall()
    columns = {
        name: _Column(storage, compression.strip("\0 "), target, never, default, tuple(some or ()))
        for name, storage, compression, target, never, default, some in rows
    }
    return _Settings(tablespace, identity, tuple(options or ()), tuple(toast or ()), columns)
