"""Shuffled group whitening and losses against their definitions: ZCA, loops, finite differences."""

import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from whiten_index.training.contrastive_model import info_nce
from whiten_index.training.group_whitening import ShuffledGroupWhitening, group_map
from whiten_index.training.training_config import GroupMap

DIM = 24


def features(*, seed: int = 0, condition: float = 1e3) -> Any:
    """Return correlated rows (n, d) with a mean, whose covariance has about that condition."""
    rng = np.random.default_rng(seed)
    turn, _ = np.linalg.qr(rng.standard_normal((DIM, DIM)))
    spread = np.geomspace(1, condition**-0.5, DIM)
    rows = rng.standard_normal((64, DIM)) * spread @ turn.T + rng.standard_normal(DIM)
    return torch.from_numpy(rows)


def zca(group: NDArray[np.float64], epsilon: float) -> NDArray[np.float64]:
    """Return centred rows whitened by numpy alone."""
    centred = group - group.mean(0)
    values, vectors = np.linalg.eigh(np.cov(group, rowvar=False).reshape(2 * [group.shape[1]]))
    return centred @ (vectors / np.sqrt(values + epsilon)) @ vectors.T


def whitening(**options: Any) -> ShuffledGroupWhitening:
    options = {"groups": 6, "epsilon": 0.0, **options}
    return ShuffledGroupWhitening(DIM, **options)


@pytest.mark.parametrize("group_map", get_args(GroupMap))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("groups", [1, 4, 12])
def test_each_group_of_a_call_has_covariance_one(
    group_map: GroupMap, dtype: torch.dtype, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = whitening(groups=groups, group_map=group_map)
    orders = []
    draw = module._orders
    monkeypatch.setattr(module, "_orders", lambda views: orders.append(draw(views)) or orders[-1])
    out = module(features(condition=1e4).to(dtype)).double().numpy()
    assert out.shape == (64, DIM)
    for group in orders[0][0].numpy().reshape(groups, -1):
        covariance = np.cov(out[:, group], rowvar=False).reshape(len(group), len(group))
        np.testing.assert_allclose(covariance, np.eye(len(group)), atol=1e-4)
    np.testing.assert_allclose(out.mean(0), 0, atol=1e-4)


@pytest.mark.parametrize("epsilon", [0.0, 1e-2])
def test_it_is_numpys_zca_of_each_group_with_channels_back_in_their_places(epsilon: float) -> None:
    rows = features()
    torch.manual_seed(3)
    out = whitening(epsilon=epsilon)(rows).numpy()
    torch.manual_seed(3)
    order = torch.rand(1, DIM).argsort(1)[0].numpy()
    for group in order.reshape(6, -1):
        np.testing.assert_allclose(out[:, group], zca(rows.numpy()[:, group], epsilon), atol=1e-8)


def test_views_are_whitened_each_over_its_own_batch() -> None:
    views = torch.stack([features(seed=1), 5 * features(seed=2) + 7])
    together = whitening(shuffle=False)(views)
    for view, white in zip(views, together, strict=True):
        torch.testing.assert_close(white, whitening(shuffle=False)(view))


@pytest.mark.parametrize("shape", [(8, 6), (2, 8, 6)])
def test_gradients_are_those_of_finite_differences(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module = ShuffledGroupWhitening(6, groups=2, epsilon=1e-3, shuffle=False)
    rows = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(module, (rows,))


def test_a_gradient_of_pca_is_that_of_its_zca_turned() -> None:
    torch.manual_seed(0)
    rows = torch.randn(20, 4, dtype=torch.float64, requires_grad=True)

    def turned(kind: GroupMap) -> torch.Tensor:
        centred = rows - rows.mean(0)
        covariance = centred.mT @ centred / 19
        out = centred @ group_map(kind, covariance).mT
        if kind == "zca":
            with torch.no_grad():
                vectors = torch.linalg.eigh(covariance)[1].flip(-1)
            out = out @ vectors
        return out

    weights = torch.randn(20, 4, dtype=torch.float64)
    gradients = [
        torch.autograd.grad((turned(kind) * weights).sum(), rows)[0] for kind in ("pca", "zca")
    ]
    torch.testing.assert_close(*gradients)


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
