"""Linear maps from the embeddings of one model to those of another, fitted on texts of both.

Drift-Adapter (arXiv 2509.23471) maps queries of a new model to the space of the old one. Here rows
of the old model are mapped to the new space, so that an index may hold rows of both.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.tensors import content_digest
from whiten_index.errors import WhiteningError
from whiten_index.whitening.moments import Moments
from whiten_index.whitening.spectrum import unit_rows

# Penalties of ridge regression, as shares of the mean variance.
_PENALTIES = (1e-3, 1e-2, 1e-1)
_NEAREST, _QUERIES = 10, 256
BridgeKind = Literal["ridge", "orthogonal"]


def joint_moments(pairs: Iterable[tuple[NDArray[np.floating], NDArray[np.floating]]]) -> Moments:
    """Return the moments of rows x (d,) and y (e,) side by side, (d + e,), each at unit length.

    The pairs are blocks of rows (n, d) and (n, e).
    """
    total: Moments | None = None
    for x, y in pairs:
        if len(x):
            block = Moments.of(np.hstack([_unit(x), _unit(y)]))
            total = block if total is None else total + block
    if total is None:
        raise WhiteningError("no row is encoded by both models; encode a sample first")
    return total


@dataclass(frozen=True, eq=False)
class Bridge:
    """An affine map of unit rows: y ≈ (x − mean_x) M + mean_y.

    Attributes:
        kind: ``ridge`` regression, or an ``orthogonal`` map with one scale (Procrustes).
        agreement: share of the ten nearest rows of the new model that mapped rows find among
            held-out rows, if it was chosen by that.
    """

    kind: BridgeKind
    mean_x: NDArray[np.float64]  # (d,)
    mean_y: NDArray[np.float64]  # (e,)
    matrix: NDArray[np.float64]  # (d, e)
    agreement: float | None = None

    @classmethod
    def fit(cls, moments: Moments, dim: int, kind: BridgeKind, penalty: float = 0.0) -> "Bridge":
        """Fit a map.

        Args:
            moments: joint ones of both models.
            dim: width d of the rows that are mapped.
            kind: of the map.
            penalty: of ridge regression, as a share of the mean variance.
        """
        scatter, cross = moments.scatter[:dim, :dim], moments.scatter[:dim, dim:]
        mean_x, mean_y = moments.mean[:dim], moments.mean[dim:]
        if kind == "ridge":
            variance = float(np.trace(scatter)) / len(scatter) or 1.0
            matrix = np.linalg.solve(scatter + penalty * variance * np.eye(len(scatter)), cross)
        else:
            # Least squares over orthogonal maps times a scale (Schönemann 1966).
            left, values, right = np.linalg.svd(cross, full_matrices=False)
            matrix = left @ right * (values.sum() / max(float(np.trace(scatter)), 1e-300))
        return cls(kind, mean_x, mean_y, np.asarray(matrix, np.float64))

    @classmethod
    def choose(
        cls, moments: Moments, held_out: tuple[NDArray[np.floating], NDArray[np.floating]]
    ) -> "Bridge":
        """Return the map by which held-out rows (n, d) and (n, e) agree best on neighbours.

        Up to 256 rows ask by the embedding of the new model for their ten nearest among all
        others. The map decides which mapped rows they find.
        """
        x, y = held_out
        queries = _unit(y[:_QUERIES])
        wanted = _nearest(queries, _unit(y))
        dim = x.shape[1]
        fits = [cls.fit(moments, dim, "ridge", penalty) for penalty in _PENALTIES]
        fits.append(cls.fit(moments, dim, "orthogonal"))
        scored = []
        for each in fits:
            found = _nearest(queries, _unit(each.apply(x)))
            pairs = zip(found.tolist(), wanted.tolist(), strict=True)
            scored.append(float(np.mean([len({*a} & {*b}) / len(b) for a, b in pairs])))
        best = int(np.argmax(scored))
        return replace(fits[best], agreement=scored[best])

    @property
    def digest(self) -> str:
        """Identity of the map."""
        arrays = {"mean_x": self.mean_x, "mean_y": self.mean_y, "matrix": self.matrix}
        return content_digest(arrays, {"kind": self.kind})

    def apply(self, rows: NDArray[np.floating]) -> NDArray[np.float64]:
        """Map rows (n, d), scaled to unit length, to (n, e)."""
        found: NDArray[np.float64] = (_unit(rows) - self.mean_x) @ self.matrix + self.mean_y
        return found


def _unit(rows: NDArray[np.floating]) -> NDArray[np.float64]:
    return unit_rows(rows.astype(np.float64))


def _nearest(queries: NDArray[np.float64], rows: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the nearest rows (q, 10) of queries, which are the first rows, without themselves."""
    scores = queries @ rows.T
    scores[np.arange(len(queries)), np.arange(len(queries))] = -np.inf
    count = min(_NEAREST, len(rows) - 1)
    return np.argpartition(-scores, count - 1, axis=1)[:, :count]
