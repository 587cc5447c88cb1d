"""Fixtures of the engines."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vectordb.memory_writer import Server
from tests.vectordb.writers.engines import BACKENDS, REAL, Backend, Memory
from whiten_index.vectordb.database_writer import DatabaseWriter


@pytest.fixture(params=["memory", "memory without transactions", *REAL])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    if request.param in BACKENDS:
        return BACKENDS[request.param](tmp_path, request)
    transactions = request.param == "memory"
    return Memory("", transactions=transactions, server=Server(transactions=transactions))


@pytest.fixture(params=REAL)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    """An engine that outlives a process, and has names and options."""
    return BACKENDS[request.param](tmp_path, request)


@pytest.fixture
def shared(backend: Backend) -> Backend:
    if not backend.shared:
        pytest.skip("it takes one connection at a time")
    return backend


@pytest.fixture
def writer(backend: Backend) -> Iterator[DatabaseWriter]:
    with backend.open(**backend.options) as opened:
        yield opened


@pytest.fixture(params=[each for each in REAL if each.values != ("postgresql",)])
def embedded(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    folder = tmp_path / "embedded"
    folder.mkdir()
    return BACKENDS[request.param](folder, request)
