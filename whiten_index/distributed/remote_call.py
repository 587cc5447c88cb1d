"""Steps of a build on a worker, with their progress events replayed here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from whiten_index.distributed.executors import Executor
from whiten_index.progress import Stages


def remote_call(
    executor: Executor, stages: Stages, function: Callable[..., Any], *args: Any
) -> Any:
    """Return ``function(stages, *args)``, called on a worker where there are workers.

    The worker's stages and notes are replayed to ``stages`` when it is done.
    """
    if not executor.remote:
        return function(stages, *args)
    result, events, remote = executor.call(functools.partial(_record, function), args)
    for name, arguments in events:
        getattr(stages.watcher, name)(*arguments)
        if name == "start":
            stages.watcher.advance(arguments[1])
    for mine, more in ((stages.seconds, remote.seconds), (stages.rows, remote.rows)):
        for stage, amount in more.items():
            mine[stage] = mine.get(stage, 0) + amount
    return result


def _record(
    function: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Any, list[tuple[str, tuple[Any, ...]]], Stages]:
    recorder = ProgressRecorder()
    stages = Stages(recorder)
    return function(stages, *args), recorder.events, stages


class ProgressRecorder:
    """A watcher that keeps its events, other than advances: a replayed stage advances as a whole.

    Attributes:
        events: name of the method and its arguments.
    """

    def __init__(self) -> None:
        self.events: list[tuple[str, tuple[Any, ...]]] = []

    def start(self, stage: str, total: int) -> None:
        """Record the start of a stage."""
        self.events.append(("start", (stage, total)))

    def advance(self, rows: int) -> None:
        """Ignore it."""

    def finish(self, stage: str, seconds: float) -> None:
        """Record the end of a stage."""
        self.events.append(("finish", (stage, seconds)))

    def note(self, message: str) -> None:
        """Record a sentence."""
        self.events.append(("note", (message,)))
