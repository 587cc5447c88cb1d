"""Semantic textual similarity: cosines of pairs against gold scores, in the three aggregations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whiten_index.errors import ConfigError
from whiten_index.evaluation.metrics import pearson, spearman

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
    groups = np.asarray(subsets, dtype=object)
    together = _measured(measure, truth, found, name)
    parts: dict[str, float | None] = {}
    for subset in dict.fromkeys(groups.tolist()):
        inside, part = groups == subset, f"{name}, subset {subset}"
        try:
            parts[str(subset)] = _measured(measure, truth[inside], found[inside], part)
        except ConfigError:
            if averaged:
                raise
            parts[str(subset)] = None
    if not averaged:
        return dict.fromkeys(AGGREGATIONS, together), parts
    each = np.array(list(parts.values()), np.float64)
    weighted = np.average(each, weights=list(Counter(groups.tolist()).values()))
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
