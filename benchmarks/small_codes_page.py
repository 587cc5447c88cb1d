"""Page of small codes with charts to point at, made by the report of a sweep."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.results_file import read, run_of
from benchmarks.small_codes import RAW_EXACT, SETTINGS
from whiten_index.measure.results import INTERVAL, line_of
from whiten_index.measure.sweep_report import write_report

_RUN = "small_codes"


def records() -> Iterator[dict[str, Any]]:
    """Yield the results as a sweep's: its first line, and a point for each setting."""
    facts = run_of(_RUN)
    libraries = ("python", "numpy", "torch", "transformers")
    yield {
        "type": "sweep",
        "run": _RUN,
        "time": facts["date"],
        "machine": {name: facts[name] for name in ("processor", "cores")},
        "versions": {name: facts[name] for name in libraries},
        "dataset": {
            "name": "SciFact", "rows": 5_183, "dim": 384, "encoder": "all-MiniLM-L6-v2",
            "queries": 300, "judged": True, "raw_bytes_per_row": 1_536,
        },
        "build": "whiten-index build corpus.parquet --text-column title --text-column text "
        "--id-column id",
    }  # fmt: skip
    for row in read(_RUN):
        point = SETTINGS[row["setting"]]
        setting = point.setting()
        if setting["rerank"]:
            setting["rerank"]["bytes_per_row"] = 2 * 384
        quality = {"ndcg@10": row["mean"] / 100}
        limits = [] if row["setting"] == RAW_EXACT else [limit / 100 for limit in row["interval"]]
        yield {
            "type": "point",
            "run": _RUN,
            "key": point.key,
            **setting,
            "exponent": row["exponent"],
            "factory": row["factory"],
            "bytes": {"per_row": row["bytes_per_row"], "fixed": row["fixed_bytes"]},
            "quality": quality,
            "intervals": {INTERVAL: limits} if limits else {},
            "latency_ms": row["latency_ms"],
        }


def page() -> str:
    """Return the page, made from the results of ``benchmarks.small_codes``."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "results.jsonl").write_bytes(b"".join(map(line_of, records())))
        return write_report(Path(folder)).read_text(encoding="utf-8")
