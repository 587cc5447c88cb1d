"""Every engine that has a writer, with nothing in it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.vectordb.memory_writer import MemoryWriter, Server
from whiten_index.vectordb.database_writer import DatabaseWriter
from whiten_index.vectordb.registry import open_writer


@dataclass(frozen=True)
class Backend:
    """An engine with nothing in it.

    Attributes:
        address: of the database.
        folder: of an engine without a server.
        options: of an approximate index.
        halves: whether it keeps float16.
        metrics: that it ranks by.
        shared: whether it takes several connections at once.
        transactions: whether changes that fail leave nothing behind.
        any_name: whether a table may have any name.
        impatient: options to give up soon if there is a lock.
    """

    address: str
    folder: Path = Path()
    options: dict[str, str] = field(default_factory=dict)
    halves: bool = True
    metrics: tuple[str, ...] = ("cosine", "ip")
    shared: bool = True
    transactions: bool = True
    any_name: bool = False
    impatient: dict[str, str] = field(default_factory=dict)

    def open(self, name: str = "docs", **options: str) -> DatabaseWriter:
        return open_writer(self.address, name, options=options)


BACKENDS: dict[str, Callable[[Path, pytest.FixtureRequest], Backend]] = {
    "postgresql": lambda _, request: Backend(
        request.getfixturevalue("address"), any_name=True, impatient={"lock_timeout": "1"}
    ),
    "qdrant": lambda folder, _: Backend(
        f"qdrant://{folder}/q", folder / "q", shared=False, transactions=False
    ),
    "lancedb": lambda folder, _: Backend(
        f"lancedb://{folder}/a folder", folder / "a folder",
        {"index": "ivf_sq", "num_partitions": "60"}, transactions=False,
    ),
    "milvus": lambda folder, _: Backend(
        f"milvus://{folder}/docs.db", folder / "docs.db", halves=False, transactions=False,
    ),
    "duckdb": lambda folder, _: Backend(
        f"duckdb://{folder}/docs.duckdb", folder, halves=False, shared=False,
    ),
    "sqlite": lambda folder, _: Backend(
        f"sqlite://{folder}/docs.sqlite", folder, halves=False, metrics=("cosine",),
        impatient={"lock_timeout": "1"},
    ),
}  # fmt: skip
# Without a server, and small enough for the default suite.
FILES = ("duckdb", "sqlite")


@dataclass(frozen=True)
class Memory(Backend):
    """The stand-in that pushes are tested with where no database is installed."""

    server: Server = field(default_factory=Server)

    def open(self, name: str = "docs", **options: str) -> DatabaseWriter:
        return MemoryWriter(self.server)


REAL = [pytest.param(name, marks=() if name in FILES else pytest.mark.service) for name in BACKENDS]
