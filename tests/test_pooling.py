"""Pooling, the mean of layers and batching: tensor functions against naive loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn

from whiten_index.encoding.batching import batches_by_length
from whiten_index.encoding.pooling import Pooling, mean_layers, pool


def naive_pool(tokens: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """Pool the (t, d) states of one text that has no padding."""
    if pooling is Pooling.MEAN:
        return sum(tokens) / len(tokens)
    if pooling is Pooling.MAX:
        return torch.stack([max(column) for column in tokens.T])
    return tokens[0 if pooling is Pooling.CLS else -1]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("pooling", Pooling)
def test_pooling_sees_no_padding(pooling, side):
    random = torch.Generator().manual_seed(0)
    lengths = [1, 5, 3, 8, 2]
    states = torch.randn(5, 8, 4, generator=random) - 3
    mask = torch.zeros(5, 8, dtype=torch.int64)
    for row, length in enumerate(lengths):
        mask[row, slice(length) if side == "right" else slice(8 - length, 8)] = 1
    expected = torch.stack(
        [naive_pool(states[i][mask[i] == 1], pooling) for i in range(len(lengths))]
    )
    states[mask == 0] = 1e6 * torch.randn(int((mask == 0).sum()), 4, generator=random)
    torch.testing.assert_close(pool(states, mask, pooling), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pooling", Pooling)
def test_pooling_is_computed_in_float32(pooling, dtype):
    """A thousand values near 300 overflow a float16 sum, and bfloat16 loses their mean."""
    states = (torch.rand(2, 1000, 3, generator=torch.Generator().manual_seed(0)) + 300).to(dtype)
    mask = torch.ones(2, 1000, dtype=torch.int64)
    found = pool(states, mask, pooling)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, pool(states.float(), mask, pooling))


def test_layers_are_averaged():
    states = [torch.full((1, 2, 3), float(value)) for value in (1, 10, 100)]
    assert torch.equal(mean_layers(states, (2,)), states[2])
    torch.testing.assert_close(mean_layers(states, (0, 2)), torch.full((1, 2, 3), 50.5))


# --------------------------------------------------------------------------- batching

LENGTHS = stn.arrays(np.int64, st.integers(0, 60), elements=st.integers(0, 40))


@given(lengths=LENGTHS, budget=st.integers(1, 200), most=st.integers(1, 10))
def test_batches_hold_every_row_once_within_the_budget(lengths, budget, most):
    batches = list(batches_by_length(lengths, token_budget=budget, most_rows=most))
    rows = [int(row) for batch in batches for row in batch]
    assert sorted(rows) == list(range(len(lengths)))
    for batch in batches:
        assert 1 <= len(batch) <= most
        assert len(batch) == 1 or len(batch) * lengths[batch].max() <= budget
    assert all(np.diff(lengths[rows]) <= 0)
