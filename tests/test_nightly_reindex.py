"""The nightly job: its order, its last line and its exit status, whatever happens on the way.

The library's own functions are stood in for, but in the last tests; what they do is tested with
them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from pipelines.nightly_reindex import main
from tests.bad_input_helpers import numbers, table
from tests.bad_input_helpers import run as run_command
from whiten_index.errors import (
    ArtifactError,
    BusyError,
    ConfigError,
    CorpusError,
    EncoderError,
    GateError,
    StorageError,
    WhiteningError,
)
from whiten_index.progress import Progress, Stages

REPORT: dict[str, Any] = {
    "out": "out",
    "store": "raw",
    "version": "000002-0123456789ab",
    "base": "000001-0123456789ab",
    "up_to_date": False,
    "rows": {"total": 60, "new": 1, "changed": 2, "document": 0, "deleted": 3, "unchanged": 57},
    "counts": {"read": 60, "encoded": 3, "reused": 57, "truncated": 0, "skipped": {}},
    "files": {"read": 1, "skipped": 4},
    "drift": {"kl_per_dim": 0.002},
    "decision": {"whitening": "keep", "index": "carried", "why": "small", "threshold": 0.01},
    "gates": [{"name": "counts", "passed": True, "found": {}, "bound": {}, "why": ""}],
    "bytes": {"index_file": 100},
    "seconds": {"encode": 1.0},
    "stage_rows": {"encode": 3},
    "created": "2026-01-02T03:04:05+00:00",
}
BAD_GATE = {"name": "canaries", "passed": False, "found": {"recall": 0.2}, "bound": {}, "why": "r"}
CLOSING = {"published", "up_to_date", "gate_failed", "failed", "interrupted"}


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """The fields that the job files below use."""

    index: str
    corpus: tuple[str, ...] = ()
    refit: str = "auto"
    drift_threshold: float = 0.01

    def __post_init__(self) -> None:
        if self.refit not in ("auto", "always", "never"):
            raise ConfigError(f"--refit {self.refit!r} is unknown")


@dataclass(frozen=True)
class Told:
    values: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return self.values


@dataclass(frozen=True)
class Pruned:
    removed: tuple[str, ...] = ("000001-0123456789ab",)
    bytes: int = 10


@dataclass
class Library:
    """What stands in for the library: what was called, and what each call is to do."""

    report: dict[str, Any] = field(default_factory=lambda: dict(REPORT))
    raises: dict[str, BaseException] = field(default_factory=dict)
    called: list[tuple[str, Any]] = field(default_factory=list)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, members in {
            "update": {
                "UpdateConfig": UpdateConfig,
                "update_index": self.update_index,
                "plan_update": self.plan_update,
            },
            "versions": {"prune": self.prune},
            "upkeep": {"gc_store": self.gc_store, "compact_store": self.compact_store},
        }.items():
            module = ModuleType(f"whiten_index.{name}")
            vars(module).update(members)
            monkeypatch.setitem(sys.modules, module.__name__, module)

    def call(self, name: str, given: Any) -> None:
        self.called.append((name, given))
        if name in self.raises:
            raise self.raises[name]

    def update_index(self, config: UpdateConfig, *, progress: Progress) -> Told:
        with Stages(progress).stage("encode", 3) as watcher:
            watcher.advance(3)
            self.call("update", config)
        return Told(self.report)

    def plan_update(self, config: UpdateConfig, *, progress: Progress) -> Told:
        self.call("plan", config)
        return Told({"rows": REPORT["rows"], "seconds": 12.0})

    def prune(self, root: Path, *, keep: int) -> Pruned:
        self.call("prune", (root, keep))
        return Pruned()

    def gc_store(self, root: Path) -> Told:
        self.call("gc", root)
        return Told({"shards": 2})

    def compact_store(self, root: Path) -> None:
        self.call("compact", root)

    @property
    def order(self) -> list[str]:
        return [name for name, _ in self.called]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    library.install(monkeypatch)
    return library


@pytest.fixture
def index(tmp_path: Path, published: Path) -> Path:
    shutil.copytree(published / "out", tmp_path / "out")
    return tmp_path / "out"


def job_file(index: Path, **keys: Any) -> Path:
    path = index.parent / "job.toml"
    lines = [f"{key.replace('_', '-')} = {json.dumps(value)}" for key, value in keys.items()]
    path.write_text("\n".join([f"index = {json.dumps(str(index))}", *lines]))
    return path


def run(job: Path, *flags: str) -> tuple[int, list[dict[str, Any]]]:
    """Run the job in this process; return its exit status and its log lines."""
    result = CliRunner().invoke(main, [str(job), "--log", "json", *flags])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, [json.loads(line) for line in result.stdout.splitlines()]


def metrics(path: Path) -> dict[tuple[str, ...], float]:
    """Return (name, label values apart from the index's) -> value."""
    found = {}
    for family in text_string_to_metric_families(path.read_text()):
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name != "index"]
            found[sample.name.removeprefix("whiten_index_"), *labels] = sample.value
    return found


