"""Moments taken where the embeddings are: a block's sums leave the device, not its rows."""

from __future__ import annotations

import functools
import operator

import numpy as np
import torch
from torch import Tensor

from whiten_index.moments import Moments

_BLOCK_ROWS = 8192


@torch.inference_mode()
def moments_on_device(rows: Tensor) -> Moments:
    """Return the moments of rows (n, d) on any device that computes in float64.

    Means, centring and products are those of ``Moments.of``, in float64 and block by block; only
    the order of the additions differs.
    """
    blocks = (_block(rows[i : i + _BLOCK_ROWS]) for i in range(0, len(rows), _BLOCK_ROWS))
    return functools.reduce(operator.add, blocks, Moments.empty(rows.shape[1]))


def _block(rows: Tensor) -> Moments:
    x = rows.double()
    mean = x.mean(dim=0)
    x = x - mean
    # The mean of a long float64 sum is off by a few ulp; centring again removes what is left.
    rest = x.mean(dim=0)
    x = x - rest
    scatter = np.asarray((x.T @ x).cpu().numpy(), dtype=np.float64)
    return Moments(float(len(rows)), (mean + rest).cpu().numpy(), scatter)
