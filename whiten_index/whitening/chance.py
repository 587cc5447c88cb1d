"""What two samples of one population differ by, as far as it bears on a transform fitted on one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whiten_index.whitening.moments import Moments

# Chance is given this many of its standard deviations before it is called drift.
_DEVIATIONS = 3.0


@dataclass(frozen=True)
class Chance:
    """What chance shows between the samples of a fit and of today, were both of one population.

    n_f and n_t rows, n_s of them the same, are compared along r whitened dimensions. A difference
    of their means has variance v = 1/n_f + 1/n_t − 2n_s/(n_f n_t) in each, one of their covariances
    (1 + κ)v off the diagonal and (2 + 3κ)v on it: Muirhead 1982, "Aspects of multivariate
    statistical theory", ch. 1, for elliptical rows of kurtosis κ, which is 0 for Gaussian ones. κ
    comes from the fit's fourth moment, and is 0 where that is not held.

    Attributes:
        before: n_f.
        after: n_t.
        shared: n_s.
        width: r.
        kurtosis: κ.
    """

    before: float
    after: float
    shared: float
    width: int
    kurtosis: float

    @classmethod
    def of(cls, fitted: Moments, today: Moments, shared: float, *, width: int) -> Chance:
        """Take the numbers of rows and the kurtosis from moments."""
        return cls(fitted.count, today.count, shared, width, _kurtosis(fitted))

    def sampling(self) -> float:
        """Return the KL a dimension to expect: v/2 + v[(1 + κ)(r + 1) + κ]/4.

        To second order the KL is half the square of the difference of the means and a quarter of
        that of the covariances. For Gaussian rows it is v(r + 3)/4, as of Wilks' χ² (1938).
        """
        if not self.width:
            return 0.0
        heavy = 1 + self.kurtosis
        return self._spread * (0.5 + (heavy * (self.width + 1) + self.kurtosis) / 4)

    def noise(self, *, mean: bool, covariance: bool) -> float:
        """Return what of the KL a dimension a refit would only take over, not mend.

        A fit on few rows is far off by chance, and a refit on many mends that: such drift is not
        noise. In expectation a refit comes nearer to the population than the fit is by the
        measured KL less (1/n_t)(1 − n_s/n_f) of the means and

            ½[(g_t − 1) − (n_s/n_t)(g_f − 1)],   g = (n − 1)/(n − r − 2),

        of the covariances, (1 + κ)-fold; r g is E tr S⁻¹ of the covariance S of Gaussian rows
        (Muirhead 1982, ch. 3). For samples without a common row that is about (r + 3)/(2n_t), and
        0 where rows were only added. Three standard deviations are added: of the χ², and, since
        the covariances differ by the sum of ‖x‖⁴ over the c rows that came or went, whose relative
        variance is 8/r for Gaussian rows, of that sum.

        Args:
            mean: whether the means' part counts.
            covariance: whether the covariances' does; without enough rows today to have an
                inverse, its noise is infinite.
        """
        if not self.width or not (mean or covariance):
            return 0.0
        expected, freedom, heavy = 0.0, 0.0, 1 + self.kurtosis
        if mean:
            expected += (1 - self.shared / self.before) / self.after
            freedom += self.width
        if covariance:
            now, old = self._inflation(self.after), 0.0
            if math.isinf(now):
                return math.inf
            if self.shared:
                old = self.shared / self.after * self._inflation(self.before)
            expected += heavy * (now - old) / 2
            freedom += heavy**2 * self.width * (self.width + 1) / 2
        variance = 2 * freedom * (self._spread / (2 * self.width)) ** 2
        changed = self.before + self.after - 2 * self.shared
        if covariance and changed:
            variance += self.sampling() ** 2 * 8 / (self.width * changed)
        return max(expected, 0.0) + _DEVIATIONS * math.sqrt(variance)

    def gained(self, variances: NDArray[np.float64], kept: slice) -> float:
        """Return what share of variance new directions may hold more than old ones by chance.

        To first order directions i kept and j not, of variances λ, turn by angles θ that gain
        Σ 2θe − θ²|λᵢ − λⱼ|, where e, of variance (1 + κ)v λᵢλⱼ, is what chance adds between them.
        Σθ² is at most m, the lesser number of directions kept and not kept, so that for every μ
        no more can be gained than Σ e²/(|λᵢ − λⱼ| + μ) + μm; the least of these is returned. It
        is too little where few rows make equal variances look apart.

        Args:
            variances: (d,) of all directions, falling.
            kept: which of them the transform keeps.
        """
        inside = variances[kept]
        outside = np.delete(variances, kept)
        total, most = float(variances.sum()), min(len(inside), len(outside))
        if not most or not total > 0:
            return 0.0
        gaps = np.abs(np.subtract.outer(inside, outside))
        squares = (1 + self.kurtosis) * self._spread * np.multiply.outer(inside, outside)
        bounds = [
            float((squares / (gaps + mu)).sum() + mu * most)
            for mu in variances[0] * np.geomspace(1e-8, 1e2, 41)
        ]
        return min(min(bounds) / total, 1.0)

    @property
    def _spread(self) -> float:
        """v, the variance of a difference of means in whitened units."""
        both = 2 * self.shared / (self.before * self.after)
        # Rounding may leave less than nothing.
        return max(1 / self.before + 1 / self.after - both, 0.0)

    def _inflation(self, rows: float) -> float:
        """Return g − 1, by how much too long the inverse of a sample's covariance is."""
        left = rows - self.width - 2
        return (self.width + 1) / left if left > 0 else math.inf


def _kurtosis(moments: Moments) -> float:
    """Return κ ≥ 0 of elliptical rows: E‖c‖⁴ = (1 + κ)(2 tr Σ² + (tr Σ)²); 0 where not known."""
    if moments.quartic is None:
        return 0.0
    covariance = moments.covariance(ddof=0)
    trace = float(np.trace(covariance))
    if not trace > 0:
        return 0.0
    scaled = covariance / trace
    fourth = moments.quartic / moments.count / trace / trace
    found = fourth / (2 * float(np.square(scaled).sum()) + 1) - 1
    return max(found, 0.0) if math.isfinite(found) else 0.0
