"""Work for executors: squares of numbers, with trouble at some of them."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whiten_index.distributed.executors import Work
from whiten_index.errors import ConfigError, CorpusError, StorageError


@dataclass(frozen=True)
class Square(Work):
    """Squares numbers, and adds a line to ``log`` for each that it begins and ends.

    Attributes:
        log: a file.
        trouble: number -> ``raise``, ``unpicklable`` (an error), ``exit``, ``die`` (each worker),
            ``once`` (its first worker dies), ``full`` (the disk is).
        seconds: that each takes.
    """

    log: Path
    trouble: tuple[tuple[int, str], ...] = ()
    seconds: float = 0.0

    def run(self, item: int, advance: Callable[[int], None]) -> tuple[int, int]:
        self._write("begin", item)
        trouble = dict(self.trouble).get(item, "")
        if trouble == "raise":
            raise CorpusError(f"{item} is damaged")
        if trouble == "unpicklable":
            raise type("Local", (Exception,), {})(f"{item} is damaged")
        if trouble == "full":
            raise StorageError("the disk is full")
        if trouble == "exit":
            # More than a pipe holds: the thread that writes has the lock in its hand.
            for _ in range(5000):
                advance(item)
            time.sleep(0.5)
            os._exit(3)
        if trouble == "die" or (trouble == "once" and self.log_of("begin").count(item) == 1):
            # Results of the items before are on their way.
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.seconds)
        advance(item)
        return item**2, os.getpid()

    def finish(self, ran: tuple[int, int]) -> tuple[int, int]:
        self._write("end", round(ran[0] ** 0.5))
        return ran

    def _write(self, what: str, item: int) -> None:
        with self.log.open("a") as file:
            file.write(f"{what} {item} {os.getpid()}\n")

    def log_of(self, what: str) -> list[int]:
        """Return the numbers that were begun or ended."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [int(line.split()[1]) for line in lines if line.startswith(what)]

    def workers(self) -> set[str]:
        """Return the processes that began a number."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return {line.split()[2] for line in lines}


def refuse(path: str) -> Any:
    raise ConfigError(f"{path} is not there")


def accept() -> None:
    pass


def squares(results: list[tuple[int, Any]]) -> list[int]:
    """Return the squares by position."""
    return [square for _, (square, _) in sorted(results)]
