"""Metrics against figures worked out by hand and against the textbook formulas."""

import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.helpers.judged import evaluate
from whiten_index.evaluation.metrics import mean_interval, spearman

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
