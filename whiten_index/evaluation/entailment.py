"""Entailment by a threshold on the cosine of two sentences, as WhiteningBERT scores RTE."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whiten_index.errors import ConfigError
from whiten_index.evaluation.sts import pair_cosines
from whiten_index.evaluation.transfer import binomial_deviation

THRESHOLD = 0.5


@dataclass(frozen=True, kw_only=True)
class EntailmentScore:
    """How often a threshold on the cosine tells entailment; shares are of 1.

    Attributes:
        accuracy: share of the tested pairs told rightly, a cosine of ``threshold`` or more
            counting as entailment.
        deviation: √(p(1 − p)/n) of the accuracy.
        deviation_of: ``binomial``.
        threshold: the fixed one.
        constant: whether it calls every pair the same.
        tuned_accuracy: accuracy at ``tuned_threshold``.
        tuned_threshold: the threshold that tells most pairs to train on rightly, of equal ones
            the lowest. None, as are the two beside it, where those are not of both classes.
        tuned_constant: whether that one calls every tested pair the same.
        majority: share of the larger class among the tested pairs.
        rows: pairs by split.
    """

    accuracy: float
    deviation: float
    deviation_of: str
    threshold: float
    constant: bool
    tuned_accuracy: float | None
    tuned_threshold: float | None
    tuned_constant: bool | None
    majority: float
    rows: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """Return the figures by name."""
        return asdict(self)


def score_entailment(
    first: ArrayLike,
    second: ArrayLike,
    entailed: ArrayLike,
    tested: ArrayLike,
    *,
    threshold: float = THRESHOLD,
) -> EntailmentScore:
    """Score pairs of embeddings (n, d) by their cosine.

    Huang et al. (2021), "WhiteningBERT: an easy unsupervised sentence embedding approach", take
    the threshold 0.5 on the dev split. The pairs that are not tested tune another one.

    Args:
        first: one row a pair; a row of zeros has cosine 0 with any.
        second: the partner of each.
        entailed: (n,) whether the pair is an entailment.
        tested: (n,) whether the pair is scored; the others, where there are any, tune.
        threshold: the fixed one.

    Raises:
        ConfigError: arrays that do not fit together, NaN, or no pair to test.
    """
    truth, scored = np.asarray(entailed, dtype=bool), np.asarray(tested, dtype=bool)
    cosines = _checked_cosines(first, second)
    if not cosines.shape == truth.shape == scored.shape:
        raise ConfigError(
            f"{len(cosines)} pairs, {truth.shape} labels and {scored.shape} splits; give one for "
            "each pair"
        )
    if not scored.any():
        raise ConfigError(f"none of {len(scored)} pairs is to be tested; give some to test")
    gold, trained = truth[scored], truth[~scored]
    accuracy, constant = _at(threshold, cosines[scored], gold)
    tuned, tuned_accuracy, tuned_constant = None, None, None
    # Pairs of one class only would be told best by calling every pair the same.
    if trained.any() and not trained.all():
        tuned = tuned_threshold(cosines[~scored], trained)
        tuned_accuracy, tuned_constant = _at(tuned, cosines[scored], gold)
    return EntailmentScore(
        accuracy=accuracy,
        deviation=binomial_deviation(accuracy, len(gold)),
        deviation_of="binomial",
        threshold=threshold,
        constant=constant,
        tuned_accuracy=tuned_accuracy,
        tuned_threshold=tuned,
        tuned_constant=tuned_constant,
        majority=float(max(gold.mean(), 1 - gold.mean())),
        rows={"train": int((~scored).sum()), "dev": len(gold)},
    )


def tuned_threshold(cosines: ArrayLike, entailed: ArrayLike) -> float:
    """Return the t for which ``cosine >= t`` names most of the (n,) pairs rightly.

    Every way to part the pairs by their cosine is tried: below all, halfway between neighbours,
    and above all. Of equal ones the lowest is taken.
    """
    values, truth = np.asarray(cosines, np.float64), np.asarray(entailed, dtype=bool)
    distinct, places = np.unique(values, return_inverse=True)
    gains = np.bincount(places, weights=np.where(truth, -1.0, 1.0), minlength=len(distinct))
    # Raising the threshold over a value loses its entailments and wins its others.
    right = truth.sum() + np.concatenate([[0.0], np.cumsum(gains)])
    best = int(np.argmax(right))
    if best == 0:
        return float(distinct[0])
    if best == len(distinct):
        return float(np.nextafter(distinct[-1], np.inf))
    below, above = distinct[best - 1], distinct[best]
    between = below + (above - below) / 2
    return float(between if between > below else above)


def _checked_cosines(first: ArrayLike, second: ArrayLike) -> NDArray[np.float64]:
    """Return the cosine (n,) of each pair, refusing what has none."""
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if a.ndim != 2 or a.shape != b.shape:
        raise ConfigError(f"pairs of shapes {a.shape} and {b.shape}; give two (n, d) arrays")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ConfigError("the embeddings hold NaN or infinity; drop or mend those pairs first")
    return pair_cosines(a, b)


def _at(
    threshold: float, cosines: NDArray[np.float64], gold: NDArray[np.bool_]
) -> tuple[float, bool]:
    """Return the accuracy at a threshold, and whether all pairs are called the same."""
    called = cosines >= threshold
    return float(np.mean(called == gold)), bool(called.all() or not called.any())
