"""Eigenvalues, rank, and the width k. numpy only."""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whiten_index.errors import ConfigError

_LEAST_RELATIVE = 1e-10
_TIE = 1e-6
Real = TypeVar("Real", np.float32, np.float64)


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Σ = UΛUᵀ, eigenvalues in falling order."""

    # (d,) float64, falling; values that rounding made negative are 0.
    eigenvalues: NDArray[np.float64]
    eigenvectors: NDArray[np.float64]  # (d, d) float64, one a column, of fixed sign

    @classmethod
    def of(cls, covariance: NDArray[np.float64]) -> "Spectrum":
        """Decompose a symmetric matrix (d, d).

        The sign of each eigenvector makes its entry of largest magnitude positive, the first of
        several, so that two fits of the same data agree.
        """
        values, vectors = np.linalg.eigh(covariance)
        values, vectors = np.maximum(values[::-1], 0.0), vectors[:, ::-1]
        # Entries that tie but for rounding must not decide the sign by their last digit.
        magnitudes = np.abs(vectors)
        largest = (magnitudes >= (1 - _TIE) * magnitudes.max(axis=0)).argmax(axis=0)
        signs = np.sign(vectors[largest, np.arange(len(largest))])
        return cls(values, np.ascontiguousarray(vectors * signs))

    def shrunk(self, coefficient: float) -> "Spectrum":
        """Return the spectrum of (1 − ρ)Σ + ρ (tr Σ / d) I."""
        if not coefficient:
            return self
        target = coefficient * self.eigenvalues.mean()
        return Spectrum((1 - coefficient) * self.eigenvalues + target, self.eigenvectors)

    @property
    def rank(self) -> int:
        """Numerical rank."""
        return numerical_rank(self.eigenvalues)


def least_share(dim: int, *, floor: float = 0.0) -> float:
    """Return the share of λ₁ up to which a variance counts as none: max(d·ε, 1e-10, floor).

    An eigenvalue in float64 is off by about ε·λ₁, whatever its own size.
    """
    return max(dim * float(np.finfo(np.float64).eps), _LEAST_RELATIVE, floor)


def numerical_rank(eigenvalues: NDArray[np.float64], *, floor: float = 0.0) -> int:
    """Count the eigenvalues (d,), falling, above max(d·ε, 1e-10, floor) times the first."""
    least = least_share(len(eigenvalues), floor=floor) * eigenvalues[0]
    return int((eigenvalues > least).sum()) if eigenvalues[0] > 0 else 0


def variance_kept(eigenvalues: NDArray[np.float64], k: int) -> float:
    """Return the share of the total variance that the first k directions hold."""
    total = float(eigenvalues.sum())
    return float(eigenvalues[:k].sum()) / total if total > 0 else 0.0


def real_rows(
    given: ArrayLike, width: int | None, *, taker: str, noun: str = "raw embeddings"
) -> NDArray[np.floating]:
    """Return rows (n, d) that a caller passed: floats as they are, other numbers as float64.

    Raises:
        ConfigError: another width, or not what numpy would make numbers of by force: complex
            numbers, dates, texts of digits, numbers behind a mask.
    """
    shape = f"(n, {'d' if width is None else width})"
    try:
        rows = np.asarray(given)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(f"{noun} are {shape} numbers ({error})") from error
    if rows.dtype.kind not in "fiub" or np.ma.is_masked(given):
        kind = "masked" if np.ma.is_masked(given) else f"of type {rows.dtype}"
        raise ConfigError(
            f"{noun} are {shape} numbers, and these are {kind}; convert them to float32"
        )
    if rows.ndim != 2 or (width is not None and rows.shape[1] != width):
        form = ", one a row and not reduced" if noun.startswith("raw") else ""
        raise ConfigError(f"{taker} takes {shape} {noun}{form}; these have shape {rows.shape}")
    return rows if rows.dtype.kind == "f" else rows.astype(np.float64)


def unit_rows(rows: NDArray[Real]) -> NDArray[Real]:
    """Scale rows (n, d) to unit length; rows of zeros stay as they are.

    Those of float16 become float32. Squares are summed in float64, as they may be infinite.
    """
    rows = rows.astype(np.promote_types(rows.dtype, np.float32), copy=False)
    squares = np.einsum("nd,nd->n", rows, rows, dtype=np.float64, casting="same_kind")
    norms, scaled = np.sqrt(squares)[:, None], np.zeros_like(rows)
    np.divide(rows, norms, out=scaled, where=norms != 0, casting="same_kind")
    return scaled


def reciprocal(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return 1/values, and 0 where a value is 0."""
    return np.divide(1.0, values, out=np.zeros_like(values), where=values > 0)
