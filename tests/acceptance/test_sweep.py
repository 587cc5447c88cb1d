"""Sweeps and their reports: figures of exact points against brute force, files, going on."""

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.acceptance.commands import done, run, start
from tests.acceptance.random_corpora import COLUMNS, RandomCorpus, make_corpus
from tests.acceptance.truth import MAX_LENGTH, SciFact, ndcg, nearest, whitening

DIM = 16
GRID = (
    "--k", "4,8", "--transforms", "pca,whitening,truncate", "--codecs", "fp32,sq8",
    "--indexes", "flat", "--sample", 50,
)  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> RandomCorpus:
    return make_corpus(tmp_path_factory.mktemp("sweep"), 600, DIM, seed=9)


@pytest.fixture(scope="module")
def swept(corpus: RandomCorpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small sweep without judgements; not to be changed."""
    out = tmp_path_factory.mktemp("swept") / "sweep"
    done("sweep", corpus.corpus, *COLUMNS, *GRID, "--out", out)
    return out


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def points(folder: Path) -> list[dict[str, Any]]:
    return [line for line in lines(folder) if line["type"] == "point"]


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
    for point in points(out):
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


def test_a_report_is_made_again_from_its_results_alone(swept: Path, tmp_path: Path) -> None:
    shutil.copy(swept / "results.jsonl", tmp_path / "results.jsonl")
    done("report", tmp_path)
    again, first = (folder / "report.html" for folder in (tmp_path, swept))
    assert _without_times(again.read_text()) == _without_times(first.read_text())


def _without_times(page: str) -> str:
    return re.sub(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?", "", page)


def test_a_killed_sweep_goes_on_where_it_was(corpus: RandomCorpus, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    arguments = (
        "sweep", corpus.corpus, *COLUMNS, "--k", "4,8", "--transforms", "pca,whitening",
        "--codecs", "fp32,fp16,sq8,sq4", "--indexes", "flat", "--sample", 50, "--no-baselines",
        "--out", out,
    )  # fmt: skip
    process = start(*arguments)
    deadline = time.monotonic() + 120
    try:
        while process.poll() is None and time.monotonic() < deadline:
            # A line is written when its point was measured.
            results = out / "results.jsonl"
            if results.exists() and results.read_bytes().count(b'"type": "point"') >= 3:
                break
            time.sleep(0.01)
    finally:
        process.kill()
        process.communicate()
    assert not (out / "report.html").exists()
    # The last line may be cut off; the others are whole.
    whole = (out / "results.jsonl").read_text().split("\n")[:-1]
    before = [each for each in map(json.loads, whole) if each["type"] == "point"]
    again = run(*arguments, "--json")
    assert again.status == 0, again.err
    assert again.json["found"] >= len(before) >= 3
    after = points(out)
    assert after[: len(before)] == before
    assert len({point["key"] for point in after}) == len(after) == (
        again.json["found"] + again.json["measured"]
    )  # fmt: skip
    assert (out / "report.html").exists()
