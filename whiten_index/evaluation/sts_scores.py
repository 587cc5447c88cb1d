"""Semantic textual similarity: cosines of pairs against gold scores, in the three aggregations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class Correlation:
    """Correlations of predictions with gold scores over the subsets of a set, in −1 … 1.

    Attributes:
        all: of all pairs together (SimCSE, MTEB).
        mean: mean over the subsets (WhiteningBERT).
        wmean: mean over the subsets, weighted by their pairs (BERT-whitening).
        subsets: name -> of its pairs alone; None where these cannot be ranked.
    """

    all: float
    mean: float
    wmean: float
    subsets: dict[str, float | None]

    def to_json(self) -> dict[str, Any]:
        """Return the figures times 100."""
        return {name: 100 * getattr(self, name) for name in AGGREGATIONS}


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
) -> Correlation:
    """Correlate (n,) predictions with (n,) gold scores of the subset of each pair.

    Where subsets are not ``averaged``, the three figures are one, and a subset that cannot be
    ranked has None. ``name`` is the set's in errors.
    """
    truth, found = np.asarray(gold, np.float64), np.asarray(predicted, np.float64)
    groups = np.asarray(subsets, dtype=object)
    together = _measured(measure, truth, found, name)
    parts: dict[str, float | None] = {}
    sizes: list[int] = []
    for subset in dict.fromkeys(groups.tolist()):
        inside = groups == subset
        sizes.append(int(inside.sum()))
        try:
            parts[str(subset)] = _measured(
                measure, truth[inside], found[inside], f"{name}, subset {subset}"
            )
        except ConfigError:
            if averaged:
                raise
            parts[str(subset)] = None
    if not averaged:
        return Correlation(together, together, together, parts)
    each = np.array([value for value in parts.values() if value is not None])
    return Correlation(together, float(each.mean()), float(np.average(each, weights=sizes)), parts)


def _measured(
    measure: str, gold: NDArray[np.float64], predicted: NDArray[np.float64], name: str
) -> float:
    if len(predicted) > 1 and np.ptp(predicted) <= _SPREAD:
        raise ConfigError(
            f"{name}: all {len(predicted)} predicted similarities are {predicted[0]:.6g}, so they "
            "rank nothing and have no correlation; check the model, the layers and the transform"
        )
    try:
        return MEASURES[measure](gold, predicted)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
