"""The nightly job of an index: update, push, prune, compact, collect garbage, write metrics.

Each line on standard output is one event, a JSON object; see ``docs/nightly.md``.
"""

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qs

from pydantic import Field

from whiten_index.artifacts.files import is_folder
from whiten_index.cli.log_lines import Ending, LogLines, ending_of, failure, run_job
from whiten_index.cli.monitoring import check_metrics, write_metrics
from whiten_index.cli.schema_options import paths_from, read_toml, rename_keys
from whiten_index.cli.signals import INTERRUPTED, raise_if_interrupted
from whiten_index.cli.streams import print_exception
from whiten_index.errors import BusyError, ConfigError, DatabaseError, GateError, WhitenIndexError
from whiten_index.options import job_keys, schema
from whiten_index.pipeline.build_config import BuildConfig
from whiten_index.pipeline.update_config import UpdateConfig
from whiten_index.vectordb.push_config import PushConfig

# Logged apart, before the last line.
_LOGGED_APART = ("drift", "decision", "gates", "notes")
# Options that name, next to the address, the place of a table.
_PLACES = ("schema", "db")
_PATHS = {"index", "corpus", "store", "canary_file", "metrics"}


@schema
class NightlyJob(UpdateConfig):
    """A job file: the options of an update, and the steps after it."""

    keep_versions: Annotated[int | None, Field(ge=1)] = None  # sound ones, None for all
    gc: bool = True  # remove shards that no kept version needs, after versions were removed
    compact: bool = False  # join small shards of the store
    metrics: str | None = None  # file for node_exporter
    push: tuple[PushConfig, ...] = ()  # databases and files to bring to the published version

    @classmethod
    def read(cls, path: Path) -> "NightlyJob":
        """Read a job file, and refuse it whole if any key or value is not valid."""
        where = f"job file {path}"
        values, own, built = read_toml(path), job_keys(cls), job_keys(BuildConfig)
        for key in values:
            if key.replace("-", "_") in built.keys() - own.keys():
                raise ConfigError(f"{where}: {key} stays as built; leave it out, or build again")
        values = rename_keys(values, own, where=where)
        for key in _PATHS & values.keys():
            values[key] = paths_from(path.parent, values[key])
        # One that is no folder here has a name on the hub.
        if isinstance(model := values.get("model"), str) and is_folder(path.parent / model):
            values["model"] = paths_from(path.parent, model)
        tables = values.pop("push", [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise ConfigError(f"{where}: push is a table; write [[push]] above each")
        try:
            job = cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        keys = job_keys(PushConfig)
        del keys["index"]
        pushes, places = [], dict[tuple[Any, ...], int]()
        for number, table in enumerate(tables, 1):
            push = f"{where}, push {number}"
            named = rename_keys(table, keys, where=push)
            for key in {"to", "store"} & named.keys():
                named[key] = paths_from(path.parent, named[key], mark=":" if key == "to" else "://")
            try:
                config = PushConfig(index=job.index, **named)
            except ConfigError as error:
                raise ConfigError(f"{push}: {error}") from error
            place = (config.to, config.table, *(config.options.get(name) for name in _PLACES))
            if (before := places.setdefault(place, number)) != number:
                # Each would undo the other every night.
                raise ConfigError(
                    f"{push} goes where push {before} does; give it another table or file, or "
                    "leave one out"
                )
            pushes.append(config)
        return replace(job, push=tuple(pushes))


def run_nightly(path: Path, *, dry_run: bool = False) -> int:
    """Run a job file, or say what it would do; log events and return the exit status."""
    lines = LogLines()

    def work() -> Ending:
        job = NightlyJob.read(path)
        return _planned(job, lines) if dry_run else _Night(job, lines).run()

    return run_job(work, kept="shards", lines=lines)


def _planned(job: NightlyJob, lines: LogLines) -> Ending:
    from whiten_index.pipeline.plan import plan_update
    from whiten_index.vectordb.registry import require_client
    from whiten_index.vectordb.vector_files import require_file

    if job.metrics is not None:
        check_metrics(Path(job.metrics))
    status = 0
    for config in job.push:
        try:
            require_file(config.to) if config.to_file else require_client(config.to)
        except ConfigError as error:
            status = DatabaseError.exit_code
            LogLines(**_place(config)).log("push_failed", **failure(error), exit_code=status)
    plan = plan_update(job, progress=lines)
    status = GateError.exit_code if plan.get("refused") else status
    pushes = [target(config) for config in job.push]
    steps = {"keep_versions": job.keep_versions, "gc": job.gc, "compact": job.compact}
    return Ending("planned", {**plan, **steps, "push": pushes}, status)


@dataclass
class _Night:
    """One run of a job; ``failed`` has the exit status of each step that failed."""

    job: NightlyJob
    lines: LogLines
    started: float = field(default_factory=time.monotonic)
    failed: dict[str, int] = field(default_factory=dict)
    step: str = ""
    report: Mapping[str, Any] | None = None

    def run(self) -> Ending:
        """Run every step; metrics are written whatever happens, unless another job is running."""
        if self.job.metrics is not None:
            # A refused path is another file's and must not be overwritten.
            check_metrics(Path(self.job.metrics))
        try:
            ending = self._update()
        except (Exception, KeyboardInterrupt) as error:
            # The metrics belong to the job that holds the lock.
            if not isinstance(error, BusyError):
                self._write_metrics(ending_of(error))
            raise
        try:
            self._push()
            # What a failure needs to be looked into stays.
            if self.report is not None:
                self._tidy(self.report["store"])
        except KeyboardInterrupt:
            # A failure of the update stays one.
            fields = {**ending.fields, "stopped_in": self.step}
            if not ending.exit_code:
                message = "the update is done; run the same job to do the rest"
                fields |= {"update": ending.event, "message": message}
                ending = Ending("interrupted", {}, INTERRUPTED)
            ending = replace(ending, fields=fields)
        self._write_metrics(ending)
        if not self.failed:
            return ending
        # The metrics may have failed as well.
        status = ending.exit_code or self._status
        fields = {**ending.fields, "failed": list(self.failed), "exit_code": status}
        return Ending(ending.event, fields, status)

    @property
    def _status(self) -> int:
        """Exit status of the first later step that failed, else 0."""
        return next(iter(self.failed.values()), 0)

    def _update(self) -> Ending:
        """Update the index and return the ending; unknown errors and BusyError are raised."""
        from whiten_index.pipeline.update import update_index

        try:
            self.report = report = update_index(self.job, progress=self.lines).to_json()
            gates = report["gates"]
            for name in ("drift", "decision"):
                if report[name] is not None:
                    self.lines.log(name, **report[name])
            ending = Ending("up_to_date" if report["up_to_date"] else "published", report)
        except BusyError:
            raise
        except WhitenIndexError as error:
            gates = error.gates if isinstance(error, GateError) else ()
            ending = ending_of(error)
        for gate in gates:
            self.lines.log("gate", **gate)
        ending = replace(ending, fields=_shown(ending.fields))
        if ending.exit_code and self.job.push:
            # Pushes may take hours, or end the process.
            self.lines.log("update_failed", **ending.fields)
        return ending

    def _push(self) -> None:
        # Before versions are removed: changes are found by the versions in between.
        from whiten_index.vectordb.push import push_index

        store = self.job.store if self.report is None else self.report["store"]
        for config in self.job.push:
            lines = LogLines(**_place(config))
            lines.log("push_started")
            # Of a push every failure has one status: a gate of it is not the update's.
            with self._step(f"push {target(config)}", lines, DatabaseError.exit_code):
                config = replace(config, store=config.store or store)
                report = push_index(config, progress=lines).to_json()
                lines.log("push_finished", **_shown(report))

    def _tidy(self, store: str) -> None:
        """Remove old versions, join small shards and remove shards that are no longer needed."""
        job = self.job
        tables = [f"push {target(config)}" for config in job.push if config.table is not None]
        if job.keep_versions is not None and self.failed.keys() & set(tables):
            why = "a database is behind, and what changed since is known from the versions between"
            self.lines.log("prune_left_out", why=why)
        elif job.keep_versions is not None:
            with self._step("prune"):
                from whiten_index.versions.retention import prune

                removed = prune(job.index, keep=job.keep_versions)
                self.lines.log("prune_finished", **asdict(removed))
        if job.compact:
            with self._step("compact"):
                from whiten_index.versions.compaction import compact_store

                compacted = compact_store(store)
                self.lines.log("compact_finished", **asdict(compacted))
                compacted.require_sound()
        # After compaction, which leaves shards that nothing needs.
        if job.keep_versions is not None and job.gc and "prune" not in self.failed:
            with self._step("gc"):
                from whiten_index.versions.gc import gc_store

                self.lines.log("gc_finished", **asdict(gc_store(store)))

    @contextmanager
    def _step(
        self, step: str, lines: LogLines | None = None, status: int | None = None
    ) -> Iterator[None]:
        """Run a step whose failure must not keep the others from running."""
        self.step = step
        try:
            yield
        except Exception as error:
            # A library may have made another error of it. Metrics come after an interruption too.
            if step != "metrics":
                raise_if_interrupted()
            self.failed[step] = status or ending_of(error).exit_code
            logged = {**failure(error), "exit_code": self.failed[step]}
            (lines or self.lines).log(f"{step.split()[0]}_failed", **logged)
            if not isinstance(error, WhitenIndexError):
                print_exception(error)

    def _write_metrics(self, ending: Ending) -> None:
        if self.job.metrics is None:
            return
        with self._step("metrics"):
            write_metrics(
                Path(self.job.metrics),
                index=self.job.index,
                outcome=ending.event,
                exit_code=ending.exit_code or self._status,
                seconds=time.monotonic() - self.started,
                updated=self.report is not None,
            )


def _shown(report: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in report.items() if name not in _LOGGED_APART}


def target(config: PushConfig) -> str:
    """Return the file, or the database and table, that a push writes."""
    place = _place(config)
    if config.table is None:
        return place["to"]
    inside = (config.options[name] for name in _PLACES if name in config.options)
    return f"{place['to']} {'.'.join((*inside, config.table))}"


def _place(config: PushConfig) -> dict[str, str]:
    to, _, query = config.to.partition("?")
    # Servers of one machine may differ in their sockets alone.
    host = parse_qs(query).get("host", [""])[0]
    if re.fullmatch(r"/[\w./-]*", host):
        to += f"?host={host}"
    return {"to": to} if config.table is None else {"to": to, "table": config.table}
