"""What a role lacks to push: the server's own sentence names one thing at a time."""

from __future__ import annotations

from enum import Enum
from typing import Any

from whiten_index.vectordb.postgres.register import REGISTER

# Superusers and owners have all of these without a grant.
_QUERY = """
    WITH place AS (SELECT oid, nspname FROM pg_namespace WHERE nspname = %(schema)s)
    SELECT format('GRANT USAGE ON SCHEMA %%I TO %%I', nspname, current_user) FROM pg_namespace
        WHERE nspname IN (%(schema)s, %(extension)s) AND NOT has_schema_privilege(oid, 'USAGE')
    UNION ALL SELECT format('GRANT CREATE ON SCHEMA %%I TO %%I', nspname, current_user) FROM place
        WHERE %(doing)s = 'fill' AND NOT has_schema_privilege(oid, 'CREATE')
    UNION ALL SELECT format('GRANT TEMPORARY ON DATABASE %%I TO %%I', current_database(),
            current_user)
        WHERE %(doing)s = 'change' AND NOT has_database_privilege(current_database(), 'TEMPORARY')
    UNION ALL SELECT format('GRANT %%s ON %%I.%%I TO %%I', string_agg(r, ', '), place.nspname,
            c.relname, current_user)
        FROM pg_class c JOIN place ON place.oid = c.relnamespace,
            unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS r
        WHERE (c.relname = %(register)s
                OR %(doing)s IN ('read', 'change') AND c.relname = %(name)s)
            AND (r = 'SELECT' OR %(doing)s IN ('change', 'fill'))
            AND NOT has_table_privilege(c.oid, r)
        GROUP BY c.oid, c.relname, place.nspname
    UNION ALL SELECT format('ALTER TABLE %%I.%%I OWNER TO %%I', place.nspname, c.relname,
            current_user)
            || format(' (or push as %%I, who owns it, or as a member of that role)',
            pg_get_userbyid(c.relowner))
        FROM pg_class c JOIN place ON place.oid = c.relnamespace
        WHERE %(doing)s = 'fill' AND c.relkind = 'r' AND NOT pg_has_role(c.relowner, 'USAGE')
            AND c.relname = %(name)s
"""


class Doing(Enum):
    """What a role needs rights for.

    To ask what is published, to read its rows, to change them, to put a new table in place.
    """

    ASK = "ask"
    READ = "read"
    CHANGE = "change"
    FILL = "fill"


def lacking(connection: Any, *, schema: str, extension: str, name: str, doing: Doing) -> str:
    """Return the statements that give the role of a connection the rights that it lacks.

    Such as ``GRANT CREATE ON SCHEMA x TO y``, a ``;`` between them; "" where it lacks none.

    Args:
        connection: to the database, in no transaction that failed.
        schema: of the tables.
        extension: schema that pgvector is installed in.
        name: that users query.
        doing: for what.
    """
    given = {"schema": schema, "extension": extension, "name": name, "register": REGISTER}
    found = connection.execute(_QUERY, given | {"doing": doing.value})
    return "; ".join(told for (told,) in found.fetchall())
