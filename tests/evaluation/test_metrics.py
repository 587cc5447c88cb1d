"""Metrics against the textbook and scipy, and run files: read as written, or refused by line."""

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.helpers.judged import evaluate
from whiten_index.errors import CorpusError
from whiten_index.evaluation.metrics import mean_interval, spearman
from whiten_index.evaluation.trec_run import RUN_ENDINGS, Ranking, read_run, write_run
from whiten_index.search.search_index import Hit

Grades, Scores = Mapping[str, int], Mapping[str, float]


def test_the_interval_of_a_mean_is_that_of_its_standard_error() -> None:
    values = np.random.default_rng(1).normal(0.3, 2, 4_000)
    error = 1.96 * values.std() / math.sqrt(len(values))
    expected = values.mean() - error, values.mean() + error
    assert mean_interval(values) == pytest.approx(expected, abs=0.1 * error)


def _ranked(scores: Scores, cut: int) -> list[str]:
    return sorted(scores, key=lambda document: -scores[document])[:cut]


def _ndcg(grades: Grades, scores: Scores, cut: int) -> float:
    def dcg(gains: list[int]) -> float:
        return sum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains, start=1))

    gains = [max(grades.get(document, 0), 0) for document in _ranked(scores, cut)]
    return dcg(gains) / dcg(sorted((max(g, 0) for g in grades.values()), reverse=True)[:cut])


def _recall(grades: Grades, scores: Scores, cut: int) -> float:
    relevant = {document for document, grade in grades.items() if grade > 0}
    return len(relevant & set(_ranked(scores, cut))) / len(relevant)


def _mrr(grades: Grades, scores: Scores, cut: int) -> float:
    hits = [rank for rank, d in enumerate(_ranked(scores, cut), 1) if grades.get(d, 0) > 0]
    return 1 / hits[0] if hits else 0.0


def _map(grades: Grades, scores: Scores, cut: int) -> float:
    hits = [rank for rank, d in enumerate(_ranked(scores, cut), 1) if grades.get(d, 0) > 0]
    precision = [found / rank for found, rank in enumerate(hits, start=1)]
    return sum(precision) / sum(grade > 0 for grade in grades.values())


@pytest.mark.parametrize("cut", [1, 3, 10, 100])
@pytest.mark.parametrize(
    ("name", "formula"), [("ndcg", _ndcg), ("recall", _recall), ("mrr", _mrr), ("map", _map)]
)
def test_random_runs_agree_with_the_textbook(
    name: str, formula: Callable[[Grades, Scores, int], float], cut: int
) -> None:
    random = np.random.default_rng(cut)
    documents = [f"d{i}" for i in range(40)]
    qrels, run = {}, {}
    for query in map(str, range(30)):
        judged = random.choice(documents, 12, replace=False)
        qrels[query] = dict(zip(judged.tolist(), random.integers(-1, 4, 12).tolist(), strict=True))
        qrels[query][str(judged[0])] = 1
        found = random.choice(documents, random.integers(1, 30), replace=False).tolist()
        run[query] = dict(zip(found, random.permutation(len(found)).tolist(), strict=True))
    expected = np.mean([formula(qrels[query], run[query], cut) for query in qrels])
    metric = f"{name}@{cut}"
    assert evaluate(qrels, run, [metric])[metric] == pytest.approx(expected, abs=1e-9)


SCORES = st.floats(allow_nan=False) | st.integers(-2, 2).map(float)
LISTS = st.integers(2, 60).flatmap(
    lambda n: st.tuples(*[st.lists(SCORES, min_size=n, max_size=n)] * 2)
)


@given(LISTS)
def test_spearman_is_scipys(lists: tuple[list[float], list[float]]) -> None:
    stats = pytest.importorskip("scipy.stats")
    gold, predicted = lists
    assume(len(set(gold)) > 1)
    assume(len(set(predicted)) > 1)
    expected = stats.spearmanr(gold, predicted).statistic
    assert spearman(gold, predicted) == pytest.approx(expected, abs=1e-12)


METRICS = ("ndcg@10", "recall@20", "mrr@10", "map@20")


def rankings(*, numbers: bool) -> list[Ranking]:
    rng = np.random.default_rng(3)
    made = []
    for query in range(40):
        documents = rng.permutation(200)[: int(rng.integers(1, 31))].tolist()
        scores = np.sort(rng.normal(size=len(documents)).astype(np.float32))[::-1].tolist()
        ids = documents if numbers else [f"d{i}" for i in documents]
        made.append(Ranking(query if numbers else f"q{query}", ids, scores))
    return made


