"""Isotropy and uniformity of a cloud of vectors, in float64.

Rows of zeros have no direction and are left out everywhere.
"""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whiten_index.errors import ConfigError
from whiten_index.whitening.moments import Moments
from whiten_index.whitening.shrinkage import empirical_covariance
from whiten_index.whitening.spectrum import real_rows, unit_rows

# Above it Gao et al. (2021), SimCSE, take the pairs of STS-B as positive.
POSITIVE_ABOVE = 4.0
_LEAST_ROWS = 3
# Larger blocks leave the cache and are slower.
_BLOCK_BYTES = 8 << 20


def geometry(vectors: ArrayLike) -> dict[str, float]:
    """Measure the shape of vectors (n, d), in O(n²d) time and a few blocks of memory."""
    rows, zero_rows = _directed(vectors, least=_LEAST_ROWS)
    n, spectrum, total = len(rows), _spectrum(rows), unit_rows(rows).sum(axis=0)
    return {
        "rows": n,  # measured
        # Of all pairs of distinct rows; 0 where directions are even.
        "mean_cosine": float(total @ total - n) / (n * (n - 1)),
        "isoscore": _isoscore(spectrum),
        "effective_rank": _effective_rank(spectrum),  # directions in use, 1 to the width
        # Lower is more even; about -4 is the least in many dims.
        "uniformity": uniformity(rows),
        "zero_rows": zero_rows,  # left out of the above
    }


def _effective_rank(eigenvalues: NDArray[np.float64]) -> float:
    """Return exp of the entropy of a spectrum (Roy and Vetterli 2007); 0 without variance."""
    used = eigenvalues[eigenvalues > 0]
    if not len(used):
        return 0.0
    shares = used / used.sum()
    shares = shares[shares > 0]
    return float(np.exp(-(shares * np.log(shares)).sum()))


def _isoscore(values: NDArray[np.float64]) -> float:
    """Return IsoScore of a covariance with the eigenvalues (d,): 0 (one direction) to 1 (even).

    The score of Rudman, Gillman, Rayne and Eickhoff (2022) is (dφ − 1)/(d − 1) of the share φ of
    dims in use; their steps to it come down to dφ = (Σλ)² / Σλ². It is 0 where there is no variance
    at all, and 1 in one dimension, whose only direction is in use.
    """
    if values.max() == 0:
        return 0.0
    if len(values) == 1:
        return 1.0
    shares = values / values.max()
    used = float(shares.sum()) ** 2 / float(shares @ shares)
    return min(max((used - 1) / (len(values) - 1), 0.0), 1.0)


def uniformity(vectors: ArrayLike) -> float:
    """Return log E exp(−2‖u − v‖²) over pairs of distinct rows of (n, d) at unit length.

    Wang and Isola (2020), "Understanding contrastive representation learning through alignment
    and uniformity on the hypersphere". All pairs are taken, a block at a time.
    """
    units = unit_rows(_directed(vectors, least=2)[0])
    n, total = len(units), 0.0
    step = max(_BLOCK_BYTES // (8 * n), 1)
    for start in range(0, n, step):
        cosines = units[start : start + step] @ units.T
        np.fill_diagonal(cosines[:, start:], -np.inf)  # of a row with itself
        total += float(np.exp(4 * cosines - 4).sum())
    return math.log(total / (n * (n - 1)))


def alignment(first: ArrayLike, second: ArrayLike) -> float:
    """Return E‖u − v‖² over pairs of rows of (n, d) at unit length: 0 (equal) to 4 (opposite).

    Wang and Isola (2020), with exponent 2. The pairs are those that should be close, such as
    paraphrases; a pair with a row of zeros is left out.
    """
    pair = (real_rows(rows, None, taker="alignment", noun="rows") for rows in (first, second))
    a, b = (rows.astype(np.float64) for rows in pair)
    if a.shape != b.shape:
        raise ConfigError(f"alignment takes two (n, d) arrays; these are {a.shape} and {b.shape}")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ConfigError("the pairs hold NaN or infinity; drop or mend those first")
    directed = a.any(axis=1) & b.any(axis=1)
    if not directed.any():
        raise ConfigError(f"none of the {len(a)} pairs has two rows that are not zero; give some")
    apart = unit_rows(a[directed]) - unit_rows(b[directed])
    return float(np.einsum("nd,nd->n", apart, apart).mean())


def _directed(vectors: ArrayLike, *, least: int) -> tuple[NDArray[np.float64], int]:
    """Return the rows that are not zero, scaled as a whole to at most 1, and how many are zero."""
    rows = real_rows(vectors, None, taker="geometry", noun="vectors").astype(np.float64)
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
    """Return the eigenvalues (d,) of the covariance; rounding errors are 0."""
    covariance = empirical_covariance(Moments.of(rows), ddof=0)
    values = np.asarray(np.linalg.eigvalsh(covariance), dtype=np.float64)
    rounding = len(values) * float(np.finfo(np.float64).eps)
    return np.where(values > rounding * values[-1], values, 0.0)
