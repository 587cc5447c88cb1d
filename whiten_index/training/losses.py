"""InfoNCE with several positives (Zhuo et al. 2023, equations 7 and 8)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from whiten_index.training.config import PositiveSum


def info_nce(
    anchors: Tensor,
    positives: Tensor,
    *,
    temperature: float = 0.05,
    summed: PositiveSum = PositiveSum.OUTSIDE,
) -> Tensor:
    """Return the mean over anchors of the contrastive loss, by cosine similarity.

    With sim(i, j, p) the cosine of anchor i and the p-th positive of sentence j, over τ:

    - outside, equation 7: -1/m Σ_p log( exp sim(i, i, p) / Σ_j exp sim(i, j, p) );
    - inside, equation 8: -log( Σ_p exp sim(i, i, p) / Σ_p Σ_j exp sim(i, j, p) ).

    With one positive both are SimCSE's (Gao et al. 2021, equation 1).

    Args:
        anchors: (n, d).
        positives: (m, n, d); row i of each is a positive of anchor i.
        temperature: τ.
        summed: which of the two.
    """
    with torch.autocast(anchors.device.type, enabled=False):
        # (m, n, n): positive p of sentence j for anchor i
        similar = _unit(anchors) @ _unit(positives).mT / temperature
        own = similar.diagonal(dim1=1, dim2=2)
        if summed is PositiveSum.OUTSIDE:
            return (similar.logsumexp(2) - own).mean()
        return (torch.logsumexp(similar, (0, 2)) - own.logsumexp(0)).mean()


def _unit(features: Tensor) -> Tensor:
    wide = features if features.dtype == torch.float64 else features.float()
    return nn.functional.normalize(wide, dim=-1)
