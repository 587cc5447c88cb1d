"""The nightly update as a scheduled job: a TOML job file in, a new version out.

Run it as ``python -m pipelines.nightly_reindex job.toml``. A job file::

    index = "/var/lib/whiten-index/news"    # a published index, whose settings are kept
    corpus = ["/srv/corpus/news"]           # left out: the one that the index was built from
    refit = "auto"                          # and whatever else `whiten-index update` takes
    keep-versions = 7                       # older ones are removed, then shards that none needs
    compact = true                          # many small shards of the store become few
    metrics = "/var/lib/prometheus/node-exporter/news.prom"     # needs whiten-index[metrics]

    [[push]]                                # bring a database to it; there may be several
    to = "postgresql://news@db/news"        # its password: PGPASSWORD or ~/.pgpass, never here
    table = "docs"                          # and whatever else `whiten-index push` takes
    options = {m = 16}

In order: update, push, remove versions beyond ``keep-versions``, compact, remove shards of the
store that are no longer needed, among them what compaction wrote again (not with ``gc = false``;
what is younger than a week stays for a while), metrics. Without ``keep-versions`` nothing is ever
removed. Paths are relative to the folder that the job runs in. ``--dry-run`` says what would be
done and how long it should take, looks for the clients of the databases and at the files that would
be replaced, and writes nothing.

Every line on standard output is one event, as text or with ``--log json`` as a JSON object with
``time`` and ``event``; of a push, from ``push_started`` on, also ``to`` and ``table``. The last is
``published``, ``up_to_date``, ``gate_failed``, ``failed`` or ``interrupted``; after ``--dry-run``
it is ``planned``. The exit status is that of ``whiten-index update``, so 9 where a gate failed, or
after ``--dry-run`` would fail (``refused`` says why). What comes after the update (push, prune,
compact, gc, metrics) cannot undo it: where one fails, a line such as ``prune_failed`` says why, the
others are done, the last line still says what became of the update and names what ``failed``, and
the exit status is that of the first that did, 10 for a push whatever it failed of. A job that is
stopped after a good update ends with 130 and ``interrupted``, and that line says what became of the
update; after one that failed it ends as that did.

What is pushed is what is published: after an update, where there was none to make, where a gate
failed, as after a rollback, and where the update failed of anything that has an exit status of its
own (then a line ``update_failed`` comes first, and nothing is removed or compacted). A push goes
on, or makes up for it, the next time. While a database is behind, old versions stay
(``prune_left_out``), since what changed is known from those between. Nothing is pushed where the
job file is refused before the update begins (2: an unknown key, a [[push]] or metrics that cannot
be used), where another job is at work (6), which the metrics are left to, where the job is stopped
before, or where an error that nobody foresaw ends the update (1).
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any

import click

from pipelines.nightly_job import Job
from pipelines.nightly_push import FAILED, can_push, push, target
from whiten_index.errors import BusyError, GateError, WhitenIndexError
from whiten_index.log_lines import Ending, LogForm, LogLines, failure, run_job
from whiten_index.monitoring import LastRun, Outcome, check_metrics, write_metrics
from whiten_index.signals import INTERRUPTED, stop_on_signals

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
        failed: what failed beside the update, a push with its target -> exit status.
        behind: whether a database has not got what is published.
        doing: what is under way after the update.
        updated: how the update ended, once it has.
        report: of the update, once it ended well.
        gates: findings, once there are any.
    """

    job: Job
    lines: LogLines
    started: float = field(default_factory=time.monotonic)
    failed: dict[str, int] = field(default_factory=dict)
    behind: bool = False
    doing: str = ""
    updated: Ending | None = None
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
            if self.updated is None or not isinstance(error, KeyboardInterrupt):
                self._measure(*_outcome(error))
                raise
            ending = self._stopped(self.updated)
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
        self.updated = self._update()
        # First, since what changed since the database's version is known from the versions between.
        store = self.job.update.get("store") if self.report is None else self.report["store"]
        for config in self.job.pushes:
            self.doing = f"push {target(config)}"
            if not push(replace(config, store=config.store or store), self.lines):
                self.failed[self.doing] = FAILED
                # A file is written as a whole, whatever it was.
                self.behind |= config.table is not None
        # What a failure needs to be looked into stays.
        if self.report is not None:
            self._care(Path(self.report["store"]))
        return self.updated

    def _update(self) -> Ending:
        """Return how the update ended; what is unforeseen, or of another job, is raised."""
        try:
            report = self._report()
        except BusyError:
            raise
        except GateError as error:
            self.gates = error.gates
            self._log_gates()
            return self._not_updated(Outcome.GATE_FAILED, error, candidate=error.candidate)
        except WhitenIndexError as error:
            return self._not_updated(Outcome.FAILED, error)
        outcome = Outcome.UP_TO_DATE if report["up_to_date"] else Outcome.PUBLISHED
        return Ending(outcome.value, self._told(report))

    def _not_updated(self, outcome: Outcome, error: WhitenIndexError, **more: Any) -> Ending:
        said = {**failure(error), **more, "exit_code": error.exit_code}
        if self.job.pushes:
            # Pushes may take hours, or be what ends the process.
            self.lines.log("update_failed", **said)
        return Ending(outcome.value, said, error.exit_code)

    def _stopped(self, updated: Ending) -> Ending:
        """Return how a job ends that was stopped after its update: a failure stays one."""
        stopped = {"stopped_in": self.doing}
        if updated.exit_code:
            return Ending(updated.event, {**updated.fields, **stopped}, updated.exit_code)
        more = {"message": "the update is done; run the same job to do the rest", **stopped}
        fields = {**updated.fields, "update": updated.event, **more}
        return Ending(Outcome.INTERRUPTED.value, fields, INTERRUPTED)

    def _told(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a line says of a report."""
        left_out = {*_OWN_LINES, *(_FOR_MACHINES if self.lines.form is LogForm.TEXT else ())}
        return {name: value for name, value in report.items() if name not in left_out}

    def _report(self) -> dict[str, Any]:
        """Update the index, and log what is to be known of it."""
        from whiten_index.pipeline.changes import ids_lines
        from whiten_index.pipeline.update import update_index
        from whiten_index.pipeline.update_config import UpdateConfig

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
        if job.keep_versions is not None and self.behind:
            why = "a database is behind, and what changed since is known from the versions between"
            self.lines.log("prune_left_out", why=why)
        elif job.keep_versions is not None:
            self._aside("prune", lambda: _prune(job.index, keep=job.keep_versions or 1))
        if job.compact:
            self._aside("compact", lambda: _compact(store))
        # Last, since what compaction wrote again is needed by nothing where it lay before.
        if job.keep_versions is not None and job.gc and "prune" not in self.failed:
            self._aside("gc", lambda: _gc(store))

    def _aside(self, name: str, work: Callable[[], Any]) -> None:
        """Do what must not keep the rest from being done."""
        self.doing = name
        try:
            self.lines.log(f"{name}_finished", **_fields(work()))
        except Exception as error:
            # An unforeseen one too: the version is published, and the last line must say so.
            self._failed(name, error)

    def _measure(self, outcome: Outcome, status: int) -> None:
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
        self.failed[name] = _outcome(error)[1]
        self.lines.log(f"{name}_failed", **failure(error), exit_code=self.failed[name])
        if not isinstance(error, WhitenIndexError):
            traceback.print_exc()


def _outcome(error: BaseException) -> tuple[Outcome, int]:
    if isinstance(error, KeyboardInterrupt):
        return Outcome.INTERRUPTED, INTERRUPTED
    return Outcome.FAILED, error.exit_code if isinstance(error, WhitenIndexError) else 1


def _prune(index: Path, *, keep: int) -> Any:
    from whiten_index.versions.retention import prune

    return prune(index, keep=keep)


def _gc(store: Path) -> Any:
    from whiten_index.versions.gc import gc_store

    return gc_store(store)


def _compact(store: Path) -> Any:
    from whiten_index.versions.compaction import compact_store

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
    from whiten_index.pipeline.changes import ids_lines
    from whiten_index.pipeline.update_config import UpdateConfig
    from whiten_index.pipeline.update_plan import plan_update

    if job.metrics is not None:
        check_metrics(job.metrics)
    pushes = [0 if can_push(config, lines) else FAILED for config in job.pushes]
    plan = plan_update(UpdateConfig(**job.update), progress=lines).to_json()
    for line in ids_lines(plan):
        lines.note(line)
    refused = [GateError.exit_code] if plan.get("refused") else []
    return Ending(
        "planned",
        {
            **plan,
            "keep_versions": job.keep_versions,
            "gc": job.gc,
            "compact": job.compact,
            "push": [target(config) for config in job.pushes],
        },
        next(filter(None, [*refused, *pushes]), 0),
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
