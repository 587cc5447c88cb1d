"""Retrieval quality by trec_eval's own code; qrels and run are named as in the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from whiten_index.errors import ConfigError

Qrels = Mapping[str, Mapping[str, int]]
Run = Mapping[str, Mapping[str, float]]
_MEASURES = {"ndcg": "ndcg_cut", "recall": "recall", "map": "map_cut", "mrr": "recip_rank"}


def evaluate(qrels: Qrels, run: Run, metrics: Sequence[str]) -> dict[str, float]:
    """Return the mean of each metric over the judged queries, in 0 … 1.

    A query of the qrels that the run lacks counts 0; queries without a relevant document are
    left out, as BEIR does.

    Args:
        qrels: query id -> document id -> relevance, 0 or less is not relevant.
        run: query id -> document id -> score.
        metrics: such as ``ndcg@10``, ``recall@100``, ``mrr@10``, ``map@100``.

    Raises:
        ConfigError: a metric is unknown, or pytrec_eval is not installed.
    """
    judged = {
        query: {document: int(grade) for document, grade in grades.items()}
        for query, grades in qrels.items()
        if any(grade > 0 for grade in grades.values())
    }
    return {metric: _mean(judged, run, metric) for metric in metrics}


def _mean(qrels: Qrels, run: Run, metric: str) -> float:
    try:
        import pytrec_eval
    except ImportError as error:
        raise ConfigError(
            "evaluation needs pytrec_eval; pip install 'whiten-index[eval]'"
        ) from error
    name, cut = _parse(metric)
    if name == "mrr":
        # trec_eval's reciprocal rank has no cut of its own.
        run = {query: _best(scores, cut) for query, scores in run.items()}
        measure = key = "recip_rank"
    else:
        measure, key = f"{_MEASURES[name]}.{cut}", f"{_MEASURES[name]}_{cut}"
    shared = {query: dict(scores) for query, scores in run.items() if query in qrels}
    evaluator = pytrec_eval.RelevanceEvaluator(qrels, {measure})
    found = evaluator.evaluate(shared) if shared else {}
    return sum(values[key] for values in found.values()) / len(qrels) if qrels else 0.0


def _parse(metric: str) -> tuple[str, int]:
    name, _, cut = metric.partition("@")
    if name not in _MEASURES or not cut.isdigit() or int(cut) < 1:
        known = ", ".join(f"{known}@10" for known in _MEASURES)
        raise ConfigError(f"metric {metric!r} is unknown; use one such as {known}")
    return name, int(cut)


def _best(scores: Mapping[str, float], count: int) -> dict[str, float]:
    ranked = sorted(scores.items(), key=lambda item: (-item[1], item[0]))
    return dict(ranked[:count])