def test_a_whole_night(library: Library, index: Path) -> None:
    prom = index.parent / "night.prom"
    job = job_file(
        index, corpus="news/*.parquet", refit="never", drift_threshold=0.5, keep_versions=3,
        compact=True, metrics=str(prom),
    )  # fmt: skip
    status, events = run(job)
    assert status == 0
    assert library.called == [
        (
            "update",
            UpdateConfig(
                index=str(index), corpus=["news/*.parquet"], refit="never", drift_threshold=0.5
            ),
        ),
        ("prune", (index, 3)),
        ("compact", Path("raw")),
        ("gc", Path("raw")),
    ]
    assert [event["event"] for event in events] == [
        "stage_started", "stage_finished", "drift", "decision", "gate",
        "prune_finished", "compact_finished", "gc_finished", "published",
    ]  # fmt: skip
    said = {event["event"]: event for event in events}
    assert said["drift"]["kl_per_dim"] == 0.002
    assert said["decision"]["whitening"] == "keep"
    assert (said["gate"]["name"], said["gate"]["passed"]) == ("counts", True)
    assert said["prune_finished"]["removed"] == ["000001-0123456789ab"]
    assert said["gc_finished"]["shards"] == 2
    last = events[-1]
    assert last["rows"] == REPORT["rows"]
    assert (last["version"], last["seconds"]) == (REPORT["version"], {"encode": 1.0})
    found = metrics(prom)
    assert found["last_run_outcome", "published"] == 1
    assert found["update_rows", "changed"] == 2
    assert found["update_gate_passed", "counts"] == 1
    assert found["published_rows",] == 60


