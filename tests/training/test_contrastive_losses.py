"""InfoNCE with several positives against loops over its definition."""

import math

import pytest
import torch
from torch import Tensor

from whiten_index.training.contrastive_model import info_nce


def similarity(a: Tensor, b: Tensor, temperature: float) -> float:
    return float(a @ b / (a.norm() * b.norm()) / temperature)


def looped(anchors: Tensor, positives: Tensor, temperature: float) -> float:
    """Return the loss by the sum of equation 7, a number at a time."""
    total = 0.0
    for i, anchor in enumerate(anchors):
        fractions = []
        for positive in positives:
            top = math.exp(similarity(anchor, positive[i], temperature))
            bottom = sum(math.exp(similarity(anchor, other, temperature)) for other in positive)
            fractions.append(top / bottom)
        total -= sum(math.log(each) for each in fractions) / len(positives)
    return total / len(anchors)


@pytest.mark.parametrize("many", [1, 2, 5])
@pytest.mark.parametrize("temperature", [0.05, 1.0])
def test_the_loss_is_what_its_equation_says(many: int, temperature: float) -> None:
    torch.manual_seed(0)
    anchors = torch.randn(7, 5, dtype=torch.float64)
    positives = torch.randn(many, 7, 5, dtype=torch.float64)
    found = info_nce(anchors, positives, temperature=temperature)
    assert float(found) == pytest.approx(looped(anchors, positives, temperature), rel=1e-10)


def test_its_gradient_is_that_of_finite_differences() -> None:
    torch.manual_seed(2)
    anchors = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    positives = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)

    def loss(some: Tensor, others: Tensor) -> Tensor:
        return info_nce(some, others, temperature=0.5)

    assert torch.autograd.gradcheck(loss, (anchors, positives))
