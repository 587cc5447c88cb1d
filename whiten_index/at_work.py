"""Steps of a build done by a worker as they would be here, stages and notes included."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from whiten_index.progress import Stages
from whiten_index.runners import Calls


def at_work(calls: Calls, stages: Stages, function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(stages, *args)`` on a worker, here where there is none.

    What it tells its stages there is told to these when it is done.
    """
    if not calls.elsewhere:
        return function(stages, *args)
    ((result, diary),) = calls.map(functools.partial(_noted, function), [args])
    diary.replay(stages)
    return result


def _noted(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, _Diary]:
    diary = _Diary()
    result = function(Stages(diary), *args)
    return result, diary


@dataclass
class _Diary:
    """What a job on another machine told of its stages."""

    entries: list[tuple[str, Any]] = field(default_factory=list)
    _totals: dict[str, int] = field(default_factory=dict)

    def start(self, stage: str, total: int) -> None:
        """Remember the start of a stage."""
        self._totals[stage] = total

    def advance(self, rows: int) -> None:
        """Pass over it: a stage is told of as a whole."""

    def finish(self, stage: str, seconds: float) -> None:
        """Write down a stage."""
        self.entries.append(("stage", (stage, self._totals.pop(stage), seconds)))

    def note(self, message: str) -> None:
        """Write down a sentence."""
        self.entries.append(("note", message))

    def replay(self, stages: Stages) -> None:
        """Tell ``stages`` all of it."""
        for what, entry in self.entries:
            if what == "note":
                stages.watcher.note(entry)
                continue
            name, total, seconds = entry
            stages.watcher.start(name, total)
            stages.watcher.advance(total)
            stages.seconds[name] = stages.seconds.get(name, 0.0) + seconds
            stages.rows[name] = stages.rows.get(name, 0) + total
            stages.watcher.finish(name, seconds)
