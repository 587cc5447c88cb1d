"""Several processes that try the points, and the library that some of them need."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
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


def environment(folder: Path, library: Path | None = None) -> dict[str, str]:
    """Return the environment of a process; with a library, its operations are numbered."""
    return {
        **os.environ,
        **_ONE_THREAD,
        **({"LD_PRELOAD": str(library)} if library else {}),
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }


def tried(
    folder: Path, module: ModuleType, *arguments: object, library: Path | None = None
) -> list[dict[str, Any]]:
    """Return the objects that several processes of a module print."""
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                module.__name__,
                folder,
                *map(str, (part, PROCESSES, *arguments)),
            ],
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
    return [json.loads(line) for line in lines]


def tried_faults(folder: Path, share: float) -> list[dict[str, Any]]:
    """Return what came of a share of the points of every command; see ``child``."""
    found = tried(folder, child, share, library=compiled(folder))
    return [point for point in found if "fault" in point]


def assert_no_problems(points: list[dict[str, Any]]) -> None:
    harmful = [point for point in points if point["problems"]]
    shown = "\n".join(json.dumps(point)[:2000] for point in harmful[:5])
    assert not harmful, f"{len(harmful)} of {len(points)}, such as\n{shown}"
