"""The covariance a transform is fitted on: empirical or shrunk, from moments alone.

Σ* = (1 − ρ)Σ + ρ (tr Σ / d) I. Shrinkage moves eigenvalues and leaves eigenvectors where they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from whiten_index.errors import ConfigError, WhiteningError
from whiten_index.whitening.moments import Moments


class Estimator(Enum):
    """Estimator of the shrinkage coefficient ρ."""

    EMPIRICAL = "empirical"
    LEDOIT_WOLF = "ledoit-wolf"
    OAS = "oas"
    FIXED = "fixed"


_NAMED = (Estimator.EMPIRICAL, Estimator.LEDOIT_WOLF, Estimator.OAS)


def parse_shrinkage(text: str | float | None) -> tuple[Estimator, float]:
    """Read ``empirical``, ``ledoit-wolf``, ``oas``, a coefficient 0 … 1, or None (empirical).

    Returns:
        The estimator and, where it is fixed, its coefficient; a coefficient of 0 is empirical.

    Raises:
        ConfigError: the value is unknown.
    """
    if text is None:
        return Estimator.EMPIRICAL, 0.0
    name = str(text).strip().lower()
    for estimator in _NAMED:
        if name == estimator.value:
            return estimator, 0.0
    try:
        coefficient = float(name)
    except ValueError:
        coefficient = math.nan
    if 0 <= coefficient <= 1:
        return (Estimator.FIXED if coefficient else Estimator.EMPIRICAL), coefficient
    raise ConfigError(
        f"--shrinkage {text} is not understood; give "
        f"{', '.join(estimator.value for estimator in _NAMED)}, or a number 0 to 1"
    )


def empirical_covariance(moments: Moments, *, ddof: int = 1) -> NDArray[np.float64]:
    """Return Σ (d, d), which is 0 where the rows are equal but for the rounding of their mean.

    Raises:
        WhiteningError: not more than ``ddof`` rows.
    """
    covariance = moments.covariance(ddof=ddof)
    rounding = moments.dim * np.finfo(np.float64).eps
    if np.trace(covariance) <= rounding**2 * np.square(moments.mean).sum():
        return np.zeros_like(covariance)
    return covariance


def shrink(covariance: NDArray[np.float64], coefficient: float) -> NDArray[np.float64]:
    """Return (1 − ρ)Σ + ρ (tr Σ / d) I for Σ (d, d)."""
    target = float(np.trace(covariance)) / len(covariance)
    return (1 - coefficient) * covariance + coefficient * target * np.eye(len(covariance))


def shrinkage_coefficient(moments: Moments, shrinkage: str | float | None = None) -> float:
    """Return ρ in 0 … 1.

    Weights count as so many equal rows each. Both named estimators need sums of the stream only:
    OAS the scatter, Ledoit-Wolf Σ‖c‖⁴ besides.

    Raises:
        WhiteningError: these sums cannot give it.
        ConfigError: ``shrinkage`` is not understood.
    """
    estimator, fixed = parse_shrinkage(shrinkage)
    if estimator in _COEFFICIENTS and not empirical_covariance(moments, ddof=0).any():
        return 0.0
    return _COEFFICIENTS[estimator](moments) if estimator in _COEFFICIENTS else fixed


def shrunk_covariance(
    moments: Moments, shrinkage: str | float | None = None, *, ddof: int = 1
) -> tuple[NDArray[np.float64], float]:
    """Return Σ* (d, d) and its coefficient, which is that of scatter/n whatever ``ddof``.

    Raises:
        WhiteningError: not more than ``ddof`` rows, or sums that cannot give the coefficient.
        ConfigError: ``shrinkage`` is not understood.
    """
    covariance = empirical_covariance(moments, ddof=ddof)
    coefficient = shrinkage_coefficient(moments, shrinkage)
    return shrink(covariance, coefficient), coefficient


def ledoit_wolf_coefficient(moments: Moments) -> float:
    """Return ρ of Ledoit and Wolf, min(b², δ²)/δ²: δ² = ‖S − μI‖², b² = (Σ‖c‖⁴/n − ‖S‖²)/n.

    Ledoit and Wolf 2004, "A well-conditioned estimator for large-dimensional covariance
    matrices". The rows enter only through ``moments.quartic`` = Σ w‖c‖⁴, c = x − mean.

    Raises:
        WhiteningError: these moments do not hold it, or hold one that cannot be right.
    """
    if moments.quartic is None:
        raise WhiteningError(
            "Ledoit-Wolf shrinkage needs the sum of the fourth powers, which these moments do not "
            "hold (an earlier release, or another program, took them); use --shrinkage oas, or "
            "take the moments from the rows again"
        )
    scaled, unit = _of_mean_variance_one(moments)
    distance = _squared_distance_to_identity(scaled)
    # By Jensen Σ‖c‖⁴/n ≥ (Σ‖c‖²/n)² ≥ ‖S‖².
    fourth, least = moments.quartic / moments.count / unit / unit, moments.dim**2
    if not least / 2 <= fourth < math.inf:
        raise WhiteningError(
            "the sum of the fourth powers does not fit the scatter of these moments, so "
            "Ledoit-Wolf cannot use it (numbers too large or too small for float64, or a damaged "
            "file); scale the embeddings, or use --shrinkage oas"
        )
    noise = max(fourth - float(np.square(scaled).sum()), 0.0) / moments.count
    return min(noise / distance, 1.0) if distance > 0 else 0.0


def oas_coefficient(moments: Moments) -> float:
    """Return ρ of the oracle approximating shrinkage (Chen, Wiesel, Eldar and Hero 2010, eq. 23).

    As in scikit-learn without its terms in 2/d: min(1, (tr S² + tr² S) / ((n + 1)(tr S² −
    tr² S/d))). Scatter and count suffice.
    """
    scaled, _ = _of_mean_variance_one(moments)
    distance = _squared_distance_to_identity(scaled)
    if moments.dim == 1:
        return 0.0
    if distance == 0:
        return 1.0
    power = float(np.square(scaled).sum())
    return min((power + moments.dim**2) / ((moments.count + 1) * distance), 1.0)


def _of_mean_variance_one(moments: Moments) -> tuple[NDArray[np.float64], float]:
    """Return S/μ and μ = tr S/d: squares of S itself may leave the range of float64."""
    covariance = moments.covariance(ddof=0)
    unit = float(np.trace(covariance)) / moments.dim
    return covariance / unit, unit


def _squared_distance_to_identity(scaled: NDArray[np.float64]) -> float:
    return float(np.square(scaled - np.eye(len(scaled))).sum())


_COEFFICIENTS: dict[Estimator, Callable[[Moments], float]] = {
    Estimator.LEDOIT_WOLF: ledoit_wolf_coefficient,
    Estimator.OAS: oas_coefficient,
}
