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


def find(folder: Path, transform: str, k: int, codec: str = "fp32") -> dict[str, Any]:
    wanted = (transform, k, codec, None)
    names = ("transform", "k", "codec", "rerank")
    (point,) = [each for each in points(folder) if tuple(each[n] for n in names) == wanted]
    return point


def test_results_have_a_line_for_each_setting(swept: Path) -> None:
    for transform in ("pca", "whitening", "truncate"):
        for k in (4, 8):
            for codec, size in (("fp32", 4), ("sq8", 1)):
                point = find(swept, transform, k, codec)
                assert point["bytes"]["per_row"] >= k * size
                assert point["bytes"]["codes"] == k * size * 550
                assert 0 < point["latency_ms"]["p50"] <= point["latency_ms"]["p99"]


def test_exact_search_of_raw_embeddings_agrees_with_itself(swept: Path) -> None:
    raw = find(swept, "none", DIM)
    assert (raw["agreement@10"], raw["index_recall@10"]) == (1, 1)
    assert raw["bytes"]["codes"] == 550 * DIM * 4


def test_exact_points_agree_as_the_same_map_by_faiss_does(swept: Path) -> None:
    """PCA and whitening that FAISS trains alone are the same maps."""
    for ours, theirs in (("pca", "faiss-pca"), ("whitening", "faiss-pcaw")):
        for k in (4, 8):
            mine, its = find(swept, ours, k), find(swept, theirs, k)
            assert mine["index_recall@10"] == its["index_recall@10"] == 1
            assert mine["agreement@10"] == pytest.approx(its["agreement@10"], abs=0.01)
            assert mine["agreement@10"] < 1


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


def test_the_report_is_one_page_that_needs_nothing_else(swept: Path) -> None:
    page = (swept / "report.html").read_text()
    assert "</html>" in page
    assert not re.findall(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page)
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=[\"'](?!data:|#)", page)
    assert "whitening" in page.lower()
    assert page.count("<svg") == 3


def test_a_report_is_made_again_from_its_results_alone(swept: Path, tmp_path: Path) -> None:
    shutil.copy(swept / "results.jsonl", tmp_path / "results.jsonl")
    done("report", tmp_path)
    again, first = (folder / "report.html" for folder in (tmp_path, swept))
    assert _without_times(again.read_text()) == _without_times(first.read_text())


def _without_times(page: str) -> str:
    return re.sub(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?", "", page)


def test_a_sweep_measures_only_what_it_has_not(
    corpus: RandomCorpus, swept: Path, tmp_path: Path
) -> None:
    out = tmp_path / "sweep"
    shutil.copytree(swept, out)
    before = points(out)
    again = run("sweep", corpus.corpus, *COLUMNS, *GRID, "--out", out, "--json").json
    assert (again["measured"], again["found"]) == (0, len(before))
    assert points(out) == before
    wider = run("sweep", corpus.corpus, *COLUMNS, *GRID, "--k", 12, "--out", out, "--json").json
    assert wider["measured"] > 0
    assert points(out)[: len(before)] == before
    assert find(out, "pca", 12)["agreement@10"] > find(out, "pca", 8)["agreement@10"]


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


def test_a_plan_measures_nothing(corpus: RandomCorpus, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    said = done("sweep", corpus.corpus, *COLUMNS, *GRID, "--out", out, "--plan")
    assert said.strip()
    assert not out.exists()
