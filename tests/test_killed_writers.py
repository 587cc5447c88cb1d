"""Commands that are killed while they write leave nothing that the next run does not remove."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_a_killed_command_leaves_nothing_after_the_next_run_of_it(tmp_path: Path) -> None:
    """And a writer that is stopped meanwhile keeps its temporary files and ends well."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.killed_writers_child", str(tmp_path)],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
