"""The model that is trained: an encoder, a head, and a loss over several views of each sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from whiten_index.encoding.pooling import Pooling, pool
from whiten_index.training.group_whitening import ShuffledGroupWhitening
from whiten_index.training.training_config import PositiveSum

Loss = Callable[[Tensor, Tensor], Tensor]


class Head(nn.Module):
    """Whitening, where there is one, then a linear map and tanh.

    Attributes:
        whitening: of the features, None for SimCSE's head.
        dense: d to d.
    """

    def __init__(self, dim: int, whitening: ShuffledGroupWhitening | None) -> None:
        super().__init__()
        self.whitening = whitening
        self.dense = nn.Linear(dim, dim)
        # As the poolers of BERT are, which SimCSE's head takes the place of.
        nn.init.normal_(self.dense.weight, std=0.02)
        nn.init.zeros_(self.dense.bias)

    def forward(self, features: Tensor) -> Tensor:
        """Return what the loss compares, of features (views, n, d)."""
        with torch.autocast(features.device.type, enabled=False):
            white = features.float() if self.whitening is None else self.whitening(features)
            out: Tensor = torch.tanh(self.dense(white))
        return out

    def folded(self) -> tuple[Tensor, Tensor]:
        """Return weight (d, d) and bias (d,) of what evaluation does before its tanh."""
        weight, bias = self.dense.weight.double(), self.dense.bias.double()
        if self.whitening is not None:
            map_, shift = self.whitening.folded()
            bias = bias + weight @ shift
            weight = weight @ map_
        return weight, bias


class ContrastiveModel(nn.Module):
    """Several views of each sentence of a batch, of which the first is pulled to the others.

    A view is a pass through the encoder, with dropout of its own, and a call of the head, with a
    permutation of its own. With fewer ``passes`` than views, views share passes by turns.

    Attributes:
        encoder: of transformers.
        pooling: tokens to features.
        head: features to what is compared.
        views: an anchor and its positives.
        passes: through the encoder.
    """

    def __init__(
        self,
        encoder: Any,
        head: Head,
        loss: Loss,
        *,
        pooling: Pooling = Pooling.CLS,
        views: int,
        passes: int | None = None,
    ) -> None:
        super().__init__()
        self.encoder: Any = encoder
        self.head, self.pooling = head, pooling
        self.views, self.passes = views, views if passes is None else passes
        self._loss = loss

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """Return the loss of a batch.

        Args:
            input_ids: (n, t) tokens.
            attention_mask: (n, t).
        """
        flat = self.features(
            input_ids.repeat(self.passes, 1), attention_mask.repeat(self.passes, 1)
        )
        passes = flat.view(self.passes, -1, flat.shape[-1])
        views = passes
        if self.passes != self.views:
            views = torch.stack([passes[view % self.passes] for view in range(self.views)])
        compared = self.head(views)
        return {"loss": self._loss(compared[0], compared[1:])}

    def features(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the pooled features (n, d) of tokens (n, t), before the head."""
        out = self.encoder(input_ids=input_ids, attention_mask=attention_mask)
        return pool(out.last_hidden_state, attention_mask, self.pooling)

    def embed(self, batch: Mapping[str, Tensor], *, with_head: bool) -> Tensor:
        """Return embeddings (n, d) of a batch, as the model that is written gives them."""
        features = self.features(batch["input_ids"], batch["attention_mask"])
        return self.head(features) if with_head else features


def info_nce(
    anchors: Tensor,
    positives: Tensor,
    *,
    temperature: float = 0.05,
    summed: PositiveSum = PositiveSum.OUTSIDE,
) -> Tensor:
    """Return the mean over anchors of the contrastive loss, by cosine similarity.

    With sim(i, j, p) the cosine of anchor i and the p-th positive of sentence j, over τ:

    - outside, equation 7: -1/m Σ_p log( exp sim(i, i, p) / Σ_j exp sim(i, j, p) );
    - inside, equation 8: -log( Σ_p exp sim(i, i, p) / Σ_p Σ_j exp sim(i, j, p) ).

    With one positive both are SimCSE's (Gao et al. 2021, equation 1).

    Args:
        anchors: (n, d).
        positives: (m, n, d); row i of each is a positive of anchor i.
        temperature: τ.
        summed: which of the two.
    """
    with torch.autocast(anchors.device.type, enabled=False):
        # (m, n, n): positive p of sentence j for anchor i
        similar = _unit(anchors) @ _unit(positives).mT / temperature
        own = similar.diagonal(dim1=1, dim2=2)
        if summed is PositiveSum.OUTSIDE:
            return (similar.logsumexp(2) - own).mean()
        return (torch.logsumexp(similar, (0, 2)) - own.logsumexp(0)).mean()


def _unit(features: Tensor) -> Tensor:
    wide = features if features.dtype == torch.float64 else features.float()
    return nn.functional.normalize(wide, dim=-1)
