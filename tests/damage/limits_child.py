"""Runs commands in a process whose memory is limited, and prints what came of each as JSON."""

from __future__ import annotations

import json
import re
import resource
import sys
from pathlib import Path

import faiss  # noqa: F401 - so that it counts as there before
import pyarrow.parquet  # noqa: F401
import torch  # noqa: F401
import transformers
from click.testing import CliRunner
from scipy import stats  # noqa: F401

from whiten_index.cli import cli

# A corpus may unpack to 1 GiB, which readers hold twice for a moment, next to earlier cases.
ROOM = 3 << 30

if __name__ == "__main__":
    _ = transformers.AutoModel
    size = re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert size is not None
    limit = int(size[1]) * 1024 + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for line in sys.stdin:
        found = CliRunner().invoke(cli, json.loads(line))
        raised = None if isinstance(found.exception, SystemExit) else repr(found.exception)
        print(json.dumps([found.exit_code, found.stderr, raised]), flush=True)
