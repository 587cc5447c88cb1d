"""What scheduled jobs have in common: a JSON object a line, the last of which says how it ended."""

from __future__ import annotations

import datetime
import json
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from whiten_index.errors import WhitenIndexError
from whiten_index.stopping import INTERRUPTED, enter_stage, heed_stop, leave_stage

_EVERY_SECONDS = 10.0


class LogLines:
    """A watcher that prints one JSON line an event, and progress every few seconds."""

    def __init__(self) -> None:
        self._stage, self._total, self._rows = "", 0, 0
        self._started = self._last = time.monotonic()

    def start(self, stage: str, total: int) -> None:
        """Log that a stage begins."""
        self._stage, self._total, self._rows = stage, total, 0
        self._started = self._last = time.monotonic()
        enter_stage()
        log("stage_started", stage=stage, rows=total)

    def advance(self, rows: int) -> None:
        """Log rate and time left, now and then."""
        heed_stop()
        self._rows += rows
        now = time.monotonic()
        if now - self._last < _EVERY_SECONDS:
            return
        self._last = now
        rate = self._rows / (now - self._started)
        log(
            "progress",
            stage=self._stage,
            rows=self._rows,
            of=self._total,
            rows_per_second=round(rate, 1),
            seconds_left=round((self._total - self._rows) / rate, 1) if rate else None,
        )

    def finish(self, stage: str, seconds: float) -> None:
        """Log that a stage ended."""
        leave_stage()
        log("stage_finished", stage=stage, seconds=round(seconds, 3))

    def note(self, message: str) -> None:
        """Log a sentence."""
        log("note", message=message)


def log(event: str, **fields: Any) -> None:
    """Print one JSON line."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    print(json.dumps({"time": now, "event": event, **fields}, default=str), flush=True)


@dataclass(frozen=True)
class Ending:
    """How a job ended.

    Attributes:
        event: of its last line.
        fields: of that line.
        exit_code: status with which the process ends.
    """

    event: str
    fields: Mapping[str, Any]
    exit_code: int = 0


def run_job(work: Callable[[], Ending], *, kept: str) -> int:
    """Do the work of a job and log how it ended, whatever happened; return the exit status.

    Args:
        work: the job.
        kept: what an interruption leaves finished, for the next run to go on from.
    """
    try:
        ending = work()
    except WhitenIndexError as error:
        log("failed", **failure(error), exit_code=error.exit_code)
        return error.exit_code
    except KeyboardInterrupt:
        log("interrupted", message=f"finished {kept} are kept; run the same job to go on")
        return INTERRUPTED
    except Exception as error:
        # Whoever reads the log lines must see an end, whatever it was; the rest is for people.
        log("failed", **failure(error), exit_code=1)
        traceback.print_exc()
        return 1
    log(ending.event, **ending.fields)
    return ending.exit_code


def failure(error: Exception) -> dict[str, str]:
    """Return what a log line says of an error."""
    return {"error": type(error).__name__, "message": str(error)}
