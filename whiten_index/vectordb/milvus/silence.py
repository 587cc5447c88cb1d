"""Keeps the client of Milvus and Milvus Lite from writing to stderr."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGERS = ("pymilvus", "pymilvus.milvus_client", "milvus_lite", "grpc")


class _Kept(logging.Handler):
    """A handler that shows nothing and keeps the last error."""

    error: BaseException | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the error of a record."""
        self.error = record.exc_info[1] if record.exc_info else self.error


class _Silence:
    """Keeps the client and Milvus Lite from writing to stderr: what they log is raised as well.

    It may be entered again, and by several threads.
    """

    def __init__(self) -> None:
        self._lock, self._depth, self._kept = threading.Lock(), 0, _Kept()
        self._before = list[tuple[logging.Logger, list[logging.Handler], bool]]()

    @contextmanager
    def __call__(self) -> Iterator[_Kept]:
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._kept = _Kept()
                loggers = [logging.getLogger(name) for name in _LOGGERS]
                self._before = [(each, each.handlers, each.propagate) for each in loggers]
                for each in loggers:
                    each.handlers, each.propagate = [self._kept], False
        try:
            yield self._kept
        finally:
            with self._lock:
                self._depth -= 1
                if not self._depth:
                    for each, handlers, propagate in self._before:
                        each.handlers, each.propagate = handlers, propagate


silence = _Silence()
