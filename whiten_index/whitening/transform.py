"""Whitening-k: x̃ = (x − μ)W with W = U[:, :k] Λ[:k]^(−γ/2) from Σ = UΛUᵀ (Su et al. 2021).

γ = 1 is whitening, γ = 0 is PCA, values between are soft. Columns are sorted by eigenvalue, so
the whitening of every smaller k is a slice of one fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whiten_index.errors import ArtifactError, ConfigError
from whiten_index.moments import Moments
from whiten_index.tensors import read_tensors, write_tensors
from whiten_index.whitening.spectrum import (
    Spectrum,
    WidthWish,
    condition_number,
    numerical_rank,
    variance_kept,
)

FILE_KIND, FORMAT_VERSION = "whitening", 1
_FLAGS = {"true": True, "false": False}


class Kind(Enum):
    """Which linear map an index applies."""

    NONE = "none"
    PCA = "pca"
    WHITENING = "whitening"


@dataclass(frozen=True, kw_only=True)
class WhiteningConfig:
    """What a user asks of the transform.

    Attributes:
        kind: none, pca or whitening.
        k: kept width: a number, ``full``, a share of variance, or None for the default.
        exponent: γ; None is what the kind says (1 for whitening, 0 for pca).
        center: subtract the mean; the directions are those of the centred data either way.
        normalize_input: fit on, and apply to, embeddings of unit length.
    """

    kind: Kind = Kind.WHITENING
    k: str | int | float | None = None
    exponent: float | None = None
    center: bool = True
    normalize_input: bool = False

    def __post_init__(self) -> None:
        wish = WidthWish.parse(self.k)
        if self.kind is Kind.NONE:
            asked = [
                name
                for name, given in (
                    ("--k", self.k is not None and not wish.full),
                    ("--exponent", self.exponent is not None),
                    ("--no-center", not self.center),
                    ("--normalize-input", self.normalize_input),
                )
                if given
            ]
            if asked:
                raise ConfigError(
                    f"--whiten none keeps every embedding as it is, so {' and '.join(asked)} "
                    "cannot apply; leave it out, or use --whiten pca"
                )
        if self.kind is Kind.PCA and self.exponent not in (None, 0):
            raise ConfigError(
                f"PCA has exponent 0; for exponent {self.exponent:g} use --whiten whitening"
            )
        if self.exponent is not None and not 0 <= self.exponent <= 2:
            raise ConfigError(
                f"--exponent {self.exponent:g} is outside 0 (PCA) to 2; 1 is whitening"
            )

    @property
    def gamma(self) -> float:
        """The exponent γ, settled."""
        if self.exponent is not None:
            return float(self.exponent)
        return 1.0 if self.kind is Kind.WHITENING else 0.0


@dataclass(frozen=True, eq=False, kw_only=True)
class Whitening:
    """A fitted transform from d to k dims.

    Attributes:
        kind: none, pca or whitening.
        mean: (d,) float64, μ.
        basis: (d, k) float64, U[:, :k], orthonormal columns.
        eigenvalues: (d,) float64, Λ in falling order.
        exponent: γ.
        center: whether μ is subtracted.
        normalize_input: whether rows are scaled to unit length first.
        count: rows the moments were taken from.
    """

    kind: Kind
    mean: NDArray[np.float64]
    basis: NDArray[np.float64]
    eigenvalues: NDArray[np.float64]
    exponent: float
    center: bool
    normalize_input: bool
    count: float

    @classmethod
    def fit(cls, moments: Moments, config: WhiteningConfig | None = None) -> Whitening:
        """Fit on moments; with ``normalize_input`` they must be those of unit vectors.

        Raises:
            WhiteningError: fewer than two rows, constant rows, or k above the rank.
        """
        config = config or WhiteningConfig()
        none = config.kind is Kind.NONE
        covariance = moments.covariance(ddof=0 if none else 1)
        if np.trace(covariance) <= (moments.dim * np.finfo(float).eps) ** 2 * np.sum(
            moments.mean**2
        ):
            # Equal rows: what is left is the rounding of the mean, and no direction.
            covariance = np.zeros_like(covariance)
        spectrum = Spectrum.of(covariance)
        if none:
            basis = np.eye(moments.dim)
        else:
            wish = WidthWish.parse(config.k)
            k = wish.resolve(spectrum.eigenvalues, count=moments.count)
            basis = spectrum.eigenvectors[:, :k]
        return cls(
            kind=config.kind,
            mean=moments.mean,
            basis=np.ascontiguousarray(basis),
            eigenvalues=spectrum.eigenvalues,
            exponent=config.gamma,
            center=config.center and not none,
            normalize_input=config.normalize_input,
            count=moments.count,
        )

    @property
    def dim(self) -> int:
        """Width d of what goes in."""
        return int(self.basis.shape[0])

    @property
    def k(self) -> int:
        """Width of what comes out."""
        return int(self.basis.shape[1])

    @property
    def rank(self) -> int:
        """Numerical rank of the covariance."""
        return numerical_rank(self.eigenvalues)

    def scales(self) -> NDArray[np.float64]:
        """Return Λ[:k]^(−γ/2), (k,); directions below the rank get weight 0, never 1/√floor."""
        if self.kind is Kind.NONE:
            return np.ones(self.k)
        scale = np.zeros(self.k)
        usable = min(self.k, self.rank)
        scale[:usable] = self.eigenvalues[:usable] ** (-self.exponent / 2)
        return scale

    def matrix(self) -> NDArray[np.float64]:
        """Return W, (d, k) float64."""
        return self.basis * self.scales()

    def apply(self, embeddings: ArrayLike) -> NDArray[np.float64]:
        """Return x̃ = (x − μ)W for rows (n, d) of any float type: (n, k) float64.

        Raises:
            ConfigError: rows of another width, or with NaN or infinity.
        """
        x = np.array(embeddings, dtype=np.float64)
        if x.ndim != 2 or x.shape[1] != self.dim:
            raise ConfigError(
                f"this whitening takes (n, {self.dim}) embeddings; these have shape {x.shape}"
            )
        if not np.isfinite(x).all():
            raise ConfigError("the embeddings hold NaN or infinity; drop or mend those rows first")
        if self.normalize_input:
            x = unit_rows(x)
        if self.center:
            x -= self.mean
        return x @ self.matrix()

    def inverse(self, vectors: ArrayLike) -> NDArray[np.float64]:
        """Return the embeddings (n, d) nearest to what gave ``vectors`` (n, k).

        Exact within the kept directions; a scaling to unit length is not undone.
        """
        z = np.asarray(vectors, dtype=np.float64)
        if z.ndim != 2 or z.shape[1] != self.k:
            raise ConfigError(f"this whitening gives (n, {self.k}) vectors; got shape {z.shape}")
        scale = self.scales()
        undo = np.divide(1.0, scale, out=np.zeros_like(scale), where=scale > 0)
        x: NDArray[np.float64] = (z * undo) @ self.basis.T
        return x + self.mean if self.center else x

    def rounding_cosine(self, *, relative_error: float) -> float:
        """Return the cosine to expect when each coordinate was kept with a relative error.

        The error of a coordinate spreads over the directions by their loadings and is scaled as
        they are, so narrow directions suffer most.

        Args:
            relative_error: root mean square, such as 2e-4 for float16.
        """
        # What the dropped directions add to each coordinate is known on average only.
        dropped = float(self.eigenvalues[self.k :].sum()) / self.dim
        variance = np.square(self.basis) @ self.eigenvalues[: self.k] + dropped
        noise = relative_error**2 * (variance + self.mean**2)
        scales = np.square(self.scales())
        signal = float(scales @ self.eigenvalues[: self.k])
        spread = float(scales @ (np.square(self.basis).T @ noise))
        return 1 / math.sqrt(1 + spread / signal) if signal > 0 else 1.0

    def truncate(self, k: int) -> Whitening:
        """Return the same fit with the first ``k`` directions only."""
        if not 1 <= k <= self.k or self.kind is Kind.NONE:
            raise ConfigError(f"a fit of k = {self.k} ({self.kind.value}) cannot be cut to {k}")
        return replace(self, basis=np.ascontiguousarray(self.basis[:, :k]))

    def describe(self) -> dict[str, Any]:
        """Return the facts a user asks for: kind, k, rank, condition number, variance kept."""
        kept = 1.0 if self.kind is Kind.NONE else variance_kept(self.eigenvalues, self.k)
        return {
            "kind": self.kind.value,
            "dim": self.dim,
            "k": self.k,
            "exponent": self.exponent,
            "center": self.center,
            "normalize_input": self.normalize_input,
            "rank": self.rank,
            "condition_number": condition_number(self.eigenvalues) if self.rank else None,
            "variance_kept": kept,
            "rows": self.count,
        }

    def save(self, path: Path | str) -> None:
        """Write a safetensors file: mean, basis, eigenvalues, and the choices as metadata."""
        tensors = {
            "mean": self.mean,
            "basis": self.basis,
            "eigenvalues": self.eigenvalues,
            "exponent": np.array([self.exponent]),
            "count": np.array([self.count]),
        }
        facts = {
            "transform": self.kind.value,
            "center": str(self.center).lower(),
            "normalize_input": str(self.normalize_input).lower(),
        }
        write_tensors(path, tensors, kind=FILE_KIND, version=FORMAT_VERSION, facts=facts)

    @classmethod
    def load(cls, path: Path | str) -> Whitening:
        """Read what ``save`` wrote.

        Raises:
            ArtifactError: the file is missing, damaged or not a whitening.
        """
        shapes = {"mean": "d", "eigenvalues": "d", "basis": "dk", "exponent": "1", "count": "1"}
        tensors, facts = read_tensors(path, kind=FILE_KIND, version=FORMAT_VERSION, shapes=shapes)
        try:
            kind = Kind(facts["transform"])
            center, normalize = (_FLAGS[facts[name]] for name in ("center", "normalize_input"))
        except (KeyError, ValueError) as error:
            raise ArtifactError(
                f"{path} cannot be read as a whitening ({error}); restore it or build again"
            ) from error
        return cls(
            kind=kind,
            mean=tensors["mean"],
            basis=tensors["basis"],
            eigenvalues=tensors["eigenvalues"],
            exponent=float(tensors["exponent"][0]),
            center=center,
            normalize_input=normalize,
            count=float(tensors["count"][0]),
        )


def unit_rows(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scale rows (n, d) to unit length; rows of zeros stay as they are."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    scaled: NDArray[np.float64] = np.divide(rows, norms, out=np.zeros_like(rows), where=norms > 0)
    return scaled
