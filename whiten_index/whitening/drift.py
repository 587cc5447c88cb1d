"""Drift between today's rows and those that a transform was fitted on.

All is measured along the directions that the transform keeps, each scaled to variance 1 on the
rows of the fit, whatever the exponent: W₁ with W₁ᵀ Σ_fit W₁ = I. Figures of PCA, soft and full
whitening over the same directions are therefore the same. With shrinkage both covariances are
shrunk by the coefficient of the fit. Kinds that read no data are measured along the widest k
directions of the fit's rows.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from whiten_index.whitening.moments import Moments
from whiten_index.whitening.shrinkage import empirical_covariance, shrink
from whiten_index.whitening.spectrum import Spectrum, least_share, numerical_rank
from whiten_index.whitening.transform import Whitening

# Nats a kept dimension beyond chance above which a transform is fitted again: of Wikinews with
# Wikipedia added, a tenth of the nearest neighbours by full whitening, k = 128, are then others.
# The default of --drift-threshold (pipeline/update_config.py), which loads no numpy.
DRIFT_THRESHOLD = 0.002
# Share of the variance that the kept directions may miss more of than they did at the fit.
_VARIANCE_THRESHOLD = 0.05
# A variance along a kept direction is never taken to be below this share of the fit's.
_LEAST_VARIANCE = 1e-10
# Chance is given this many of its standard deviations before it is called drift.
_DEVIATIONS = 3.0
_FIGURES = (
    "mean_shift", "kl_per_dim", "kl_mean_per_dim", "kl_covariance_per_dim",
    "kl_of_refit", "sampling_kl", "noise_kl", "variance_kept_at_fit", "variance_kept",
    "variance_possible", "variance_lost", "noise_variance",
)  # fmt: skip

_Array = NDArray[np.float64]
Order = Literal["auto", "always", "never"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Drift:
    """Today's rows against those of the fit, along the r directions that are kept."""

    rows_fitted: float  # rows of the fit
    rows_today: float  # rows of today
    rows_shared: float  # rows known to be in both
    mean_shift: float  # ‖(μ_today − μ_fit)ᵀ W₁‖, in standard deviations of the fit's rows
    eigenvalues: _Array  # (r,) float64, rising, of W₁ᵀ Σ_today W₁; all are 1 without drift
    kl_mean_per_dim: float  # part of the means in `kl_per_dim`, in nats
    kl_covariance_per_dim: float  # part of the covariances in it
    variance_kept_at_fit: float  # share of the fit's variance along the kept directions
    variance_kept: float  # share of today's variance along them
    variance_possible_at_fit: float  # share that the same number of the fit's widest ones hold
    variance_possible: float  # share that the same number of today's widest ones would hold
    sampling_kl: float  # KL a dimension that chance alone shows
    # Drift that may be noise of today's rows, which a refit would only take over; infinite if
    # today's rows are too few.
    noise_kl: float
    noise_variance: float  # part of `variance_lost` that chance alone may show
    reads_covariance: bool  # whether the covariance of the data moves the transform
    reads_mean: bool  # whether the mean does

    @classmethod
    def measure(
        cls, whitening: Whitening, fitted: Moments, today: Moments, *, shared: float | None = None
    ) -> "Drift":
        """Measure the drift between two moments, of unit rows if the transform takes such.

        With e the eigenvalues and δ the shift in whitened units, the divergence of the two
        Gaussians on the r kept directions is

            KL(today ‖ fit) = ½ ‖δ‖² + ½ Σ (e − 1 − ln e)   (Kullback 1959, ch. 9).

        ``shared`` rows are in both; 0, if unknown, gives chance the most room.
        """
        shared = shared or 0.0
        then, now = _covariance(fitted), _covariance(today)
        w1 = _reference(whitening, then)
        turned = w1.T @ shrink(now, whitening.shrinkage) @ w1
        variances = np.asarray(np.linalg.eigvalsh((turned + turned.T) / 2), dtype=np.float64)
        shift = (today.mean - fitted.mean) @ w1
        bounded = np.maximum(variances, _LEAST_VARIANCE)
        k = max(len(variances), 1)
        kept = slice(whitening.remove_top, whitening.remove_top + len(variances))
        centred, reads = whitening.center, whitening.kind.reads_data
        noise = SamplingNoise(fitted.count, today.count, shared, len(variances), _kurtosis(fitted))
        return cls(
            rows_fitted=fitted.count,
            rows_today=today.count,
            rows_shared=shared,
            mean_shift=float(np.linalg.norm(shift)),
            eigenvalues=variances,
            kl_mean_per_dim=float(shift @ shift) / 2 / k,
            kl_covariance_per_dim=float((bounded - 1 - np.log(bounded)).sum()) / 2 / k,
            **_variances_kept(w1, then, now, kept),
            sampling_kl=noise.sampling(),
            noise_kl=noise.remaining(mean=centred, covariance=reads),
            noise_variance=noise.variance_gained(_falling(then), kept),
            reads_covariance=reads,
            reads_mean=centred,
        )

    @property
    def k(self) -> int:
        """Number of directions compared."""
        return len(self.eigenvalues)

    @property
    def kl_per_dim(self) -> float:
        """KL(N_today ‖ N_fit)/k, in nats."""
        return self.kl_mean_per_dim + self.kl_covariance_per_dim

    @property
    def kl_of_refit(self) -> float:
        """Part of ``kl_per_dim`` that a refit takes back.

        The means count if the transform subtracts one, the covariances if it reads any.
        """
        return (self.kl_mean_per_dim if self.reads_mean else 0.0) + (
            self.kl_covariance_per_dim if self.reads_covariance else 0.0
        )

    @property
    def variance_lost(self) -> float:
        """Loss of variance kept, against the possible share, since the fit."""
        today = self.variance_possible - self.variance_kept
        return abs(today - (self.variance_possible_at_fit - self.variance_kept_at_fit))

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values, numbers in 6 digits, infinities as ``None``."""
        values = self.eigenvalues if self.k else np.ones(1)
        least, median, most = float(values[0]), float(np.median(values)), float(values[-1])
        return {
            "rows_fitted": self.rows_fitted,
            "rows_today": self.rows_today,
            "rows_shared": self.rows_shared,
            "dims": self.k,
            "eigenvalues": {"least": _short(least), "median": _short(median), "most": _short(most)},
            **{name: _short(getattr(self, name)) for name in _FIGURES},
        }


def _covariance(moments: Moments) -> _Array:
    """Return Σ (d, d), which is 0 for a single row."""
    return empirical_covariance(moments, ddof=1 if moments.count > 1 else 0)


def _reference(whitening: Whitening, fitted: _Array) -> _Array:
    """Return W₁ (d, r): the span of the kept directions, of covariance I on the fit's rows."""
    # The KL of two Gaussians is the same for every basis of that span, so that any W₁ will do; if
    # the kept directions are eigenvectors it is U Λ^(−1/2) itself.
    shrunk = shrink(fitted, whitening.shrinkage)
    if not whitening.kind.reads_data:
        spectrum = Spectrum.of(shrunk)
        live = min(whitening.k, numerical_rank(spectrum.eigenvalues))
        return spectrum.eigenvectors[:, :live] * spectrum.eigenvalues[:live] ** -0.5
    live_columns = whitening.scales() > 0
    scaled = whitening.basis[:, live_columns] * whitening.variances[live_columns] ** -0.5
    return _whitened(scaled, shrunk)


