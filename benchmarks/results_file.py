"""Raw results: one JSON object a line, with what is needed to read it years later."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_LIBRARIES = ("torch", "transformers", "numpy", "pyarrow")


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
    """Write the raw results of one benchmark, replacing those of its last run.

    Args:
        name: of the benchmark.
        rows: its results.
        folder: for a trial, in place of ``RESULTS``.
    """
    path = (folder or RESULTS) / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    facts = machine()
    lines = [json.dumps({**row, "machine": facts}, sort_keys=True) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def read(name: str) -> list[dict[str, Any]]:
    """Return the raw results of one benchmark."""
    text = (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def data_folder() -> Path:
    """Return the folder of the evaluation data that ``WHITEN_INDEX_DATA`` names."""
    named = os.environ.get("WHITEN_INDEX_DATA")
    if not named:
        raise SystemExit("set WHITEN_INDEX_DATA to the folder with the evaluation data (README)")
    return Path(named)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
