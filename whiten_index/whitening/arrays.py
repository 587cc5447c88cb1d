"""Small steps on arrays that several files here take."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

_Float = TypeVar("_Float", np.float32, np.float64)


def unit_rows(rows: NDArray[_Float]) -> NDArray[_Float]:
    """Scale rows (n, d) to unit length, in their own precision; rows of zeros stay as they are."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    scaled: NDArray[_Float] = np.divide(rows, norms, out=np.zeros_like(rows), where=norms > 0)
    return scaled


def reciprocal(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return 1/values, and 0 where a value is 0."""
    result: NDArray[np.float64] = np.divide(
        1.0, values, out=np.zeros_like(values), where=values > 0
    )
    return result
