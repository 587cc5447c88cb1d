"""The nightly update as a scheduled job: a TOML job file in, a new version out.

Run it as ``python -m pipelines.nightly_reindex job.toml``. A job file::

    index = "/var/lib/whiten-index/news"    # a published index, whose settings are kept
    corpus = ["/srv/corpus/news"]           # left out: the one that the index was built from
    refit = "auto"                          # and whatever else `whiten-index update` takes
    keep-versions = 7                       # older ones are removed, then shards that none needs
    compact = true                          # many small shards of the store become few
    metrics = "/var/lib/prometheus/node-exporter/news.prom"

In order: update, remove versions beyond ``keep-versions``, compact, remove shards of the store that
are no longer needed, among them what compaction wrote again (not with ``gc = false``; what is
younger than a week stays for a while), metrics. Without ``keep-versions`` nothing is ever
removed. Paths are relative to the folder that the job runs in. ``--dry-run`` says what would be
done and how long it should take, and writes nothing.

Every line on standard output is one event, as text or with ``--log json`` as a JSON object with
``time`` and ``event``. The last is ``published``, ``up_to_date``, ``gate_failed``, ``failed`` or
``interrupted``; after ``--dry-run`` it is ``planned``. The exit status is that of ``whiten-index
update``, so 9 where a gate failed, or after ``--dry-run`` would fail (``refused`` says why). What
comes after the update (prune, compact, gc, metrics) cannot undo it: where one fails, a line such as
``prune_failed`` says why, the others are done, the last line still says what became of the update,
and the exit status is that of the first that failed. A job that finds another one at work (6)
leaves the metrics to that.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

import click

from pipelines.nightly_job import Job
from whiten_index.errors import BusyError, GateError, WhitenIndexError
from whiten_index.log_lines import Ending, LogForm, LogLines, failure, run_job
from whiten_index.monitoring import LastRun, Outcome, check_metrics, write_metrics
from whiten_index.stopping import INTERRUPTED, finish_undisturbed, stop_on_signals

# These have lines of their own before the last.
_OWN_LINES = ("drift", "decision", "gates")
# What people can do without there: the manifest has it, or the lines of the stages did.
_FOR_MACHINES = ("whitening", "factory", "bytes", "seconds", "stage_rows")


@dataclass
class _Night:
    """One run of a job.

    Attributes:
        job: what is asked.
        lines: where it is logged.
        started: when, by the monotonic clock.
        failed: what failed beside the update -> exit status.
        report: of the update, once it ended well.
        gates: findings, once there are any.
    """

    job: Job
    lines: LogLines
    started: float = field(default_factory=time.monotonic)
    failed: dict[str, int] = field(default_factory=dict)
    report: Mapping[str, Any] | None = None
    gates: Sequence[Mapping[str, Any]] = ()

    def run(self) -> Ending:
        """Do everything; whatever becomes of it, the metrics tell."""
        if self.job.metrics is not None:
            # A path that is refused is some other file's, and is not written to.
            check_metrics(self.job.metrics)
        try:
            ending = self._work()
        except BusyError:
            # The metrics are those of the job that holds the lock.
            raise
        except (Exception, KeyboardInterrupt) as error:
            self._measure(*_outcome(error))
            raise
        self._measure(Outcome(ending.event), ending.exit_code or self._status)
        # The metrics themselves may have failed.
        status = ending.exit_code or self._status
        failed = {"failed": list(self.failed), "exit_code": status} if self.failed else {}
        return Ending(ending.event, {**ending.fields, **failed}, status)

    @property
    def _status(self) -> int:
        """Exit status of the first thing beside the update that failed, 0 where none did."""
        return next(iter(self.failed.values()), 0)

    def _work(self) -> Ending:
        try:
            report = self._update()
        except GateError as error:
            self.gates = error.gates
            self._log_gates()
            said = {**failure(error), "candidate": error.candidate, "exit_code": error.exit_code}
            return Ending(Outcome.GATE_FAILED.value, said, error.exit_code)
        self._care(Path(report["store"]))
        outcome = Outcome.UP_TO_DATE if report["up_to_date"] else Outcome.PUBLISHED
        left_out = {*_OWN_LINES, *(_FOR_MACHINES if self.lines.form is LogForm.TEXT else ())}
        return Ending(outcome.value, {k: v for k, v in report.items() if k not in left_out})

    def _update(self) -> dict[str, Any]:
        from whiten_index.changes import ids_lines
        from whiten_index.update import UpdateConfig, update_index

        report = update_index(UpdateConfig(**self.job.update), progress=self.lines).to_json()
        self.report, self.gates = report, report["gates"]
        for line in ids_lines(report):
            self.lines.note(line)
        for name in ("drift", "decision"):
            if report[name] is not None:
                self.lines.log(name, **report[name])
        self._log_gates()
        return dict(report)

    def _log_gates(self) -> None:
        for gate in self.gates:
            self.lines.log("gate", **gate)

    def _care(self, store: Path) -> None:
        """Remove what is no longer needed, and tidy the store."""
        job = self.job
        if job.keep_versions is not None:
            self._aside("prune", lambda: _prune(job.index, keep=job.keep_versions or 1))
        if job.compact:
            self._aside("compact", lambda: _compact(store))
        # Last, since what compaction wrote again is needed by nothing where it lay before.
        if job.keep_versions is not None and job.gc and "prune" not in self.failed:
            self._aside("gc", lambda: _gc(store))

    def _aside(self, name: str, work: Callable[[], Any]) -> None:
        """Do what must not keep the rest from being done."""
        try:
            self.lines.log(f"{name}_finished", **_fields(work()))
        except Exception as error:
            # An unforeseen one too: the version is published, and the last line must say so.
            self._failed(name, error)

    def _measure(self, outcome: Outcome, status: int) -> None:
        # Stopped from here on, it would end otherwise than its metrics say. A failure stays one
        # whatever comes; a success is none before its last line.
        finish_undisturbed(status or None)
        if self.job.metrics is None:
            return
        last = LastRun(
            outcome=outcome,
            exit_code=status,
            seconds=time.monotonic() - self.started,
            report=self.report,
            gates=self.gates,
        )
        try:
            write_metrics(self.job.metrics, last, index=self.job.index)
        except Exception as error:
            self._failed("metrics", error)

    def _failed(self, name: str, error: Exception) -> None:
        _, status = _outcome(error)
        self.failed[name] = status
        self.lines.log(f"{name}_failed", **failure(error), exit_code=status)
        if not isinstance(error, WhitenIndexError):
            traceback.print_exc()


def _outcome(error: BaseException) -> tuple[Outcome, int]:
    if isinstance(error, KeyboardInterrupt):
        return Outcome.INTERRUPTED, INTERRUPTED
    return Outcome.FAILED, error.exit_code if isinstance(error, WhitenIndexError) else 1


def _prune(index: Path, *, keep: int) -> Any:
    from whiten_index.versions import prune

    return prune(index, keep=keep)


def _gc(store: Path) -> Any:
    from whiten_index.upkeep import gc_store

    return gc_store(store)


def _compact(store: Path) -> Any:
    from whiten_index.upkeep import compact_store

    return compact_store(store)


def _fields(found: Any) -> dict[str, Any]:
    """Return what a line says of a report, whichever way it is told."""
    if hasattr(found, "to_json"):
        return dict(found.to_json())
    return asdict(found) if is_dataclass(found) and not isinstance(found, type) else {}


def run(path: Path, *, dry_run: bool = False, form: str | LogForm = LogForm.TEXT) -> int:
    """Do the job, or say what it would do; return the exit status."""
    lines = LogLines(form)

    def work() -> Ending:
        job = Job.read(path)
        return _planned(job, lines) if dry_run else _Night(job, lines).run()

    return run_job(work, kept="shards", lines=lines)


def _planned(job: Job, lines: LogLines) -> Ending:
    from whiten_index.changes import ids_lines
    from whiten_index.update import UpdateConfig, plan_update

    if job.metrics is not None:
        check_metrics(job.metrics)
    plan = plan_update(UpdateConfig(**job.update), progress=lines).to_json()
    for line in ids_lines(plan):
        lines.note(line)
    return Ending(
        "planned",
        {**plan, "keep_versions": job.keep_versions, "gc": job.gc, "compact": job.compact},
        GateError.exit_code if plan.get("refused") else 0,
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--dry-run", is_flag=True, help="Only say what would be done and how long it takes.")
@click.option(
    "--log",
    "form",
    type=click.Choice([form.value for form in LogForm]),
    default=LogForm.TEXT.value,
    show_default=True,
    help="How log lines are written: key=value pairs, or JSON objects.",
)
def main(job: Path, dry_run: bool, form: str) -> None:
    """Bring the index that JOB (TOML) names up to date, and publish what passes the gates."""
    stop_on_signals()
    sys.exit(run(job, dry_run=dry_run, form=form))


if __name__ == "__main__":
    main()
