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
    WEIGHTED_MEAN = "weightedmean"
    MEAN_SQRT_LENGTH = "mean_sqrt_len_tokens"


def mean_tokens(states: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over real tokens, [CLS] and [SEP] included: (n, t, d), (n, t) -> (n, d)."""
    weight = mask.to(states.dtype)
    # As a product, which reads the states once and makes no weighted copy of them.
    total = torch.bmm(weight.unsqueeze(1), states).squeeze(1)
    return total / weight.sum(dim=1, keepdim=True).clamp(min=1)


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


def weighted_mean_tokens(states: Tensor, mask: Tensor, places: Tensor) -> Tensor:
    """Return the mean weighted by place, so that later tokens count more (SGPT, arXiv 2202.08904).

    Args:
        states: (n, t, d).
        mask: (n, t), 1 where a token is pooled.
        places: (n, t), the place of each token in its text, from 1.
    """
    return mean_tokens(states, mask * places)


def mean_sqrt_length_tokens(states: Tensor, mask: Tensor) -> Tensor:
    """Return the sum over real tokens by the root of their number: (n, t, d), (n, t) -> (n, d)."""
    return mean_tokens(states, mask) * mask.sum(dim=1, keepdim=True).to(states.dtype).sqrt()


def without_prompt(mask: Tensor, tokens: int) -> Tensor:
    """Return the mask with the first ``tokens`` real tokens of each row left out, (n, t)."""
    return mask * (mask.cumsum(dim=1) > tokens)


_POOL: dict[Pooling, Callable[[Tensor, Tensor], Tensor]] = {
    Pooling.MEAN: mean_tokens,
    Pooling.CLS: cls_token,
    Pooling.MAX: max_tokens,
    Pooling.LAST: last_token,
    Pooling.MEAN_SQRT_LENGTH: mean_sqrt_length_tokens,
}


def mean_layers(hidden_states: Sequence[Tensor], layers: Sequence[int]) -> Tensor:
    """Return the mean of the chosen hidden states, (n, t, d) float32."""
    chosen = [hidden_states[layer].float() for layer in layers]
    return chosen[0] if len(chosen) == 1 else torch.stack(chosen).mean(dim=0)


def pool(states: Tensor, mask: Tensor, pooling: Pooling, *, prompt_tokens: int = 0) -> Tensor:
    """Return the pooled states (n, d), computed in float32.

    Args:
        states: (n, t, d) of the tokens.
        mask: (n, t), 1 where there is a token, whatever the padding side.
        pooling: which tokens to take.
        prompt_tokens: how many tokens at the front of every text are not pooled. They still count
            as places of the weighted mean, as in sentence-transformers.
    """
    kept = without_prompt(mask, prompt_tokens) if prompt_tokens else mask
    if pooling is Pooling.WEIGHTED_MEAN:
        return weighted_mean_tokens(states.float(), kept, mask.cumsum(dim=1))
    return _POOL[pooling](states.float(), kept)
