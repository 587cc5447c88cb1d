"""A run judged: its figures, what of run and judgements does not meet, and when nothing does."""

from __future__ import annotations

from whiten_index.measure.evaluate_retrieval import drops_self, evaluate_run


def test_ids_that_are_judged_to_be_of_other_texts_are_kept():
    qrels = {"1": {"7": 1}, "2": {"2": 1}}
    assert not drops_self(None, qrels)
    assert drops_self(True, qrels)
    assert drops_self(None, {"1": {"7": 1}, "2": {"2": 0}})
    run = {"1": {"1": 0.9, "7": 0.8}, "2": {"2": 0.9}}
    assert evaluate_run(run, qrels, ["mrr@10"])["mrr@10"] == 75
    dropped = evaluate_run(run, qrels, ["mrr@10"], drop_self=True)
    assert dropped["mrr@10"] == 50
    assert dropped["counts"]["hits_of_self"] == 2


def test_what_run_and_judgements_lack_is_counted():
    qrels = {"a": {"d1": 1, "d2": 0}, "b": {"d1": 1}, "irrelevant": {"d1": 0}}
    run = {"a": {"d1": 3.0, "d2": 2.0, "d9": 1.0}, "irrelevant": {"d1": 1.0}, "else": {"d1": 1.0}}
    found = evaluate_run(run, qrels, ["mrr@10", "recall@10"])
    assert (found["mrr@10"], found["recall@10"]) == (50, 50)
    assert found["counts"] == {
        "queries": 2,
        "queries_not_in_run": 1,
        "run_queries_not_judged": 2,
        "hits": 3,
        "hits_not_judged": 1,
        "hits_of_self": 0,
    }
