"""A run judged: its figures, what of run and judgements does not meet, and when nothing does."""

import pytest

from whiten_index.measure.eval_config import RetrievalConfig
from whiten_index.measure.evaluate_retrieval import evaluate_retrieval


@pytest.fixture
def judge(tmp_path):
    """Return a function that judges a run, both given as nested dictionaries."""

    def judged(run, qrels, metrics):
        rows = [f"{q} Q0 {d} 1 {s} x" for q, hits in run.items() for d, s in hits.items()]
        (tmp_path / "run.trec").write_text("\n".join(rows) + "\n")
        rows = [f"{q} 0 {d} {g}" for q, grades in qrels.items() for d, g in grades.items()]
        (tmp_path / "qrels.txt").write_text("\n".join(rows) + "\n")
        config = RetrievalConfig(
            run=str(tmp_path / "run.trec"), qrels=str(tmp_path / "qrels.txt"), metrics=metrics
        )  # fmt: skip
        (found,) = evaluate_retrieval(config)["datasets"].values()
        return found

    return judged


def test_ids_that_are_judged_to_be_of_other_texts_are_kept(judge):
    qrels = {"1": {"7": 1}, "2": {"2": 1}}
    run = {"1": {"1": 0.9, "7": 0.8}, "2": {"2": 0.9}}
    found = judge(run, qrels, ("mrr@10",))
    assert (found["mrr@10"], found["counts"]["hits_of_self"]) == (75, 0)
    found = judge(run, {"1": {"7": 1}, "2": {"2": 0}}, ("mrr@10",))
    assert (found["drop_self"], found["counts"]["hits_of_self"]) == (True, 2)


def test_what_run_and_judgements_lack_is_counted(judge):
    qrels = {"a": {"d1": 1, "d2": 0}, "b": {"d1": 1}, "irrelevant": {"d1": 0}}
    run = {"a": {"d1": 3.0, "d2": 2.0, "d9": 1.0}, "irrelevant": {"d1": 1.0}, "else": {"d1": 1.0}}
    found = judge(run, qrels, ("mrr@10", "recall@10"))
    assert (found["mrr@10"], found["recall@10"]) == (50, 50)
    assert found["counts"] == {
        "queries": 2, "queries_not_in_run": 1, "run_queries_not_judged": 2, "hits": 3,
        "hits_not_judged": 1, "hits_of_self": 0,
    }  # fmt: skip
