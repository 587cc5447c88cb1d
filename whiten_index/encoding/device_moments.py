"""Moments of rows on the device that computed them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whiten_index.whitening.moments import MEAN_OF_EVERY, Moments

_BLOCK_ROWS = 8192


@torch.inference_mode()
def moments_on_device(rows: Tensor) -> Moments:
    """Return the moments of rows (n, d) on any device that computes in float64.

    Shifts, products and sums are those of ``Moments.of``, in float64 and block by block; only the
    order of the additions differs.
    """
    n, d = rows.shape
    if n == 0:
        return Moments.empty(d)
    point = rows[::MEAN_OF_EVERY].mean(dim=0, dtype=torch.float64)
    first, third = (torch.zeros_like(point) for _ in range(2))
    second, fourth = point.new_zeros(d, d), point.new_zeros(())
    for i in range(0, n, _BLOCK_ROWS):
        y = rows[i : i + _BLOCK_ROWS].double() - point
        square = torch.linalg.vecdot(y, y)
        first += y.sum(dim=0)
        second.addmm_(y.T, y)
        third.addmv_(y.T, square)
        fourth += square @ square
    return Moments.from_sums(
        _array(point),
        count=float(n),
        first=_array(first),
        # A general product does not promise to be symmetric to the bit.
        second=_array((second + second.T) / 2),
        third=_array(third),
        fourth=float(fourth),
    )


def _array(values: Tensor) -> NDArray[np.float64]:
    return np.asarray(values.cpu().numpy(), dtype=np.float64)
