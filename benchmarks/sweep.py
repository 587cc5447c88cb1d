"""The sweeps behind the README's tables: SciFact, Wikinews, and a million synthetic embeddings.

Run ``WHITEN_INDEX_DATA=… python -m benchmarks.sweep WORK_FOLDER [NAME …]``; names are scifact,
wikinews, small-codes (more codecs on SciFact, into the same results) and million. Embeddings are
kept in WORK_FOLDER/store; encoding them is not counted in the seconds. A sweep that was stopped
goes on where it was, but its seconds are then those of the rest.
"""

from __future__ import annotations

import json
import resource
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.clustered import EMBEDDING, ID, write_clustered
from benchmarks.results_file import RESULTS, data_folder, machine
from whiten_index.encode import encode_corpus
from whiten_index.report import write_report
from whiten_index.sweep import SweepConfig, run_sweep, sweep_config

SECONDS = RESULTS / "sweep_seconds.jsonl"
# The grid of every sweep: k × transforms × codecs × structures are the command's own defaults.
_MILLION = 1_000_000
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


def small_codes(work: Path) -> dict[str, Any]:
    """Return the options of SciFact with more codecs, by exact search."""
    return {
        **scifact(work),
        "widths": "96,128,192,256",
        "transforms": "auto,whitening:0.25,truncate",
        "codecs": "sq8,sq6,sq4,pq,pqfs,rabitq,rabitq2,rabitq4,PRQ16x3x8,PRQ16x2x8",
        "indexes": "flat",
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
    }


def million(work: Path) -> dict[str, Any]:
    """Return the options of a million synthetic embeddings of 768 dims."""
    corpus = work / f"clustered-{_MILLION}.parquet"
    if not corpus.exists():
        partial = corpus.with_suffix(".part")
        write_clustered(partial, _MILLION)
        partial.rename(corpus)
    return {
        "corpus": [str(corpus)],
        "embedding_column": EMBEDDING,
        "id_column": ID,
        "indexes": "flat,ivf",
        "store": str(work / "store-million"),
        "out": str(work / "million"),
        "name": "a million clustered embeddings",
    }


OPTIONS = {
    "scifact": scifact,
    "wikinews": wikinews,
    "small-codes": small_codes,
    "million": million,
}


def run(name: str, work: Path) -> dict[str, Any]:
    """Encode what is missing, sweep, store results and report; return what it took."""
    config: SweepConfig = sweep_config(OPTIONS[name](work))
    encode_corpus(config.build)
    started, cpu = time.perf_counter(), time.process_time()
    report = run_sweep(config)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    write_report(report.results, config.folder)
    stored = RESULTS / f"sweep_{config.folder.name}.jsonl"
    shutil.copyfile(report.results, stored)
    return {
        "sweep": name,
        "rows": report.dataset["rows"],
        "measured": report.measured,
        "found": report.found,
        "skipped": len(report.skipped),
        "seconds": seconds,
        "cpu_seconds": cpu,
        # Pages of mapped files are counted in, as far as they were in memory.
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "machine": machine(),
    }


def main(arguments: Sequence[str]) -> None:
    """Run the sweeps named, or SciFact and Wikinews; keep the seconds of each one's last run."""
    work, names = Path(arguments[0]), arguments[1:] or ["scifact", "wikinews"]
    work.mkdir(parents=True, exist_ok=True)
    for name in names:
        found = run(name, work)
        lines = SECONDS.read_text().splitlines() if SECONDS.exists() else []
        kept = [line for line in lines if json.loads(line)["sweep"] != name]
        kept.append(json.dumps(found, sort_keys=True))
        SECONDS.write_text("\n".join(kept) + "\n")
        print(kept[-1])


if __name__ == "__main__":
    main(sys.argv[1:])