def _whitened(basis: _Array, covariance: _Array) -> _Array:
    """Return independent columns (d, r) of covariance I with the span of ``basis``."""
    inside = basis.T @ covariance @ basis
    values, vectors = np.linalg.eigh((inside + inside.T) / 2)
    if not len(values) or values[-1] <= 0:
        return basis[:, :0]
    # The rounding of Σ, at most ε tr Σ, grows as the narrowest direction is scaled.
    scaling = float(np.square(basis).sum(axis=0).max())
    rounding = float(np.finfo(np.float64).eps) * float(np.trace(covariance)) * scaling
    live = values > max(least_share(len(covariance)) * values[-1], rounding)
    turned: _Array = basis @ (vectors[:, live] * values[live] ** -0.5)
    return turned


def _variances_kept(w1: _Array, fitted: _Array, today: _Array, kept: slice) -> dict[str, float]:
    """Return the shares of variance that the span of W₁ holds, and the most it could."""
    found: dict[str, float] = {}
    inside, _ = np.linalg.qr(w1)
    for when, covariance in (("_at_fit", fitted), ("", today)):
        total = float(np.trace(covariance)) or 1.0
        amounts = {
            "variance_kept": float(np.einsum("dr,dr->", inside, covariance @ inside)),
            "variance_possible": float(_falling(covariance)[kept].sum()),
        }
        for name, amount in amounts.items():
            found[name + when] = min(max(amount / total, 0.0), 1.0)
    return found


def _falling(covariance: _Array) -> _Array:
    falling: _Array = np.maximum(np.linalg.eigvalsh(covariance)[::-1], 0.0)
    return falling


