"""The real PostgreSQL of the tests of databases, for sweeps inside it."""

from tests.vectordb.conftest import address, server

__all__ = ["address", "server"]
