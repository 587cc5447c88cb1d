"""Training on a CUDA device: run with ``pytest -m gpu``."""

from typing import Any, get_args

import numpy as np
import pytest
import torch

from whiten_index import load_encoder, train_encoder
from whiten_index.training.group_whitening import ShuffledGroupWhitening
from whiten_index.training.training_config import GroupMap, Precision

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", get_args(GroupMap))
def test_whitening_and_its_gradient_are_those_of_a_cpu(kind: GroupMap) -> None:
    torch.manual_seed(0)
    features, weights = torch.randn(2, 3, 64, 32, dtype=torch.float64).unbind(0)
    found = []
    for device in ("cpu", "cuda"):
        module = ShuffledGroupWhitening(32, groups=8, group_map=kind, shuffle=False).to(device)
        given = features.to(device).requires_grad_()
        white = module(given)
        (gradient,) = torch.autograd.grad((white * weights.to(device)).sum(), given)
        # Eigenvectors have no sign: PCA's may be turned, and its gradient with them.
        if kind == "pca":
            white, gradient = white.abs(), torch.zeros(())
        found.append((white.detach().cpu(), gradient.cpu()))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", get_args(Precision))
@pytest.mark.parametrize("whiten", [True, False])
def test_a_training_in_any_precision_ends_with_an_encoder_for_any_device(
    config: Any, precision: Precision, whiten: bool
) -> None:
    report = train_encoder(config(device="cuda", precision=precision, whiten=whiten))
    assert report.facts["steps"] == 6
    on_cpu = load_encoder(str(report.out), device="cpu").encode(["a cat", "a dog"])
    assert np.isfinite(on_cpu).all()
    on_gpu = load_encoder(str(report.out), device="cuda").encode(["a cat", "a dog"])
    np.testing.assert_allclose(on_gpu, on_cpu, atol=1e-3)
