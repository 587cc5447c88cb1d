"""Results of sweeps that never ran, shaped as a sweep writes them: figures that could be true."""

from __future__ import annotations

import json

import numpy as np

from whiten_index.report.advice import advise
from whiten_index.report.records import read_results

DIM = 384
EIGENVALUES = [float(0.02 * i**-0.9) for i in range(1, 382)]
_LOSS = {"auto": 0.0, "pca": 0.004, "whitening": 0.03, "truncate": 0.05, "faiss-pca": 0.006,
         "faiss-pcaw": 0.035}  # fmt: skip
_CODEC = {"fp32": (4.0, 0.0), "sq8": (1.0, 0.001), "pq": (0.25, 0.03), "rabitq": (0.25, 0.12)}
_GAMMA = {"auto": 0.25, "pca": 0.0, "whitening": 1.0}


def header(run="r1", name="SciFact", rows=5_183, **dataset):
    """The first line of a sweep."""
    return {
        "type": "sweep", "run": run, "time": "2026-11-21T10:30:00+00:00",
        "machine": {"processor": "A processor at 2.6 GHz", "cores": 2, "memory": 8_000_000_000},
        "versions": {"whiten_index": "0.1.0", "faiss": "1.15.1"}, "commit": "410e0adfeed1234567",
        "settings": {"target_recall": 0.95, "k": [32, 64, 128, 256],
                     "transforms": ["auto", "pca", "whitening:1", "truncate"],
                     "codecs": ["fp32", "sq8", "pq"], "indexes": ["flat", "ivf"], "rerank": 0},
        "dataset": {"name": name, "rows": rows, "dim": DIM, "encoder": "all-MiniLM-L6-v2",
                    "queries": 300, "judged": True, "raw_bytes_per_row": 4 * DIM, **dataset},
        "spectrum": {"eigenvalues": EIGENVALUES, "rank": 381},
    }  # fmt: skip


def point(
    transform="auto", k=64, codec="fp32", index="flat", *, run="r1", rows=5_183, family=None,
    ndcg=None, agreement=None, judged=True, rerank=None, per_row=None, p50=None,
):  # fmt: skip
    """A point whose figures follow from its setting, but for those that are given."""
    family = family or {"none": "raw", "truncate": "truncate"}.get(transform, "ours")
    if transform.startswith("faiss"):
        family = "faiss"
    kept = sum(EIGENVALUES[:k]) / sum(EIGENVALUES)
    noise = np.random.default_rng(abs(hash_of(transform, k, codec, index))).normal(0, 0.001)
    per_code, loss = _CODEC.get(codec, (1.0, 0.0))
    loss += _LOSS.get(transform, 0.0) + 0.18 * (1 - kept) ** 1.5 if transform != "none" else 0.0
    loss += 0.0 if index == "flat" else 0.002
    loss *= 0.3 if rerank else 1.0
    ids = 8.0 if index == "ivf" else 0.0
    graph = 272.0 if index == "hnsw" else 0.0
    row = per_code * k + ids + graph if per_row is None else per_row
    work = rows * k * (1.0 if codec == "fp32" else 0.5)
    speed = {"flat": 1.0, "ivf": 0.12, "hnsw": 0.02}[index]
    middle = 0.02 + work * speed / 2.2e6 + (0.1 if rerank else 0.0) if p50 is None else p50
    quality = 0.6451 - loss + noise if ndcg is None else ndcg
    exact = codec == "fp32" and index == "flat"
    fixed = 0 if transform == "none" else 4 * DIM * k
    factory = {"flat": "", "ivf": "IVF256,", "hnsw": "HNSW32_"}[index] + {
        "fp32": "Flat", "sq8": "SQ8", "pq": f"PQ{k // 4}", "rabitq": "RaBitQ",
    }.get(codec, codec)  # fmt: skip
    return {
        "type": "point", "run": run, "key": f"{transform}-{k}-{codec}-{index}-{rerank}",
        "family": family, "transform": transform, "exponent": _GAMMA.get(transform),
        "center": True if transform in _GAMMA else None, "k": k, "codec": codec, "index": index,
        "factory": factory,
        "parameters": {"flat": {}, "ivf": {"nprobe": 12}, "hnsw": {"efSearch": 48}}[index],
        "bytes": {"codes": per_code * k * rows, "ids": ids * rows, "lists": 0, "graph": graph,
                  "matrix": fixed, "codebooks": 0,
                  "centroids": 0, "per_row": row, "fixed": fixed,
                  "file": int(row * rows) + fixed},
        "rerank": rerank and {"candidates": rerank, "from": "store", "bytes_per_row": 2 * DIM},
        "seconds": {"project": 0.3, "train": 0.4, "add": 0.2,
                    "total": 0.9 if index == "flat" else 2.2},
        "latency_ms": {"p50": middle, "p95": middle * 1.3, "p99": middle * 1.9, "queries": 200,
                       "threads": 1},
        "throughput": {"queries_per_second": 2_500 / middle, "batch": 300, "threads": 2},
        "index_recall@10": 1.0 if exact else 0.96 if codec == "fp32" else 0.985 - loss,
        "agreement@10": min(1.0, 1 - 2.2 * loss) if agreement is None else agreement,
        "quality": {"ndcg@10": quality, "recall@100": 0.925 - 0.8 * loss, "mrr@10": quality - 0.04}
        if judged else None,
    }  # fmt: skip


def hash_of(*parts):
    """A number that is the same in every process."""
    return int.from_bytes(repr(parts).encode()[-6:], "big")


def sweep_records(run="r1", name="SciFact", rows=5_183, *, judged=True):
    """A whole sweep: four widths, four transforms, codecs, indexes, baselines, re-ranking."""
    how = {"run": run, "rows": rows, "judged": judged}
    records = [header(run, name, rows, judged=judged)]
    for k in (32, 64, 128, 256):
        for transform in ("auto", "pca", "whitening", "truncate"):
            for codec in ("fp32", "sq8", "pq"):
                records += [point(transform, k, codec, i, **how) for i in ("flat", "ivf")]
        records.append(point("auto", k, "rabitq", "flat", **how))
        records.append(point("auto", k, "rabitq", "flat", rerank=100, **how))
        if k in (64, 128):
            records.append(point("auto", k, "sq8", "hnsw", **how))
    for codec in ("fp32", "sq8", "pq", "rabitq"):
        records.append(point("none", DIM, codec, "flat", **how))
    records += [point(t, 128, c, "flat", **how) for t in ("faiss-pca", "faiss-pcaw")
                for c in ("fp32", "sq8")]  # fmt: skip
    records.append({"type": "skipped", "run": run, "key": "s1", "transform": "auto", "k": 32,
                    "codec": "pqfs", "index": "hnsw",
                    "why": "FAISS has no HNSW of PQ fast-scan"})  # fmt: skip
    return records


def write_results(path, records):
    """Write records as JSON lines."""
    path.write_text("".join(f"{json.dumps(r)}\n" for r in records), encoding="utf-8")
    return path


RAW = point("none", DIM, ndcg=0.6451, p50=1.0)


def read(tmp_path, records):
    return read_results(write_results(tmp_path / "results.jsonl", records))


def advice(tmp_path, *points, **dataset):
    """The advice on a sweep of these points."""
    return advise(read(tmp_path, [header(**dataset), *points])[0])


def titles_of(advice):
    return {title: pick.point for pick in advice.picks for title in pick.titles}
