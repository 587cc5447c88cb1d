"""Shuffled group whitening (Zhuo et al. 2023, section 3): channels whitened in random groups.

Channels are permuted, cut into groups, each group is whitened over the batch by its own
covariance, and the permutation is undone. Each call draws another permutation, so that a sentence
has as many whitened features as there are calls: positives of each other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from whiten_index.errors import ConfigError, WhiteningError
from whiten_index.training.training_config import GroupMap
from whiten_index.whitening.whitening_config import divisors


def group_map(kind: GroupMap, covariances: Tensor) -> Tensor:
    """Return W (..., c, c) of covariances (..., c, c); rows x become xWᵀ.

    Raises:
        WhiteningError: a covariance has no Cholesky factor, or is not finite.
    """
    try:
        return _mapped(kind, covariances)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise WhiteningError(
            "the features of a batch are not finite; take a smaller learning rate"
        ) from error


def _mapped(kind: GroupMap, covariances: Tensor) -> Tensor:
    if kind is GroupMap.ZCA:
        return inverse_root(covariances)
    if kind is GroupMap.NEWTON:
        return inverse_root_iterated(covariances)
    if kind is GroupMap.PCA:
        with torch.no_grad():
            vectors = torch.linalg.eigh(covariances)[1].flip(-1)
        turned: Tensor = vectors.mT @ inverse_root(covariances)
        return turned
    eye = torch.eye(covariances.shape[-1], dtype=covariances.dtype, device=covariances.device)
    lower, failed = torch.linalg.cholesky_ex(covariances)
    if failed.any():
        raise WhiteningError(
            "a group's covariance has no Cholesky factor; take a larger epsilon or zca"
        )
    inverse: Tensor = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False)
    return inverse


class ShuffledGroupWhitening(nn.Module):
    """Whitening by groups of channels, with the batch's moments in training.

    For evaluation it keeps moments of all channels, moved towards each batch's by ``momentum``
    (equation 13), and takes the groups of neighbouring channels: one affine map, see ``folded``.

    Attributes:
        dim: channels d.
        groups: G; each has d / G channels.
        epsilon: added to the diagonal of each covariance.
        shrinkage: α of Σ' = (1 - α)Σ + α·tr(Σ)/c·I, 0 for none.
        mean: (d,) running.
        covariance: (d, d) running.
        batches: that these have seen.
    """

    mean: Tensor
    covariance: Tensor
    batches: Tensor

    def __init__(
        self,
        dim: int,
        *,
        groups: int | None = None,
        group_size: int | None = None,
        group_map: GroupMap = GroupMap.ZCA,
        shuffle: bool = True,
        epsilon: float = 1e-5,
        shrinkage: float = 0.0,
        momentum: float = 0.1,
    ) -> None:
        """Take either reading of the group parameter.

        Args:
            dim: channels.
            groups: how many groups (the published code, 128).
            group_size: channels of a group (the paper's text, "group size").
            group_map: what whitens a group.
            shuffle: draw a permutation each time; else groups are of neighbouring channels.
            epsilon: added to the diagonal.
            shrinkage: towards a multiple of I, which a batch not larger than a group needs.
            momentum: weight of a batch in the running moments.

        Raises:
            ConfigError: both or neither reading is given, groups do not divide ``dim``, or a
                number is out of its range.
        """
        super().__init__()
        self.dim, self.groups = dim, _groups(dim, groups, group_size)
        self.group_map, self.shuffle = group_map, shuffle
        for name, value in (("shrinkage", shrinkage), ("momentum", momentum)):
            if not 0 <= value <= 1:
                raise ConfigError(f"{name} is {value}; give a number from 0 to 1")
        if not 0 <= epsilon < float("inf"):
            raise ConfigError(f"epsilon is {epsilon}; give 0 or more")
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
        """Whether permutations change anything, as with groups of some channels, but not all."""
        return self.shuffle and 1 not in (self.groups, self.group_size)

    def forward(self, features: Tensor) -> Tensor:
        """Whiten features; in training each view by its own batch and its own permutation.

        Args:
            features: (n, d), or (views, n, d).

        Returns:
            The same shape, in float32, or float64 where that is given.

        Raises:
            WhiteningError: in training, n does not exceed the channels of a group, and nothing is
                shrunk; or the features are of another width.
        """
        if features.shape[-1] != self.dim:
            raise WhiteningError(
                f"features have {features.shape[-1]} channels, and the whitening {self.dim}"
            )
        with torch.autocast(features.device.type, enabled=False):
            wide = features.double() if features.dtype == torch.float64 else features.float()
            views = wide if wide.dim() == 3 else wide.unsqueeze(0)
            out = self._trained(views) if self.training else self._evaluated(views)
        return out if wide.dim() == 3 else out.squeeze(0)

    def folded(self) -> tuple[Tensor, Tensor]:
        """Return weight (d, d) and bias (d,) of what evaluation does: x ↦ x Wᵀ + b."""
        blocks = self._map(self._blocks(self.covariance.double().unsqueeze(0)))[0]
        weight: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
        return weight, -(weight @ self.mean.double())

    def extra_repr(self) -> str:
        """Return what it is, for whoever prints a model."""
        return (
            f"dim={self.dim}, groups={self.groups}, map={self.group_map.value}, "
            f"shuffle={self.shuffle}, epsilon={self.epsilon}"
        )

    def _trained(self, views: Tensor) -> Tensor:
        self.require_enough(views.shape[1])
        mean = views.mean(1, keepdim=True)
        centred = views - mean
        self._remember(mean, centred)
        order = self._orders(views)
        grouped = torch.gather(centred, 2, order.unsqueeze(1).expand_as(centred))
        white = self._whiten(grouped)
        back = order.argsort(1)
        return torch.gather(white, 2, back.unsqueeze(1).expand_as(white))

    def _whiten(self, grouped: Tensor) -> Tensor:
        """Whiten centred features (views, n, d), whose groups are of neighbouring channels."""
        count, rows, _ = grouped.shape
        # (views, G, n, c)
        blocks = grouped.view(count, rows, self.groups, -1).transpose(1, 2)
        # In float32 the error would grow with the condition number of a group's covariance.
        wide = blocks.double()
        white = blocks @ self._map(wide.mT @ wide / (rows - 1)).mT.to(blocks.dtype)
        return white.transpose(1, 2).reshape(grouped.shape)

    def _map(self, covariances: Tensor) -> Tensor:
        """Return the maps of covariances (..., c, c), shrunk and with epsilon."""
        eye = torch.eye(covariances.shape[-1], dtype=covariances.dtype, device=covariances.device)
        if self.shrinkage:
            level = covariances.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
            covariances = (1 - self.shrinkage) * covariances + self.shrinkage * level * eye
        return group_map(self.group_map, covariances + self.epsilon * eye)

    def _evaluated(self, views: Tensor) -> Tensor:
        weight, bias = self.folded()
        return views @ weight.mT.to(views.dtype) + bias.to(views.dtype)

    def _blocks(self, covariances: Tensor) -> Tensor:
        """Return the blocks (k, G, c, c) of groups of neighbouring channels, of (k, d, d)."""
        c = self.group_size
        cut = covariances.view(-1, self.groups, c, self.groups, c)
        return cut.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)

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
        """Refuse a batch that cannot tell a group's covariance.

        Raises:
            WhiteningError: it cannot.
        """
        enough = rows > self.group_size or (self.shrinkage and rows > 1)
        if not enough:
            raise WhiteningError(
                f"a batch of {rows} cannot whiten groups of {self.group_size} channels, whose "
                f"covariance it cannot tell; take batches of {self.group_size + 1} or more, "
                "more groups, or a shrinkage above 0"
            )


def _groups(dim: int, groups: int | None, size: int | None) -> int:
    """Return the number of groups, by either reading."""
    if groups is not None and size is None:
        given, what = groups, "groups"
    elif size is not None and groups is None:
        given, what = size, "channels a group"
    else:
        raise ConfigError("give either the number of groups or the channels of a group")
    if given < 1:
        raise ConfigError(f"{given} {what} cannot be; give 1 or more")
    if dim % given:
        raise ConfigError(
            f"{given} {what} do not divide {dim} channels; give one of "
            f"{', '.join(map(str, divisors(dim)))}"
        )
    return given if size is None else dim // given


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
