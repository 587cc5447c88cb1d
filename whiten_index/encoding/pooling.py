"""From hidden states to one embedding a text: pure tensor functions.

Layers are counted as in ``hidden_states``: 0 is the embedding layer, L the last one.
"""

from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor

from whiten_index.errors import EncoderError


class Pooling(Enum):
    """Tokens that make the embedding."""

    MEAN = "mean"
    CLS = "cls"
    MAX = "max"
    LAST = "last"
    WEIGHTED_MEAN = "weightedmean"  # later tokens count more (SGPT, arXiv 2202.08904)
    MEAN_SQRT_LENGTH = "mean_sqrt_len_tokens"  # the sum by the root of the number of tokens


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return by how much states differ from others, NaN if one is not finite."""
    return float((found - expected).norm() / expected.norm())


def require_alike(found: Tensor, expected: Tensor, most: float) -> None:
    """Raise an EncoderError if states differ by more than rounding."""
    if not (error := relative_error(found, expected)) <= most:  # NaN is no agreement either
        raise EncoderError(f"other states than torch's, by {error:.2g}")


def mean_layers(states: Sequence[Tensor]) -> Tensor:
    """Return the mean of hidden states (n, t, d), in float32 if there are several."""
    if len(states) == 1:
        return states[0]
    return torch.stack([state.float() for state in states]).mean(dim=0)


def pool(states: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """Return the pooled states (n, d) in float32 of states (n, t, d) and a mask (n, t).

    The padding may be on either side.
    """
    states = states.float()
    rows = torch.arange(len(states), device=states.device)
    if pooling is Pooling.CLS:
        return states[rows, mask.int().argmax(dim=1)]
    if pooling is Pooling.LAST:
        positions = torch.arange(mask.shape[1], device=mask.device)
        return states[rows, (mask.int() * positions).argmax(dim=1)]
    if pooling is Pooling.MAX:
        lowest = torch.finfo(states.dtype).min
        return states.masked_fill(mask.unsqueeze(-1) == 0, lowest).amax(dim=1)
    weight = mask * mask.cumsum(dim=1) if pooling is Pooling.WEIGHTED_MEAN else mask
    weight = weight.to(states.dtype)
    # A product reads the states once and makes no weighted copy of them.
    mean = torch.bmm(weight.unsqueeze(1), states).squeeze(1)
    mean = mean / weight.sum(dim=1, keepdim=True).clamp(min=1)
    if pooling is Pooling.MEAN_SQRT_LENGTH:
        return mean * mask.sum(dim=1, keepdim=True).to(states.dtype).sqrt()
    return mean
