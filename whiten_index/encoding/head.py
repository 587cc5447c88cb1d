"""The head: what a sentence-transformers model does between its pooling and its embedding."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from whiten_index.encoding.model_files import weight_files
from whiten_index.encoding.models import ModelFolder
from whiten_index.encoding.modules import HeadStep
from whiten_index.errors import EncoderError


class _Dense(nn.Module):
    """A linear map, an activation and, where asked for, the input added to what they give."""

    def __init__(self, step: HeadStep) -> None:
        super().__init__()
        self.linear = nn.Linear(step.in_features, step.out_features, bias=step.bias)
        self.activation: nn.Module = getattr(nn, step.activation)()
        self.residual: nn.Module | None = None
        if step.residual:
            square = step.in_features == step.out_features
            self.residual = (
                nn.Identity()
                if square
                else nn.Linear(step.in_features, step.out_features, bias=False)
            )

    def forward(self, pooled: Tensor) -> Tensor:
        out: Tensor = self.activation(self.linear(pooled))
        return out if self.residual is None else out + self.residual(pooled)


class _LayerNorm(nn.Module):
    """Layer normalisation under the name that its weights are saved by."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, pooled: Tensor) -> Tensor:
        out: Tensor = self.norm(pooled)
        return out


class _Normalize(nn.Module):
    """Division by the L2 norm."""

    def forward(self, pooled: Tensor) -> Tensor:
        return nn.functional.normalize(pooled, dim=-1)


def load_head(folder: ModelFolder) -> nn.Module | None:
    """Load the steps of ``folder.head``, in float32, on the CPU, ready to be called.

    Returns:
        A module from pooled hidden states (n, hidden_size) float32 to embeddings (n, dim) float32,
        unnormalised; None where the model has no head.

    Raises:
        EncoderError: weights are damaged, incomplete or of other shapes than configured.
    """
    if not folder.head:
        return None
    steps = [_build(step, folder.name) for step in folder.head]
    return nn.Sequential(*steps).eval().requires_grad_(False)


def _build(step: HeadStep, name: str) -> nn.Module:
    if step.kind == "Normalize":
        return _Normalize()
    module = _Dense(step) if step.kind == "Dense" else _LayerNorm(step.in_features)
    try:
        module.load_state_dict(_tensors(weight_files(step.path)))
    except Exception as error:
        # Readers of weights raise what they like; for a user all mean the same.
        reason = " ".join(str(error).split())[:200]
        raise EncoderError(
            f"the weights of {step.kind} in {step.path} cannot be used ({reason}); restore the "
            f"folder of model {name}"
        ) from error
    return module


def _tensors(files: list[Path]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in files:
        # weights_only: a pickle may hold code, which is never run.
        tensors |= (
            load_file(file)
            if file.suffix == ".safetensors"
            else torch.load(file, map_location="cpu", weights_only=True)
        )
    return tensors
