"""Embeddings of a model while it is trained."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from whiten_index.training.model import ContrastiveModel
from whiten_index.training.sentences import Collator

_BATCH = 128


@torch.no_grad()
def embed(
    model: ContrastiveModel, texts: Sequence[str], collator: Collator, *, with_head: bool
) -> NDArray[np.float32]:
    """Return embeddings (n, d) in evaluation, longest texts together; nothing is drawn."""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
    out: NDArray[np.float32] | None = None
    for start in range(0, len(order), _BATCH):
        numbers = order[start : start + _BATCH]
        batch = collator([texts[number] for number in numbers])
        moved = {name: tensor.to(device) for name, tensor in batch.items()}
        found = model.embed(moved, with_head=with_head).float().cpu().numpy()
        if out is None:
            out = np.empty((len(texts), found.shape[1]), dtype=np.float32)
        out[numbers] = found
    model.train(training)
    assert out is not None
    return out
