"""A worker's process on a cluster, as those elsewhere call it."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable
from typing import Any

from whiten_index.errors import ClusterError
from whiten_index.runners.serving import Outcome, Server, portable
from whiten_index.version import VERSION


class Actor:
    """A worker process: it holds one work at a time, and what that loaded."""

    def __init__(self, version: str, python: str, cpus: int) -> None:
        self._sender = version, python
        # Tokenizers take every core of the machine otherwise.
        os.environ["RAYON_NUM_THREADS"] = str(cpus)
        self._server: Server | None = None
        # Calls come in several threads.
        self._changing, self._phase = threading.Lock(), 0

    def hello(self, check: Callable[[], None] | None) -> tuple[str, BaseException | None]:
        """Return which machine this is, and why it cannot work, if so."""
        try:
            _require_same(self._sender)
            if check is not None:
                check()
        except Exception as error:
            return platform.node(), portable(error)
        return platform.node(), None

    def sign(self) -> None:
        """Give a sign of life."""

    def open(self, phase: int, work: Any) -> None:
        """Take the work of a phase; what the former held is let go."""
        with self._changing:
            self._end()
            self._phase, self._server = phase, Server(work)

    def close(self, phase: int) -> None:
        """Let go of the work of a phase, if it is still that of this phase."""
        with self._changing:
            if self._phase == phase:
                self._end()

    def _end(self) -> None:
        if self._server is not None:
            self._server.close()
        self._server = None

    def do(self, number: int, item: Any) -> Outcome:
        """Do an item; several at a time are done side by side."""
        server = self._server
        assert server is not None, "items come after the work, and before it is closed"
        return server.do(number, item)


def _require_same(sender: tuple[str, str]) -> None:
    """Refuse a worker of another release than that of the driver, ``sender``."""
    here = VERSION, platform.python_version()
    if here != sender:
        raise ClusterError(
            f"a machine of the cluster has whiten-index {here[0]} on Python {here[1]}, and the "
            f"build was started with {sender[0]} on {sender[1]}; install the same on all"
        )
