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
        if kind is GroupMap.ZCA:
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
    """Whitening by groups of channels, with the batch's moments in training.

    For evaluation it keeps running moments of all channels, moved towards each batch's by
    ``momentum`` (equation 13), and takes the groups of neighbouring channels: one affine map, see
    ``folded``. ``shrinkage`` is α of Σ' = (1 - α)Σ + α·tr(Σ)/c·I; ``epsilon`` is added to the
    diagonal of each covariance.
    """

    mean: Tensor
    covariance: Tensor
    batches: Tensor

    def __init__(
        self,
        dim: int,
        *,
        groups: int,
        group_map: GroupMap = GroupMap.ZCA,
        shuffle: bool = True,
        epsilon: float = 1e-5,
        shrinkage: float = 0.0,
        momentum: float = 0.1,
    ) -> None:
        """Start with running moments of mean 0 and covariance I."""
        super().__init__()
        self.dim, self.groups = dim, groups
        self.group_map, self.shuffle = group_map, shuffle
        self.epsilon, self.shrinkage, self.momentum = epsilon, shrinkage, momentum
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("covariance", torch.eye(dim))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    @property
    def group_size(self) -> int:
        """Channels of a group."""
        return self.dim // self.groups

    @property
    def shuffles(self) -> bool:
        """True if permutations change anything, as with groups of some channels, but not all."""
        return self.shuffle and 1 not in (self.groups, self.group_size)

    def forward(self, features: Tensor) -> Tensor:
        """Whiten features (n, d) or (views, n, d); in training each view by its own batch.

        The result has the same shape, in float32, or float64 if that is given.
        """
        with torch.autocast(features.device.type, enabled=False):
            wide = features.double() if features.dtype == torch.float64 else features.float()
            views = wide if wide.dim() == 3 else wide.unsqueeze(0)
            if self.training:
                out = self._trained(views)
            else:
                weight, bias = (each.to(views.dtype) for each in self.folded())
                out = views @ weight.mT + bias
        return out if wide.dim() == 3 else out.squeeze(0)

    def folded(self) -> tuple[Tensor, Tensor]:
        """Return weight (d, d) and bias (d,) of the map in evaluation: x ↦ x Wᵀ + b."""
        c = self.group_size
        cut = self.covariance.double().view(self.groups, c, self.groups, c)
        blocks = self._map(cut.diagonal(dim1=0, dim2=2).permute(2, 0, 1))
        weight: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
        return weight, -(weight @ self.mean.double())

    def _trained(self, views: Tensor) -> Tensor:
        self.require_enough(views.shape[1])
        mean = views.mean(1, keepdim=True)
        centred = views - mean
        self._remember(mean, centred)
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

    @torch.no_grad()
    def _remember(self, mean: Tensor, centred: Tensor) -> None:
        """Move the running moments towards those of the batch, over its views."""
        rows = centred.shape[1]
        covariance = (centred.mT @ centred).mean(0) / (rows - 1)
        # The first batch is taken as it is: nothing was known before.
        weight = torch.where(self.batches == 0, 1.0, self.momentum).to(mean.device)
        self.mean.lerp_(mean.mean(0)[0].to(self.mean.dtype), weight.to(self.mean.dtype))
        self.covariance.lerp_(
            covariance.to(self.covariance.dtype), weight.to(self.covariance.dtype)
        )
        self.batches += 1

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
