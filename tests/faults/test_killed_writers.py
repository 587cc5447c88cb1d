"""Commands that are killed while they write leave nothing that the next run does not remove."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from whiten_index.artifacts.atomic import replace_folder
from whiten_index.errors import StorageError


@pytest.mark.slow
def test_a_killed_command_leaves_nothing_after_the_next_run_of_it(tmp_path: Path) -> None:
    """And a writer that is stopped meanwhile keeps its temporary files and ends well."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.killed_writers_child", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_a_folder_that_was_moved_aside_comes_back(tmp_path: Path) -> None:
    """A writer was killed between its two renames, where folders cannot be swapped in one step."""
    final = tmp_path / "folder"
    final.mkdir()
    (final / "f").write_text("old")
    left = tmp_path / f".tmp-{final.name}~00000000-000000000000"
    left.mkdir()
    final.rename(left / ".moved-aside")
    # What another host left counts after a day.
    os.utime(left / ".moved-aside" / "f", (0, 0))
    os.utime(left, (0, 0))

    def stopped(_: Path) -> None:
        raise StorageError("the disk is full")

    with pytest.raises(StorageError):
        replace_folder(final, stopped, files=lambda _: ["f"], what="a folder")
    assert (final / "f").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
