"""The build as a scheduled job: a TOML job file in, a published index out, log lines for machines.

Run it as ``python -m pipelines.build_index job.toml``.

The keys of the job file are the options of ``whiten-index build``. Every line on standard output
is one JSON object with ``time`` and ``event``; the last is ``published``, ``up_to_date``,
``interrupted`` or ``failed``. The exit status is that of ``whiten-index build``.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import click

from whiten_index.build import build_index
from whiten_index.config import BuildConfig, read_job
from whiten_index.errors import WhitenIndexError
from whiten_index.stopping import (
    INTERRUPTED,
    enter_stage,
    heed_stop,
    leave_stage,
    stop_on_signals,
)

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


def run(job: Path) -> int:
    """Do the job; return the exit status."""
    try:
        report = build_index(BuildConfig(**read_job(job)), progress=LogLines())
    except WhitenIndexError as error:
        log("failed", error=type(error).__name__, message=str(error), exit_code=error.exit_code)
        return error.exit_code
    except KeyboardInterrupt:
        log("interrupted", message="finished shards are kept; run the same job to go on")
        return INTERRUPTED
    except Exception as error:
        # Whoever reads the log lines must see an end, whatever it was; the rest is for people.
        log("failed", error=type(error).__name__, message=str(error), exit_code=1)
        traceback.print_exc()
        return 1
    log("up_to_date" if report.up_to_date else "published", **report.to_json())
    return 0


@click.command()
@click.argument("job", type=click.Path(dir_okay=False, path_type=Path))
def main(job: Path) -> None:
    """Build and publish the index that JOB (TOML) describes."""
    stop_on_signals()
    sys.exit(run(job))


if __name__ == "__main__":
    main()
