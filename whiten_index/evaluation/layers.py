"""Combinations of layers: cosines of pairs for any of them from one set of inner products."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whiten_index.errors import ConfigError

_BLOCK = 512
MOST_COMBINATIONS = 20_000


@dataclass(frozen=True, eq=False)
class LayerProducts:
    """Inner products of the layers of n pairs of texts a, b.

    The embedding of layers C is the mean of their states, so that the cosine of a pair is
    Σᵢⱼ⟨aᵢ, bⱼ⟩ / √(Σᵢⱼ⟨aᵢ, aⱼ⟩ · Σᵢⱼ⟨bᵢ, bⱼ⟩) over i, j in C: no combination looks at the states
    again.

    Attributes:
        across: (n, S, S) float64, ⟨aᵢ, bⱼ⟩.
        first: (n, S, S), ⟨aᵢ, aⱼ⟩.
        second: (n, S, S), ⟨bᵢ, bⱼ⟩.
    """

    across: NDArray[np.float64]
    first: NDArray[np.float64]
    second: NDArray[np.float64]

    @classmethod
    def of(
        cls,
        states: Callable[[NDArray[np.int64]], NDArray[np.floating]],
        first: NDArray[np.int64],
        second: NDArray[np.int64],
    ) -> LayerProducts:
        """Multiply the states of the texts of n pairs, a block at a time.

        Args:
            states: gives the states (m, S, d) of m rows.
            first: (n,) row of each pair's first text.
            second: (n,) row of its partner.
        """
        blocks: list[tuple[NDArray[np.float64], ...]] = []
        for start in range(0, len(first), _BLOCK):
            a, b = (
                np.asarray(states(rows[start : start + _BLOCK]), np.float64)
                for rows in (first, second)
            )
            turned_a, turned_b = a.swapaxes(1, 2), b.swapaxes(1, 2)
            blocks.append((a @ turned_b, a @ turned_a, b @ turned_b))
        return cls(*(np.concatenate(parts) for parts in zip(*blocks, strict=True)))

    def cosines(self, layers: Sequence[int]) -> NDArray[np.float64]:
        """Return the cosines (n,) of the means of ``layers``; 0 where one is all zeros."""
        chosen = np.ix_(range(len(self.across)), layers, layers)
        dots, a, b = (
            products[chosen].sum(axis=(1, 2)) for products in (self.across, self.first, self.second)
        )
        squared = np.maximum(a, 0) * np.maximum(b, 0)
        cosines: NDArray[np.float64] = np.divide(
            dots, np.sqrt(squared), out=np.zeros(len(dots)), where=squared > 0
        )
        return np.clip(cosines, -1.0, 1.0)


def combinations(count: int, *, sizes: Iterable[int]) -> list[tuple[int, ...]]:
    """Return the combinations of ``count`` layers, of each size in turn.

    Raises:
        ConfigError: a size below 1 or above ``count``, or more than ``MOST_COMBINATIONS``.
    """
    chosen, total = list(sizes), 0
    for size in chosen:
        if not 1 <= size <= count:
            raise ConfigError(
                f"{size} layers cannot be combined: the model has {count} states, the embeddings "
                "counted"
            )
        total += math.comb(count, size)
    if total > MOST_COMBINATIONS:
        raise ConfigError(
            f"{count} states have {total:,} such combinations, more than {MOST_COMBINATIONS:,}; "
            "combine fewer layers"
        )
    return [layers for size in chosen for layers in itertools.combinations(range(count), size)]


def heat_map(values: dict[tuple[int, ...], float], count: int) -> NDArray[np.float64]:
    """Return the figures of pairs as a symmetric (S, S) matrix, single layers on its diagonal."""
    matrix = np.full((count, count), np.nan)
    for layers, value in values.items():
        if len(layers) <= 2:
            i, j = layers[0], layers[-1]
            matrix[i, j] = matrix[j, i] = value
    return matrix
