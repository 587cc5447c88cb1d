"""Weights of rows by how often they occur, for ``Moments.of(rows, weights=…)``."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whiten_index.errors import ConfigError


def inverse_frequency(counts: ArrayLike, *, smoothing: float = 1.0) -> NDArray[np.float64]:
    """Return weights (n,) in proportion to a/(a + r), r = counts/mean: rare rows weigh more.

    With a = 1 a row of mean frequency weighs half as much as one that never occurs, however many
    rows there are. Arora, Liang and Ma 2017, "A simple but tough-to-beat baseline for sentence
    embeddings", take α/(α + p) with p = counts/Σcounts = r/n of the n words of a vocabulary, and
    α = 1e-3: that is a = α·n. The weights have mean 1, so that the count of the moments stays the
    number of rows.

    Args:
        counts: (n,) occurrences of each row, non-negative, not all zero.
        smoothing: a > 0, the r of a row that weighs half as much as one that never occurs.

    Raises:
        ConfigError: counts or smoothing outside these bounds.
    """
    if not 0 < smoothing < np.inf:
        raise ConfigError(f"smoothing {smoothing:g} must be a positive number, such as 1")
    weights = smoothing / (smoothing + _relative(counts))
    scaled: NDArray[np.float64] = weights / weights.mean()
    return scaled


def zipfian(counts: ArrayLike) -> NDArray[np.float64]:
    """Return weights (n,) in proportion to counts: each row weighs as much as it occurs.

    Yokoi et al. 2024, "Zipfian whitening": mean and covariance under the empirical distribution,
    where one row a word would be uniform. The weights have mean 1; what never occurs weighs 0.

    Args:
        counts: (n,) occurrences of each row, non-negative, not all zero.

    Raises:
        ConfigError: counts outside these bounds.
    """
    return _relative(counts)


class Weighting(Enum):
    """How a row's frequency becomes its weight."""

    ZIPFIAN = "zipfian"
    INVERSE_FREQUENCY = "inverse-frequency"

    @property
    def function(self) -> Callable[[ArrayLike], NDArray[np.float64]]:
        """What turns frequencies (n,) into weights (n,)."""
        return zipfian if self is Weighting.ZIPFIAN else inverse_frequency


def _relative(counts: ArrayLike) -> NDArray[np.float64]:
    """Return counts/mean(counts), checked."""
    count = np.asarray(counts, dtype=np.float64)
    if count.ndim != 1 or not len(count):
        raise ConfigError(f"counts are one number a row, (n,); these have shape {count.shape}")
    if not np.isfinite(count).all() or (count < 0).any():
        raise ConfigError("counts must be finite and not negative; clean them first")
    if not count.any():
        raise ConfigError("all counts are zero, so there is nothing to weigh by; leave them out")
    count = count / count.max()  # counts near the limit of float64 have a sum beyond it
    relative: NDArray[np.float64] = count / count.mean()
    return relative
