"""The directions of each kind: from a covariance to B and p in x̃ = ((x − μ)∘p) B diag(s) [Bᵀ]."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whiten_index.errors import WhiteningError
from whiten_index.whitening.covariance import (
    empirical_covariance,
    shrink,
    shrinkage_coefficient,
)
from whiten_index.whitening.moments import Moments
from whiten_index.whitening.spectrum import (
    Spectrum,
    WidthWish,
    least_share,
    numerical_rank,
    require_directions,
)
from whiten_index.whitening.whitening_config import Kind, WhiteningConfig


@dataclass(frozen=True, eq=False)
class Directions:
    """Result of a kind of transform on a covariance.

    Attributes:
        basis: (d, r) float64, B, orthonormal columns.
        variances: (r,) float64, of the data along the columns; None where they are the
            eigenvalues of the covariance after ``remove_top``.
        coordinate_scale: (d,) float64, p, or None for ones.
        remove_top: how many of the first eigenvectors are left out.
    """

    basis: NDArray[np.float64]
    variances: NDArray[np.float64] | None = None
    coordinate_scale: NDArray[np.float64] | None = None
    remove_top: int = 0


@dataclass(frozen=True, eq=False)
class Fit:
    """Input of the search for directions.

    Attributes:
        config: what was asked.
        covariance: (d, d) float64, shrunk if that was asked.
        spectrum: its eigenvalues and eigenvectors.
        shrinkage: the coefficient it was shrunk by.
        count: rows it was taken from.
    """

    config: WhiteningConfig
    covariance: NDArray[np.float64]
    spectrum: Spectrum
    shrinkage: float
    count: float

    @classmethod
    def prepare(cls, moments: Moments, config: WhiteningConfig) -> Fit:
        """Decompose the covariance; kinds that do not read the data need one row.

        Raises:
            WhiteningError: too few rows, or sums that cannot give the shrinkage.
        """
        try:
            covariance = empirical_covariance(moments, ddof=int(config.kind.reads_data))
        except WhiteningError as error:
            if 0 < moments.count <= 1:
                raise WhiteningError(f"{error}, or use --whiten none") from error
            raise
        rho = shrinkage_coefficient(moments, config.shrinkage)
        # The eigenvectors are those of the empirical covariance: shrunk to near the identity it
        # would no longer distinguish them.
        spectrum = Spectrum.of(covariance).shrunk(rho)
        return cls(config, shrink(covariance, rho), spectrum, rho, moments.count)

    @property
    def dim(self) -> int:
        """Width d."""
        return len(self.covariance)

    @property
    def floor(self) -> float:
        """The configured floor, 0 without one."""
        return self.config.floor or 0.0


def find_directions(fit: Fit) -> Directions:
    """Return the directions of the configured kind.

    Raises:
        ConfigError: embeddings of this width can never give what was asked.
        WhiteningError: these data cannot.
    """
    return _FINDERS[fit.config.kind](fit)


def _identity(fit: Fit) -> Directions:
    return Directions(np.eye(fit.dim))


def _leading(fit: Fit) -> Directions:
    """PCA, whitening-k (Su et al. 2021), all-but-the-top (Mu and Viswanath 2018)."""
    config, values = fit.config, fit.spectrum.eigenvalues
    top, wish = config.removed(fit.dim), WidthWish.parse(config.k)
    if config.kind is Kind.ALL_BUT_THE_TOP and config.k is None:
        wish = WidthWish(full=True)
    k = wish.resolve(values, count=fit.count, floor=fit.floor, remove_top=top)
    basis = np.ascontiguousarray(fit.spectrum.eigenvectors[:, top : top + k])
    return Directions(basis, remove_top=top)


def _zca(fit: Fit) -> Directions:
    """Σ^(−γ/2): of all whitenings the one nearest to the data (Kessy, Lewin, Strimmer 2018)."""
    fit.config.require_dim(fit.dim)
    require_directions(fit.spectrum.eigenvalues, count=fit.count)
    rank = numerical_rank(fit.spectrum.eigenvalues, floor=fit.floor)
    return Directions(np.ascontiguousarray(fit.spectrum.eigenvectors[:, :rank]))


def _zca_cor(fit: Fit) -> Directions:
    """V^(−1/2) P^(−γ/2), P the correlation matrix (Kessy, Lewin, Strimmer 2018).

    A coordinate that is constant against the widest one, as numerical rank counts, gets weight 0:
    the rest is noise, which the scaling would raise to the size of the others.
    """
    fit.config.require_dim(fit.dim)
    require_directions(fit.spectrum.eigenvalues, count=fit.count)
    variance = np.diag(fit.covariance)
    live = variance > least_share(fit.dim) * variance.max()
    scale = np.zeros(fit.dim)
    scale[live] = variance[live] ** -0.5
    correlation = fit.covariance * scale * scale[:, None]
    spectrum = Spectrum.of(correlation)
    rank = numerical_rank(spectrum.eigenvalues, floor=fit.floor)
    basis = np.ascontiguousarray(spectrum.eigenvectors[:, :rank])
    return Directions(basis, spectrum.eigenvalues[:rank], scale)


def _group(fit: Fit) -> Directions:
    """ZCA of each group of channels: H = P⁻¹ blockdiag(W₁ … W_G) P (Zhuo et al. 2023).

    The floor is against λ₁ of all channels, so that a group of constant ones stays 0.
    """
    fit.config.require_dim(fit.dim)
    require_directions(fit.spectrum.eigenvalues, count=fit.count)
    size, order = fit.config.channels(fit.dim), np.arange(fit.dim)
    if fit.config.shuffle:
        order = np.random.default_rng(fit.config.seed).permutation(fit.dim)
    basis, variances = np.zeros((fit.dim, fit.dim)), np.zeros(fit.dim)
    for start in range(0, fit.dim, size):
        channels, columns = order[start : start + size], slice(start, start + size)
        block = Spectrum.of(fit.covariance[np.ix_(channels, channels)])
        basis[channels, columns] = block.eigenvectors
        variances[columns] = block.eigenvalues
    least = least_share(fit.dim, floor=fit.floor) * fit.spectrum.eigenvalues[0]
    live = variances > least
    return Directions(np.ascontiguousarray(basis[:, live]), variances[live])


def _random(fit: Fit) -> Directions:
    """Directions drawn evenly over all: Q of a Gaussian matrix, signs fixed (Mezzadri 2007)."""
    k = _blind_width(fit)
    # One direction after the other, so that fewer are the first of more.
    gaussian = np.random.default_rng(fit.config.seed).standard_normal((k, fit.dim)).T
    q, r = np.linalg.qr(gaussian)
    return _blind(fit, np.ascontiguousarray(q * np.sign(np.diag(r))))


def _truncate(fit: Fit) -> Directions:
    return _blind(fit, np.eye(fit.dim, _blind_width(fit)))


def _blind_width(fit: Fit) -> int:
    fit.config.require_dim(fit.dim)
    return fit.config.width(fit.dim) or fit.dim


def _blind(fit: Fit, basis: NDArray[np.float64]) -> Directions:
    variances = np.einsum("dk,dk->k", basis, fit.covariance @ basis)
    return Directions(basis, np.maximum(variances, 0.0))


_FINDERS: dict[Kind, Callable[[Fit], Directions]] = {
    Kind.NONE: _identity,
    Kind.PCA: _leading,
    Kind.WHITENING: _leading,
    Kind.ZCA: _zca,
    Kind.ZCA_COR: _zca_cor,
    Kind.GROUP: _group,
    Kind.ALL_BUT_THE_TOP: _leading,
    Kind.RANDOM: _random,
    Kind.TRUNCATE: _truncate,
}
