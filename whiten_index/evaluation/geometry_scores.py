"""How a cloud of vectors fills its space: isotropy, uniformity, hubs. numpy only, float64.

Rows of zeros have no direction and are left out everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whiten_index.errors import ConfigError
from whiten_index.whitening.covariance import empirical_covariance
from whiten_index.whitening.moments import Moments
from whiten_index.whitening.spectrum import unit_rows

# Above it Gao et al. (2021), SimCSE, take the pairs of STS-B as positive.
POSITIVE_ABOVE = 4.0
_LEAST_ROWS = 3
_NEIGHBOURS = 10
# Larger blocks leave the cache and are slower.
_BLOCK_BYTES = 8 << 20
# Above the rounding of a float64 cosine, far below what tells two texts apart.
_TIE = 1e-12


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of a cloud of vectors; cosines are of pairs of distinct rows.

    Attributes:
        rows: rows measured.
        mean_cosine: mean cosine of all pairs; 0 where directions are even.
        isoscore: 0 (one direction) to 1 (the same variance in every direction).
        effective_rank: directions in use, 1 to the width.
        uniformity: lower is more even; about -4 is the least in many dims.
        hubness: skewness of the k-occurrence; 0 where no row is a hub.
        zero_rows: rows of zeros, left out of the above.
        neighbours: neighbours the k-occurrence counts, cut to ``rows`` - 1.
    """

    rows: int
    mean_cosine: float
    isoscore: float
    effective_rank: float
    uniformity: float
    hubness: float
    zero_rows: int
    neighbours: int

    @classmethod
    def of(cls, vectors: ArrayLike, *, neighbours: int = _NEIGHBOURS) -> Geometry:
        """Measure vectors (n, d) of any float type, in O(n²d) time and a few blocks of memory."""
        rows, zero_rows = _directed(vectors, least=_LEAST_ROWS)
        n = len(rows)
        spectrum = _spectrum(rows)
        units = unit_rows(rows)
        near = _cut(neighbours, n)
        closeness, occurrences = 0.0, np.zeros(n)
        for cosines in _cosines(units):
            occurrences += _occurrences(cosines, near)
            closeness += _closeness(cosines)
        return cls(
            rows=n,
            mean_cosine=_mean_cosine(units),
            isoscore=isoscore(spectrum),
            effective_rank=effective_rank(spectrum),
            uniformity=math.log(closeness / (n * (n - 1))),
            hubness=_skewness(occurrences),
            zero_rows=zero_rows,
            neighbours=near,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the figures by name."""
        return asdict(self)


def effective_rank(eigenvalues: ArrayLike) -> float:
    """Return exp of the entropy of the spectrum (d,) divided by its sum: 1 to d.

    0 where there is no variance at all. Order does not matter. Roy and Vetterli (2007), "The
    effective rank", of the eigenvalues of a covariance.
    """
    values = _checked(eigenvalues)
    used = values[values > 0]
    if not len(used):
        return 0.0
    shares = used / used.sum()
    shares = shares[shares > 0]
    return float(np.exp(-(shares * np.log(shares)).sum()))


def isoscore(eigenvalues: ArrayLike) -> float:
    """Return IsoScore of a covariance with the eigenvalues (d,): 0 (one direction) to 1 (even).

    Rudman, Gillman, Rayne and Eickhoff (2022), "IsoScore: measuring the uniformity of embedding
    space utilization". Their variances v in the principal directions are λ, scaled to norm √d;
    the isotropy defect δ = ‖v − 1‖ / √(2(d − √d)) gives the share of dims in use,
    φ = (d − δ²(d − √d))² / d², and the score (dφ − 1)/(d − 1). The steps come down to
    dφ = (Σλ)² / Σλ², which is what is computed; the order of λ does not matter.

    0 where there is no variance at all; 1 in one dimension, whose only direction is in use.
    """
    values = _checked(eigenvalues)
    if values.max() == 0:
        return 0.0
    if len(values) == 1:
        return 1.0
    shares = values / values.max()
    used = float(shares.sum()) ** 2 / float(shares @ shares)
    return min(max((used - 1) / (len(values) - 1), 0.0), 1.0)


def isotropy(vectors: ArrayLike) -> float:
    """Return IsoScore of vectors (n, d), by their covariance."""
    return isoscore(_spectrum(_directed(vectors, least=2)[0]))


def mean_cosine(vectors: ArrayLike) -> float:
    """Return the mean cosine of all pairs of distinct rows of (n, d), exactly and in O(nd).

    It is (‖Σu‖² − n) / (n(n − 1)) with u the rows at unit length.
    """
    return _mean_cosine(unit_rows(_directed(vectors, least=2)[0]))


def uniformity(vectors: ArrayLike) -> float:
    """Return log E exp(−2‖u − v‖²) over pairs of distinct rows of (n, d) at unit length.

    Wang and Isola (2020), "Understanding contrastive representation learning through alignment
    and uniformity on the hypersphere". All pairs are taken, a block at a time.
    """
    units = unit_rows(_directed(vectors, least=2)[0])
    n = len(units)
    return math.log(sum(map(_closeness, _cosines(units))) / (n * (n - 1)))


def alignment(first: ArrayLike, second: ArrayLike) -> float:
    """Return E‖u − v‖² over pairs of rows of (n, d) at unit length: 0 (equal) to 4 (opposite).

    Wang and Isola (2020), with exponent 2. The pairs are those that should be close, such as
    paraphrases; a pair with a row of zeros is left out.
    """
    a, b = (np.array(rows, dtype=np.float64) for rows in (first, second))
    if a.ndim != 2 or a.shape != b.shape:
        raise ConfigError(f"alignment takes two (n, d) arrays; these are {a.shape} and {b.shape}")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ConfigError("the pairs hold NaN or infinity; drop or mend those first")
    directed = a.any(axis=1) & b.any(axis=1)
    if not directed.any():
        raise ConfigError(f"none of the {len(a)} pairs has two rows that are not zero; give some")
    apart = unit_rows(a[directed]) - unit_rows(b[directed])
    return float(np.einsum("nd,nd->n", apart, apart).mean())


def hubness(vectors: ArrayLike, neighbours: int = _NEIGHBOURS) -> float:
    """Return the skewness of N_k: how often each row of (n, d) is a neighbour of another.

    Radovanović, Nanopoulos and Ivanović (2010), "Hubs in space", by cosine, each row left out of
    its own neighbours. Rows that tie for the last places share them, so that neither their order
    nor rounding decides which of several equal rows becomes a hub.
    """
    units = unit_rows(_directed(vectors, least=_LEAST_ROWS)[0])
    near = _cut(neighbours, len(units))
    counts = np.zeros(len(units))
    for cosines in _cosines(units):
        counts += _occurrences(cosines, near)
    return _skewness(counts)


def _directed(vectors: ArrayLike, *, least: int) -> tuple[NDArray[np.float64], int]:
    """Return the rows that are not zero, scaled as a whole to at most 1, and how many are zero."""
    rows = np.array(vectors, dtype=np.float64)
    if rows.ndim != 2:
        raise ConfigError(f"geometry takes an (n, d) array; this one has shape {rows.shape}")
    if not np.isfinite(rows).all():
        raise ConfigError("the vectors hold NaN or infinity; drop or mend those rows first")
    if rows.size and (largest := np.abs(rows).max()) > 0:
        rows /= largest
    directed = np.einsum("ij,ij->i", rows, rows) > 0
    usable = int(directed.sum())
    if usable < least:
        raise ConfigError(
            f"geometry needs {least} rows that are not zero, and there are {usable} of "
            f"{len(rows)}; give more rows"
        )
    return (rows if usable == len(rows) else rows[directed]), len(rows) - usable


def _spectrum(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the eigenvalues (d,) of the covariance; what is left by rounding is 0."""
    covariance = empirical_covariance(Moments.of(rows), ddof=0)
    values = np.asarray(np.linalg.eigvalsh(covariance), dtype=np.float64)
    rounding = len(values) * float(np.finfo(np.float64).eps)
    return np.where(values > rounding * values[-1], values, 0.0)


def _checked(eigenvalues: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(eigenvalues, dtype=np.float64)
    if values.ndim != 1 or not values.size or not np.isfinite(values).all():
        raise ConfigError(
            f"a spectrum is a list of finite eigenvalues; this one has shape {values.shape}"
        )
    return np.maximum(values, 0.0)


def _cut(neighbours: int, n: int) -> int:
    if neighbours < 1:
        raise ConfigError(f"neighbours {neighbours} is below 1; give 1 or more")
    return min(neighbours, n - 1)


def _cosines(units: NDArray[np.float64]) -> Iterator[NDArray[np.float64]]:
    """Yield the cosines of a block of rows with all rows, (b, n); a row's own is -inf."""
    n = len(units)
    step = max(_BLOCK_BYTES // (8 * n), 1)
    space = np.empty((min(step, n), n))
    for start in range(0, n, step):
        block = units[start : start + step]
        cosines = np.matmul(block, units.T, out=space[: len(block)])
        within = np.arange(len(block))
        cosines[within, start + within] = -np.inf
        yield cosines


def _mean_cosine(units: NDArray[np.float64]) -> float:
    n, total = len(units), units.sum(axis=0)
    return float(total @ total - n) / (n * (n - 1))


def _closeness(cosines: NDArray[np.float64]) -> float:
    """Return Σ exp(−2‖u − v‖²) = Σ exp(4 cos − 4); overwrites the block."""
    cosines -= 1
    cosines *= 4
    return float(np.exp(cosines, out=cosines).sum())


def _occurrences(cosines: NDArray[np.float64], near: int) -> NDArray[np.float64]:
    """Return how often each of the n rows is among the ``near`` nearest of the block's, (n,)."""
    last = np.partition(cosines, cosines.shape[1] - near, axis=1)[:, -near, None]
    above = cosines > last + _TIE
    tied = (cosines >= last - _TIE) ^ above
    places = (near - above.sum(axis=1)) / tied.sum(axis=1)
    return np.asarray(above.sum(axis=0) + places @ tied)


def _skewness(counts: NDArray[np.float64]) -> float:
    """Return the skewness E(N − μ)³ / σ³; 0 where all counts are equal but for rounding."""
    centred = counts - counts.mean()
    variance = float((centred**2).mean())
    if variance <= (_TIE * float(counts.mean())) ** 2:
        return 0.0
    return float((centred**3).mean() / variance**1.5)