def test_a_failed_gate(library: Library, index: Path) -> None:
    prom, candidate = index.parent / "night.prom", str(index / "candidates" / "000002-a")
    library.raises["update"] = GateError("canaries", gates=[BAD_GATE], candidate=candidate)
    status, events = run(job_file(index, keep_versions=2, compact=True, metrics=str(prom)))
    assert (status, events[-1]["event"], events[-1]["exit_code"]) == (9, "gate_failed", 9)
    assert events[-1]["candidate"] == candidate
    assert [e["name"] for e in events if e["event"] == "gate"] == ["canaries"]
    # What it needs to be looked into stays.
    assert library.order == ["update"]
    found = metrics(prom)
    assert found["last_run_exit_code",] == 9
    assert found["update_gate_passed", "canaries"] == 0
    assert found["published_rows",] == 60
    assert ("last_success_timestamp_seconds",) not in found


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConfigError("c"), 2),
        (CorpusError("half a file"), 3),
        (EncoderError("e"), 4),
        (ArtifactError("a"), 5),
        (StorageError("full"), 7),
        (WhiteningError("w"), 8),
        (MemoryError("m"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_whatever_fails_the_last_line_and_the_metrics_say_so(
    library: Library, index: Path, error: BaseException, expected: int
) -> None:
    library.raises["update"] = error
    prom = index.parent / "night.prom"
    status, events = run(job_file(index, keep_versions=2, compact=True, metrics=str(prom)))
    assert status == expected
    event = "interrupted" if expected == 130 else "failed"
    assert events[-1]["event"] == event
    assert [e for e in events if e["event"] in CLOSING] == events[-1:]
    assert library.order == ["update"]
    found = metrics(prom)
    assert found["last_run_exit_code",] == expected
    assert found["last_run_outcome", event] == 1
    assert found["published_rows",] == 60
    assert not [key for key in found if key[0].startswith("update_")]


def test_a_job_that_finds_another_one_leaves_the_metrics_to_that(
    library: Library, index: Path
) -> None:
    prom = index.parent / "night.prom"
    job = job_file(index, metrics=str(prom))
    library.raises["update"] = BusyError("held")
    assert run(job)[0] == 6
    assert not prom.exists()
    del library.raises["update"]
    assert run(job)[0] == 0
    before = prom.read_bytes()
    library.raises["update"] = BusyError("held")
    status, events = run(job)
    assert (status, events[-1]["event"], events[-1]["message"]) == (6, "failed", "held")
    assert prom.read_bytes() == before


@pytest.mark.parametrize("name", ["prune", "gc", "compact"])
@pytest.mark.parametrize(("error", "expected"), [(BusyError("held"), 6), (ValueError("odd"), 1)])
def test_what_follows_an_update_cannot_undo_it(
    library: Library, index: Path, name: str, error: Exception, expected: int
) -> None:
    library.raises[name] = error
    prom = index.parent / "night.prom"
    status, events = run(job_file(index, keep_versions=2, compact=True, metrics=str(prom)))
    assert (status, events[-1]["event"]) == (expected, "published")
    assert (events[-1]["failed"], events[-1]["exit_code"]) == ([name], expected)
    (said,) = [event for event in events if event["event"] == f"{name}_failed"]
    assert (said["message"], said["exit_code"]) == (str(error), expected)
    # Shards are dropped only where the versions were; nothing else waits for anything.
    every = ["update", "prune", "compact", "gc"]
    assert library.order == ([n for n in every if n != "gc"] if name == "prune" else every)
    found = metrics(prom)
    assert found["last_run_outcome", "published"] == 1
    assert found["last_run_exit_code",] == expected
    assert found["last_success_timestamp_seconds",] > 0


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", r'does not say which index: index = "DIR"'),
        ("index = 3", "does not say which index"),
        ("index = [", "is not TOML"),
        ('index = "a"\nkepp-versions = 3', "sets kepp-versions, which is unknown; .*keep-versions"),
        ('index = "a"\nkeep-versions = 0', "keep-versions takes 1 or more, .*0 was given"),
        ('index = "a"\nkeep-versions = true', "keep-versions takes a number of versions; True was"),
        ('index = "a"\ncompact = "yes"', "compact takes true or false; 'yes' was given"),
        ('index = "a"\nmetrics = 1', "metrics takes a path; 1 was given"),
        ('index = "a"\nrefit = "often"', "--refit 'often' is unknown"),
        (None, "cannot be read"),
    ],
)
def test_job_files_that_cannot_be_used(
    library: Library, tmp_path: Path, text: str | None, match: str
) -> None:
    job = tmp_path / "job.toml"
    if text is not None:
        job.write_text(text)
    status, events = run(job)
    assert (status, events[-1]["event"], events[-1]["error"]) == (2, "failed", "ConfigError")
    assert re.search(match, events[-1]["message"])
    assert library.order == []


