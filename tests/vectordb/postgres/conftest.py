"""Users of a database in a real PostgreSQL with pgvector."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.vectordb.postgres.helpers import NUMBERS, SECRET, Run, connected


@pytest.fixture
def run(address: str) -> Iterator[Run]:
    """A user of the same database, who runs statements."""
    with connected(address) as connection:

        def execute(order: str, *values: Any) -> list[tuple[Any, ...]]:
            cursor = connection.execute(order, values or None)
            return cursor.fetchall() if cursor.description else []

        yield execute


@pytest.fixture
def role(postgres: Any) -> Iterator[str]:
    """A role that may connect and no more."""
    name = f"reader{next(NUMBERS)}"
    with connected(postgres.get_uri()) as connection:
        connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{SECRET}'")
    yield name
    # Its rights go with the database that they are in.
    with connected(postgres.get_uri()) as connection:
        connection.execute(f"DROP OWNED BY {name}")
