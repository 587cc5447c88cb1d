"""InfoNCE with several positives against loops over its definition."""

import math

import pytest
import torch
from torch import Tensor

from whiten_index.training.contrastive_model import info_nce
from whiten_index.training.training_config import PositiveSum


def similarity(a: Tensor, b: Tensor, temperature: float) -> float:
    return float(a @ b / (a.norm() * b.norm()) / temperature)


def looped(anchors: Tensor, positives: Tensor, temperature: float, summed: PositiveSum) -> float:
    """Return the loss by the sums of equations 7 and 8, a number at a time."""
    total = 0.0
    for i, anchor in enumerate(anchors):
        fractions, tops, bottoms = [], 0.0, 0.0
        for positive in positives:
            top = math.exp(similarity(anchor, positive[i], temperature))
            bottom = sum(math.exp(similarity(anchor, other, temperature)) for other in positive)
            fractions.append(top / bottom)
            tops, bottoms = tops + top, bottoms + bottom
        if summed is PositiveSum.OUTSIDE:
            total -= sum(math.log(each) for each in fractions) / len(positives)
        else:
            total -= math.log(tops / bottoms)
    return total / len(anchors)


@pytest.mark.parametrize("summed", list(PositiveSum))
@pytest.mark.parametrize("many", [1, 2, 5])
@pytest.mark.parametrize("temperature", [0.05, 1.0])
def test_the_loss_is_what_its_equation_says(
    summed: PositiveSum, many: int, temperature: float
) -> None:
    torch.manual_seed(0)
    anchors = torch.randn(7, 5, dtype=torch.float64)
    positives = torch.randn(many, 7, 5, dtype=torch.float64)
    found = info_nce(anchors, positives, temperature=temperature, summed=summed)
    assert float(found) == pytest.approx(looped(anchors, positives, temperature, summed), rel=1e-10)


@pytest.mark.parametrize("summed", list(PositiveSum))
def test_its_gradient_is_that_of_finite_differences(summed: PositiveSum) -> None:
    torch.manual_seed(2)
    anchors = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    positives = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)

    def loss(some: Tensor, others: Tensor) -> Tensor:
        return info_nce(some, others, temperature=0.5, summed=summed)

    assert torch.autograd.gradcheck(loss, (anchors, positives))
