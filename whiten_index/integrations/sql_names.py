"""Names as PostgreSQL reads them."""

from __future__ import annotations

import re

from whiten_index.errors import ConfigError

_MOST_BYTES = 63  # of a name; PostgreSQL cuts longer ones
_PLAIN = re.compile("[a-z_][a-z0-9_]*")
# Words that are a name only in quotes, at least in some places: pg_get_keywords() of PostgreSQL 18.
_WORDS = """
all analyse analyze and any array as asc asymmetric authorization between bigint binary bit
boolean both case cast char character check coalesce collate collation column concurrently
constraint create cross current_catalog current_date current_role current_schema current_time
current_timestamp current_user dec decimal default deferrable desc distinct do else end except
exists extract false fetch float for foreign freeze from full grant greatest group grouping having
ilike in initially inner inout int integer intersect interval into is isnull join json json_array
json_arrayagg json_exists json_object json_objectagg json_query json_scalar json_serialize
json_table json_value lateral leading least left like limit localtime localtimestamp merge_action
national natural nchar none normalize not notnull null nullif numeric offset on only or order out
outer overlaps overlay placing position precision primary real references returning right row
select session_user setof similar smallint some substring symmetric system_user table tablesample
then time timestamp to trailing treat trim true union unique user using values varchar variadic
verbose when where window with xmlattributes xmlconcat xmlelement xmlexists xmlforest
xmlnamespaces xmlparse xmlpi xmlroot xmlserialize xmltable
"""
KEYWORDS = frozenset(_WORDS.split())


def quoted(name: str, option: str) -> str:
    """Return a name as PostgreSQL reads it, whatever it holds.

    Args:
        name: of a function or schema.
        option: that gave it, for the message.

    Raises:
        ConfigError: PostgreSQL would cut or refuse it.
    """
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        size = 0
    if "\0" in name or not 1 <= size <= _MOST_BYTES:
        raise ConfigError(
            f"{option} {name[:80]!r} is no name of PostgreSQL: these have 1 to {_MOST_BYTES} bytes "
            "of UTF-8; give another"
        )
    return '"' + name.replace('"', '""') + '"'


def brief(quoted_name: str) -> str:
    """Return a quoted name without the quotes where it is found without them too."""
    name = quoted_name[1:-1]
    return name if _PLAIN.fullmatch(name) and name not in KEYWORDS else quoted_name


def literal(text: str) -> str:
    """Return a text as PostgreSQL reads it."""
    return "'" + text.replace("'", "''") + "'"


def dollar_tag(body: str) -> str:
    """Return what quotes a body: nothing that is in it."""
    tag = "$whiten$"
    while tag in body:
        tag = f"{tag[:-1]}_$"
    return tag
