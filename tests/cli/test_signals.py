"""One signal stops a command or job with status 130; how a build resumes is in acceptance tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.bad_input import EMBEDDED, process
from whiten_index import open_index

# A library that drops exceptions of its callbacks is stood for by __del__.
JOB = """
import os, signal, sys, time
from whiten_index.cli.log_lines import Ending, LogLines, run_job
from whiten_index.progress import Stages
from whiten_index.cli.signals import stop_on_signals

lines = LogLines()

class Drops:
    def __del__(self):
        os.kill(os.getpid(), signal.{name})
        time.sleep(0.1)

def work():
    with Stages(lines).stage("encode", 10) as watcher:
        {stopped}
        watcher.advance(1)
        time.sleep(60)
    return Ending("published", {{}})

stop_on_signals()
sys.exit(run_job(work, kept="shards", lines=lines))
"""
STOPPED = {
    "once": "os.kill(os.getpid(), signal.{name})",
    # As timeout does, to the process and to its group.
    "twice": "os.kill(os.getpid(), signal.SIGTERM); os.kill(os.getpid(), signal.SIGTERM)",
    "in a callback": "Drops()",
}


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("how", STOPPED)
def test_a_job_that_is_stopped_logs_it_and_ends_with_130(name: str, how: str) -> None:
    # A shell without job control has what it starts in the background ignore Ctrl-C.
    heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    script = JOB.format(name=name, stopped=STOPPED[how].format(name=name))
    ended = subprocess.run(
        [sys.executable, "-c", heeds + script], capture_output=True, text=True, timeout=50
    )
    assert ended.returncode == 130, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1])["event"] == "interrupted"


def test_a_terminated_build_leaves_no_temporary_files_and_no_lock(tmp_path: Path) -> None:
    rows = np.random.default_rng(3).standard_normal((750, 4))
    pq.write_table(pa.table({"id": range(750), "e": list(rows)}), tmp_path / "c.parquet")
    out = tmp_path / "out"
    command = (
        "build",
        tmp_path / "c.parquet",
        *EMBEDDED,
        "--shard-rows",
        5,
        "--out",
        out,
        "--json",
    )
    started = process(*command)
    deadline = time.monotonic() + 60
    while sum(len(files) for _, _, files in os.walk(out / "store")) < 10:
        assert time.monotonic() < deadline
        assert started.poll() is None, started.communicate()
        time.sleep(0.002)
    os.kill(started.pid, signal.SIGTERM)
    stdout, stderr = started.communicate(timeout=60)
    assert started.returncode == 130, stderr
    assert stdout == ""
    assert "Traceback" not in stderr
    assert "the same command takes up where this one stopped" in stderr.splitlines()[-1]
    assert not [path for path in out.rglob("*") if "tmp" in path.name]
    again = process(*command)
    again.communicate(timeout=60)
    assert again.returncode == 0
    assert len(open_index(out)) == 750
