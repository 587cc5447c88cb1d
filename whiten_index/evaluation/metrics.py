"""Quality: of retrieval by trec_eval's own code, of similarity by correlation with gold scores."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whiten_index.errors import ConfigError, CorpusError, require_installed

Qrels = Mapping[str, Mapping[str, int]]
Run = Mapping[str, Mapping[str, float]]
_MEASURES = {"ndcg": "ndcg_cut", "recall": "recall", "map": "map_cut", "mrr": "recip_rank"}
# Seven ASCII digits at most: trec_eval's counters cannot hold more.
_METRIC = re.compile(r"([a-z]+)@0*([1-9][0-9]{0,6})")
_DEEPEST = 1_000_000
_DRAWS = 2_000  # of a bootstrap


def evaluate_each(qrels: Qrels, run: Run, metric: str) -> dict[str, float]:
    """Return the metric of each judged query, in 0 … 1 and in the order of the qrels.

    A query of the qrels that the run lacks counts 0; queries without a relevant document are
    left out, as BEIR does. A grade of 0 or less is not relevant. A metric is such as ``ndcg@10``,
    ``recall@100``, ``mrr@10``, ``map@100``.
    """
    pytrec_eval = require_evaluator()
    name, cut = parse_metric(metric)
    judged = {
        query: {document: int(grade) for document, grade in grades.items()}
        for query, grades in with_answers(qrels).items()
    }
    ranked = {query: dict(scores) for query, scores in run.items() if query in judged}
    together: list[Mapping[str, Any]] = [judged, *judged.values(), *ranked.values()]
    for ids in together:
        _require_c_strings(ids)
    if name == "mrr":
        # trec_eval's reciprocal rank has no cut.
        ranked = {query: _best(scores, cut) for query, scores in ranked.items()}
        measure = key = "recip_rank"
    else:
        measure, key = f"{_MEASURES[name]}.{cut}", f"{_MEASURES[name]}_{cut}"
    evaluator = pytrec_eval.RelevanceEvaluator(judged, {measure})
    found = evaluator.evaluate(ranked) if ranked else {}
    return {query: float(found[query][key]) if query in found else 0.0 for query in judged}


def mean_interval(values: NDArray[np.float64], draws: int = _DRAWS) -> tuple[float, float]:
    """Return the 95 % interval of the mean of (n,) values, by bootstrap."""
    return _interval(drawn.mean(axis=-1) for drawn in _resampled(values, draws))


def correlation_interval(gold: ArrayLike, predicted: ArrayLike) -> tuple[float, float]:
    """Return the 95 % interval of the rank correlation of (n,) scores, by bootstrap over pairs.

    Ranks are those among all pairs. A draw in which all of either side are equal is left out.
    """
    both = np.stack([_ranks("gold", gold), _ranks("predicted", predicted)])

    def correlations(drawn: NDArray[np.float64]) -> NDArray[np.float64]:
        varies = (drawn.min(axis=-1) < drawn.max(axis=-1)).all(axis=0)
        x, y = drawn - drawn.mean(axis=-1, keepdims=True)
        xx, yy, xy = (np.einsum("dn,dn->d", *pair)[varies] for pair in ((x, x), (y, y), (x, y)))
        found: NDArray[np.float64] = xy / np.sqrt(xx * yy)
        return found

    return _interval(map(correlations, _resampled(both, _DRAWS)))


def _resampled(values: NDArray[np.float64], draws: int) -> Iterator[NDArray[np.float64]]:
    """Yield (…, draws, n) of (…, n) values, drawn with replacement, some draws at a time."""
    rng, n = np.random.default_rng(0), values.shape[-1]
    at_once = max(2**16 // n, 1)
    for start in range(0, draws, at_once):
        yield values.take(rng.integers(n, size=(min(at_once, draws - start), n)), axis=-1)


def _interval(drawn: Iterable[NDArray[np.float64]]) -> tuple[float, float]:
    low, high = np.percentile(np.concatenate(list(drawn)), (2.5, 97.5)).tolist()
    return low, high


def with_answers(qrels: Qrels) -> dict[str, Mapping[str, int]]:
    """Return the queries that have a relevant document."""
    return {query: grades for query, grades in qrels.items() if any(g > 0 for g in grades.values())}


def require_evaluator() -> Any:
    """Return the module pytrec_eval."""
    require_installed("pytrec_eval", by="evaluation", extra="eval")
    import pytrec_eval

    return pytrec_eval


def spearman(gold: ArrayLike, predicted: ArrayLike) -> float:
    """Return the rank correlation of two (n,) score lists, in −1 … 1; ties share a mean rank.

    It is Pearson's correlation of the ranks (Spearman 1904).
    """
    return float(np.corrcoef(_ranks("gold", gold), _ranks("predicted", predicted))[0, 1])


def pearson(gold: ArrayLike, predicted: ArrayLike) -> float:
    """Return the linear correlation of two (n,) score lists, in −1 … 1 (Pearson 1895)."""
    return float(np.corrcoef(_checked("gold", gold), _checked("predicted", predicted))[0, 1])


def _checked(name: str, given: ArrayLike) -> NDArray[np.float64]:
    """Return (n,) scores that can be correlated."""
    scores = np.asarray(given, np.float64)
    if len(scores) < 2:
        raise ConfigError(f"there is {len(scores)} {name} score; a correlation needs 2 or more")
    if (scores == scores[0]).all():
        raise ConfigError(
            f"all {len(scores)} {name} scores are equal ({scores[0]:g}), so they rank nothing; "
            "give scores that differ"
        )
    return scores


def _ranks(name: str, given: ArrayLike) -> NDArray[np.float64]:
    _, groups, counts = np.unique(_checked(name, given), return_inverse=True, return_counts=True)
    mean_ranks: NDArray[np.float64] = np.cumsum(counts) - (counts - 1) / 2
    return mean_ranks[groups]


def parse_metric(metric: str) -> tuple[str, int]:
    """Return name and cut of a metric, such as ndcg and 10."""
    found = _METRIC.fullmatch(metric)
    if not found or found[1] not in _MEASURES or int(found[2]) > _DEEPEST:
        known = ", ".join(f"{known}@10" for known in _MEASURES)
        raise ConfigError(
            f"metric {metric[:60]!r} is unknown; use one such as {known}, of {_DEEPEST:,} hits at "
            "most"
        )
    return found[1], int(found[2])


def _require_c_strings(ids: Iterable[str]) -> None:
    """Refuse ids that trec_eval, which reads C strings of UTF-8, would end the process over."""
    together = "".join(ids)
    if together.isascii() and "\0" not in together:
        return
    for each in ids:
        if "\0" in each or re.search(r"[\ud800-\udfff]", each):
            raise CorpusError(
                f"the id {each!r} has a NUL character or half a surrogate pair, which trec_eval "
                "cannot read; rename it in corpus, queries, judgements and run"
            )


def _best(scores: Mapping[str, float], count: int) -> dict[str, float]:
    # As trec_eval ranks: by scores in float32, and of equal ones the last id in UTF-8 first.
    with np.errstate(over="ignore"):
        single = np.array(list(scores.values()), np.float32).tolist()
    order = sorted(zip(single, scores, strict=True), reverse=True)
    return {document: scores[document] for _, document in order[:count]}


AGGREGATIONS = ("all", "mean", "wmean")
MEASURES: dict[str, Callable[[ArrayLike, ArrayLike], float]] = {
    "spearman": spearman,
    "pearson": pearson,
}
# What rounding makes of equal cosines.
_SPREAD = 1e-12


def pair_cosines(first: ArrayLike, second: ArrayLike) -> NDArray[np.float64]:
    """Return the cosine (n,) of each row of (n, k) with its partner; 0 where one is all zeros."""
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    dots, left, right = (np.einsum("ij,ij->i", *pair) for pair in ((a, b), (a, a), (b, b)))
    norms = np.sqrt(left * right)
    cosines: NDArray[np.float64] = np.divide(dots, norms, out=np.zeros(len(dots)), where=norms > 0)
    return np.clip(cosines, -1.0, 1.0)


def rows_by_label(labels: Iterable[Any]) -> dict[Any, list[int]]:
    """Return label -> its rows, both in the order in which they occur."""
    rows: dict[Any, list[int]] = {}
    for row, label in enumerate(labels):
        rows.setdefault(label, []).append(row)
    return rows


def correlate(
    gold: ArrayLike,
    predicted: ArrayLike,
    subsets: ArrayLike,
    *,
    measure: str = "spearman",
    averaged: bool = True,
    name: str = "the pairs",
) -> tuple[dict[str, float], dict[str, float | None]]:
    """Correlate (n,) predictions with (n,) gold scores of the subset of each pair, times 100.

    ``name`` is the set's in errors.

    Returns:
        The figures of ``AGGREGATIONS``: of all pairs together (SimCSE, MTEB), their mean over the
        subsets (WhiteningBERT), and that mean weighted by pairs (BERT-whitening); the three are one
        if subsets are not ``averaged``. And the figure of each subset, None for one that cannot be
        ranked and is not averaged.
    """
    truth, found = np.asarray(gold, np.float64), np.asarray(predicted, np.float64)
    groups = rows_by_label(np.asarray(subsets, dtype=object).tolist())
    together = _measured(measure, truth, found, name)
    parts: dict[str, float | None] = {}
    for subset, inside in groups.items():
        part = f"{name}, subset {subset}"
        try:
            parts[str(subset)] = _measured(measure, truth[inside], found[inside], part)
        except ConfigError:
            if averaged:
                raise
            parts[str(subset)] = None
    if not averaged:
        return dict.fromkeys(AGGREGATIONS, together), parts
    each = np.array(list(parts.values()), np.float64)
    weighted = np.average(each, weights=list(map(len, groups.values())))
    return {"all": together, "mean": float(each.mean()), "wmean": float(weighted)}, parts


def _measured(
    measure: str, gold: NDArray[np.float64], predicted: NDArray[np.float64], name: str
) -> float:
    if len(predicted) > 1 and np.ptp(predicted) <= _SPREAD:
        raise ConfigError(
            f"{name}: all {len(predicted)} predicted similarities are {predicted[0]:.6g}, so they "
            "rank nothing and have no correlation; check the model, the layers and the transform"
        )
    try:
        return 100 * MEASURES[measure](gold, predicted)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
