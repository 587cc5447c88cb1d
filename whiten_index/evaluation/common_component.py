"""The direction that all sentences share, and sentences without it: the second half of SIF."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whiten_index.errors import ConfigError


def common_component(
    embeddings: ArrayLike, *, weights: ArrayLike | None = None
) -> NDArray[np.float64]:
    """Return the first right singular vector (d,) of rows (n, d), which are not centred.

    Arora, Liang and Ma 2017, "A simple but tough-to-beat baseline for sentence embeddings". It is
    the first eigenvector of XᵀX; its sign does not matter.

    Args:
        embeddings: the rows.
        weights: (n,) how often each row counts, once where it is left out.

    Raises:
        ConfigError: not a matrix, NaN or infinity, or no row that is not zero.
    """
    rows = np.asarray(embeddings, np.float64)
    if rows.ndim != 2 or not np.isfinite(rows).all() or not rows.any():
        raise ConfigError(
            f"the common component is one of finite rows that are not all zero; these have shape "
            f"{rows.shape}"
        )
    weighted = rows if weights is None else rows * np.asarray(weights, np.float64)[:, None]
    _, vectors = np.linalg.eigh(weighted.T @ rows)
    component: NDArray[np.float64] = vectors[:, -1]
    return component


def without_component(embeddings: ArrayLike, component: ArrayLike) -> NDArray[np.float64]:
    """Return rows (n, d) less their projection on a unit direction (d,): x − u(uᵀx)."""
    rows, unit = np.asarray(embeddings, np.float64), np.asarray(component, np.float64)
    return rows - np.outer(rows @ unit, unit)
