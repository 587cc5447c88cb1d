"""Results of sweeps that never ran, shaped as a sweep writes them: figures that could be true."""

from __future__ import annotations

import numpy as np

from whiten_index.report.advice import advise
from whiten_index.report.records import line_of, read_results

DIM = 384
EIGENVALUES = [float(0.02 * i**-0.9) for i in range(1, 382)]
_LOSS = {"auto": 0.0, "pca": 0.004, "whitening": 0.03, "truncate": 0.05, "faiss-pca": 0.006,
         "faiss-pcaw": 0.035}  # fmt: skip
_CODEC = {"fp32": (4.0, 0.0), "sq8": (1.0, 0.001), "pq": (0.25, 0.03), "rabitq": (0.25, 0.12)}
_HOW = ("all", "mean", "wmean")
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
    path.write_bytes(b"".join(map(line_of, records)))
    return path


RAW = point("none", DIM, ndcg=0.6451, p50=1.0)


def read(tmp_path, records):
    return read_results(write_results(tmp_path / "results.jsonl", records))


def advice(tmp_path, *points, **dataset):
    """The advice on a sweep of these points."""
    return advise(read(tmp_path, [header(**dataset), *points])[0])


def titles_of(advice):
    return {title: pick.point for pick in advice.picks for title in pick.titles}


def papers_results(seed=0):
    """What reproducing papers writes: rows that ran, a stand-in, rows that did not, drawings."""
    rng = np.random.default_rng(seed)
    sets = ["STS-B", "STS12", "a|b <i>"]

    def row(model, status, *, published=True, **more):
        cells = {}
        for name in sets:
            theirs = float(rng.uniform(20, 60)) if published else None
            every = {how: float(rng.uniform(20, 90)) for how in ("all", "mean", "wmean")}
            ours = {**every, "ours": every["mean"], "difference": every["mean"] - (theirs or 0.0)}
            cells[name] = {"published": theirs, **(ours if status != "not run" else {})}
        return {"model": model, "setting": "token=AVG, layer=L1+L12", "status": status,
                "figures": cells, **more}  # fmt: skip

    rows = [
        row("own <b>model</b>", "ran", hub="own", ran_with="own", layers=[1, 12],
            command="whiten-index eval sts --model 'a <own> `model`' --layers 1,12"),
        row("BERT-base", "stand-in", why="bert is <far> away", ran_with="MiniLM", layers=[1, 6],
            command="whiten-index eval sts --model MiniLM",
            command_of_own="whiten-index eval sts --model bert", notes=["a note | of it"]),
        row("GPT_3", "not run", why="no weights & no hope"),
        row("unpublished", "ran", published=False),
    ]  # fmt: skip
    table = {"source": "Paper & Co", "table": "Table 1", "title": "a title", "datasets": sets,
             "aggregation": "mean", "metric": "spearman", "rows": rows}  # fmt: skip
    shares = {"published": 0.5531, "ours": 0.5632, "f1": 0.4321, "notes": ["by chance"]}
    further = {"source": "Another paper", "table": "Table 9", "aggregation": None,
               "metric": "mrr@10", "datasets": ["QQP"], "title": "search", "rows": [
                   {"model": "m", "setting": "", "status": "ran",
                    "figures": {"QQP": shares}}]}  # fmt: skip
    square = rng.uniform(-5, 80, (5, 5))
    series = [{"name": f"S_{n}", "y": [None, *map(float, rng.uniform(30, 70, 3))]}
              for n in range(6)]  # fmt: skip
    return {
        "made": {"versions": {"torch": "2.13"}, "date": "2026-11-21T10:30:00", "seconds": 12.5},
        "stand_in": {"model": "MiniLM", "layers": 6, "dim": 384},
        "tables": [table, further],
        "figures": [
            {"id": "k", "source": "Paper & Co", "title": "Effect of <k>", "kind": "curves",
             "x": [16, 64, 128, 256], "x_label": "k", "y_label": "Spearman × 100",
             "series": series, "caption": "Of a set."},
            {"id": "k", "source": "Paper & Co", "title": "Pairs", "kind": "heat_map",
             "matrix": ((square + square.T) / 2).tolist(), "labels": list("01234"),
             "axis": "layer", "caption": "Raw."},
        ],
        "not_run": [{"source": "A third", "table": "Table 2", "model": f"flow {n}", "setting": "",
                     "why": "takes <training>"} for n in (1, 2)],
    }  # fmt: skip
