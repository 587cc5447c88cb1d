"""Compile the library, try the points in several processes, and collect what came of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.faults import child

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = 2
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def compiled(folder: Path) -> Path:
    """Return the library of interpose.c, compiled in a folder."""
    built, source = folder / "interpose.so", Path(__file__).with_name("interpose.c")
    options = ["-shared", "-fPIC", "-O2", "-Wall", "-Werror"]
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, *options, "-o", built, source, "-ldl"], check=True)
    return built


def environment(folder: Path, library: Path) -> dict[str, str]:
    """Return the environment of a process whose operations are numbered."""
    return {
        **os.environ,
        **_ONE_THREAD,
        "LD_PRELOAD": str(library),
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }


def tried(folder: Path, share: float, *flows: str) -> list[dict[str, Any]]:
    """Return what came of a share of the points, a dictionary for each; see ``child``."""
    library = compiled(folder)
    shares = [str(PROCESSES), str(share), *flows]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", child.__name__, folder, str(part), *shares],
            cwd=ROOT,
            env=environment(folder, library),
            stdout=(folder / f"{part}.jsonl").open("w"),
            stderr=(folder / f"{part}.err").open("w"),
        )
        for part in range(PROCESSES)
    ]
    for part, process in enumerate(processes):
        assert process.wait() == 0, (folder / f"{part}.err").read_text()
    lines = [line for part in range(PROCESSES) for line in (folder / f"{part}.jsonl").open()]
    return [point for point in map(json.loads, lines) if "fault" in point]
