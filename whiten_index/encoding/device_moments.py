"""Moments taken where the embeddings are: a block's sums leave the device, not its rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from whiten_index.moments import Moments


@torch.inference_mode()
def moments_on_device(rows: Tensor) -> Moments:
    """Return the moments of rows (n, d) on any device that computes in float64.

    Means, centring and products are those of ``Moments.of``, in float64; only the order of the
    additions differs.
    """
    x = rows.double()
    mean = x.mean(dim=0)
    x = x - mean
    # The mean of a long float64 sum is off by a few ulp; centring again removes what is left.
    rest = x.mean(dim=0)
    x = x - rest
    scatter = np.asarray((x.T @ x).cpu().numpy(), dtype=np.float64)
    return Moments(float(len(rows)), (mean + rest).cpu().numpy(), scatter)
