"""A run judged: its figures, what of run and judgements does not meet, and when nothing does."""

from __future__ import annotations

import pytest

from whiten_index.errors import CorpusError
from whiten_index.measure.evaluate_retrieval import drops_self, evaluate_run


def test_ids_that_are_judged_to_be_of_other_texts_are_kept():
    qrels = {"1": {"7": 1}, "2": {"2": 1}}
    assert not drops_self(None, qrels)
    assert drops_self(True, qrels)
    assert drops_self(None, {"1": {"7": 1}, "2": {"2": 0}})
    run = {"1": {"1": 0.9, "7": 0.8}, "2": {"2": 0.9}}
    assert evaluate_run(run, qrels, ["mrr@10"]).figures == {"mrr@10": 0.75}
    dropped = evaluate_run(run, qrels, ["mrr@10"], drop_self=True)
    assert dropped.figures == {"mrr@10": 0.5}
    assert dropped.counts["hits_of_self"] == 2


def test_what_run_and_judgements_lack_is_counted():
    qrels = {"a": {"d1": 1, "d2": 0}, "b": {"d1": 1}, "irrelevant": {"d1": 0}}
    run = {"a": {"d1": 3.0, "d2": 2.0, "d9": 1.0}, "irrelevant": {"d1": 1.0}, "else": {"d1": 1.0}}
    found = evaluate_run(run, qrels, ["mrr@10", "recall@10"])
    assert found.figures == {"mrr@10": 0.5, "recall@10": 0.5}
    assert found.counts == {
        "queries": 2,
        "queries_not_in_run": 1,
        "run_queries_not_judged": 2,
        "hits": 3,
        "hits_not_judged": 1,
        "hits_of_self": 0,
    }


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            {"Q1": {"d1": 1.0}, "Q2": {}},
            r"no query of run.trec is in test.tsv: the run has ids such as 'Q1' and 'Q2', the "
            r"judgements 'q1' and 'q2'; give files of one set, and check the split",
        ),
        (
            {"q1": {"c.parquet:0:1": 1.0}, "q2": {}},
            r"no document of run.trec is in test.tsv: the run has ids such as 'c.parquet:0:1', "
            r"the judgements 'd1' and 'd2'; .* the id column of the corpus",
        ),
        ({"q1": {}}, r"no document of run.trec is in test.tsv: the run has ids such as none"),
        ({"graded 0": {"d1": 1.0}}, "no query of run.trec is in test.tsv"),
    ],
)
def test_a_run_whose_ids_match_nothing_is_refused(run, message):
    qrels = {"q1": {"d1": 1}, "q2": {"d2": 1}, "graded 0": {"d1": 0}}
    with pytest.raises(CorpusError, match=message):
        evaluate_run(run, qrels, ["ndcg@10"], names=("run.trec", "test.tsv"))
