"""Bad input: one sentence, an exit status, and what was published before stays searchable.

What its tests share: the command line, a sound corpus, and a folder with a published index. The
other tests of the command line, of job files and of signals take these too.

A file whose tests take ``place`` says ``place = bad_input.place``, since
the name imported would look redefined; ``published`` is in conftest.py.
"""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from whiten_index.cli import cli

ROWS, DIM = 60, 6
PROJECT = Path(__file__).parents[2]
OPTIONS, CORPUS, ENCODER, ARTIFACT, BUSY, DISK, WHITENING = range(2, 9)


def run(*arguments: Any) -> tuple[int, str, str]:
    """Return exit status, standard output and standard error; an exception that leaks fails."""
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def night(job: Path, *flags: str) -> tuple[int, list[dict[str, Any]]]:
    """Run a nightly job; return its exit status and its log lines."""
    status, stdout, _ = run("nightly", job, *flags)
    return status, [json.loads(line) for line in stdout.splitlines()]


def ends(status: int, event: str, job: Path, *flags: str) -> list[dict[str, Any]]:
    """Run a nightly job that must end with a status and a last line; return its log lines."""
    found, lines = night(job, *flags)
    assert (found, lines[-1]["event"]) == (status, event), lines
    return lines


def succeed(*arguments: Any) -> str:
    """Return standard output of a command that must succeed."""
    status, stdout, stderr = run(*arguments)
    assert status == 0, stderr
    assert "Error" not in stderr
    return stdout


def fails(status: int, text: str, *arguments: Any) -> None:
    """Run a command that must end with a status and say a text."""
    found, stdout, stderr = run(*arguments)
    assert found == status, stderr or stdout
    assert text in stderr


def one_object(text: str) -> dict[str, Any]:
    """Read one JSON object and nothing else, without NaN or Infinity, which are not JSON."""
    assert text.endswith("}\n")

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    value = json.loads(text, parse_constant=refuse)
    assert isinstance(value, dict)
    return value


def process(
    *arguments: Any, code: str = "from whiten_index.cli import main; main()"
) -> subprocess.Popen[str]:
    """Start a command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=PROJECT,
        # As in a person's shell, also where whoever runs the tests ignores Ctrl-C (nohup, cron).
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def run_python(*arguments: Any, **environment: str) -> str:
    """Return standard output of a fresh interpreter that must succeed."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": str(PROJECT), **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_one_error(stderr: str, *, match: str) -> None:
    """Standard error is one line ``Error: …``, after nothing but click's reminder of the usage."""
    *before, last = stderr.splitlines()
    assert last.startswith("Error: "), stderr
    assert re.search(match, last), last
    assert "Traceback" not in stderr
    assert all(not line or line.startswith(("Usage: ", "Try '")) for line in before), stderr


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Make the system refuse larger files, as a full disk or a quota does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def numbers(seed: int = 0, rows: int = ROWS) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal((rows, DIM)).astype(np.float32)


def table(rows: int = ROWS, **columns: Any) -> pa.Table:
    """Return a sound corpus with some columns replaced."""
    sound = {
        "id": [f"d{i}" for i in range(rows)],
        "e": list(numbers(rows=rows)),
        "text": [f"the cat {i}" for i in range(rows)],
        "year": list(range(rows)),
    }
    return pa.table({**sound, **columns})


@dataclass(frozen=True)
class Place:
    """A folder with a published index, and what was found in it then."""

    root: Path
    found: str

    @property
    def out(self) -> Path:
        return self.root / "out"

    def write(self, content: pa.Table, name: str = "bad/bad.parquet") -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(content, path, write_page_checksum=True)
        return path.parent

    def assert_unharmed(self) -> None:
        status, stdout, stderr = run("search", self.out, "--like", "d7", "--json")
        assert (status, stdout) == (0, self.found), stderr
        assert not [p for p in self.root.rglob("*") if p.name.startswith(".tmp")]


@pytest.fixture
def place(tmp_path: Path, published: Path) -> Place:
    shutil.copytree(published, tmp_path / "place")
    status, stdout, _ = run("search", tmp_path / "place" / "out", "--like", "d7", "--json")
    assert status == 0
    return Place(tmp_path / "place", stdout)


def assert_refused(place: Place, arguments: tuple[Any, ...], status: int, match: str) -> None:
    found, stdout, stderr = run(*arguments)
    assert found == status, stderr or stdout
    assert_one_error(stderr, match=match)
    place.assert_unharmed()


EMBEDDED = ("--embedding-column", "e", "--id-column", "id")
