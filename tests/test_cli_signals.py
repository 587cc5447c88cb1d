"""Signals in mid-build: what was finished is kept, and the same command takes up from there.

Signals at the end of a process are tested in test_stopping.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.bad_input_helpers import EMBEDDED, one_object, process, succeed, table
from whiten_index import open_index

HANGING = """
import time
from whiten_index.cli import main
from whiten_index.shard import ShardWork
def hang(self, window):
    print("hangs", flush=True)
    time.sleep(600)
ShardWork.read = hang
main()
"""


def finished_shards(out: Path) -> int:
    return len(list(out.glob("store/*/shards/[0-9a-f]*/manifest.json")))


def stop(command: Sequence[Any], out: Path, how: signal.Signals) -> int:
    """Stop a build in mid-encode; return how many shards it had finished."""
    started = process(*command)
    deadline = time.monotonic() + 60
    while finished_shards(out) < 3:
        assert time.monotonic() < deadline
        assert started.poll() is None, started.communicate()
        time.sleep(0.002)
    os.kill(started.pid, how)
    stdout, stderr = started.communicate(timeout=60)
    assert started.returncode == 130, stderr
    assert stdout == ""
    assert "Traceback" not in stderr
    assert "the same command takes up where this one stopped" in stderr.splitlines()[-1]
    assert not [path for path in out.rglob("*") if "tmp" in path.name or "owner" in path.name]
    return finished_shards(out)


def test_a_terminated_build_leaves_no_rubbish_and_the_same_command_goes_on(tmp_path: Path) -> None:
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
    finished = stop(command, out, signal.SIGTERM)
    assert not (out / "CURRENT").exists()
    assert 3 <= finished < 150
    counts = one_object(succeed(*command))["counts"]
    assert (counts["reused"], counts["encoded"]) == (finished * 5, 750 - finished * 5)
    assert len(open_index(out)) == 750


def test_ctrl_c_while_encoding_leaves_no_rubbish_and_the_same_command_goes_on(
    tmp_path: Path, tiny_model: Path, tiny_words: tuple[str, ...]
) -> None:
    random = np.random.default_rng(4)
    texts = [" ".join(random.choice(tiny_words, 20)) + f" {i}" for i in range(600)]
    pq.write_table(pa.table({"id": range(600), "text": texts}), tmp_path / "c.parquet")
    out = tmp_path / "out"
    options = ("--text-column", "text", "--id-column", "id", "--model", tiny_model, "--k", 8)
    build = ("build", tmp_path / "c.parquet", *options, "--shard-rows", 20, "--out", out, "--json")
    # A published index of a few rows stays what it is.
    before = one_object(succeed(*build, "--limit", 20))["version"]
    finished = stop(build, out, signal.SIGINT)
    assert open_index(out).bundle.version == before
    assert 3 <= finished < 30
    counts = one_object(succeed(*build))["counts"]
    assert (counts["reused"], counts["encoded"]) == (finished * 20, 600 - finished * 20)
    assert len(open_index(out)) == 600


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_build_that_hangs_stops_at_once_when_asked_twice(
    tmp_path: Path, how: signal.Signals
) -> None:
    corpus, out = tmp_path / "c.parquet", tmp_path / "out"
    pq.write_table(table(), corpus)
    hanging = process("build", corpus, *EMBEDDED, "--k", 4, "--out", out, code=HANGING)
    try:
        assert hanging.stdout is not None
        assert "hangs\n" in hanging.stdout
        os.kill(hanging.pid, how)
        # One request that comes twice at one moment, as from `timeout`, is not a second one.
        os.kill(hanging.pid, how)
        with pytest.raises(subprocess.TimeoutExpired):
            hanging.wait(timeout=0.5)
        # One that comes just as the process begins to wait for a lock is heard with the next one.
        for _ in range(30):
            os.kill(hanging.pid, how)
            with contextlib.suppress(subprocess.TimeoutExpired):
                hanging.wait(timeout=0.5)
                break
        _, stderr = hanging.communicate(timeout=10)
    finally:
        hanging.kill()
    assert hanging.returncode == 130
    assert stderr == (
        "Stopped at once. What was finished is kept; the same command takes up where this one "
        "stopped.\n"
    )
    # No lock stays that would keep the next one out.
    succeed("build", corpus, *EMBEDDED, "--k", 4, "--out", out)
