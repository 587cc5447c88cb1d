"""Mean and covariance of a stream in O(d²) memory: exact to merge, to subtract, to save.

Batches are combined by the pairwise update of Chan, Golub and LeVeque (1979), "Updating
formulae and a pairwise algorithm for computing sample variances", on centred float64 products.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whiten_index.errors import ArtifactError, ConfigError, WhiteningError
from whiten_index.tensors import read_tensors, write_tensors

KIND, FORMAT_VERSION = "moments", 1
_BLOCK_ROWS = 4096


@dataclass(frozen=True, eq=False)
class Moments:
    """Count, mean and centred scatter of n rows of d coordinates.

    Attributes:
        count: sum of the weights; the number of rows where no weights were given.
        mean: (d,) float64.
        scatter: (d, d) float64, Σᵢ wᵢ (xᵢ − mean)(xᵢ − mean)ᵀ.
    """

    count: float
    mean: NDArray[np.float64]
    scatter: NDArray[np.float64]

    @classmethod
    def empty(cls, dim: int) -> Moments:
        """Return the moments of no rows of ``dim`` coordinates: the zero of ``+``."""
        return cls(0.0, np.zeros(dim), np.zeros((dim, dim)))

    @classmethod
    def of(cls, rows: ArrayLike, *, weights: ArrayLike | None = None) -> Moments:
        """Return the moments of ``rows``.

        Args:
            rows: (n, d), any float type; products are taken in float64.
            weights: (n,) non-negative frequencies, or None for one each.

        Raises:
            ConfigError: wrong shapes, a negative weight, a NaN or an infinity.
        """
        data = np.asarray(rows)
        if data.ndim != 2:
            raise ConfigError(f"moments take an (n, d) array; this one has shape {data.shape}")
        weight = None if weights is None else _checked_weights(weights, len(data))
        blocks = (
            _block(
                data[i : i + _BLOCK_ROWS], None if weight is None else weight[i : i + _BLOCK_ROWS]
            )
            for i in range(0, len(data), _BLOCK_ROWS)
        )
        return functools.reduce(operator.add, blocks, cls.empty(data.shape[1]))

    @classmethod
    def total(cls, parts: Iterable[Moments]) -> Moments:
        """Return the sum of ``parts``, of which there must be at least one."""
        return functools.reduce(operator.add, parts)

    @property
    def dim(self) -> int:
        """The number of coordinates d."""
        return int(self.mean.shape[0])

    def update(self, rows: ArrayLike, *, weights: ArrayLike | None = None) -> Moments:
        """Return the moments of these rows and ``rows`` (n, d) together."""
        return self + Moments.of(rows, weights=weights)

    def __add__(self, other: Moments) -> Moments:
        self._require_same_dim(other)
        if other.count == 0:
            return self
        if self.count == 0:
            return other
        count = self.count + other.count
        delta = other.mean - self.mean
        mean = self.mean + delta * (other.count / count)
        spread = np.outer(delta, delta) * (self.count * other.count / count)
        return Moments(count, mean, self.scatter + other.scatter + spread)

    def __sub__(self, other: Moments) -> Moments:
        """Return the moments of what is left when the rows of ``other`` leave."""
        self._require_same_dim(other)
        if other.count == 0:
            return self
        count = self.count - other.count
        if count < 0:
            raise WhiteningError(
                f"cannot take {other.count:g} rows away from {self.count:g}; "
                "subtract moments only from a sum that holds them"
            )
        if count == 0:
            return Moments.empty(self.dim)
        mean = self.mean + (self.mean - other.mean) * (other.count / count)
        delta = other.mean - mean
        spread = np.outer(delta, delta) * (count * other.count / self.count)
        return Moments(count, mean, self.scatter - other.scatter - spread)

    def covariance(self, *, ddof: int = 1) -> NDArray[np.float64]:
        """Return Σ = scatter / (count − ddof), (d, d), symmetric.

        Raises:
            WhiteningError: there are not more than ``ddof`` rows.
        """
        if self.count <= ddof:
            raise WhiteningError(
                f"a covariance with ddof={ddof} needs more than {ddof} rows, and there are "
                f"{self.count:g}; add rows to the corpus"
            )
        return self.scatter / (self.count - ddof)

    def save(self, path: Path | str) -> None:
        """Write a safetensors file: ``count``, ``mean``, the scatter's upper triangle."""
        tensors = {
            "count": np.array([self.count]),
            "mean": self.mean,
            "scatter_upper": self.scatter[np.triu_indices(self.dim)],
        }
        write_tensors(path, tensors, kind=KIND, version=FORMAT_VERSION)

    @classmethod
    def load(cls, path: Path | str) -> Moments:
        """Read what ``save`` wrote.

        Raises:
            ArtifactError: the file is missing, damaged or not of moments.
        """
        shapes = {"count": "1", "mean": "d", "scatter_upper": "u"}
        tensors, _ = read_tensors(path, kind=KIND, version=FORMAT_VERSION, shapes=shapes)
        mean, upper = tensors["mean"], tensors["scatter_upper"]
        if len(upper) != len(mean) * (len(mean) + 1) // 2:
            raise ArtifactError(
                f"{path} cannot be read as moments: {len(upper)} entries of a scatter over "
                f"{len(mean)} dims; restore it from a copy, or build again"
            )
        scatter = np.zeros((len(mean), len(mean)))
        scatter[np.triu_indices(len(mean))] = upper
        return cls(float(tensors["count"][0]), mean, scatter + np.triu(scatter, 1).T)

    def _require_same_dim(self, other: Moments) -> None:
        if self.dim != other.dim:
            raise ConfigError(
                f"moments of {self.dim} and of {other.dim} dims do not combine; "
                "take both from one encoder"
            )


def _checked_weights(weights: ArrayLike, n: int) -> NDArray[np.float64]:
    weight = np.asarray(weights, dtype=np.float64)
    if weight.shape != (n,):
        raise ConfigError(f"{n} rows need {n} weights; these have shape {weight.shape}")
    if not np.isfinite(weight).all() or (weight < 0).any():
        raise ConfigError("weights must be finite and not negative; clean them first")
    return weight


def _block(rows: NDArray[np.floating], weight: NDArray[np.float64] | None) -> Moments:
    """Return the moments of a block small enough to hold in float64."""
    x = rows.astype(np.float64)
    if not np.isfinite(x).all():
        raise ConfigError("moments take finite numbers; these rows hold NaN or infinity")
    count = float(len(x)) if weight is None else float(weight.sum())
    if count == 0:
        return Moments.empty(x.shape[1])
    mean = x.mean(axis=0) if weight is None else weight @ x / count
    x -= mean
    # The mean of a long float64 sum is off by a few ulp; centring again removes what is left.
    rest = x.mean(axis=0) if weight is None else weight @ x / count
    x -= rest
    if weight is not None:
        x *= np.sqrt(weight)[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        scatter = x.T @ x
    if not np.isfinite(scatter).all():
        raise ConfigError("the rows are too large for their products in float64; scale them down")
    return Moments(count, mean + rest, scatter)
