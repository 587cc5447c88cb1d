"""Intervals of a mean over several sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Figure = Callable[[NDArray[np.int64]], float]


def interval_over_sets(sets: Sequence[tuple[int, Figure]], draws: int = 2_000) -> list[float]:
    """Return the 95 % interval of the mean over sets of a figure, by bootstrap within each set.

    Args:
        sets: for each its number of items, and the figure of the items drawn, by their numbers.
        draws: of every set.
    """
    rng = np.random.default_rng(0)
    means = [
        np.mean([figure(rng.integers(count, size=count)) for count, figure in sets])
        for _ in range(draws)
    ]
    found: list[float] = np.percentile(means, (2.5, 97.5)).tolist()
    return found
