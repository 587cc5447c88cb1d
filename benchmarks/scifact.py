"""Quality, bytes and latency on SciFact for a handful of transforms, exact search.

Run ``WHITEN_INDEX_DATA=… python -m benchmarks.scifact WORK_FOLDER``.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.results_file import data_folder, write
from whiten_index import BuildConfig, build_index, open_index
from whiten_index.corpus import CorpusConfig
from whiten_index.index import set_threads
from whiten_index.metrics import evaluate
from whiten_index.search import SearchIndex

METRICS = ("ndcg@10", "recall@100", "mrr@10")
_TOP_K = 100


@dataclass(frozen=True)
class Setting:
    """One transform to measure: name, kind, width, exponent."""

    name: str
    whiten: str
    k: int | None = None
    exponent: float | None = None


SETTINGS = (
    Setting("raw embeddings", "none"),
    Setting("auto: chosen without labels", "auto"),
    Setting("auto, k = 128", "auto", 128),
    Setting("PCA", "pca", 128),
    Setting("soft whitening, exponent 0.25", "whitening", 128, 0.25),
    Setting("whitening", "whitening", 128),
)


def corpus_config(data: Path, work: Path) -> BuildConfig:
    """Return the build of the raw index: title and text joined, 256 tokens, mean pooling."""
    return BuildConfig(
        corpus=(str(data / "retrieval/scifact/corpus.parquet"),),
        text_columns=("title", "text"),
        id_column="id",
        pooling="mean",
        max_length=256,
        store=str(work / "store"),
        out=str(work / "raw embeddings"),
        whiten="none",
    )


def build(data: Path, work: Path, setting: Setting) -> dict[str, Any]:
    """Build one setting; the embeddings are in the store, so that only ``auto`` encodes pieces."""
    config = replace(
        corpus_config(data, work),
        out=str(work / setting.name),
        whiten=setting.whiten,
        k=setting.k,
        exponent=setting.exponent,
    )
    return build_index(config).to_json()


def qrels(data: Path) -> dict[str, dict[str, int]]:
    """Return the judgements of the test split."""
    table = pq.read_table(data / "retrieval/scifact/qrels.parquet").to_pylist()
    judged: dict[str, dict[str, int]] = {}
    for row in table:
        if row["split"] == "test":
            judged.setdefault(row["query_id"], {})[row["doc_id"]] = row["relevance"]
    return judged


def quality(data: Path, index: SearchIndex) -> dict[str, float]:
    """Return the metrics of an index over the test queries, × 100."""
    judged = qrels(data)
    queries = CorpusConfig(
        sources=(str(data / "retrieval/scifact/queries.parquet"),),
        text_columns=("text",),
        id_column="id",
        row_filter=f"id in {sorted(judged)!r}",
    )
    run = {
        str(r.query_id): dict(zip(map(str, r.ids), r.scores, strict=True))
        for r in index.rank(queries, top_k=_TOP_K)
    }
    return {name: 100 * value for name, value in evaluate(judged, run, METRICS).items()}


def latency(indexes: dict[str, SearchIndex], *, rounds: int = 400) -> dict[str, float]:
    """Return the median milliseconds of one query on one thread, settings interleaved."""
    set_threads(1)
    query = np.random.default_rng(0).normal(size=(rounds, 384)).astype(np.float32)
    spent: dict[str, list[float]] = {name: [] for name in indexes}
    for i in range(rounds):
        for name, index in indexes.items():
            started = time.perf_counter()
            index.bundle.search(query[i : i + 1], 10)
            spent[name].append(1000 * (time.perf_counter() - started))
    return {name: statistics.median(times) for name, times in spent.items()}


def measure(data: Path, work: Path) -> Iterator[dict[str, Any]]:
    """Yield the figures of every setting."""
    build_index(corpus_config(data, work))
    reports = {setting.name: build(data, work, setting) for setting in SETTINGS[1:]}
    reports[SETTINGS[0].name] = build_index(corpus_config(data, work)).to_json()
    indexes = {setting.name: open_index(work / setting.name) for setting in SETTINGS}
    milliseconds = latency(indexes)
    for setting in SETTINGS:
        report, index = reports[setting.name], indexes[setting.name]
        yield {
            "benchmark": "scifact",
            "setting": setting.name,
            "k": report["whitening"]["k"],
            "exponent": report["whitening"]["exponent"],
            "bytes_per_vector": report["bytes"]["vectors"] / report["rows"],
            "median_ms_per_query": milliseconds[setting.name],
            **quality(data, index),
        }


if __name__ == "__main__":
    print(write("scifact", measure(data_folder(), Path(sys.argv[1]))))
