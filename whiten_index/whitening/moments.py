"""Mean and covariance of a stream in O(d²) memory: exact to merge, to subtract, to save.

Rows are shifted by a point near their mean, then summed, in float64, and the sums are moved to
the mean at the end: the shifted two-pass algorithm of Chan, Golub and LeVeque (1983), "Algorithms
for computing the sample variance". Batches are combined by their pairwise update (1979), "Updating
formulae and a pairwise algorithm for computing sample variances".
"""

import functools
import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whiten_index.artifacts.tensors import read_tensors, write_tensors
from whiten_index.errors import ArtifactError, ConfigError, WhiteningError
from whiten_index.whitening.spectrum import real_rows

KIND, FORMAT_VERSION = "moments", 1
# Sums take rows that fit the cache of one core; products take as many as BLAS is fastest with.
_STRIP_ROWS, _BLOCK_ROWS = 256, 4096
# Rows are shifted by the mean of every m-th of them, at most √m spreads from the mean of all (by
# Jensen's inequality). That multiplies rounding errors by m + 1 at most.
MEAN_OF_EVERY = 16


@dataclass(frozen=True, eq=False)
class Moments:
    """Count, mean and centred scatter of n rows of d coordinates; c = x − mean below.

    Attributes:
        count: number of rows.
        mean: (d,) float64.
        scatter: (d, d) float64, Σᵢ cᵢcᵢᵀ.
        cubic: (d,) float64, Σᵢ ‖cᵢ‖² cᵢ.
        quartic: Σᵢ ‖cᵢ‖⁴, what Ledoit and Wolf's shrinkage needs; ``cubic`` is what ``quartic``
            needs to be combined. Both are None where a part did not hold them, or where they are
            beyond float64.

    Examples:
        >>> rows = np.random.default_rng(0).normal(size=(1000, 8))
        >>> moments = Moments.of(rows[:400]).update(rows[400:])
        >>> bool(np.allclose(moments.covariance(), np.cov(rows.T)))
        True
    """

    count: float
    mean: NDArray[np.float64]
    scatter: NDArray[np.float64]
    cubic: NDArray[np.float64] | None = None
    quartic: float | None = None

    def __repr__(self) -> str:
        return f"Moments({self.count:g} rows, {self.dim} dims)"

    @classmethod
    def empty(cls, dim: int) -> "Moments":
        """Return the moments of no rows of ``dim`` coordinates: the zero of ``+``."""
        return cls(0.0, np.zeros(dim), np.zeros((dim, dim)), np.zeros(dim), 0.0)

    @classmethod
    def of(cls, rows: ArrayLike) -> "Moments":
        """Return the moments of ``rows``, the covariance within 1e-12 (Frobenius, relative).

        Args:
            rows: (n, d), any float type.

        Raises:
            ConfigError: a wrong shape, a NaN or an infinity.
        """
        data = real_rows(rows, None, taker="a sum of moments", noun="rows")
        with np.errstate(over="ignore", invalid="ignore"):
            moments = _two_pass(data)
        if np.isfinite(moments.scatter).all():
            return moments
        if np.isfinite(data).all():
            raise ConfigError(
                "the rows are too large for their products in float64; scale them down"
            )
        raise ConfigError("moments take finite numbers; these rows hold NaN or infinity")

    @classmethod
    def total(cls, parts: "Iterable[Moments]") -> "Moments":
        """Return the sum of ``parts``, of which there must be at least one."""
        return functools.reduce(operator.add, parts)

    @property
    def dim(self) -> int:
        """The number of coordinates d."""
        return int(self.mean.shape[0])

    def update(self, rows: ArrayLike) -> "Moments":
        """Return the moments of these rows and ``rows`` (n, d) together."""
        return self + Moments.of(rows)

    def __add__(self, other: "Moments") -> "Moments":
        self._require_same_dim(other)
        if other.count == 0:
            return self
        if self.count == 0:
            return other
        count = self.count + other.count
        delta = other.mean - self.mean
        away = delta * (other.count / count)
        scatter = self.scatter + other.scatter
        scatter += _square(delta, self.count * other.count / count)
        both = Moments(count, self.mean + away, scatter)
        ours, theirs = self._higher_moved(-away), other._higher_moved(delta - away)
        if ours is None or theirs is None:
            return both
        return replace(both, **_held(ours[0] + theirs[0], ours[1] + theirs[1]))

    def __sub__(self, other: "Moments") -> "Moments":
        self._require_same_dim(other)
        if other.count == 0:
            return self
        count = self.count - other.count
        if count < 0:
            raise WhiteningError(
                f"cannot take {other.count:.16g} rows away from {self.count:.16g}; "
                "subtract moments only from a sum that holds them"
            )
        if count == 0:
            return Moments.empty(self.dim)
        delta = other.mean - self.mean
        away = -delta * (other.count / count)
        scatter = self.scatter - other.scatter
        scatter -= _square(delta - away, count * other.count / self.count)
        left = Moments(count, self.mean + away, scatter)
        gone = other._higher_moved(delta)
        if self.cubic is None or self.quartic is None or gone is None:
            return left
        return left._with_higher(away, self.cubic - gone[0], self.quartic - gone[1])

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
        """Write a safetensors file: count, mean, the scatter's upper triangle, higher moments."""
        tensors = {
            "count": np.array([self.count]),
            "mean": self.mean,
            "scatter_upper": self.scatter[np.triu_indices(self.dim)],
        }
        if self.cubic is not None and self.quartic is not None:
            tensors |= {"cubic": self.cubic, "quartic": np.array([self.quartic])}
        write_tensors(path, tensors, kind=KIND, version=FORMAT_VERSION)

    @classmethod
    def load(
        cls, path: Path | str, *, rows: int | None = None, dim: int | None = None
    ) -> "Moments":
        """Read what ``save`` wrote, of so many ``rows`` of ``dim`` coordinates if these are given.

        Raises:
            ArtifactError: the file is missing, damaged, not of moments, or of other rows.
        """
        tensors, _ = read_tensors(
            path,
            kind=KIND,
            version=FORMAT_VERSION,
            shapes={"count": "1", "mean": "d", "scatter_upper": "u"},
            optional={"cubic": "d", "quartic": "1"},
        )
        mean, upper = tensors["mean"], tensors["scatter_upper"]
        cubic, quartic = tensors.get("cubic"), tensors.get("quartic")
        fault = ""
        if len(upper) != len(mean) * (len(mean) + 1) // 2:
            fault = f"{len(upper)} entries of a scatter over {len(mean)} dims"
        elif (cubic is None) != (quartic is None):
            fault = "one of the cubic and the quartic moment is missing"
        elif rows not in (None, tensors["count"][0]) or dim not in (None, len(mean)):
            fault = f"they are of {tensors['count'][0]:g} rows of {len(mean)} dims"
        if fault:
            raise ArtifactError(
                f"{path} cannot be read as moments: {fault}; restore it from a copy, or build again"
            )
        scatter = np.zeros((len(mean), len(mean)))
        scatter[np.triu_indices(len(mean))] = upper
        count, scatter = float(tensors["count"][0]), scatter + np.triu(scatter, 1).T
        fourth = None if quartic is None else float(quartic[0])
        return cls(count, mean, scatter, cubic, fourth)

    @np.errstate(over="ignore", invalid="ignore")
    def _higher_moved(self, e: NDArray[np.float64]) -> tuple[NDArray[np.float64], float] | None:
        """Return Σ ‖c + e‖²(c + e) and Σ ‖c + e‖⁴ multiplied out, None if they are unknown."""
        if self.cubic is None or self.quartic is None:
            return None
        turned, trace, square = self.scatter @ e, np.trace(self.scatter), e @ e
        cubic = self.cubic + 2 * turned + (trace + self.count * square) * e
        quartic = self.quartic + 4 * (e @ turned + e @ self.cubic)
        return cubic, float(quartic + square * (self.count * square + 2 * trace))

    @np.errstate(over="ignore", invalid="ignore")
    def _with_higher(
        self, e: NDArray[np.float64], cubic_moved: NDArray[np.float64], quartic_moved: float
    ) -> "Moments":
        """Return these moments with higher ones: the inverse of ``_higher_moved(e)``."""
        turned, trace, square = self.scatter @ e, np.trace(self.scatter), e @ e
        cubic = cubic_moved - 2 * turned - (trace + self.count * square) * e
        quartic = quartic_moved - 4 * (e @ turned + e @ cubic)
        quartic -= square * (self.count * square + 2 * trace)
        return replace(self, **_held(cubic, float(quartic)))

    def _require_same_dim(self, other: "Moments") -> None:
        if self.dim != other.dim:
            raise ConfigError(
                f"moments of {self.dim} and of {other.dim} dims do not combine; "
                "take both from one encoder"
            )


