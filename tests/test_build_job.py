"""The build as a scheduled job: its log lines, its last line and its exit status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.bad_input_helpers import PROJECT, ROWS, one_object, run_build_job, table, write_job


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    pq.write_table(table(), tmp_path / "c.parquet")
    return tmp_path / "c.parquet"


def test_the_scheduled_job_logs_json_lines(tmp_path: Path, corpus: Path) -> None:
    job = write_job(tmp_path / "job.toml", corpus, tmp_path / "out")
    status, events = run_build_job(job)
    assert status == 0
    assert events[-1]["event"] == "published"
    assert events[-1]["counts"]["read"] == ROWS
    assert all({"time", "event"} <= set(event) for event in events)
    started = [event["stage"] for event in events if event["event"] == "stage_started"]
    finished = [event["stage"] for event in events if event["event"] == "stage_finished"]
    assert started == finished
    assert {"encode", "fit", "publish"} <= set(started)
    version = events[-1]["version"]
    status, events = run_build_job(job)
    assert (status, events[-1]["event"], events[-1]["version"]) == (0, "up_to_date", version)


def test_the_scheduled_job_says_that_it_failed(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.toml", tmp_path / "gone.parquet", tmp_path / "out")
    done = subprocess.run(
        [sys.executable, "-m", "pipelines.build_index", str(job)],
        capture_output=True,
        text=True,
        cwd=PROJECT,
    )
    last = one_object(done.stdout.splitlines()[-1] + "\n")
    assert (done.returncode, last["event"], last["exit_code"]) == (3, "failed", 3)
    assert last["error"] == "CorpusError"
    assert "gone.parquet does not exist" in last["message"]
    assert "Traceback" not in done.stderr
