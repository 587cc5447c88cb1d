"""Quality on SciFact through the published index, by exact search."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from whiten_index import BuildConfig, build_index
from whiten_index.corpus.corpus_config import CorpusConfig
from whiten_index.evaluation.metrics import evaluate_each
from whiten_index.pipeline.build_options import TransformName
from whiten_index.search.search_index import SearchIndex

METRICS = ("ndcg@10", "recall@100", "mrr@10")
_TOP_K = 100


@dataclass(frozen=True)
class Setting:
    """One transform to measure: name, kind, width, exponent."""

    name: str
    whiten: TransformName
    k: int | None = None
    exponent: float | None = None


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
    scores = {name: list(evaluate_each(judged, run, name).values()) for name in METRICS}
    return {name: 100 * sum(each) / len(each) for name, each in scores.items()}
