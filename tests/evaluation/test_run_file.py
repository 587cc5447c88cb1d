"""Run files read: what was written comes back, what cannot be read says where and why."""

import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.judged import evaluate
from whiten_index.errors import CorpusError
from whiten_index.evaluation.trec_run import RUN_ENDINGS, Ranking, read_run, write_run
from whiten_index.search.search_index import Hit

METRICS = ("ndcg@10", "recall@20", "mrr@10", "map@20")


def rankings(*, numbers: bool = False, queries: int = 40) -> list[Ranking]:
    rng = np.random.default_rng(3)
    made = []
    for query in range(queries):
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
