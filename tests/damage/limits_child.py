"""Runs each command in a fork whose memory is limited, and prints what came of it as JSON."""

import json
import os
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

from whiten_index.cli import cli, terminal
from whiten_index.evaluation import sts_sets  # noqa: F401
from whiten_index.measure import evaluate_retrieval  # noqa: F401
from whiten_index.pipeline import build  # noqa: F401

if __name__ == "__main__":
    _ = transformers.AutoModel
    terminal.EVERY_SECONDS = 1e6  # a slow machine shows no progress among the errors
    size = re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert size is not None
    for line in sys.stdin:
        room, arguments = json.loads(line)
        if os.fork() == 0:
            limit = int(size[1]) * 1024 + room
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            found = CliRunner().invoke(cli, arguments)
            raised = None if isinstance(found.exception, SystemExit) else repr(found.exception)
            print(json.dumps([found.exit_code, found.stderr, raised]), flush=True)
            os._exit(0)
        if os.wait()[1]:
            print(json.dumps([None, "", "it ended before its time"]), flush=True)
