"""Retrieval sets with judgements, and the quality of vectors on them by exact search."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from whiten_index.evaluation.metrics import evaluate_each
from whiten_index.whitening.spectrum import unit_rows

METRIC, _DEPTH = "ndcg@10", 10
# Extracts of BEIR sets hold almost only judged documents, so are not comparable with BEIR itself.
# No rule was developed on the last three; extracts not named here have fewer than 350 documents.
GROUPS = {
    "SciFact, Cranfield, CACM": ("scifact", "cranfield", "cacm"),
    "five BEIR extracts": ("dbpedia-entity", "msmarco", "webis-touche2020", "fiqa", "hotpotqa"),
    "LISA, SCIDOCS, FEVER": ("lisa", "scidocs", "fever"),
}


@dataclass(frozen=True)
class JudgedSet:
    """A corpus, its queries and what answers them.

    Attributes:
        name: of the set.
        corpus: Parquet file of the documents.
        row_filter: which rows of the file, None for all.
        queries: query id -> text, the judged ones.
        qrels: query id -> document id -> grade.
    """

    name: str
    corpus: Path
    row_filter: str | None
    queries: Mapping[str, str]
    qrels: Mapping[str, Mapping[str, int]]


def judged_set(data: Path, name: str) -> JudgedSet:
    """Return one of SciFact (test), Cranfield, CACM, LISA, or an extract of a BEIR set."""
    folder = data / "retrieval" / name
    if extract := not folder.is_dir():
        folder = data / "retrieval" / "beir_mini"
    tables = [pq.read_table(folder / f"{kind}.parquet") for kind in ("queries", "qrels")]
    if extract:
        tables = [table.filter(pc.equal(table["dataset"], name)) for table in tables]
    texts = {str(row["id"]): row["text"] for row in tables[0].to_pylist()}
    qrels: dict[str, dict[str, int]] = {}
    for row in tables[1].to_pylist():
        # SciFact keeps its training judgements beside; Cranfield's code -1 marks a query's source.
        counts = row["split"] == "test" if name == "scifact" else row.get("code") != -1
        if counts and row["relevance"] > 0:
            qrels.setdefault(str(row["query_id"]), {})[str(row["doc_id"])] = row["relevance"]
    return JudgedSet(
        name,
        folder / "corpus.parquet",
        f"dataset == '{name}'" if extract else None,
        {query: texts[query] for query in qrels},
        qrels,
    )


def joined_texts(judged: JudgedSet) -> tuple[list[str], list[str]]:
    """Return ids and title and text of every document, those without any content included."""
    rows = pq.read_table(judged.corpus).to_pylist()
    joined = [f"{row['title'] or ''} {row['text'] or ''}".strip() for row in rows]
    return [str(row["id"]) for row in rows], joined


def ndcg_each(
    judged: JudgedSet,
    ids: Iterable[str],
    documents: NDArray[np.floating],
    queries: NDArray[np.floating],
) -> NDArray[np.float64]:
    """Return the nDCG@10 × 100 of each query (q,), by exact search by cosine.

    Args:
        judged: the set.
        ids: n document ids.
        documents: (n, k) vectors.
        queries: (q, k) vectors, in the order of ``judged.queries``.
    """
    names = np.array(list(ids))
    cosines = (unit_rows(queries) @ unit_rows(documents).T).astype(np.float32)
    nearest = np.argpartition(-cosines, _DEPTH - 1, axis=1)[:, :_DEPTH]
    run = {
        query: dict(zip(names[row].tolist(), cosines[at, row].tolist(), strict=True))
        for at, (query, row) in enumerate(zip(judged.queries, nearest, strict=True))
    }
    each = evaluate_each(judged.qrels, run, METRIC)
    return 100 * np.array(list(each.values()))


def ndcg(
    judged: JudgedSet,
    ids: Iterable[str],
    documents: NDArray[np.float64],
    queries: NDArray[np.float64],
) -> float:
    """Return the mean of ``ndcg_each``."""
    return float(ndcg_each(judged, ids, documents, queries).mean())
