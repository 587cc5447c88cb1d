"""Shrinkage of a covariance: Σ* = (1 − ρ)Σ + ρ (tr Σ / d) I moves eigenvalues, not eigenvectors."""

import math

import numpy as np
from numpy.typing import NDArray

from whiten_index.errors import WhiteningError
from whiten_index.whitening.moments import Moments
from whiten_index.whitening.whitening_config import parse_shrinkage


def empirical_covariance(moments: Moments, *, ddof: int = 1) -> NDArray[np.float64]:
    """Return Σ (d, d), which is 0 if the rows are equal up to the rounding of their mean."""
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
    """Return ρ in 0 … 1."""
    estimator, fixed = parse_shrinkage(shrinkage)
    if estimator in ("empirical", "fixed"):
        return fixed
    if not empirical_covariance(moments, ddof=0).any():
        return 0.0
    # Divided by the mean variance, since squares of S itself may leave the range of float64.
    covariance = moments.covariance(ddof=0)
    unit = float(np.trace(covariance)) / moments.dim
    scaled = covariance / unit
    distance = float(np.square(scaled - np.eye(moments.dim)).sum())
    if estimator == "oas":
        return _oas(moments, scaled, distance)
    return _ledoit_wolf(moments, scaled, distance, unit)


def _ledoit_wolf(
    moments: Moments, scaled: NDArray[np.float64], distance: float, unit: float
) -> float:
    """Return min(b², δ²)/δ² with δ² = ‖S − μI‖² and b² = (Σ‖c‖⁴/n − ‖S‖²)/n.

    Ledoit and Wolf 2004, "A well-conditioned estimator for large-dimensional covariance
    matrices". The rows enter only through ``moments.quartic`` = Σ w‖c‖⁴, c = x − mean.
    """
    if moments.quartic is None:
        raise WhiteningError(
            "Ledoit-Wolf shrinkage needs the sum of the fourth powers, which these moments do not "
            "hold (it was beyond float64, or another program took them); use --shrinkage oas, or "
            "take the moments from the rows again"
        )
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


def _oas(moments: Moments, scaled: NDArray[np.float64], distance: float) -> float:
    """Return the oracle approximating shrinkage (Chen, Wiesel, Eldar and Hero 2010, eq. 23).

    As in scikit-learn without its terms in 2/d: min(1, (tr S² + tr² S) / ((n + 1)(tr S² −
    tr² S/d))).
    """
    if moments.dim == 1:
        return 0.0
    if distance == 0:
        return 1.0
    power = float(np.square(scaled).sum())
    return min((power + moments.dim**2) / ((moments.count + 1) * distance), 1.0)