def _short(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


@dataclass(frozen=True)
class SamplingNoise:
    """Sampling noise of the drift between two samples of one population.

    n_f and n_t rows, n_s of them the same, are compared along r whitened dimensions. A difference
    of their means has variance v = 1/n_f + 1/n_t − 2n_s/(n_f n_t) in each, one of their covariances
    (1 + κ)v off the diagonal and (2 + 3κ)v on it: Muirhead 1982, "Aspects of multivariate
    statistical theory", ch. 1, for elliptical rows of kurtosis κ, which is 0 for Gaussian ones.
    """

    before: float  # n_f
    after: float  # n_t
    shared: float  # n_s
    width: int  # r
    kurtosis: float  # κ

    def sampling(self) -> float:
        """Return the KL a dimension to expect: v/2 + v[(1 + κ)(r + 1) + κ]/4.

        To second order the KL is half the square of the difference of the means and a quarter of
        that of the covariances. For Gaussian rows it is v(r + 3)/4, as of Wilks' χ² (1938).
        """
        if not self.width:
            return 0.0
        heavy = 1 + self.kurtosis
        return self._spread * (0.5 + (heavy * (self.width + 1) + self.kurtosis) / 4)

    def remaining(self, *, mean: bool, covariance: bool) -> float:
        """Return the KL a dimension that a refit would only take over, not mend.

        A fit on few rows is far off by chance, and a refit on many mends that: such drift is not
        noise. In expectation a refit comes nearer to the population than the fit is by the
        measured KL less (1/n_t)(1 − n_s/n_f) of the means and

            ½[(g_t − 1) − (n_s/n_t)(g_f − 1)],   g = (n − 1)/(n − r − 2),

        of the covariances, (1 + κ)-fold; r g is E tr S⁻¹ of the covariance S of Gaussian rows
        (Muirhead 1982, ch. 3). For samples without a common row that is about (r + 3)/(2n_t), and
        0 if rows were only added. Three standard deviations are added: of the χ², and, since
        the covariances differ by the sum of ‖x‖⁴ over the c rows that came or went, whose relative
        variance is 8/r for Gaussian rows, of that sum.

        Without enough rows today for the covariance to have an inverse, its noise is infinite.
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

    def variance_gained(self, variances: _Array, kept: slice) -> float:
        """Return the share of variance that new directions may gain over old ones by chance.

        To first order directions i kept and j not, of variances λ, turn by angles θ that gain
        Σ 2θe − θ²|λᵢ − λⱼ|, where e, of variance (1 + κ)v λᵢλⱼ, is what chance adds between them.
        Σθ² is at most m, the lesser number of directions kept and not kept, so that for every μ
        no more can be gained than Σ e²/(|λᵢ − λⱼ| + μ) + μm; the least of these is returned. It
        is too little if few rows make equal variances look apart.

        ``variances`` (d,) are of all directions, falling, of which ``kept`` are the transform's.
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
        both = 2 * self.shared / (self.before * self.after)
        # Rounding may leave less than nothing.
        return max(1 / self.before + 1 / self.after - both, 0.0)

    def _inflation(self, rows: float) -> float:
        """Return g − 1, the excess length of the inverse of a sample's covariance."""
        left = rows - self.width - 2
        return (self.width + 1) / left if left > 0 else math.inf


def _kurtosis(moments: Moments) -> float:
    """Return κ ≥ 0 of elliptical rows: E‖c‖⁴ = (1 + κ)(2 tr Σ² + (tr Σ)²); 0 if unknown."""
    if moments.quartic is None:
        return 0.0
    covariance = moments.covariance(ddof=0)
    trace = float(np.trace(covariance))
    if not trace > 0:
        return 0.0
    scaled = covariance / trace
    fourth = moments.quartic / moments.count / trace / trace
    found = fourth / (2 * float(np.square(scaled).sum()) + 1) - 1
    # Σ‖c‖⁴ ≤ (Σ‖c‖²)², whatever a damaged file says.
    return min(max(found, 0.0), moments.count) if math.isfinite(found) else 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision whether a transform is kept or fitted again."""

    whitening: Literal["keep", "refit"]  # `keep` or `refit`
    why: str  # one sentence with the figure and the threshold
    threshold: float  # nats a dimension it was decided by


def decide(drift: Drift, *, threshold: float = DRIFT_THRESHOLD, order: Order = "auto") -> Decision:
    """Decide whether a transform is kept or fitted again.

    It is fitted again if ``kl_of_refit`` is above ``threshold`` and ``noise_kl`` together, or
    if the kept directions miss more of the variance than at the fit, by more than 5 % and
    ``noise_variance``: new topics may need directions that the transform drops.
    """
    figure = f"the drift is {drift.kl_of_refit:.4g} nats a dimension"
    room = f"{threshold + drift.noise_kl:.4g} ({threshold:g}, and the rest is sampling noise)"
    lost = drift.variance_lost
    refits = False
    if order != "auto":
        refits = order == "always"
        why = f"--refit {order} was given ({figure}, the threshold {threshold:g})"
    elif not (drift.reads_covariance or drift.reads_mean):
        why = "this kind of transform reads no data, so a refit would give the same one"
    elif math.isinf(drift.noise_kl):
        why = (
            f"{drift.rows_today:g} rows are too few to tell {drift.k} dimensions by, so a refit "
            f"would fit chance ({figure}, the threshold {threshold:g})"
        )
    elif drift.kl_of_refit > threshold + drift.noise_kl:
        refits, why = True, f"{figure}, above the threshold of {room}"
    elif drift.reads_covariance and lost > _VARIANCE_THRESHOLD + drift.noise_variance:
        refits = True
        why = (
            f"the directions kept miss {lost:.1%} more of the variance than at the fit, above "
            f"{_VARIANCE_THRESHOLD:.0%} (they hold {drift.variance_kept:.1%} of today's, "
            f"and as many new ones would hold {drift.variance_possible:.1%})"
        )
    else:
        why = f"{figure}, not above the threshold of {room}"
    return Decision("refit" if refits else "keep", why, threshold)
