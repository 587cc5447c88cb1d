"""The contract itself, on the database in memory that a push is tested against."""

from __future__ import annotations

from typing import ClassVar

import pytest

from tests.memory_sink import MemorySink, Server
from tests.sink_contract import SharedContract
from whiten_index.sinks import Sink

_SERVERS: dict[str, Server] = {}


class TestMemory(SharedContract):
    @pytest.fixture
    def address(self) -> str:
        _SERVERS["here"] = Server(transactions=self.transactions)
        return "here"

    def connect(self, address: str, options: dict[str, str] | None = None) -> Sink:
        assert not options
        return MemorySink(_SERVERS[address])


class TestMemoryWithoutTransactions(TestMemory):
    transactions: ClassVar[bool] = False
