"""Log lines of scheduled jobs: one for each event, the last with the outcome."""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn

from whiten_index.address import hide_secrets
from whiten_index.artifacts.files import unforeseen
from whiten_index.cli.signals import INTERRUPTED, raise_if_interrupted
from whiten_index.cli.streams import guarded, print_exception
from whiten_index.errors import GateError, WhitenIndexError
from whiten_index.paths import plain_json

_EVERY_SECONDS = 10.0


class LogForm(Enum):
    """Form of a log line: ``json``, an object, or ``text``, key=value pairs (logfmt)."""

    JSON = "json"
    TEXT = "text"

    def line(self, fields: Mapping[str, Any]) -> str:
        """Return one line; in text, nested names have dots (``rows.new=3``) and lists are JSON."""
        if self is LogForm.JSON:
            return plain_json(json.dumps(fields, default=str))
        return " ".join(f"{_key(name)}={_value(value)}" for name, value in _flat(fields))


class LogLines:
    """A watcher that prints one line an event, and progress every few seconds."""

    def __init__(self, form: str | LogForm = LogForm.JSON, **labels: Any) -> None:
        """Take the form of the lines, and fields of each of them."""
        self.form, self._labels = LogForm(form), labels
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
        if now - self._last < _EVERY_SECONDS:
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
        print(self.form.line({"time": now, "event": event, **self._labels, **fields}), flush=True)


def log(event: str, /, **fields: Any) -> None:
    """Print one JSON line."""
    LogLines().log(event, **fields)


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
        message = f"finished {kept} are kept; run the same job to go on"
        return Ending("interrupted", {"message": message}, INTERRUPTED)
    error = unforeseen(error, step="the job") or error
    status = error.exit_code if isinstance(error, WhitenIndexError) else 1
    fields: dict[str, Any] = {**failure(error), "exit_code": status}
    if isinstance(error, GateError):
        fields |= {"candidate": error.candidate, "gates": list(error.gates)}
        return Ending("gate_failed", fields, status)
    return Ending("failed", fields, status)


def log_job(
    form: str, work: Callable[[LogLines], Mapping[str, Any]], *, planned: bool = False
) -> NoReturn:
    """Run the work of a command as a job; end the process with its report as the last line."""
    lines = LogLines(form)

    def end() -> Ending:
        report = work(lines)
        event = "planned" if planned else "up_to_date" if report["up_to_date"] else "published"
        return Ending(event, report, GateError.exit_code if report.get("refused") else 0)

    sys.exit(run_job(end, kept="shards", lines=lines))


def failure(error: BaseException) -> dict[str, str]:
    """Return the fields of a log line about an error."""
    return {"error": type(error).__name__, "message": hide_secrets(str(error))}


def _flat(fields: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _key(name: str) -> str:
    # A reason or a column may be called anything; a key ends at the first of these.
    plain = (c if c.isprintable() and c not in ' ="' else "_" for c in name)
    return "".join(plain) or "_"


def _value(value: object) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    plain = isinstance(value, list | tuple)
    text = json.dumps(value, default=str) if plain else str(value)
    if text and text.isprintable() and not set(text) & set(' ="\\'):
        return text
    return json.dumps(text, ensure_ascii=not text.isprintable())
