"""Small steps on arrays that several files here take."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def unit_rows(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scale rows (n, d) to unit length; rows of zeros stay as they are."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    scaled: NDArray[np.float64] = np.divide(rows, norms, out=np.zeros_like(rows), where=norms > 0)
    return scaled


def reciprocal(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return 1/values, and 0 where a value is 0."""
    result: NDArray[np.float64] = np.divide(
        1.0, values, out=np.zeros_like(values), where=values > 0
    )
    return result
