"""Work for clusters: squares of numbers, with trouble at some of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from whiten_index.errors import ConfigError, CorpusError, StorageError


@dataclass(frozen=True)
class Square:
    """Squares numbers, and leaves a line in ``diary`` for each that it begins and ends.

    Attributes:
        diary: a file.
        trouble: number -> what happens there: ``raise``, ``die``, ``once`` (its first worker dies),
            ``slow`` (two minutes, the first time), ``hang`` (likewise its whole process, for ever),
            ``full`` (the disk is).
        seconds: that each takes.
    """

    diary: Path
    trouble: tuple[tuple[int, str], ...] = ()
    seconds: float = 0.0
    advance: Callable[[int], None] | None = None

    def telling(self, advance):
        return replace(self, advance=advance)

    def note(self, what, item):
        with self.diary.open("a") as file:
            file.write(f"{what} {item} {os.getpid()}\n")

    def begun(self, item):
        return self.diary.read_text().count(f"begin {item} ")

    def read(self, item):
        return item

    def prepare(self, item):
        return item

    def run(self, item):
        self.note("begin", item)
        trouble = dict(self.trouble).get(item, "")
        if trouble == "raise":
            raise CorpusError(f"{item} is damaged")
        if trouble == "full":
            raise StorageError("the disk is full")
        if trouble == "die" or (trouble == "once" and self.begun(item) == 1):
            # What was done just before is to be told of first.
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        if trouble == "hang" and self.begun(item) == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(120 if trouble == "slow" and self.begun(item) == 1 else self.seconds)
        self.advance(item)
        return item**2, os.getpid()

    def finish(self, ran):
        self.note("end", round(ran[0] ** 0.5))
        return ran


def refuse(path):
    raise ConfigError(f"{path} is not there")
