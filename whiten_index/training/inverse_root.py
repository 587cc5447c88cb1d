"""Inverse square roots of covariances, with gradients that equal eigenvalues do not break.

The derivative of a function of a symmetric matrix needs the divided differences of that function
only (Daleckii and Krein 1965; Higham, Functions of Matrices, 2008, theorem 3.11). For
f(λ) = λ^(-1/2) these have no difference in a denominator::

    (f(a) - f(b)) / (a - b) = -1 / (√a √b (√a + √b))

whereas the gradient of ``torch.linalg.eigh`` divides by a - b.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Each multiplies the least eigenvalue by 2.25 until the rest is quadratic: these take a condition
# number times the channels of 1e9 to the precision of float64's products.
ITERATIONS = 32


def inverse_root(matrices: Tensor) -> Tensor:
    """Return A^(-1/2) of symmetric matrices; directions without variance get 0.

    Args:
        matrices: (..., c, c), positive semi-definite, float32 or float64.

    Returns:
        (..., c, c), symmetric. Eigenvalues below c · ε · λ₁ count as none, ε of the type.
    """
    root: Tensor = _InverseRoot.apply(matrices)  # type: ignore[no-untyped-call]
    return root


def inverse_root_iterated(matrices: Tensor, *, iterations: int = ITERATIONS) -> Tensor:
    """Return A^(-1/2) of symmetric matrices by products alone, as GPUs like them.

    The coupled Newton iteration of Denman and Beavers in the inverse-free form of Schulz (Higham
    2008, equation 6.35), of the matrix divided by its trace; gradients go through the iterations.

    Args:
        matrices: (..., c, c), positive definite: a direction without variance never converges.
        iterations: see ``ITERATIONS``.
    """
    trace = matrices.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    trace = trace.clamp_min(torch.finfo(matrices.dtype).tiny)
    eye = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    root, inverse = matrices / trace, eye.expand_as(matrices)
    for _ in range(iterations):
        step = 1.5 * eye - 0.5 * inverse @ root
        root, inverse = root @ step, step @ inverse
    return inverse / trace.sqrt()


class _InverseRoot(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrices: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(matrices)
        floor = values[..., -1:] * (values.shape[-1] * torch.finfo(values.dtype).eps)
        kept = (values > floor) & (values > 0)
        ctx.save_for_backward(values, vectors, kept)
        weights = torch.where(kept, values, 1).rsqrt() * kept
        root: Tensor = (vectors * weights.unsqueeze(-2)) @ vectors.mT
        return root

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        values, vectors, kept = ctx.saved_tensors
        differences = _divided_differences(values, kept)
        inner = vectors.mT @ (0.5 * (gradient + gradient.mT)) @ vectors
        out: Tensor = vectors @ (differences * inner) @ vectors.mT
        return out


def _divided_differences(values: Tensor, kept: Tensor) -> Tensor:
    """Return (f(λᵢ) - f(λⱼ)) / (λᵢ - λⱼ), (..., c, c), where f is 0 for what is not kept."""
    safe = torch.where(kept, values, 1)
    root = safe.sqrt()
    rows, columns = root.unsqueeze(-1), root.unsqueeze(-2)
    both = -1 / (rows * columns * (rows + columns))
    one, other = kept.unsqueeze(-1), kept.unsqueeze(-2)
    # Of two, one without variance: f is 0 there, and the values are apart.
    gap = torch.where(one ^ other, values.unsqueeze(-1) - values.unsqueeze(-2), 1)
    mixed = (one / rows - other / columns) / gap
    return both * (one & other) + mixed * (one ^ other)