def test_a_scheduler_stops_it_between_two_batches(library: Library, index: Path) -> None:
    """SIGTERM in a stage ends a process with the job's last line and its metrics."""
    prom = index.parent / "night.prom"
    job, log = job_file(index, metrics=str(prom)), index.parent / "log"
    if pid := os.fork():
        deadline = time.monotonic() + 60
        while not (log.exists() and "stage_started" in log.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    else:
        try:
            _in_child(library, job, log)
        finally:
            os._exit(99)
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert events[-1]["event"] == "interrupted"
    assert metrics(prom)["last_run_outcome", "interrupted"] == 1


def _in_child(library: Library, job: Path, log: Path) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT, 0o644), 1)
    sys.stdout = os.fdopen(1, "w")

    def endless(config: UpdateConfig, *, progress: Progress) -> Told:
        with Stages(progress).stage("encode", 10**9) as watcher:
            while True:
                time.sleep(0.02)
                watcher.advance(1)

    sys.modules["whiten_index.pipeline.update"].update_index = endless  # type: ignore[attr-defined]
    try:
        main([str(job), "--log", "json"])
    except SystemExit as ended:
        os._exit(int(ended.code or 0))


@pytest.fixture
def news(tmp_path: Path) -> Path:
    """An index of 60 rows, and its corpus in the folder beside, in two files."""
    write_parquet(tmp_path / "news" / "a.parquet", table().slice(0, 40))
    write_parquet(tmp_path / "news" / "b.parquet", table().slice(40))
    status, _, stderr = run_command(
        "build", tmp_path / "news", "--embedding-column", "e", "--id-column", "id", "--k", 3,
        "--out", tmp_path / "out",
    )  # fmt: skip
    assert status == 0, stderr
    return tmp_path / "out"


def write_parquet(path: Path, rows: pa.Table) -> None:
    path.parent.mkdir(exist_ok=True)
    pq.write_table(rows, path)


def test_nights_in_a_row(news: Path) -> None:
    """With the library itself: a day on which rows change, one on which nothing does."""
    prom = news.parent / "night.prom"
    job = job_file(news, refit="never", keep_versions=1, gc=False, metrics=str(prom))
    changed = table(e=[*numbers()[:58], *(numbers(seed=1)[58:] * 1.01)])
    # d59 and d58 are other vectors, d40 and d41 are gone.
    write_parquet(news.parent / "news" / "b.parquet", changed.slice(42))
    before = sorted(path for path in news.parent.rglob("*") if "lock" not in path.name)
    status, events = run(job, "--dry-run")
    assert (status, events[-1]["event"]) == (0, "planned"), events
    assert sorted(path for path in news.parent.rglob("*") if "lock" not in path.name) == before

    status, events = run(job)
    assert (status, events[-1]["event"]) == (0, "published"), events
    rows = {"total": 58, "new": 0, "changed": 2, "document": 0, "deleted": 2, "unchanged": 56}
    assert events[-1]["rows"] == rows
    gates = {event["name"]: event["passed"] for event in events if event["event"] == "gate"}
    assert {"counts", "canaries", "size"} <= set(gates)
    assert all(gates.values())
    versions = [path.name for path in (news / "versions").iterdir()]
    assert versions == [events[-1]["version"]]
    found = metrics(prom)
    assert {k: found["update_rows", k] for k in rows if k != "total"} | {"total": 58} == rows
    assert found["published_rows",] == 58
    assert found["published_version_number",] == 2
    assert found["update_refit",] == 0
    assert {("update_gate_passed", name) for name in gates} <= set(found)
    assert ("update_drift", "kl_per_dim") in found

    status, events = run(job)
    assert (status, events[-1]["event"]) == (0, "up_to_date"), events
    assert metrics(prom)["update_rows", "unchanged"] == 58


def test_a_night_on_which_half_the_corpus_is_gone(news: Path) -> None:
    prom = news.parent / "night.prom"
    job = job_file(news, max_shrink=0.1, keep_versions=1, metrics=str(prom))
    (news.parent / "news" / "a.parquet").unlink()
    before = (news / "CURRENT").read_bytes()
    status, events = run(job)
    assert (status, events[-1]["event"]) == (9, "gate_failed"), events
    assert "size" in [event["name"] for event in events if not event.get("passed", True)]
    assert Path(events[-1]["candidate"]).is_dir()
    assert (news / "CURRENT").read_bytes() == before
    found = metrics(prom)
    assert found["update_gate_passed", "size"] == 0
    assert found["published_rows",] == 60