def as_run(ranked: list[Ranking]) -> dict[str, dict[str, float]]:
    return {str(r.query_id): dict(zip(map(str, r.ids), r.scores, strict=True)) for r in ranked}


def some_qrels(run: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, int]]:
    rng = np.random.default_rng(4)
    return {
        query: {document: int(rng.integers(0, 3)) for document in found} | {"elsewhere": 1}
        for query, found in run.items()
    }


@pytest.mark.parametrize("ending", RUN_ENDINGS)
@pytest.mark.parametrize("numbers", [False, True])
def test_a_run_written_and_read_again_is_the_same_to_every_metric(tmp_path, ending, numbers):
    written = rankings(numbers=numbers)
    path = tmp_path / f"run{ending}"
    write_run(path, written)
    found, expected = read_run(path), as_run(written)
    # Nine digits are enough for every float32.
    assert {q: {d: np.float32(s) for d, s in each.items()} for q, each in found.items()} == {
        q: {d: np.float32(s) for d, s in each.items()} for q, each in expected.items()
    }
    qrels = some_qrels(expected)
    assert evaluate(qrels, found, METRICS) == evaluate(qrels, expected, METRICS)


def test_kept_lists_are_written_as_a_whole(tmp_path: Path) -> None:
    """Millions of numbers would take seconds, one by one."""
    kept = {"numbers": [0.5] * 10_000, "texts": ["a"] * 10_000, "some": [0.5, float("nan"), None]}
    calls = Counter[str]()
    ranking = Ranking("q", ["d"], [1.0], lambda: [Hit("d", 1.0, 0, kept)])
    sys.setprofile(lambda _, event, __: calls.update([event]))
    try:
        write_run(tmp_path / "run.jsonl", [ranking])
    finally:
        sys.setprofile(None)
    assert calls["call"] < 1_000
    (hit,) = json.loads((tmp_path / "run.jsonl").read_text())["hits"]
    assert hit["columns"] == kept | {"some": [0.5, None, None]}


@pytest.mark.parametrize(
    ("ending", "text", "message"),
    [
        (".trec", "", r"run\.trec is empty: it holds no rows"),
        (".trec", "q Q0 d 1 0.5 x\nq Q0 e 2 0.4\n", r"line 2, has 5 fields, expected 6 .*'q Q0 e"),
        (".trec", "q 0 d 1\n", "line 1, has 4 fields, expected 6 between blanks"),
        (".run", "q Q0 d 1 half x\n", "line 1, has 'half' as score, expected a finite number"),
        (".trec", "q\0a Q0 d 1 1 x\n",
            r"line 1, has 'q\\x00a' as query_id, expected a text without a NUL character"),
        (".jsonl", '{"query_id": "q", "hits": [{"id": "\\ud800", "score": 1}]}',
            r"line 1, has .* as hits, expected .* .expected a text that UTF-8"),
        (".trec", "q Q0 d 1 0.9 x\np Q0 d 1 0.9 x\nq Q0 d 2 0.1 x\n",
            "line 3, has document 'd' of query 'q' again; keep one, such as the best passage"),
        (".jsonl", '{"query_id": "q", "hits": [}', "line 1, is no JSON object .*Expecting value"),
        (".jsonl", '{"query_id": "q", "hits": []}\n{"query_id": "q", "hits": []}\n',
            "line 2, ranks query 'q' again"),
        (".jsonl", '{"query_id": 1, "hits": [{"id": 2.5, "score": 1}]}',
            "line 1, has .*2.5.* as hits, expected .* .expected text or a whole"),
        (".parquet", "PAR1 torn", "is not a readable Parquet file"),
    ],
)  # fmt: skip
def test_bad_lines_are_named(tmp_path: Path, ending: str, text: str, message: str):
    path = tmp_path / f"run{ending}"
    path.write_text(text)
    with pytest.raises(CorpusError, match=message):
        read_run(path)


def test_a_date_that_python_does_not_know_is_named(tmp_path: Path):
    dates = pa.array([2**60], pa.timestamp("us"))
    columns = {"query_id": ["q"], "doc_id": ["d"], "score": dates}
    pq.write_table(pa.table(columns), tmp_path / "run.parquet")
    with pytest.raises(CorpusError, match=r"run\.parquet is not a readable Parquet file"):
        read_run(tmp_path / "run.parquet")
