"""From hidden states to one embedding a text: pure tensor functions.

Layers are counted as in ``hidden_states``: 0 is the embedding layer, L the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

import torch
from torch import Tensor


class Pooling(Enum):
    """Which tokens make the embedding."""

    MEAN = "mean"
    CLS = "cls"
    MAX = "max"
    LAST = "last"


def mean_tokens(states: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over real tokens, [CLS] and [SEP] included: (n, t, d), (n, t) -> (n, d)."""
    weight = mask.unsqueeze(-1).to(states.dtype)
    return (states * weight).sum(dim=1) / weight.sum(dim=1).clamp(min=1)


def cls_token(states: Tensor, mask: Tensor) -> Tensor:
    """Return the first real token, wherever the padding is: (n, t, d), (n, t) -> (n, d)."""
    return states[torch.arange(len(states), device=states.device), mask.int().argmax(dim=1)]


def max_tokens(states: Tensor, mask: Tensor) -> Tensor:
    """Return the maximum over real tokens, by coordinate: (n, t, d), (n, t) -> (n, d)."""
    lowest = torch.finfo(states.dtype).min
    return states.masked_fill(mask.unsqueeze(-1) == 0, lowest).amax(dim=1)


def last_token(states: Tensor, mask: Tensor) -> Tensor:
    """Return the last real token, wherever the padding is: (n, t, d), (n, t) -> (n, d)."""
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = (mask.int() * positions).argmax(dim=1)
    return states[torch.arange(len(states), device=states.device), last]


_POOL: dict[Pooling, Callable[[Tensor, Tensor], Tensor]] = {
    Pooling.MEAN: mean_tokens,
    Pooling.CLS: cls_token,
    Pooling.MAX: max_tokens,
    Pooling.LAST: last_token,
}


def mean_layers(hidden_states: Sequence[Tensor], layers: Sequence[int]) -> Tensor:
    """Return the mean of the chosen hidden states, (n, t, d) float32."""
    chosen = [hidden_states[layer].float() for layer in layers]
    return chosen[0] if len(chosen) == 1 else torch.stack(chosen).mean(dim=0)


def pool(states: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """Return (n, d) from token states (n, t, d) and mask (n, t), computed in float32."""
    return _POOL[pooling](states.float(), mask)
