"""Log lines of scheduled jobs: a JSON object for each event, the last with the outcome."""

import datetime
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from whiten_index.artifacts.files import unforeseen
from whiten_index.cli import terminal
from whiten_index.cli.signals import INTERRUPTED, raise_if_interrupted
from whiten_index.cli.streams import guarded, print_exception
from whiten_index.errors import GateError, WhitenIndexError, hide_secrets
from whiten_index.paths import plain_json
from whiten_index.progress import Progress


class LogLines(Progress):
    """A watcher that prints one line an event, with ``labels``, and progress every few seconds."""

    def __init__(self, **labels: Any) -> None:
        self._labels = labels
        self._stage, self._total, self._rows = "", 0, 0
        self._started = self._last = time.monotonic()

    def start(self, stage: str, total: int) -> None:
        """Log that a stage begins."""
        self._stage, self._total, self._rows = stage, total, 0
        self._started = self._last = time.monotonic()
        self.log("stage_started", stage=stage, rows=total)

    def advance(self, rows: int) -> None:
        """Log rate and time left, now and then."""
        raise_if_interrupted()
        self._rows += rows
        now = time.monotonic()
        if now - self._last < terminal.EVERY_SECONDS:
            return
        self._last = now
        rate = self._rows / (now - self._started)
        self.log(
            "progress",
            stage=self._stage,
            rows=self._rows,
            of=self._total,
            rows_per_second=round(rate, 1),
            seconds_left=round((self._total - self._rows) / rate, 1) if rate else None,
        )

    def finish(self, stage: str, seconds: float) -> None:
        """Log that a stage ended."""
        self.log("stage_finished", stage=stage, seconds=round(seconds, 3))

    def note(self, message: str) -> None:
        """Log a sentence."""
        self.log("note", message=message)

    def log(self, event: str, /, **fields: Any) -> None:
        """Print one line."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = {"time": now, "event": event, **self._labels, **fields}
        print(plain_json(json.dumps(line, default=str)), flush=True)


log = LogLines().log


@dataclass(frozen=True)
class Ending:
    """End of a job: the event and fields of its last line, and its exit status."""

    event: str
    fields: Mapping[str, Any]
    exit_code: int = 0


def run_job(work: Callable[[], Ending], *, kept: str, lines: LogLines | None = None) -> int:
    """Do the work of a job, log its end whatever happened, and return the exit status.

    ``kept`` is the noun of the finished work that an interruption keeps, such as ``shards``.
    """
    with guarded() as streams:
        try:
            ending = work()
        except (Exception, KeyboardInterrupt) as error:
            ending = ending_of(error, kept=kept)
            if ending.exit_code == 1:
                # Readers of the log must see an end in any case; the rest is for people.
                print_exception(error)
        (lines or LogLines()).log(ending.event, **ending.fields)
        return streams.end(ending.exit_code)


def ending_of(error: BaseException, *, kept: str = "shards") -> Ending:
    """Return the ending of a job that an error stopped."""
    if isinstance(error, KeyboardInterrupt):
        message = f"{str(error) or f'kept the finished {kept}'}; run the same job to go on"
        return Ending("interrupted", {"message": message}, INTERRUPTED)
    error = unforeseen(error, step="the job") or error
    status = error.exit_code if isinstance(error, WhitenIndexError) else 1
    fields: dict[str, Any] = {**failure(error), "exit_code": status}
    if isinstance(error, GateError):
        fields |= {"candidate": error.candidate, "gates": list(error.gates)}
        return Ending("gate_failed", fields, status)
    return Ending("failed", fields, status)


def failure(error: BaseException) -> dict[str, str]:
    """Return the fields of a log line about an error."""
    return {"error": type(error).__name__, "message": hide_secrets(str(error))}
