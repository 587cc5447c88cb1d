"""Records of sweeps: those of sweeps that never ran are shaped as a sweep writes them."""

import json
from pathlib import Path
from typing import Any

from whiten_index.measure.results import Sweep, line_of, read_sweeps

DIM, ROWS = 384, 5_183
EIGENVALUES = [float(0.02 * i**-0.9) for i in range(1, 382)]
_BYTES = {"fp32": 4.0, "sq8": 1.0, "pq": 0.25, "rabitq": 0.125}
_LOSS = {"auto": 0.0, "pca": 0.004, "whitening": 0.03, "truncate": 0.05, "faiss-pca": 0.006,
         "none": 0.0, "sq8": 0.001, "pq": 0.03, "rabitq": 0.12}  # fmt: skip
_GAMMA = {"auto": 0.25, "pca": 0.0, "whitening": 1.0}


def header(run: str = "r1", name: str = "SciFact", **dataset: Any) -> dict[str, Any]:
    """Return the first line of a sweep."""
    return {
        "type": "sweep", "run": run, "time": "2026-11-21T10:30:00+00:00",
        "machine": {"processor": "A processor at 2.6 GHz", "cores": 2},
        "versions": {"whiten_index": "0.1.0", "faiss": "1.15.1"},
        "settings": {"target_recall": 0.95},
        "dataset": {"name": name, "rows": ROWS, "dim": DIM, "encoder": "all-MiniLM-L6-v2",
                    "queries": 300, "judged": True, "raw_bytes_per_row": 4 * DIM, **dataset},
        "spectrum": {"eigenvalues": EIGENVALUES, "rank": 381},
    }  # fmt: skip


def point(
    transform: str = "auto", k: int = 64, codec: str = "fp32", index: str = "flat", *,
    run: str = "r1", ndcg: float | None = None, agreement: float | None = None,
    judged: bool = True, rerank: int = 0, per_row: float | None = None, p50: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return a point whose figures follow from its setting, unless they are given."""
    families = {"none": "raw", "truncate": "truncate", "faiss-pca": "faiss"}
    kept = sum(EIGENVALUES[:k]) / sum(EIGENVALUES)
    loss = _LOSS[transform] + _LOSS.get(codec, 0.0) + 0.18 * (1 - kept) ** 1.5
    loss *= 0.3 if rerank else 1.0
    row = _BYTES.get(codec, 1.0) * k + (8.0 if index == "ivf" else 0.0)
    middle = 0.02 + ROWS * k * (0.12 if index == "ivf" else 1.0) / 2.2e6 if p50 is None else p50
    quality = 0.6451 - loss if ndcg is None else ndcg
    structure = {"flat": "", "ivf": "IVF256,"}.get(index, index)
    code = {"fp32": "Flat", "sq8": "SQ8", "pq": f"PQ{k // 4}"}.get(codec, codec)
    return {
        "type": "point", "run": run, "key": f"{transform}-{k}-{codec}-{index}-{rerank}",
        "family": families.get(transform, "ours"), "transform": transform, "k": k, "codec": codec,
        "index": index, "exponent": _GAMMA.get(transform),
        "center": True if transform in _GAMMA else None,
        "factory": structure + code,
        "parameters": {"nprobe": 12} if index == "ivf" else {},
        "bytes": {"per_row": row if per_row is None else per_row, "fixed": 4 * DIM * k},
        "rerank": {"candidates": rerank, "bytes_per_row": 2 * DIM} if rerank else None,
        "seconds": {"total": 0.9},
        "latency_ms": {"p50": middle, "p95": middle * 1.3, "p99": middle * 1.9, "spread": 1.1},
        "throughput": {"queries_per_second": 2_500 / middle},
        "index_recall@10": 0.96,
        "agreement@10": min(1.0, 1 - 2.2 * loss) if agreement is None else agreement,
        "quality": {"ndcg@10": quality, "recall@100": 0.925 - 0.8 * loss, "mrr@10": quality - 0.04}
        if judged else None,
    }  # fmt: skip


RAW = point("none", DIM, ndcg=0.6451, p50=1.0)


def sweep_records(run: str = "r1", name: str = "SciFact", *, judged: bool = True) -> list[Any]:
    """Return a whole sweep: four widths, transforms, codecs, indexes, baselines, re-ranking."""
    how: dict[str, Any] = {"run": run, "judged": judged}
    records = [header(run, name, judged=judged)]
    for k in (32, 64, 128, 256):
        for transform in ("auto", "pca", "whitening", "truncate", "faiss-pca"):
            for codec in ("fp32", "sq8", "pq"):
                records += [point(transform, k, codec, i, **how) for i in ("flat", "ivf")]
        records += [point("auto", k, "rabitq", rerank=again, **how) for again in (0, 100)]
    records += [point("none", DIM, codec, **how) for codec in ("fp32", "sq8", "pq", "rabitq")]
    why = "FAISS has no <HNSW> of PQ fast-scan"
    return [*records, {"type": "skipped", "run": run, "key": "auto/k32/pqfs/hnsw", "why": why}]


def write_results(path: Path, records: list[Any]) -> Path:
    """Write records as JSON lines."""
    path.write_bytes(b"".join(map(line_of, records)))
    return path


def lines_of(out: Path) -> list[dict[str, Any]]:
    """Return the lines that a sweep wrote."""
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def points_of(out: Path) -> dict[str, dict[str, Any]]:
    """Return key -> record of the points that a sweep wrote."""
    return {line["key"]: line for line in lines_of(out) if line["type"] == "point"}


def read(folder: Path, *records: Any) -> list[Sweep]:
    """Write records and read their sweeps."""
    return read_sweeps(write_results(folder / "results.jsonl", list(records)))
