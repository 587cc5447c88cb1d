"""Peak memory of encoding and fitting at two corpus sizes, each in a process of its own.

Run ``python -m benchmarks.memory CORPUS.parquet TEXT_COLUMN STORE_FOLDER ROWS ROWS …``.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results_file import write
from whiten_index import BuildConfig, Whitening, encode_corpus


def encode_and_fit(corpus: str, column: str, store: str, rows: int) -> dict[str, Any]:
    """Encode ``rows`` rows into a new store, fit a whitening, return peak RSS and rates."""
    config = BuildConfig(corpus=(corpus,), text_columns=(column,), store=store, limit=rows)
    report = encode_corpus(config)
    Whitening.fit(report.store.total_moments(report.record.distinct_parts))
    return {
        "benchmark": "memory",
        "corpus": Path(corpus).name,
        "rows": rows,
        "encoded": report.counts.encoded,
        "peak_rss_mb": peak_rss_mb(),
        "rows_per_second": report.counts.encoded / report.stages.seconds["encode"],
    }


def peak_rss_mb() -> float:
    """Return the most memory this process ever held, in MiB."""
    status = Path("/proc/self/status")
    if status.exists():
        # Unlike ru_maxrss this is not inherited from the process that started this one.
        (line,) = (row for row in status.read_text().splitlines() if row.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)  # bytes on macOS


def measure(
    corpus: str, column: str, folder: str, sizes: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yield the figures of each size; a size must be encoded whole, so each has its own store."""
    for rows in sizes:
        arguments = [corpus, column, f"{folder}/{rows}", str(rows)]
        command = [sys.executable, "-m", "benchmarks.memory", "--one", *arguments]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        yield json.loads(done.stdout)


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        source, text, folder, size = sys.argv[2:]
        print(json.dumps(encode_and_fit(source, text, folder, int(size))))
    else:
        source, text, folder, *sizes = sys.argv[1:]
        print(write("memory", measure(source, text, folder, [int(n) for n in sizes])))
