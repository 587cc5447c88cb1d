"""The nightly job: its steps, its last line, its exit status and its metrics, whatever fails."""

import json
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.bad_input import ends, night, numbers, run, table
from whiten_index import open_index
from whiten_index.artifacts.lock import only_writer
from whiten_index.cli import cli
from whiten_index.cli.nightly_job import NightlyJob
from whiten_index.errors import BusyError, CorpusError, StorageError

CLOSING = {"published", "up_to_date", "gate_failed", "failed", "interrupted"}


class News:
    """An index of 60 rows, its corpus in two files next to it, and a job file."""

    def __init__(self, root: Path, published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.root, self.index, self.metrics = root, root / "out", root / "night.prom"
        shutil.copytree(published, root, dirs_exist_ok=True)

    def job(self, **keys: Any) -> Path:
        path = self.root / "job.toml"
        keys = {"index": str(self.index), "refit": "never", **keys}
        lines = [f"{key.replace('_', '-')} = {json.dumps(value)}" for key, value in keys.items()]
        path.write_text("\n".join(lines))
        return path

    def change(self) -> None:
        """Give two rows other vectors, and take two away."""
        changed = table(e=[*numbers()[:58], *(numbers(seed=1)[58:] * 1.01)])
        pq.write_table(changed.slice(42), self.root / "news" / "b.parquet")

    def measured(self) -> dict[tuple[str, ...], float]:
        """Return (name, label values apart from the index's) -> value."""
        found = {}
        for family in text_string_to_metric_families(self.metrics.read_text()):
            for sample in family.samples:
                labels = [value for name, value in sample.labels.items() if name != "index"]
                found[sample.name.removeprefix("whiten_index_"), *labels] = sample.value
        return found


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus and its index; not to be changed."""
    root = tmp_path_factory.mktemp("news")
    (root / "news").mkdir()
    pq.write_table(table().slice(0, 40), root / "news" / "a.parquet")
    pq.write_table(table().slice(40), root / "news" / "b.parquet")
    columns = ["--embedding-column", "e", "--id-column", "id", "--k", "3"]
    arguments = ["build", str(root / "news"), *columns, "--out", str(root / "out")]
    assert CliRunner().invoke(cli, arguments).exit_code == 0
    return root


@pytest.fixture
def news(tmp_path: Path, published: Path, monkeypatch: pytest.MonkeyPatch) -> News:
    made = News(tmp_path, published, monkeypatch)
    # The version remembers the corpus of the first folder.
    monkeypatch.chdir(tmp_path)
    return made


def names_of(events: list[dict[str, Any]], *endings: str) -> list[str]:
    return [event["event"] for event in events if event["event"].endswith(endings)]


def test_nights_in_a_row(news: News) -> None:
    """A day on which rows change, and one on which nothing does."""
    job = news.job(
        corpus="news", keep_versions=1, compact=True, metrics=str(news.metrics),
    )  # fmt: skip
    news.change()
    before = sorted(path for path in news.root.rglob("*") if "lock" not in path.name)
    status, events = night(job, "--dry-run")
    assert (status, events[-1]["event"], events[-1]["keep_versions"]) == (0, "planned", 1), events
    assert sorted(path for path in news.root.rglob("*") if "lock" not in path.name) == before

    events = ends(0, "published", job)
    rows = {"total": 58, "new": 0, "changed": 2, "document": 0, "deleted": 2, "unchanged": 56}
    assert events[-1]["rows"] == rows
    assert names_of(events, "drift", "decision") == ["drift", "decision"]
    after = names_of(events, "prune_finished", "compact_finished", "gc_finished")
    assert after == ["prune_finished", "compact_finished", "gc_finished"]
    gates = {event["name"]: event["passed"] for event in events if event["event"] == "gate"}
    assert {"counts", "canaries", "size"} <= set(gates)
    assert all(gates.values())
    versions = [path.name for path in (news.index / "versions").iterdir()]
    assert versions == [events[-1]["version"]]
    found = news.measured()
    assert found["last_run_outcome", "published"] == 1
    assert found["published_rows",] == 58

    events = ends(0, "up_to_date", job)
    assert not names_of(events, "drift", "decision", "gate")
    assert news.measured()["last_success_timestamp_seconds",] > 0


def test_nothing_is_removed_unasked(news: News) -> None:
    for keys, steps in (({}, []), ({"keep_versions": 2, "gc": False}, ["prune_finished"])):
        status, events = night(news.job(corpus="news", **keys))
        assert status == 0
        assert names_of(events, "prune_finished", "compact_finished", "gc_finished") == steps
    assert not list(news.root.glob("*.prom"))


def test_a_failed_gate(news: News) -> None:
    job = news.job(corpus="news", max_shrink=0.1, keep_versions=1, metrics=str(news.metrics))
    (news.root / "news" / "a.parquet").unlink()
    before = (news.index / "CURRENT").read_bytes()
    assert night(job, "--dry-run")[0] == 9
    status, events = night(job)
    assert (status, events[-1]["event"], events[-1]["exit_code"]) == (9, "gate_failed", 9), events
    assert "size" in [event["name"] for event in events if not event.get("passed", True)]
    assert Path(events[-1]["candidate"]).is_dir()
    assert (news.index / "CURRENT").read_bytes() == before
    # What it needs to be looked into stays.
    assert not names_of(events, "prune_finished", "gc_finished")
    found = news.measured()
    assert found["last_run_exit_code",] == 9
    assert found["published_rows",] == 60
    assert ("last_success_timestamp_seconds",) not in found


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (CorpusError("half a file"), 3), (MemoryError("m"), 7), (KeyboardInterrupt(), 130),
        (OSError(28, "No space left on device"), 7), (ValueError("odd"), 1),
    ],
)  # fmt: skip
def test_whatever_the_update_fails_of_the_last_line_and_the_metrics_say_so(
    news: News, error: BaseException, expected: int
) -> None:
    news.monkeypatch.setattr("whiten_index.pipeline.update.update_index", Mock(side_effect=error))
    job = news.job(keep_versions=2, compact=True, metrics=str(news.metrics))
    status, out, err = run("nightly", job)
    events = [json.loads(line) for line in out.splitlines()]
    event = "interrupted" if expected == 130 else "failed"
    assert (status, events[-1]["event"]) == (expected, event)
    assert ("Traceback" in err) == (expected == 1)
    assert [each for each in events if each["event"] in CLOSING] == events[-1:]
    assert not names_of(events, "prune_finished", "compact_finished", "gc_finished")
    found = news.measured()
    assert found["last_run_exit_code",] == expected
    assert found["last_run_outcome", event] == 1
    assert found["published_rows",] == 60
    assert not [key for key in found if key[0].startswith("update_")]


def test_a_job_that_finds_another_one_leaves_the_metrics_to_that(news: News) -> None:
    job = news.job(corpus="news", metrics=str(news.metrics))
    with only_writer(news.index, what="it"):
        assert night(job)[0] == 6
        assert not news.metrics.exists()
    assert night(job)[0] == 0
    before = news.metrics.read_bytes()
    with only_writer(news.index, what="it"):
        status, events = night(job)
    assert (status, events[-1]["event"]) == (6, "failed")
    assert news.metrics.read_bytes() == before


@pytest.mark.parametrize("step", ["prune", "gc", "compact"])
@pytest.mark.parametrize(("error", "expected"), [(BusyError("held"), 6), (ValueError("odd"), 1)])
def test_what_follows_an_update_cannot_undo_it(
    news: News, step: str, error: Exception, expected: int
) -> None:
    names = {"prune": "retention.prune", "gc": "gc.gc_store", "compact": "compaction.compact_store"}
    news.monkeypatch.setattr(f"whiten_index.versions.{names[step]}", Mock(side_effect=error))
    news.change()
    keys = {"keep_versions": 2, "compact": True, "metrics": str(news.metrics)}
    events = ends(expected, "published", news.job(corpus="news", **keys))
    assert (events[-1]["failed"], events[-1]["exit_code"]) == ([step], expected)
    (failed,) = [event for event in events if event["event"] == f"{step}_failed"]
    assert (failed["message"], failed["exit_code"]) == (str(error), expected)
    # Shards are removed only if the versions were; nothing else waits for anything.
    others = [f"{each}_finished" for each in ("prune", "compact", "gc") if each != step]
    done = names_of(events, "prune_finished", "compact_finished", "gc_finished")
    assert done == (["compact_finished"] if step == "prune" else others)
    found = news.measured()
    assert found["last_run_outcome", "published"] == 1
    assert found["last_run_exit_code",] == expected
    assert found["last_success_timestamp_seconds",] > 0


def test_an_interruption_after_the_update(news: News, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "whiten_index.versions.compaction.compact_store", Mock(side_effect=KeyboardInterrupt)
    )
    keys = {"keep_versions": 2, "compact": True, "metrics": str(news.metrics)}
    events = ends(130, "interrupted", news.job(corpus="news", **keys))
    assert (events[-1]["update"], events[-1]["stopped_in"]) == ("up_to_date", "compact")
    assert not names_of(events, "gc_finished")
    found = news.measured()
    assert found["last_run_outcome", "interrupted"] == 1
    assert found["last_success_timestamp_seconds",] > 0


@pytest.mark.parametrize("found", [True, False])
def test_metrics_that_cannot_be_written_do_not_hide_the_update(news: News, found: bool) -> None:
    news.monkeypatch.setattr(
        "whiten_index.cli.nightly_job.write_metrics", Mock(side_effect=StorageError("full"))
    )
    corpus = "news" if found else "none"
    status, events = night(news.job(corpus=corpus, metrics=str(news.metrics)))
    assert status == (7 if found else 3)
    assert events[-2]["event"] == "metrics_failed"
    assert events[-1]["event"] == ("up_to_date" if found else "failed")


@pytest.mark.parametrize("error", [StorageError("the disk is out"), OSError(5, "the disk is out")])
def test_an_index_that_cannot_be_read_at_the_end(news: News, error: Exception) -> None:
    news.monkeypatch.setattr("whiten_index.cli.monitoring.read_published", Mock(side_effect=error))
    status, events = night(news.job(metrics=str(news.metrics)))
    assert (status, events[-1]["event"], events[-1]["failed"]) == (7, "up_to_date", ["metrics"])
    found = news.measured()
    assert found["last_run_exit_code",] == status
    assert found["last_run_outcome", "up_to_date"] == 1
    assert ("published_rows",) not in found


def test_an_index_that_cannot_be_opened(news: News, monkeypatch: pytest.MonkeyPatch) -> None:
    assert night(news.job(metrics=str(news.metrics)))[0] == 0
    monkeypatch.setenv("AWS_ENDPOINT_URL", "minio:9000")
    status, events = night(news.job(index="s3://bucket/index", metrics=str(news.metrics)))
    assert (status, events[-1]["event"], events[-1]["error"]) == (2, "failed", "ConfigError")
    assert news.measured()["last_run_exit_code",] == 2
    assert news.measured()["last_run_outcome", "failed"] == 1


@pytest.mark.parametrize("name", ["night.txt", "out/CURRENT", "job.toml"])
def test_a_path_that_is_refused_for_metrics_stays_as_it_is(news: News, name: str) -> None:
    news.metrics = news.root / name
    job = news.job(metrics=str(news.metrics))
    before = news.metrics.read_bytes() if news.metrics.exists() else None
    events = ends(2, "failed", job)
    assert "does not end in .prom" in events[-1]["message"]
    assert (news.metrics.read_bytes() if news.metrics.exists() else None) == before
    assert len(open_index(news.index).bundle) == 60


def test_paths_are_relative_to_the_folder_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "models/own").mkdir(parents=True)
    lines = ['index = "news:v2"', 'corpus = ["at 10:30.parquet", "s3://b/c.parquet"]']
    (tmp_path / "job.toml").write_text("\n".join([*lines, 'model = "models/own"']))
    job = NightlyJob.read(tmp_path / "job.toml")
    assert (str(job.index), job.model) == (str(tmp_path / "news:v2"), str(tmp_path / "models/own"))
    assert list(job.corpus) == [str(tmp_path / "at 10:30.parquet"), "s3://b/c.parquet"]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "--index is missing"),
        ("index = 3", "--index takes text"),
        ("index = [", "is not TOML"),
        ('index = "a"\nkepp-versions = 3',
            "kepp-versions is unknown; did you mean keep_versions\\?"),
        ('index = "a"\nid-column = "b"', "id-column stays as built; leave it out, or build"),
        ('index = "a"\nkeep-versions = 0',
            "--keep-versions takes a value greater than or equal to 1"),
        ('index = "a"\nkeep-versions = true', "--keep-versions takes a whole number"),
        ('index = "a"\ncompact = "yes"', "--compact takes true or false"),
        ('index = "a"\nmetrics = 1', "--metrics takes text"),
        ('index = "~\\u0000/a"', "NUL character"),
        ('index = "a"\nrefit = "often"', "'often' is unknown"),
        ('index = "a"\npush = ["v.parquet"]', r"write \[\[push\]\] above each"),
        (None, "cannot be read"),
    ],
)  # fmt: skip
def test_job_files_that_cannot_be_used(tmp_path: Path, text: str | None, match: str) -> None:
    job = tmp_path / "job.toml"
    if text is not None:
        job.write_text(text)
    status, events = night(job)
    assert (status, events[-1]["event"], events[-1]["error"]) == (2, "failed", "ConfigError")
    assert re.search(match, events[-1]["message"])
