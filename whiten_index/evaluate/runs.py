"""A run judged: the mean of each metric, and what of run and judgements does not meet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whiten_index.errors import CorpusError
from whiten_index.evaluation.metrics import Qrels, Run, evaluate
from whiten_index.labels.judged import some


@dataclass(frozen=True)
class RunFigures:
    """What a run is worth.

    Attributes:
        figures: metric -> its mean over the judged queries, in 0 … 1.
        counts: of queries and hits: ``queries`` judged, those of them ``queries_not_in_run``,
            which count 0, ``run_queries_not_judged`` (without a relevant document), which do not
            count, the ``hits`` of judged queries, those of them ``hits_not_judged``, which count
            as not relevant, and the ``hits_of_self`` that were left out.
    """

    figures: dict[str, float]
    counts: dict[str, int]

    def to_json(self, more: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Return the figures times 100, and the counts, with ``more`` of them, beside."""
        figures = {metric: 100 * value for metric, value in self.figures.items()}
        return {**figures, "counts": {**(more or {}), **self.counts}}


def evaluate_run(
    run: Run,
    qrels: Qrels,
    metrics: Sequence[str],
    *,
    drop_self: bool | None = None,
    names: tuple[str, str] = ("the run", "the judgements"),
) -> RunFigures:
    """Judge a run that was read from a file.

    Args:
        run: query id -> document id -> score.
        qrels: query id -> document id -> grade.
        metrics: such as ``ndcg@10``.
        drop_self: leave out hits with the query's own id; see ``drops_self``.
        names: what errors call run and judgements.

    Raises:
        ConfigError: a metric is unknown, or pytrec_eval is not installed.
        CorpusError: run and judgements have no query, or no document, in common.
    """
    relevant = _with_answers(qrels)
    _require_match(run, relevant, names)
    kept, dropped = without_self(run) if drops_self(drop_self, qrels) else (run, 0)
    found = run_figures(kept, relevant, metrics)
    return RunFigures(found.figures, {**found.counts, "hits_of_self": dropped})


def run_figures(run: Run, qrels: Qrels, metrics: Sequence[str]) -> RunFigures:
    """Judge a run whose ids are known to be those of the judgements; see ``evaluate_run``."""
    relevant = _with_answers(qrels)
    hits = [(query, document) for query in relevant for document in run.get(query, ())]
    counts = {
        "queries": len(relevant),
        "queries_not_in_run": sum(query not in run for query in relevant),
        "run_queries_not_judged": sum(query not in relevant for query in run),
        "hits": len(hits),
        "hits_not_judged": sum(document not in relevant[query] for query, document in hits),
    }
    return RunFigures(evaluate(relevant, run, metrics), counts)


def drops_self(asked: bool | None, qrels: Qrels) -> bool:
    """Tell whether hits with the query's own id are left out.

    Where queries are themselves documents (ArguAna, Quora) each finds itself first, and no
    judgement says so; BEIR's evaluation leaves such hits out of every set. A judgement that calls
    one relevant shows that the ids of queries and documents have nothing to do with each other, as
    in Cranfield, where both count from 1.

    Args:
        asked: what the user says, None to follow the rule above.
        qrels: query id -> document id -> grade.
    """
    if asked is not None:
        return asked
    return not any(grades.get(query, 0) > 0 for query, grades in qrels.items())


def without_self(run: Run) -> tuple[dict[str, dict[str, float]], int]:
    """Return a run without the hits that have their query's id, and how many these were."""
    kept = {
        query: {document: score for document, score in found.items() if document != query}
        for query, found in run.items()
    }
    return kept, sum(query in found for query, found in run.items())


def _with_answers(qrels: Qrels) -> Qrels:
    return {
        query: grades
        for query, grades in qrels.items()
        if any(grade > 0 for grade in grades.values())
    }


def _require_match(run: Run, qrels: Qrels, names: tuple[str, str]) -> None:
    """Refuse a run of another set, or of other ids, whose figures would all be 0.

    Raises:
        CorpusError: no query, or no document of any query, is in both.
    """
    if not run.keys() & qrels.keys():
        raise _no_match("query", names, run, qrels, "the split of the judgements and the id column")
    found = dict.fromkeys(document for each in run.values() for document in each)
    judged = dict.fromkeys(document for grades in qrels.values() for document in grades)
    if not found.keys() & judged.keys():
        raise _no_match("document", names, found, judged, "the id column of the corpus")


def _no_match(
    what: str, names: tuple[str, str], ours: Iterable[str], theirs: Iterable[str], check: str
) -> CorpusError:
    run, qrels = names
    return CorpusError(
        f"no {what} of {run} is in {qrels}: the run has ids such as {some(ours) or 'none'}, the "
        f"judgements {some(theirs)}; give files of one set, and check {check} that the run was "
        "made with"
    )
