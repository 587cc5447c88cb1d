"""A fitted transform, of whatever kind: x̃ = (x − μ) B diag(s), s = variance^(−γ/2).

Whitening-k (Su et al. 2021) has B = U[:, :k] from Σ = UΛUᵀ. γ = 1 is whitening, γ = 0
is PCA, values between are soft. Columns are sorted by eigenvalue, so the whitening of every
smaller k is a slice of one fit.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from safetensors import SafetensorError, safe_open

from whiten_index.artifacts.atomic import replacing, require_path, require_replaceable
from whiten_index.artifacts.files import writing
from whiten_index.artifacts.tensors import content_digest, read_tensors, write_tensors
from whiten_index.errors import ArtifactError, ConfigError, WhiteningError, require_config
from whiten_index.paths import shown
from whiten_index.whitening.moments import Moments
from whiten_index.whitening.shrinkage import empirical_covariance, shrinkage_coefficient
from whiten_index.whitening.spectrum import (
    Real,
    Spectrum,
    least_share,
    numerical_rank,
    real_rows,
    reciprocal,
    unit_rows,
)
from whiten_index.whitening.whitening_config import (
    ESTIMATORS,
    Kind,
    Similarity,
    WhiteningConfig,
    WidthSpec,
    default_width,
    parse_shrinkage,
)

_FILE_KIND, _FORMAT_VERSION = "whitening", 1
_MATRIX_KIND, _MATRIX_VERSION = "affine", 1
# Lengths take squares, which float64 holds up to here.
_LARGEST = 1e150
# Of the variances, whose sum float64 holds too.
_WIDEST = 1e303
_FLAGS = ("center", "normalize_input")
_NUMBERS = ("exponent", "count", "shrinkage", "floor")
_SHAPES = {
    "mean": "d",
    "eigenvalues": "d",
    "basis": "dk",
    "remove_top": "1",
    **dict.fromkeys(_NUMBERS, "1"),
}
_OPTIONAL = {"basis_variances": "k"}


@dataclass(frozen=True, eq=False, kw_only=True)
class Affine:
    """x̃ ≈ x·matrix + bias in float32."""

    matrix: NDArray[np.float32]  # (d, k)
    bias: NDArray[np.float32]  # (k,), −μW
    normalize_input: bool  # whether rows are scaled to unit length first
    similarity: Similarity  # of the vectors; for cosines they are scaled to unit length last

    def save(self, file: Path | str, *, facts: Mapping[str, str] | None = None) -> Path:
        """Write a safetensors file atomically and return its path.

        It has the tensors ``matrix`` and ``bias``; the rest and ``facts`` are metadata.

        Raises:
            ConfigError: the file's ending is not ``.safetensors``, or something else than an
                exported matrix is there.
            StorageError: the file cannot be written.
        """
        own = {"similarity": self.similarity, "normalize_input": str(self.normalize_input).lower()}
        path = require_path(file)
        if path.suffix != ".safetensors":
            raise ConfigError(f"a matrix is exported to a .safetensors file; {path.name} is none")
        require_replaceable(path, _is_matrix, "an exported matrix")
        with writing(path, kept=""), replacing(path) as temporary:
            write_tensors(
                temporary,
                {"matrix": self.matrix, "bias": self.bias},
                kind=_MATRIX_KIND,
                version=_MATRIX_VERSION,
                facts={**(facts or {}), **own},
                seal=True,
            )
        return path


def _is_matrix(path: Path) -> bool:
    try:
        with safe_open(path, framework="numpy") as file:
            return bool((file.metadata() or {}).get("kind") == _MATRIX_KIND)
    except SafetensorError:
        return False


@dataclass(frozen=True, eq=False, kw_only=True)
class Whitening:
    """A fitted transform from d to k dims.

    Attributes:
        kind: which linear map.
        mean: (d,) float64, μ.
        basis: (d, k) float64, B, orthonormal columns.
        eigenvalues: (d,) float64, Λ of the covariance (shrunk, if so asked) in falling order.
        exponent: γ.
        center: whether μ is subtracted.
        normalize_input: whether rows are scaled to unit length first.
        count: rows the moments were taken from.
        basis_variances: (k,) float64, of the data along the columns of the basis, or None if
            those are the eigenvalues after ``remove_top``.
        estimator: empirical, ledoit-wolf, oas or fixed: the source of ``shrinkage``.
        shrinkage: the coefficient ρ of the shrinkage, 0 … 1.
        floor: the share of λ₁ below which directions get weight 0.
        remove_top: number of widest directions dropped.
        similarity: by which vectors are compared, ``cosine`` or ``dot``.
    """

    kind: Kind
    mean: NDArray[np.float64]
    basis: NDArray[np.float64]
    eigenvalues: NDArray[np.float64]
    exponent: float
    center: bool
    normalize_input: bool
    count: float
    basis_variances: NDArray[np.float64] | None = None
    estimator: str = "empirical"
    shrinkage: float = 0.0
    floor: float = 0.0
    remove_top: int = 0
    similarity: Similarity = "cosine"

    def __repr__(self) -> str:
        return (
            f"Whitening({self.kind.value}, {self.dim} to {self.k} dims, exponent {self.exponent:g})"
        )

    @classmethod
    def fit(
        cls, data: Moments | NDArray[np.floating], config: WhiteningConfig | None = None
    ) -> "Whitening":
        """Fit on embeddings, or on their moments if they do not fit into memory.

        Args:
            data: (n, d) embeddings, or their moments. With ``normalize_input`` moments must be
                those of unit vectors; embeddings are normalised here.
            config: kind, k and the other choices; by default whitening.

        Examples:
            >>> embeddings = np.random.default_rng(0).normal(size=(1000, 8))
            >>> Whitening.fit(embeddings, WhiteningConfig(k=4)).apply(embeddings).shape
            (1000, 4)

        Raises:
            WhiteningError: fewer than two rows, constant rows, k above the rank, or sums that
                cannot give the shrinkage.
            ConfigError: k does not fit the width of the embeddings.
        """
        config = config or WhiteningConfig()
        require_config(config, WhiteningConfig)
        moments = _moments_of(data, unit=config.normalize_input)
        dim = moments.dim
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
        basis, variances, top = np.eye(dim), None, 0
        if config.kind.reads_data:
            # PCA, whitening-k (Su et al. 2021), all-but-the-top (Mu and Viswanath 2018).
            top, wish = config.removed(dim), WidthSpec.parse(config.k)
            if config.kind is Kind.ALL_BUT_THE_TOP and config.k is None:
                wish = WidthSpec(full=True)
            values, floor = spectrum.eigenvalues, config.floor or 0.0
            k = resolve_width(wish, values, count=moments.count, floor=floor, remove_top=top)
            basis = np.ascontiguousarray(spectrum.eigenvectors[:, top : top + k])
        elif config.kind is Kind.TRUNCATE:
            # As models of Matryoshka kind order coordinates (Kusupati et al. 2022).
            config.require_dim(dim)
            basis = np.eye(dim, config.width(dim) or dim)
            variances = np.diag(covariance)[: basis.shape[1]].copy()
        fitted = cls(
            kind=config.kind,
            mean=moments.mean,
            basis=basis,
            eigenvalues=spectrum.eigenvalues,
            exponent=config.gamma,
            center=config.centered,
            normalize_input=config.normalize_input,
            count=moments.count,
            basis_variances=variances,
            estimator=parse_shrinkage(config.shrinkage)[0],
            shrinkage=rho,
            floor=config.floor or 0.0,
            remove_top=top,
            similarity=config.similarity,
        )
        if not np.isfinite(fitted.scales()).all():
            raise WhiteningError("the embeddings are too near to 0 for float64; scale them up")
        return fitted

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

    @property
    def variances(self) -> NDArray[np.float64]:
        """Variances (k,) along the columns of the basis."""
        if self.basis_variances is not None:
            return self.basis_variances
        return self.eigenvalues[self.remove_top : self.remove_top + self.k]

    def scales(self) -> NDArray[np.float64]:
        """Return s = variance^(−γ/2), (k,).

        Directions below the rank or the floor get weight 0, never 1/√floor. Kinds that do not
        look at the data weigh 1 throughout.
        """
        variances = self.variances
        if not self.kind.reads_data:
            return np.ones(len(variances))
        live = variances > least_share(self.dim, floor=self.floor) * self.eigenvalues[0]
        scale = np.zeros(len(variances))
        scale[live] = variances[live] ** (-self.exponent / 2)
        return scale

    def matrix(self) -> NDArray[np.float64]:
        """Return W, (d, k) float64, the whole map of centred rows."""
        return self._matrix.copy()

    @cached_property
    def _matrix(self) -> NDArray[np.float64]:
        return self.basis * self.scales()

    def apply(self, embeddings: ArrayLike) -> NDArray[np.float64]:
        """Return x̃ = (x − μ)W for rows (n, d) of any float type: (n, k) float64.

        Raises:
            ConfigError: rows of another width, or with NaN or infinity.
        """
        x = real_rows(embeddings, self.dim, taker="this transform").astype(np.float64)
        # NaN is within no bounds.
        if not (x.min(initial=0.0) >= -_LARGEST and x.max(initial=0.0) <= _LARGEST):
            raise ConfigError(
                f"the embeddings hold NaN or infinity, or a number above {_LARGEST:g}, whose "
                "square is beyond float64; drop or mend those rows first"
            )
        if self.normalize_input:
            x = unit_rows(x)
        if self.center:
            x -= self.mean
        return x @ self._matrix

    def vectors(self, embeddings: ArrayLike) -> NDArray[np.float64]:
        """Return the vectors (n, k) that are compared: ``apply``, for cosines at unit length."""
        return self.compared(self.apply(embeddings))

    def compared(self, rows: NDArray[Real]) -> NDArray[Real]:
        """Return rows (n, m), at unit length if the similarity is the cosine."""
        return unit_rows(rows) if self.similarity == "cosine" else rows

    def inverse(self, vectors: ArrayLike) -> NDArray[np.float64]:
        """Return the embeddings (n, d) within the kept directions that give ``vectors`` (n, k).

        Exact for rows within them, for every kind. For other rows it is the nearest point
        of that span, which goes through μ, or through 0 without centring. A scaling to unit length
        is not undone.
        """
        z = real_rows(vectors, self.k, taker="the inverse", noun="vectors").astype(np.float64)
        x: NDArray[np.float64] = (z * reciprocal(self.scales())) @ self.basis.T
        return x + self.mean if self.center else x

    def truncate(self, k: int) -> "Whitening":
        """Return the same fit with the first ``k`` directions only.

        Raises:
            ConfigError: fewer were fitted.
        """
        if isinstance(k, bool) or not isinstance(k, (int, np.integer)):
            raise ConfigError(f"k is a whole number; {shown(k)} was given")
        if not 1 <= k <= self.k or self.kind is Kind.NONE:
            raise ConfigError(f"a fit of k = {self.k} ({self.kind.value}) cannot be cut to {k}")
        own = self.basis_variances
        return replace(
            self,
            basis=np.ascontiguousarray(self.basis[:, :k]),
            basis_variances=None if own is None else own[:k],
        )

    def export(self) -> Affine:
        """Return one float32 matrix and bias, x̃ ≈ x·matrix + bias.

        Where the mean is long against the spread of the embeddings, float32 loses digits in that
        sum; then subtract μ first, in full precision, and leave the bias out.

        Raises:
            WhiteningError: W does not fit into float32.
        """
        with np.errstate(over="ignore"):
            single = self._matrix.astype(np.float32)
        if not np.isfinite(single).all():
            raise WhiteningError(
                "the matrix is too large for float32, since the embeddings are nearly 0; scale "
                "them up before the fit"
            )
        mean = self.mean if self.center else np.zeros(self.dim)
        # By the rounded matrix: then the rounding of W acts on x − μ only, not on μ.
        bias = -(mean @ single.astype(np.float64))
        return Affine(
            matrix=single,
            bias=bias.astype(np.float32),
            normalize_input=self.normalize_input,
            similarity=self.similarity,
        )

    def choices(self) -> dict[str, Any]:
        """Return the options of the fit, which identify it, without results from the data."""
        shrinks = self.estimator != "empirical"
        optional = {
            "estimator": self.estimator if shrinks else None,
            "shrinkage": self.shrinkage if self.estimator == "fixed" else None,
            "floor": self.floor or None,
            "remove_top": self.remove_top or None,
        }
        return {
            "kind": self.kind.value,
            "dim": self.dim,
            "k": self.k,
            "exponent": self.exponent,
            "center": self.center,
            "normalize_input": self.normalize_input,
            "similarity": self.similarity,
            **{name: value for name, value in optional.items() if value is not None},
        }

    @property
    def digest(self) -> str:
        """Hash of what is stored, 32 hex digits: equal digests give equal vectors.

        It is the same on every machine, and after ``save`` and ``load``.
        """
        names = ("mean", "basis", "eigenvalues", "basis_variances")
        given = {name: getattr(self, name) for name in names}
        arrays = {name: x.astype("<f8") for name, x in given.items() if x is not None}
        choices = json.dumps(self.choices(), sort_keys=True)
        return content_digest(arrays, {"choices": choices})[:32]

    def describe(self) -> dict[str, Any]:
        """Return kind, k, rank, variance kept and the other choices."""
        total = self.eigenvalues.sum()
        kept = min(float(self.variances.sum()) / float(total), 1.0) if total > 0 else 0.0
        shrunk = self.estimator != "empirical"
        return {
            **self.choices(),
            **({"shrinkage": self.shrinkage} if shrunk else {}),
            "rank": self.rank,
            "variance_kept": 1.0 if self.kind is Kind.NONE else kept,
            "rows": self.count,
        }

    def save(self, path: Path | str) -> None:
        """Write a safetensors file: mean, basis, eigenvalues, and the choices as metadata."""
        given = {name: getattr(self, name) for name in (*_SHAPES, *_OPTIONAL)}
        tensors = {name: np.atleast_1d(x) for name, x in given.items() if x is not None}
        facts = {"transform": self.kind.value, "estimator": self.estimator}
        facts["similarity"] = self.similarity
        facts |= {name: str(getattr(self, name)).lower() for name in _FLAGS}
        write_tensors(path, tensors, kind=_FILE_KIND, version=_FORMAT_VERSION, facts=facts)

    @classmethod
    def load(cls, path: Path | str) -> "Whitening":
        """Read what ``save`` wrote.

        Raises:
            ArtifactError: the file is missing, damaged or not a whitening.
        """
        tensors, facts = read_tensors(
            path, kind=_FILE_KIND, version=_FORMAT_VERSION, shapes=_SHAPES, optional=_OPTIONAL
        )
        fields: dict[str, Any] = {name: x.astype(np.float64) for name, x in tensors.items()}
        try:
            fields["kind"] = Kind(facts["transform"])
            fields |= {name: facts[name] for name in ("estimator", "similarity")}
            fields |= {name: {"true": True, "false": False}[facts[name]] for name in _FLAGS}
            fields |= {name: float(tensors[name][0]) for name in _NUMBERS}
            fields["remove_top"] = int(tensors["remove_top"][0])
            known = cls.__dataclass_fields__
            found = cls(**{name: value for name, value in fields.items() if name in known})
            fault = found._fault()
        except (KeyError, ValueError) as error:
            fault = str(error)
        if fault:
            raise ArtifactError(
                f"{path} cannot be read as whitening ({fault}); restore it or build again"
            )
        return found

    def _fault(self) -> str:
        if self.kind is Kind.TRUNCATE and self.basis_variances is None:
            return "it has no basis_variances"
        for name in ("eigenvalues", "basis_variances"):
            found = getattr(self, name)
            if found is not None and not ((found >= 0) & (found <= _WIDEST)).all():
                return f"{name} that are no variances"
        if not 0 <= self.exponent <= 2 or np.abs(self.basis).max(initial=0) > 2:
            return f"exponent {self.exponent:g}, or directions longer than 1"
        if self.estimator not in (*ESTIMATORS, "fixed"):
            return f"estimator {self.estimator}"
        if self.similarity not in get_args(Similarity):
            return f"similarity {self.similarity}"
        dim, kept = self.basis.shape
        if not (kept and 0 <= self.remove_top <= dim - kept):
            return f"remove_top {self.remove_top} and {kept} directions, of {dim}"
        return ""


def resolve_width(
    wish: WidthSpec,
    eigenvalues: NDArray[np.float64],
    *,
    count: float,
    floor: float = 0.0,
    remove_top: int = 0,
) -> int:
    """Return the k wished for of a spectrum (d,) fitted on ``count`` rows.

    At most the directions left: the rank, less ``remove_top``, of eigenvalues above ``floor``
    times the first. A share of the variance is that after ``remove_top``.
    """
    if numerical_rank(eigenvalues) == 0:
        raise WhiteningError(
            f"all {count:g} embeddings are equal, so there is no direction to keep; "
            "check the corpus, or use --whiten none"
        )
    rank, dim = numerical_rank(eigenvalues, floor=floor), len(eigenvalues)
    left = rank - remove_top
    if left < 1:
        raise WhiteningError(
            f"--remove-top {remove_top} leaves none of the {rank} directions of the "
            f"embeddings; use --remove-top {rank - 1} or less"
        )
    if wish.number is not None and wish.number > left:
        why = f"{count:g} rows span no more" if count - 1 <= rank else f"of {dim} dims"
        why += f", --floor {floor:g}" if rank < numerical_rank(eigenvalues) else ""
        why += f", --remove-top {remove_top}" if remove_top else ""
        raise WhiteningError(
            f"k = {wish.number} is above the rank {left} of the embeddings ({why}); "
            f"use --k {left} or less, or --k full"
        )
    if wish.variance is not None:
        rest = eigenvalues[remove_top:]
        shares = np.cumsum(rest) / rest.sum()
        return min(int(np.searchsorted(shares, wish.variance)) + 1, left)
    return left if wish.full else wish.number or min(default_width(dim), left)


def _moments_of(data: Moments | NDArray[np.floating], *, unit: bool) -> Moments:
    if isinstance(data, Moments):
        return data
    rows = real_rows(data, None, taker="a fit", noun="rows")
    return Moments.of(unit_rows(rows) if unit else rows)
