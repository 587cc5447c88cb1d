"""From hidden states to one embedding a text: pure tensor functions.

Layers are counted as in ``hidden_states``: 0 is the embedding layer, L the last one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from whiten_index.encoding.encoder_config import POOLINGS
from whiten_index.errors import EncoderError


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


def pool(states: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """Return the pooled states (n, d) in float32 of states (n, t, d) and a mask (n, t).

    The padding may be on either side. With weightedmean later tokens count more (SGPT, arXiv
    2202.08904); mean_sqrt_len_tokens divides the sum by the root of the number of tokens.
    """
    assert pooling in POOLINGS, pooling
    states = states.float()
    rows = torch.arange(len(states), device=states.device)
    if pooling == "cls":
        return states[rows, mask.int().argmax(dim=1)]
    if pooling == "last":
        positions = torch.arange(mask.shape[1], device=mask.device)
        return states[rows, (mask.int() * positions).argmax(dim=1)]
    if pooling == "max":
        lowest = torch.finfo(states.dtype).min
        return states.masked_fill(mask.unsqueeze(-1) == 0, lowest).amax(dim=1)
    weight = mask * mask.cumsum(dim=1) if pooling == "weightedmean" else mask
    weight = weight.to(states.dtype)
    # A product reads the states once and makes no weighted copy of them.
    mean = torch.bmm(weight.unsqueeze(1), states).squeeze(1)
    mean = mean / weight.sum(dim=1, keepdim=True).clamp(min=1)
    if pooling == "mean_sqrt_len_tokens":
        return mean * mask.sum(dim=1, keepdim=True).to(states.dtype).sqrt()
    return mean
