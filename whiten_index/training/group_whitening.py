"""Shuffled group whitening (Zhuo et al. 2023, section 3): channels whitened in random groups.

Channels are permuted, cut into groups, each group is whitened over the batch by its own
covariance, and the permutation is undone. Each call draws another permutation, so that a sentence
has as many whitened features as there are calls: positives of each other.
"""

from typing import Any

import torch
from torch import Tensor, nn

from whiten_index.errors import WhiteningError
from whiten_index.training.training_config import GroupMap


def group_map(kind: GroupMap, covariances: Tensor) -> Tensor:
    """Return W (..., c, c) of covariances (..., c, c); rows x become xWᵀ."""
    try:
        root: Tensor = _InverseRoot.apply(covariances)  # type: ignore[no-untyped-call]
        if kind == "zca":
            return root
        with torch.no_grad():
            vectors = torch.linalg.eigh(covariances)[1].flip(-1)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise WhiteningError(
            "the features of a batch are not finite; take a smaller learning rate"
        ) from error
    turned: Tensor = vectors.mT @ root
    return turned


class ShuffledGroupWhitening(nn.Module):
    """Whitening by groups of channels, with the moments of each batch.

    ``shrinkage`` is α of Σ' = (1 - α)Σ + α·tr(Σ)/c·I; ``epsilon`` is added to the diagonal of each
    covariance.
    """

    def __init__(
        self,
        dim: int,
        *,
        groups: int,
        group_map: GroupMap = "zca",
        shuffle: bool = True,
        epsilon: float = 1e-5,
        shrinkage: float = 0.0,
    ) -> None:
        super().__init__()
        self.dim, self.groups = dim, groups
        self.group_map, self.shuffle = group_map, shuffle
        self.epsilon, self.shrinkage = epsilon, shrinkage

    @property
    def group_size(self) -> int:
        """Channels of a group."""
        return self.dim // self.groups

    @property
    def shuffles(self) -> bool:
        """True if permutations change anything, as with groups of some channels, but not all."""
        return self.shuffle and 1 not in (self.groups, self.group_size)

    def forward(self, features: Tensor) -> Tensor:
        """Whiten features (n, d) or (views, n, d), each view by its own batch.

        The result has the same shape, in float32, or float64 if that is given.
        """
        with torch.autocast(features.device.type, enabled=False):
            wide = features.double() if features.dtype == torch.float64 else features.float()
            return self._whiten(wide.reshape(-1, *wide.shape[-2:])).view(wide.shape)

    def _whiten(self, views: Tensor) -> Tensor:
        self.require_enough(views.shape[1])
        centred = views - views.mean(1, keepdim=True)
        order = self._orders(views)
        grouped = torch.gather(centred, 2, order.unsqueeze(1).expand_as(centred))
        # (views, G, n, c): groups are of neighbouring channels.
        blocks = grouped.view(*grouped.shape[:2], self.groups, -1).transpose(1, 2)
        # In float32 the error would grow with the condition number of a group's covariance.
        wide = blocks.double()
        white = blocks @ self._map(wide.mT @ wide / (views.shape[1] - 1)).mT.to(blocks.dtype)
        white = white.transpose(1, 2).reshape(grouped.shape)
        back = order.argsort(1)
        return torch.gather(white, 2, back.unsqueeze(1).expand_as(white))

    def _map(self, covariances: Tensor) -> Tensor:
        """Return the maps of covariances (..., c, c), shrunk and with epsilon."""
        eye = torch.eye(covariances.shape[-1], dtype=covariances.dtype, device=covariances.device)
        if self.shrinkage:
            level = covariances.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
            covariances = (1 - self.shrinkage) * covariances + self.shrinkage * level * eye
        return group_map(self.group_map, covariances + self.epsilon * eye)

    def _orders(self, views: Tensor) -> Tensor:
        """Return a permutation of the channels for each view, (views, d)."""
        shape = views.shape[0], self.dim
        if not self.shuffle:
            return torch.arange(self.dim, device=views.device).expand(shape)
        return torch.rand(shape, device=views.device).argsort(1)

    def require_enough(self, rows: int) -> None:
        """Refuse a batch of too few rows for the covariance of a group."""
        if rows > self.group_size or (self.shrinkage and rows > 1):
            return
        raise WhiteningError(
            f"a batch of {rows} cannot whiten groups of {self.group_size} channels, whose "
            f"covariance it cannot determine; take batches of {self.group_size + 1} or more, "
            "more groups, or a shrinkage above 0"
        )


class _InverseRoot(torch.autograd.Function):
    """A^(-1/2) of positive semi-definite (..., c, c); 0 along eigenvalues below c · ε · λ₁."""

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