def _two_pass(rows: NDArray[np.floating]) -> Moments:
    """Return the moments of rows (n, d). NaN and infinity pass on to the scatter."""
    n, d = rows.shape
    sample = rows[::MEAN_OF_EVERY]
    point = sample.sum(axis=0, dtype=np.float64) / max(len(sample), 1)
    space, product = np.empty((min(n, _BLOCK_ROWS), d)), np.empty((d, d))
    first, second, third, fourth = np.zeros(d), np.zeros((d, d)), np.zeros(d), 0.0
    for i in range(0, n, _STRIP_ROWS):
        begin = i % _BLOCK_ROWS
        strip = rows[i : i + _STRIP_ROWS]
        y = space[begin : begin + len(strip)]
        np.subtract(strip, point, out=y, casting="same_kind")  # rounded once
        square = np.einsum("ij,ij->i", y, y)
        first += np.ones(len(y)) @ y
        third += square @ y
        fourth += float(square @ square)
        end = begin + len(y)
        if end == _BLOCK_ROWS or i + len(y) == n:
            block = space[:end]
            second += np.matmul(block.T, block, out=product)
    if not n:
        return Moments.empty(d)
    away = first / n
    scatter = second - _square(away, n)
    return Moments(float(n), point + away, scatter)._with_higher(away, third, fourth)


def _square(e: NDArray[np.float64], factor: float) -> NDArray[np.float64]:
    """Return factor · eeᵀ, symmetric to the bit."""
    return np.outer(e, e) * factor


def _held(cubic: NDArray[np.float64], quartic: float) -> dict[str, Any]:
    """Return the two as fields, None if they are beyond float64."""
    held = bool(np.isfinite(quartic) and np.isfinite(cubic).all())
    return {"cubic": cubic if held else None, "quartic": quartic if held else None}
