"""Sweeps: figures of exact points against brute force."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.acceptance.commands import done
from tests.acceptance.truth import MAX_LENGTH, SciFact, ndcg, nearest, whitening
from tests.acceptance.vectors import COLUMNS


def test_judged_points_have_the_quality_of_brute_force(
    vectors_corpus: Path,
    scifact: SciFact,
    embeddings: np.ndarray,
    query_embeddings: np.ndarray,
    tmp_path: Path,
) -> None:
    out = tmp_path / "sweep"
    done(
        "sweep", vectors_corpus, *COLUMNS, "--model", "all-MiniLM-L6-v2", "--pooling", "mean",
        "--max-length", MAX_LENGTH, "--queries", scifact.queries, "--qrels", scifact.qrels,
        "--k", "16,64", "--transforms", "pca,whitening,truncate", "--codecs", "fp32",
        "--indexes", "flat", "--no-baselines", "--out", out,
    )  # fmt: skip
    ids, relevant = [str(each) for each in scifact.ids()], scifact.relevant()
    asked = [str(each) for each in scifact.query_ids()]
    seen = 0
    lines = map(json.loads, (out / "results.jsonl").read_text().splitlines())
    for point in (line for line in lines if line["type"] == "point"):
        transform, k = point["transform"], point["k"]
        mean, matrix = whitening(embeddings, k, exponent=float(transform == "whitening"))
        if transform in ("none", "truncate"):
            mean, matrix = np.zeros(embeddings.shape[1]), np.eye(embeddings.shape[1])[:, :k]
        rows, _ = nearest((embeddings - mean) @ matrix, (query_embeddings - mean) @ matrix, 10)
        if point["rerank"] is not None or point["index_recall@10"] < 1:
            continue
        values = [
            ndcg([ids[row] for row in near], relevant[query])
            for query, near in zip(asked, rows, strict=True)
        ]
        assert point["quality"]["ndcg@10"] == pytest.approx(np.mean(values), abs=0.005)
        seen += 1
    assert seen >= 6
