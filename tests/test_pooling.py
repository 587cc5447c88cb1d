"""Pooling and the mean of layers: tensor functions against naive loops."""

from __future__ import annotations

import pytest
import torch

from whiten_index.encoding.pooling import Pooling, mean_layers, pool, without_prompt


def naive_pool(tokens: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """Pool the (t, d) states of one text that has no padding."""
    if pooling is Pooling.MEAN:
        return sum(tokens) / len(tokens)
    if pooling is Pooling.MAX:
        return torch.stack([max(column) for column in tokens.T])
    if pooling is Pooling.WEIGHTED_MEAN:
        return sum(i * token for i, token in enumerate(tokens, 1)) / sum(range(1, len(tokens) + 1))
    if pooling is Pooling.MEAN_SQRT_LENGTH:
        return sum(tokens) / len(tokens) ** 0.5
    return tokens[0 if pooling is Pooling.CLS else -1]


def padded(lengths: list[int], side: str) -> torch.Tensor:
    """Return the mask of texts padded on a side."""
    mask = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    for row, length in enumerate(lengths):
        mask[row, slice(length) if side == "right" else slice(-length, None)] = 1
    return mask


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("pooling", Pooling)
def test_pooling_sees_no_padding(pooling, side):
    random = torch.Generator().manual_seed(0)
    lengths = [1, 5, 3, 8, 2]
    states = torch.randn(5, 8, 4, generator=random) - 3
    mask = padded(lengths, side)
    expected = torch.stack(
        [naive_pool(states[i][mask[i] == 1], pooling) for i in range(len(lengths))]
    )
    states[mask == 0] = 1e6 * torch.randn(int((mask == 0).sum()), 4, generator=random)
    torch.testing.assert_close(pool(states, mask, pooling), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_prompt_is_the_first_tokens_whatever_the_padding(side):
    mask = padded([2, 6, 3], side)
    kept = without_prompt(mask, 2)
    assert kept.sum(dim=1).tolist() == [0, 4, 1]
    # Of each text the last tokens are left, and no padding.
    for row, real in zip(kept, mask, strict=True):
        places = real.nonzero().flatten().tolist()
        assert row.nonzero().flatten().tolist() == places[2:]
    assert torch.equal(without_prompt(mask, 0), mask)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("pooling", Pooling)
def test_a_prompt_that_is_not_pooled_changes_places_only(pooling, side):
    states = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(0))
    mask = padded([4, 8, 3], side)
    found = pool(states, mask, pooling, prompt_tokens=2)
    for row in range(3):
        tokens = states[row][mask[row] == 1]
        if pooling is Pooling.WEIGHTED_MEAN:
            weights = torch.arange(3, len(tokens) + 1)
            expected = (tokens[2:] * weights[:, None]).sum(dim=0) / weights.sum()
        else:
            expected = naive_pool(tokens[2:], pooling)
        torch.testing.assert_close(found[row], expected)


def test_layers_are_averaged():
    states = [torch.full((1, 2, 3), float(value)) for value in (1, 10, 100)]
    assert torch.equal(mean_layers(states, (2,)), states[2])
    torch.testing.assert_close(mean_layers(states, (0, 2)), torch.full((1, 2, 3), 50.5))
