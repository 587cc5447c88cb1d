"""How the cost of a build grows: time and bytes a row, and memory, from 100,000 rows to a million.

Run ``python -m benchmarks.growth WORK_FOLDER [ROWS …]``: embeddings of 768 dims from a Parquet
column, PCA to 128, an IVF index within a budget of 256 MiB, each build in a process and with its
own store. ``python -m benchmarks.growth --plot`` draws ``docs/growth.png`` from the results.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.clustered import EMBEDDING, ID, write_clustered
from benchmarks.results_file import read, write
from whiten_index import BuildConfig, build_index

SIZES = (100_000, 200_000, 500_000, 1_000_000)
K, BUDGET = 128, "256MiB"
PLOT = Path(__file__).parents[1] / "docs/growth.png"
_LOOK_SECONDS = 0.02


class AnonymousMemory:
    """The most memory of its own a process held while this is entered, files mapped left out."""

    def __init__(self) -> None:
        self.before = self.peak = anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> AnonymousMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(_LOOK_SECONDS):
            self.peak = max(self.peak, anonymous_bytes())


def anonymous_bytes() -> int:
    """Return the memory of this process that no file stands behind (Linux)."""
    status = Path("/proc/self/status").read_text()
    (line,) = (row for row in status.splitlines() if row.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def one_build(corpus: str, rows: int, folder: str) -> dict[str, Any]:
    """Build one index from scratch; return seconds, bytes and memory."""
    config = BuildConfig(
        corpus=(corpus,),
        embedding_column=EMBEDDING,
        id_column=ID,
        limit=rows,
        whiten="pca",
        k=K,
        factory=f"IVF{4 * math.isqrt(rows)},Flat",
        memory_budget=BUDGET,
        out=folder,
    )
    wall, cpu = time.perf_counter(), time.process_time()
    with AnonymousMemory() as memory:
        report = build_index(config).to_json()
    return {
        "kind": "IVF",
        "rows": rows,
        "k": K,
        "factory": report["factory"],
        "budget": BUDGET,
        "seconds": time.perf_counter() - wall,
        "cpu_seconds": time.process_time() - cpu,
        "stages": report["seconds"],
        "bytes": report["bytes"],
        "anonymous_before": memory.before,
        "anonymous_peak": memory.peak,
        "cores": os.cpu_count(),
    }


def measure(work: Path, sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the figures of each size, smallest first."""
    work.mkdir(parents=True, exist_ok=True)
    corpus = work / f"clustered-{max(sizes)}.parquet"
    if not corpus.exists():
        partial = corpus.with_suffix(".part")
        write_clustered(partial, max(sizes))
        partial.rename(corpus)
    for rows in sizes:
        folder = work / "index"
        shutil.rmtree(folder, ignore_errors=True)
        arguments = [str(corpus), str(rows), str(folder)]
        command = [sys.executable, "-m", "benchmarks.growth", "--one", *arguments]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        yield json.loads(done.stdout)
    shutil.rmtree(work / "index", ignore_errors=True)


def plot(path: Path = PLOT) -> None:
    """Draw time, bytes and memory against rows."""
    from matplotlib.figure import Figure

    found = read("growth")
    figure: Any = Figure(figsize=(12, 3.6), layout="constrained")
    axes = figure.subplots(1, 3)
    names = ("µs a row, all of the build", "bytes a row, index file", "MiB held by the build")
    points = sorted(found, key=lambda p: p["rows"])
    rows = [p["rows"] for p in points]
    series = (
        [1e6 * p["seconds"] / p["rows"] for p in points],
        [p["bytes"]["index_file"] / p["rows"] for p in points],
        [(p["anonymous_peak"] - p["anonymous_before"]) / 2**20 for p in points],
    )
    for panel, values in zip(axes, series, strict=True):
        panel.plot(rows, values, color="#0b5fa5", marker="o", label="IVF")
    axes[2].axhline(256, color="#555555", ls="--", label=f"--memory-budget {BUDGET}")
    for panel, name in zip(axes, names, strict=True):
        panel.set(title=name, xlabel="rows", xscale="log")
        panel.set_ylim(0, 1.1 * panel.get_ylim()[1])
        panel.grid(visible=True, color="#dddddd")
    axes[2].legend()
    axes[0].legend()
    figure.savefig(path, dpi=100)


def main(arguments: Sequence[str]) -> None:
    """Measure, or with ``--one`` build once, or with ``--plot`` draw."""
    if arguments[:1] == ["--plot"]:
        plot()
    elif arguments[:1] == ["--one"]:
        corpus, rows, folder = arguments[1:]
        print(json.dumps(one_build(corpus, int(rows), folder)))
    else:
        sizes = [int(size) for size in arguments[1:]] or list(SIZES)
        print(write("growth", measure(Path(arguments[0]), sizes)))
        plot()


if __name__ == "__main__":
    main(sys.argv[1:])
