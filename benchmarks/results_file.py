"""Raw results: JSON lines, the first of which says which run of which command wrote them."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_LIBRARIES = ("torch", "transformers", "numpy", "pyarrow")
# What the first line of every file tells.
FACTS = ("benchmark", "commit", "command", "date", "processor", "cores", "python", *_LIBRARIES)
_CHANGED = "-dirty"
used = list[str]()


def machine() -> dict[str, Any]:
    """Return what the figures depend on: processor, cores, library releases."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in _LIBRARIES},
    }


def write(name: str, rows: Iterable[Mapping[str, Any]], *, folder: Path | None = None) -> Path:
    """Write the raw results of one run of one command, replacing those of its last run.

    Args:
        name: of the benchmark.
        rows: its results.
        folder: for a trial, in place of ``RESULTS``.
    """
    path = (folder or RESULTS) / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    # Taken first: the checkout may change while rows are measured.
    facts = {"benchmark": name, "commit": _commit(), "command": _command(), **machine()}
    lines = [json.dumps(row, sort_keys=True) for row in (facts, *rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def read(name: str) -> list[dict[str, Any]]:
    """Return the raw results of one benchmark, without the line on its run."""
    used.append(name)
    return _lines(name)[1:]


def run_of(name: str) -> dict[str, Any]:
    """Return which run wrote a benchmark's results.

    Raises:
        SystemExit: they do not say.
    """
    facts = _lines(name)[0]
    if missing := [fact for fact in FACTS if not facts.get(fact)]:
        raise SystemExit(
            f"{name}.jsonl does not say its {', '.join(missing)}; run its benchmark again, or "
            "remove the file and its tables"
        )
    return facts


def require_sources() -> None:
    """Refuse results of no commit, of a run that is not named, or of several runs.

    Raises:
        SystemExit: it names the file.
    """
    for path in sorted(RESULTS.glob("*.jsonl")):
        if str(run_of(path.stem)["commit"]).endswith(_CHANGED):
            raise SystemExit(
                f"{path.name} was measured with changed files; commit them and run its benchmark "
                "again"
            )
        if any({"benchmark", "command"} <= row.keys() for row in _lines(path.stem)[1:]):
            raise SystemExit(f"{path.name} holds rows of several runs; run its benchmark again")


def source(name: str) -> str:
    """Return one line on the run behind a benchmark's results."""
    facts = run_of(name)
    return (
        f"`{facts['command']}`, {facts['date']}, commit {facts['commit'][:10]}, "
        f"{facts['processor']}, {facts['cores']} cores"
    )


def data_folder() -> Path:
    """Return the folder of the evaluation data that ``WHITEN_INDEX_DATA`` names."""
    named = os.environ.get("WHITEN_INDEX_DATA")
    if not named:
        raise SystemExit(
            "set WHITEN_INDEX_DATA to the folder of the evaluation data (docs/benchmarks.md)"
        )
    return Path(named)


def _lines(name: str) -> list[dict[str, Any]]:
    text = (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def _command() -> str:
    """Return the command that runs, folders of this machine by their names alone."""
    arguments = [Path(each).name if os.sep in each else each for each in sys.argv[1:]]
    return " ".join(["python -m", f"benchmarks.{Path(sys.argv[0]).stem}", *arguments])


def _commit() -> str:
    """Return the commit checked out, marked where files differ from it."""

    def git(*arguments: str) -> str:
        found = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
        return found.stdout.strip()

    changed = git("status", "--porcelain", "--", "..", ":!results")
    return git("rev-parse", "HEAD") + (_CHANGED if changed else "")


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
