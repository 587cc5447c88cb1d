"""The contract itself, on the database in memory that a push is tested against."""

from __future__ import annotations

from typing import ClassVar

import pytest

from tests.vectordb.memory_writer import MemoryWriter, Server
from tests.vectordb.writer_contract import SharedContract
from whiten_index.vectordb.database_writer import DatabaseWriter

_SERVERS: dict[str, Server] = {}


class TestMemory(SharedContract):
    @pytest.fixture
    def address(self) -> str:
        _SERVERS["here"] = Server(transactions=self.transactions)
        return "here"

    def connect(self, address: str, options: dict[str, str] | None = None) -> DatabaseWriter:
        assert not options
        return MemoryWriter(_SERVERS[address])


class TestMemoryWithoutTransactions(TestMemory):
    transactions: ClassVar[bool] = False
