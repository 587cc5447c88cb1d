"""int8 on a CPU: faster and not the same; how much is measured on the corpus's own texts."""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from whiten_index.errors import EncoderError

NEIGHBOURS = 10


@dataclass(frozen=True, slots=True)
class Agreement:
    """How well two encoders agree on the same texts.

    Attributes:
        rows: how many texts.
        cosine_mean: mean cosine between the two embeddings of a text.
        cosine_min: the least of them.
        neighbours: how many nearest neighbours of each text were compared.
        overlap: share of these that both have, exact search by cosine.
    """

    rows: int
    cosine_mean: float
    cosine_min: float
    neighbours: int
    overlap: float

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


def quantized(model: nn.Module) -> nn.Module:
    """Return a model whose linear layers compute in int8, inputs scaled batch by batch.

    Layers that narrow (the second of each feed-forward block) stay in float32: their inputs have
    outliers that cost more agreement than their time is worth.

    Raises:
        EncoderError: this torch cannot do it.
    """
    chosen = {
        name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and layer.in_features <= layer.out_features
    }
    try:
        with warnings.catch_warnings():
            # Deprecated in favour of torchao, which without compiling is slower than float32.
            warnings.simplefilter("ignore")
            scheme = torch.ao.quantization.per_channel_dynamic_qconfig
            made: nn.Module = torch.ao.quantization.quantize_dynamic(  # type: ignore[no-untyped-call]
                model, dict.fromkeys(chosen, scheme)
            )
    except (AttributeError, ImportError, RuntimeError) as error:
        raise EncoderError(
            f"this torch ({torch.__version__}) has no int8 for CPUs ({str(error)[:100]}); use "
            "--dtype float32"
        ) from error
    return made


def agreement(ours: NDArray[np.floating], exact: NDArray[np.floating]) -> Agreement:
    """Compare two embeddings (n, d) of the same n texts, n at least 2."""
    a, b = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (ours, exact))
    cosines = (a * b).sum(axis=1)
    count = min(NEIGHBOURS, len(a) - 1)
    shared = [
        len(set(one) & set(other))
        for one, other in zip(_neighbours(a, count), _neighbours(b, count), strict=True)
    ]
    return Agreement(
        rows=len(a),
        cosine_mean=float(cosines.mean()),
        cosine_min=float(cosines.min()),
        neighbours=count,
        overlap=float(np.mean(shared)) / count,
    )


def _neighbours(unit: NDArray[np.floating], count: int) -> list[list[int]]:
    scores = unit @ unit.T
    np.fill_diagonal(scores, -np.inf)
    found: list[list[int]] = np.argsort(-scores, axis=1, kind="stable")[:, :count].tolist()
    return found
