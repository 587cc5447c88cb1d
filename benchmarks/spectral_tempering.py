"""Spectral Tempering, an exponent by the spectrum alone, which ``auto`` is compared with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from whiten_index.whitening.spectrum import numerical_rank


def spectral_tempering(eigenvalues: NDArray[np.float64], k: int) -> float:
    """Return the exponent γ at width k by Spectral Tempering (arXiv 2603.19339).

    γ(k) = min(1, SNR(k)/SNR(κ)), where SNR(k) = max(0, λ_k/σ² − 1), σ² is the mean of the last
    tenth of the eigenvalues within the rank, and κ is the knee of SNR, or k/2 without a knee. The
    rule belongs to centred embeddings. ``eigenvalues`` (d,) fall; k is at most their rank.

    Examples:
        >>> round(spectral_tempering(1 / np.arange(1.0, 101), 32), 3)
        0.232
    """
    rank = numerical_rank(eigenvalues)
    ratios = np.maximum(0.0, eigenvalues[:rank] / eigenvalues[rank * 9 // 10 : rank].mean() - 1)
    knee = _knee(ratios)
    at_knee = ratios[max(k // 2, 1) - 1 if knee is None else knee]
    # Without any signal there is nothing to scale.
    return float(min(1.0, ratios[k - 1] / at_knee)) if at_knee > 0 else 0.0


def _knee(curve: NDArray[np.float64]) -> int | None:
    """Return the place of the first knee of a convex falling curve (n,), None if it has none.

    Kneedle (Satopaa et al. 2011), S = 0.5: with both axes scaled to 0 … 1, a peak of the depth
    below the chord is a knee if the depth falls by half a step of x before the next peak.
    """
    if curve[0] == curve[-1]:
        return None
    x = np.linspace(0.0, 1.0, len(curve))
    depth = (curve[0] - curve) / (curve[0] - curve[-1]) - x
    peaks = 1 + np.flatnonzero((depth[1:-1] >= depth[:-2]) & (depth[1:-1] >= depth[2:]))
    falls = depth[peaks] - np.minimum.reduceat(depth, peaks)
    return next((int(peak) for peak in peaks[falls > x[1] / 2]), None)
