"""A sweep of structures and codecs on Wikinews, and the options of SciFact for other benchmarks.

Run ``WHITEN_INDEX_DATA=… python -m benchmarks.sweep WORK_FOLDER`` on a quiet machine. Embeddings
are kept in WORK_FOLDER; encoding them is not counted in the seconds.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.results_file import data_folder, write
from whiten_index.encode import encode_corpus
from whiten_index.sweep import run_sweep, sweep_config

_ENCODER = {"pooling": "mean", "max_length": 256}


def scifact(work: Path) -> dict[str, Any]:
    """Return the options of SciFact's test queries, title and text joined."""
    data = data_folder() / "retrieval/scifact"
    return {
        **_ENCODER,
        "corpus": [str(data / "corpus.parquet")],
        "text_columns": ["title", "text"],
        "id_column": "id",
        "keep": ["title"],
        "queries": str(data / "queries.parquet"),
        "qrels": str(data / "qrels.parquet"),
        "qrels_split": "test",
        "store": str(work / "store"),
        "out": str(work / "scifact"),
    }


def wikinews(work: Path) -> dict[str, Any]:
    """Return the options of Wikinews, some of whose sentences are the queries."""
    return {
        **_ENCODER,
        "corpus": [str(data_folder() / "sentences/wikinews_en.parquet")],
        "text_columns": ["text"],
        "keep": ["text"],
        "store": str(work / "store-wikinews"),
        "out": str(work / "wikinews"),
        "name": "wikinews",
        "widths": "128",
        "transforms": "pca",
    }


def measure(work: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of the sweep's results, and one on what it took."""
    config = sweep_config(wikinews(work))
    encode_corpus(config.build)
    started, cpu = time.perf_counter(), time.process_time()
    report = run_sweep(config)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    if report.found:
        raise SystemExit(f"{config.folder} has points of another run; name an empty folder")
    yield from map(json.loads, report.results.read_text().splitlines())
    yield {
        "type": "cost",
        "rows": report.dataset["rows"],
        "points": report.measured,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


if __name__ == "__main__":
    print(write("sweep_wikinews", list(measure(Path(sys.argv[1])))))
