"""Quality and latency of small vectors on SciFact: means over seeds, intervals over queries.

Run ``WHITEN_INDEX_DATA=… python -m benchmarks.small_codes WORK_FOLDER [SEEDS]`` on a quiet machine.
Every index is made by the function that a build calls. Codes that are trained depend on the seed,
so each setting is made with five seeds. The 95 % interval of its difference to raw embeddings is
of a bootstrap over queries, each query's nDCG@10 averaged over the seeds. Latencies are timed by
turns, of the first seed. FAISS's own PCA, product codes and OPQ are trained by FAISS alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.results_file import data_folder, write
from whiten_index.evaluation.metrics import evaluate_each, mean_interval
from whiten_index.measure.sweep_config import FAISS, RAW, TRUNCATE, Point, SweepConfig
from whiten_index.measure.sweep_run import prepare_dataset, read_queries
from whiten_index.measure.trial import Made, Space, Trial, open_space
from whiten_index.pipeline.encode import encode_corpus
from whiten_index.progress import Progress, Stages

_DIM, _SEEDS, _DRAWS = 384, 5, 10_000


@dataclass(frozen=True, slots=True)
class Peer(Point):
    """An index that FAISS trains and fills alone, by its factory string."""

    faiss: str = ""

    def factory(self, rows: int) -> str:  # noqa: ARG002
        """Return the factory string, whatever the rows."""
        return self.faiss


def scifact(work: Path) -> dict[str, Any]:
    """Return the options of SciFact's test queries, title and text joined."""
    data = data_folder() / "retrieval/scifact"
    return {
        "pooling": "mean",
        "max_length": 256,
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


def ours(transform: str, k: int, codec: str, rerank: int = 0) -> Point:
    """Return a point over a fitted transform."""
    return Point("ours", transform, k, codec, "flat", rerank)


def peer(factory: str) -> Point:
    """Return a point that FAISS makes alone, and that is not compared with an exact one."""
    return Peer(FAISS, factory, _DIM, "fp32", "flat", faiss=factory)


def raw(codec: str) -> Point:
    """Return a point over raw embeddings."""
    return Point(RAW, "none", _DIM, codec, "flat")


RAW_EXACT = "raw embeddings, exact"
SETTINGS: dict[str, Point] = {
    RAW_EXACT: raw("fp32"),
    "auto, k = 256, 8 bits": ours("auto", 256, "sq8"),
    "auto, k = 128, 8 bits": ours("auto", 128, "sq8"),
    "PCA, k = 128, 8 bits": ours("pca", 128, "sq8"),
    "truncated, k = 128, 8 bits": Point(TRUNCATE, TRUNCATE, 128, "sq8", "flat"),
    "auto, k = 256, 4 bits": ours("auto", 256, "sq4"),
    "auto, k = 192, 6 bits": ours("auto", 192, "sq6"),
    "auto, k = 256, EDEN4": ours("auto", 256, "EDEN4"),
    "auto, k = 128, 6 bits": ours("auto", 128, "sq6"),
    "raw embeddings, EDEN2": raw("EDEN2"),
    "raw embeddings, TurboQuant2": raw("SQtqmse2"),
    "raw embeddings, RaBitQ2": raw("rabitq2"),
    "auto, k = 128, EDEN4": ours("auto", 128, "EDEN4"),
    "auto, k = 192, EDEN2": ours("auto", 192, "EDEN2"),
    "raw embeddings, EDEN1": raw("EDEN1"),
    "raw embeddings, RaBitQ": raw("rabitq"),
    "raw embeddings, PQ96": raw("pq96"),
    "auto, k = 192, PQ96": ours("auto", 192, "pq96"),
    "auto, k = 256, PQ64": ours("auto", 256, "pq64"),
    "auto, k = 256, PQ64, 100 re-ranked": ours("auto", 256, "pq64", 100),
    "PCA, k = 256, PQ64": ours("pca", 256, "pq64"),
    "raw embeddings, PQ64": raw("pq64"),
    "FAISS: OPQ, PQ64": peer("L2norm,OPQ64_256,PQ64"),
    "FAISS: PCA, k = 256, PQ64": peer("PCA256,L2norm,PQ64"),
    "auto, k = 192, PQ48": ours("auto", 192, "pq48"),
    "raw embeddings, PQ48": raw("pq48"),
    "auto, k = 128, PQ32": ours("auto", 128, "pq32"),
    "auto, k = 128, PQ32, 100 re-ranked": ours("auto", 128, "pq32", 100),
    "raw embeddings, PQ32": raw("pq32"),
    "FAISS: OPQ, PQ32": peer("L2norm,OPQ32_128,PQ32"),
    "FAISS: PCA, k = 128, PQ32": peer("PCA128,L2norm,PQ32"),
    "auto, k = 64, PQ16": ours("auto", 64, "pq16"),
    "raw embeddings, PQ16": raw("pq16"),
}


def measure(work: Path, seeds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each setting."""
    stages = Stages(Progress())
    options = {**scifact(work), "out": str(work / "small-codes"), "threads": 2}
    config = SweepConfig(**options)
    encoded = encode_corpus(config.build)
    judged = read_queries(config)
    assert judged is not None
    folder = work / "indexes"
    folder.mkdir(parents=True, exist_ok=True)
    each = dict[str, list[NDArray[np.float64]]]()
    made = dict[str, Made]()
    spaces = dict[tuple[str, str, int], Space]()
    for seed in range(seeds):
        seeded = replace(config, seed=seed)
        dataset = prepare_dataset(seeded, encoded, judged, stages)
        assert dataset.documents is not None
        for title, point in SETTINGS.items():
            own = SETTINGS[RAW_EXACT] if isinstance(point, Peer) else point
            if own.space not in spaces:
                spaces[own.space] = open_space(config, dataset, own, stages)
            truth = spaces[SETTINGS[RAW_EXACT].space].truth
            trial = Trial(seeded, dataset, truth, folder / str(seed))
            trial.folder.mkdir(exist_ok=True)
            index = trial.make(point, spaces[own.space])
            scores, rows = trial.search_of(index)(dataset.queries, 10)
            run = {
                query: dict(zip(dataset.documents[near], best.tolist(), strict=True))
                for query, near, best in zip(judged.texts, rows, scores, strict=True)
            }
            values = evaluate_each(judged.qrels, run, "ndcg@10")
            each.setdefault(title, []).append(100 * np.array(list(values.values())))
            if seed == 0:
                made[title] = index
    trial = replace(trial, folder=folder / "0")
    trial.time(list(made.values()), made[RAW_EXACT])
    exact = np.stack(each[RAW_EXACT]).mean(axis=0)
    for title, of_seeds in each.items():
        scored = np.stack(of_seeds)
        means = scored.mean(axis=1)
        low, high = mean_interval(scored.mean(axis=0) - exact, _DRAWS)
        record = made[title].record
        yield {
            "setting": title,
            "factory": record["factory"],
            "exponent": record["exponent"],
            "bytes_per_row": record["bytes"]["per_row"],
            "fixed_bytes": record["bytes"]["fixed"],
            "ndcg@10": means.tolist(),
            "mean": float(means.mean()),
            "deviation": float(means.std(ddof=1)),
            "difference": float(scored.mean() - exact.mean()),
            "interval": [low, high],
            "latency_ms": record["latency_ms"],
        }


if __name__ == "__main__":
    asked = int(sys.argv[2]) if len(sys.argv) > 2 else _SEEDS
    print(write("small_codes", measure(Path(sys.argv[1]), asked)))
