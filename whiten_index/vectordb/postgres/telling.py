"""What PostgreSQL refuses, in its own sentence, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psycopg

from whiten_index.errors import DatabaseError
from whiten_index.vectordb.row_checks import RowsError

# SQLSTATE, or its class, of what is wrong with the rows themselves.
_OF_ROWS = ("23502", "23505", "22", "54000")
_AGAIN = "push again when that is mended: it goes on where it was"
_NOT_ALLOWED = "42501"
# SQLSTATE, or its class of two letters -> what to do.
_REMEDIES = {
    "28": "give the user in the address, and the password in PGPASSWORD or ~/.pgpass",
    "3D000": "create the database, or name another in the address",
    "3F000": "create the schema, or give --option schema=NAME",
    "23505": "two rows have one key; give every document an id of its own",
    "23502": "users set a column NOT NULL that has no value in some row; drop NOT NULL, or mend "
    "the corpus",
    "42703": "users changed the columns of the table; change them back, or drop it and push again",
    "42P10": "the primary key of the table was dropped; push all rows with --full",
    "42501": "connect as a role that may do this, or have an owner grant the right",
    "42P07": "choose another --table, or rename what has this name",
    "22P05": "the database's encoding lacks a character; use one with the encoding UTF8",
    "22008": "a date or time is out of PostgreSQL's range; leave the column out of --keep",
    "22003": "a number is out of the column's range; push with --dtype float32, or mend the corpus",
    "25006": "connect to the primary server",
    "2BP01": "drop what depends on the table, push again and make it anew; the table is as it was",
    "53100": f"make room on the server's disk (or, where shared memory is named, give --option "
    f"max_parallel_maintenance_workers=0); {_AGAIN}",
    "53200": f"the server is out of memory; give a smaller --option maintenance_work_mem; {_AGAIN}",
    "53300": "the server has no connection left; end others, or try again later",
    "54000": "shorten the ids, which an index takes up to some 2,700 bytes of",
    "55P03": "others hold a lock on the table, such as a long query; nothing was changed: push "
    "again when they are done, or try longer with --option lock_timeout=SECONDS",
    "57P": f"the server was stopped; {_AGAIN}",
    "57014": "something cancelled the statement; push again",
    "08": _AGAIN,
}


@contextmanager
def telling(target: str, lacks: Callable[[], str] = str) -> Iterator[None]:
    """Turn errors of the client and the server into those of a writer.

    Args:
        target: what was talked to, as it may be shown.
        lacks: tells what gives the role the rights that it lacks, where the server refuses for
            want of one; it may fail.

    Raises:
        DatabaseError: with the server's sentence and what to do; ``RowsError`` where it is the rows
            that the server refuses.
    """
    try:
        yield
    except psycopg.Error as error:
        of_rows = (error.sqlstate or "").startswith(_OF_ROWS)
        rights = ""
        if error.sqlstate == _NOT_ALLOWED:
            with suppress(psycopg.Error):
                rights = lacks()
        told = f"{target}: {said(error, rights)}"
        raise (RowsError if of_rows else DatabaseError)(told) from error


def lack_of(rights: str) -> str:
    """Return what to do about rights that a role lacks.

    Args:
        rights: statements that give them.
    """
    return f"this role lacks rights: connect as another one, or have an owner run {rights}"


def said(error: psycopg.Error, lacks: str = "") -> str:
    """Return the server's sentence, and what to do.

    Args:
        error: of the client.
        lacks: statements that give the rights that the role lacks, where that is why.
    """
    about = error.diag
    state = error.sqlstate or ""
    first = (about.message_primary or str(error) or type(error).__name__).strip()
    parts = [" ".join(first.split())]
    detail = about.message_detail
    # Of a row that comes twice it names the key, of a table in use what depends on it.
    if detail:
        parts.append("(" + " ".join(detail.split())[:500] + ")")
    if (about.context or "").startswith("COPY "):
        parts.append(f"({str(about.context).splitlines()[0][:200]})")
    remedy = lack_of(lacks) if lacks else _remedy(state, error)
    return " ".join(parts) + (f"; {remedy}" if remedy else "")


def _remedy(state: str, error: psycopg.Error) -> str | None:
    for length in (5, 3, 2):
        if state[:length] in _REMEDIES:
            return _REMEDIES[state[:length]]
    # An error without a state is the client's own: the connection is gone.
    return _AGAIN if not state and isinstance(error, psycopg.OperationalError) else None
