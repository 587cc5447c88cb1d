"""The nightly job: its last line, its exit status and its metrics, whatever happens on the way."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from pipelines.nightly_reindex import main
from tests.bad_input_helpers import numbers, table
from tests.bad_input_helpers import run as run_command
from whiten_index.errors import BusyError, CorpusError, StorageError


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
        ('index = "a"\nrefit = "often"', "refit"),
        (None, "cannot be read"),
    ],
)
def test_job_files_that_cannot_be_used(tmp_path: Path, text: str | None, match: str) -> None:
    job = tmp_path / "job.toml"
    if text is not None:
        job.write_text(text)
    status, events = run(job)
    assert (status, events[-1]["event"], events[-1]["error"]) == (2, "failed", "ConfigError")
    assert re.search(match, events[-1]["message"])


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


def raising(error: BaseException) -> Any:
    def fails(*_: Any, **__: Any) -> Any:
        raise error

    return fails


@pytest.mark.parametrize(
    ("error", "expected"),
    [(CorpusError("half a file"), 3), (StorageError("full"), 7), (MemoryError(), 1),
     (KeyboardInterrupt(), 130)],
)  # fmt: skip
def test_whatever_fails_the_last_line_and_the_metrics_say_so(
    news: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, expected: int
) -> None:
    monkeypatch.setattr("whiten_index.pipeline.update.update_index", raising(error))
    prom = news.parent / "night.prom"
    status, events = run(job_file(news, keep_versions=2, compact=True, metrics=str(prom)))
    event = "interrupted" if expected == 130 else "failed"
    assert (status, events[-1]["event"]) == (expected, event)
    found = metrics(prom)
    assert found["last_run_exit_code",] == expected
    assert found["last_run_outcome", event] == 1
    assert found["published_rows",] == 60


def test_a_job_that_finds_another_one_leaves_the_metrics_to_that(
    news: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prom = news.parent / "night.prom"
    monkeypatch.setattr("whiten_index.pipeline.update.update_index", raising(BusyError("held")))
    status, events = run(job_file(news, metrics=str(prom)))
    assert (status, events[-1]["event"], events[-1]["message"]) == (6, "failed", "held")
    assert not prom.exists()


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("prune", "retention.prune"),
        ("gc", "gc.gc_store"),
        ("compact", "compaction.compact_store"),
    ],
)
def test_what_follows_an_update_cannot_undo_it(
    news: Path, monkeypatch: pytest.MonkeyPatch, name: str, function: str
) -> None:
    monkeypatch.setattr(f"whiten_index.versions.{function}", raising(BusyError("held")))
    prom = news.parent / "night.prom"
    write_parquet(news.parent / "news" / "b.parquet", table().slice(42))
    status, events = run(job_file(news, keep_versions=2, compact=True, metrics=str(prom)))
    assert (status, events[-1]["event"], events[-1]["failed"]) == (6, "published", [name])
    found = metrics(prom)
    assert found["last_run_outcome", "published"] == 1
    assert found["last_run_exit_code",] == 6
