"""Options of a transform, and checks that they go together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whiten_index.errors import ConfigError
from whiten_index.whitening.covariance import Estimator, parse_shrinkage
from whiten_index.whitening.spectrum import WidthWish, default_width


class Kind(Enum):
    """Linear map that an index applies."""

    NONE = "none"
    PCA = "pca"
    WHITENING = "whitening"
    ZCA = "zca"
    ZCA_COR = "zca-cor"
    GROUP = "group"
    ALL_BUT_THE_TOP = "all-but-the-top"
    RANDOM = "random"
    TRUNCATE = "truncate"

    @property
    def rotates_back(self) -> bool:
        """True if vectors are turned back to the coordinates of the embeddings, so that k = d."""
        return self in (Kind.ZCA, Kind.ZCA_COR, Kind.GROUP)

    @property
    def whitens(self) -> bool:
        """True if directions are scaled by their variance."""
        return self is Kind.WHITENING or self.rotates_back

    @property
    def reads_data(self) -> bool:
        """True if the directions come from the data, not from a seed or from nowhere."""
        return self not in (Kind.NONE, Kind.RANDOM, Kind.TRUNCATE)


_WIDTH, _SHARE, _CENTER = "--k", "--k as a share of variance", "--no-center"
_EXPONENT, _SHRINKAGE, _FLOOR = "--exponent", "--shrinkage", "--floor"
_GROUPS, _GROUP_SIZE, _SHUFFLE = "--groups", "--group-size", "--shuffle"
_REMOVE_TOP, _NORMALIZE = "--remove-top", "--normalize-input"

_BASELINE = frozenset({_WIDTH, _CENTER, _NORMALIZE})
_DIRECTIONS = _BASELINE | {_SHARE, _FLOOR, _REMOVE_TOP}
_WHITENED = frozenset({_CENTER, _NORMALIZE, _EXPONENT, _SHRINKAGE, _FLOOR})
_TAKES: dict[Kind, frozenset[str]] = {
    Kind.NONE: frozenset(),
    Kind.PCA: _DIRECTIONS,
    Kind.WHITENING: _DIRECTIONS | _WHITENED,
    Kind.ZCA: _WHITENED,
    Kind.ZCA_COR: _WHITENED,
    Kind.GROUP: _WHITENED | {_GROUPS, _GROUP_SIZE, _SHUFFLE},
    Kind.ALL_BUT_THE_TOP: _DIRECTIONS,
    Kind.RANDOM: _BASELINE,
    Kind.TRUNCATE: _BASELINE,
}
_DOES: dict[Kind, str] = {
    Kind.NONE: "keeps every embedding as it is",
    Kind.PCA: "turns the embeddings and scales nothing",
    Kind.WHITENING: "takes all coordinates together",
    Kind.ZCA: "keeps all coordinates, taken together",
    Kind.ZCA_COR: "keeps all coordinates, taken together",
    Kind.GROUP: "keeps all coordinates",
    Kind.ALL_BUT_THE_TOP: "drops the widest directions and scales nothing",
    Kind.RANDOM: "draws its directions without looking at the data",
    Kind.TRUNCATE: "cuts coordinates off without looking at the data",
}


@dataclass(frozen=True, kw_only=True)
class WhiteningConfig:
    """Options of a transform.

    Attributes:
        kind: which linear map.
        k: kept width: a number, ``full``, a share of variance, or None for the default. The share
            is of the variance left after ``remove_top``. Kinds that rotate back keep all d.
        exponent: γ; None is what the kind says (1 for those that whiten, else 0).
        center: subtract the mean; the directions are those of the centred data either way. None
            is what the kind says: no for none, random and truncate, else yes.
        normalize_input: fit on, and apply to, embeddings of unit length.
        groups: number of groups of channels (the reading of WhitenedCSE's published code).
        group_size: channels a group (the reading of its paper); one of the two for ``group``.
        shuffle: permute the channels by the seed before they are cut into groups.
        seed: of the shuffle, and of the directions of ``random``.
        shrinkage: ``empirical`` or None, ``ledoit-wolf``, ``oas``, or a coefficient 0 … 1.
        floor: directions below this share of λ₁ get weight 0; never less than the numerical rank.
        remove_top: how many of the widest directions are dropped; None is 0, or d/100 and at
            least 1 for ``all-but-the-top``.

    Raises:
        ConfigError: an option that cannot apply to the kind, or a value outside its bounds.

    Example:
        >>> WhiteningConfig(kind=Kind.PCA, k=128).gamma
        0.0
    """

    kind: Kind = Kind.WHITENING
    k: str | int | float | None = None
    exponent: float | None = None
    center: bool | None = None
    normalize_input: bool = False
    groups: int | None = None
    group_size: int | None = None
    shuffle: bool = False
    seed: int = 0
    shrinkage: str | float | None = None
    floor: float | None = None
    remove_top: int | None = None

    def __post_init__(self) -> None:
        self._require_applicable()
        self._require_bounds()
        if self.kind is Kind.GROUP and (self.groups is None) == (self.group_size is None):
            raise ConfigError(
                "--whiten group needs one of --groups (how many groups) and --group-size (channels "
                f"a group); {'both are' if self.groups is not None else 'neither is'} given"
            )

    @property
    def gamma(self) -> float:
        """The exponent γ, settled."""
        if self.exponent is not None:
            return float(self.exponent)
        return 1.0 if self.kind.whitens else 0.0

    @property
    def centered(self) -> bool:
        """True if the mean is subtracted, settled."""
        if self.kind is Kind.NONE:
            return False
        return self.kind.reads_data if self.center is None else self.center

    def removed(self, dim: int) -> int:
        """Return how many of the widest of ``dim`` directions are dropped.

        All-but-the-top drops about d/100 (Mu and Viswanath 2018).
        """
        if self.remove_top is not None:
            return self.remove_top
        return max(1, round(dim / 100)) if self.kind is Kind.ALL_BUT_THE_TOP else 0

    def channels(self, dim: int) -> int:
        """Return the channels a group, of ``dim`` in all.

        Raises:
            ConfigError: ``dim`` cannot be cut into such groups.
        """
        option, asked = (
            (_GROUPS, self.groups) if self.groups is not None else (_GROUP_SIZE, self.group_size)
        )
        if asked is None:
            return dim
        if dim % asked:
            raise ConfigError(
                f"{option} {asked} does not divide the {dim} dims of the embeddings; "
                f"use {option} {near_divisors(dim, asked)}"
            )
        return dim // asked if option == _GROUPS else asked

    def width(self, dim: int) -> int | None:
        """Return the k to expect of embeddings of ``dim``, before the data are seen.

        The rank may turn out less; None where a share of variance decides.
        """
        wish = WidthWish.parse(self.k)
        if self.kind is Kind.NONE or self.kind.rotates_back:
            return dim
        if wish.variance is not None:
            return None
        everything = wish.full or (self.kind is Kind.ALL_BUT_THE_TOP and wish.number is None)
        left = dim - self.removed(dim)
        return left if everything else wish.number or min(default_width(dim), left)

    def require_dim(self, dim: int) -> None:
        """Refuse, before anything is encoded, what embeddings of ``dim`` can never give.

        Raises:
            ConfigError: k is above d, or not d where all are kept; no such groups; nothing left.
        """
        number, left = WidthWish.parse(self.k).number, dim - self.removed(dim)
        if self.kind.rotates_back and number not in (None, dim):
            raise ConfigError(
                f"--whiten {self.kind.value} keeps all {dim} coordinates, so --k {number} cannot "
                "apply; leave it out, or use --whiten whitening"
            )
        if left < 1:
            raise ConfigError(
                f"--remove-top {self.remove_top} leaves none of the {dim} dims; remove fewer"
            )
        if self.kind is not Kind.NONE and number is not None and number > left:
            removed = f" left after --remove-top {self.removed(dim)}" if left < dim else ""
            raise ConfigError(
                f"--k {number} is more than the {left} dims of the embeddings{removed}; "
                f"use --k {left} or less"
            )
        self.channels(dim)

    def _require_applicable(self) -> None:
        takes = _TAKES[self.kind]
        asked = [name for name, given in self._asked().items() if given]
        if self.kind is Kind.PCA and self.exponent not in (None, 0):
            raise ConfigError(
                f"PCA has exponent 0; for exponent {self.exponent:g} use --whiten whitening"
            )
        if self.kind is Kind.PCA and _EXPONENT in asked:
            asked.remove(_EXPONENT)
        if unfit := [name for name in asked if name not in takes]:
            others = [kind.value for kind in Kind if _TAKES[kind] >= set(asked)]
            instead = f", or use --whiten {' or '.join(others)}" if others else ""
            raise ConfigError(
                f"--whiten {self.kind.value} {_DOES[self.kind]}, so {' and '.join(unfit)} "
                f"cannot apply; leave it out{instead}"
            )

    def _asked(self) -> dict[str, bool]:
        """Return which options were given, by their names on the command line.

        A seed is not among them: it is always there, and one seed may serve a whole job.
        """
        wish = WidthWish.parse(self.k)
        share = wish.variance is not None
        widths = _WIDTH in _TAKES[self.kind]
        # Whether a number is the d that a kind keeps is known where d is.
        number = wish.number is not None and not self.kind.rotates_back
        return {
            _WIDTH: number or (share and not widths),
            _SHARE: share and widths,
            _EXPONENT: self.exponent is not None,
            # To centre is no wish even where nothing is centred, so that one default serves all.
            _CENTER: self.center is False,
            _NORMALIZE: self.normalize_input,
            _GROUPS: self.groups is not None,
            _GROUP_SIZE: self.group_size is not None,
            _SHUFFLE: self.shuffle,
            _SHRINKAGE: parse_shrinkage(self.shrinkage)[0] is not Estimator.EMPIRICAL,
            _FLOOR: self.floor is not None,
            _REMOVE_TOP: self.remove_top is not None,
        }

    def _require_bounds(self) -> None:
        whole = "the whole numbers from"
        bounds: tuple[tuple[str, float | None, Callable[[float], bool], str], ...] = (
            (_EXPONENT, self.exponent, lambda x: 0 <= x <= 2, "0 (PCA) to 2; 1 is whitening"),
            (
                _FLOOR,
                self.floor,
                lambda x: 0 <= x < 1,
                "0 to below 1, a share of λ₁",
            ),
            (_GROUPS, self.groups, lambda x: x >= 1 and x % 1 == 0, f"{whole} 1"),
            (_GROUP_SIZE, self.group_size, lambda x: x >= 1 and x % 1 == 0, f"{whole} 1"),
            (_REMOVE_TOP, self.remove_top, lambda x: x >= 0 and x % 1 == 0, f"{whole} 0"),
            ("--seed", self.seed, lambda x: 0 <= x < 2**63 and x % 1 == 0, f"{whole} 0"),
        )
        for option, value, inside, legal in bounds:
            if value is not None and not inside(value):
                raise ConfigError(f"{option} {value:g} is outside {legal}")


def divisors(dim: int) -> list[int]:
    """Return the numbers of equal groups that ``dim`` channels can be cut into."""
    return [n for n in range(1, dim + 1) if dim % n == 0]


def near_divisors(dim: int, asked: int) -> str:
    """Return the divisors next below and next above ``asked``, as a choice."""
    known = divisors(dim)
    below, above = [n for n in known if n < asked], [n for n in known if n > asked]
    return " or ".join(str(n) for n in below[-1:] + above[:1])


def inverse_frequency(counts: ArrayLike, *, smoothing: float = 1.0) -> NDArray[np.float64]:
    """Return weights (n,) in proportion to a/(a + r), r = counts/mean: rare rows weigh more.

    With a = 1 a row of mean frequency weighs half as much as one that never occurs, however many
    rows there are. Arora, Liang and Ma 2017, "A simple but tough-to-beat baseline for sentence
    embeddings", take α/(α + p) with p = counts/Σcounts = r/n of the n words of a vocabulary, and
    α = 1e-3: that is a = α·n. The weights have mean 1, so that the count of the moments stays the
    number of rows.

    Args:
        counts: (n,) occurrences of each row, non-negative, not all zero.
        smoothing: a > 0, the r of a row that weighs half as much as one that never occurs.

    Raises:
        ConfigError: counts or smoothing outside these bounds.
    """
    if not 0 < smoothing < np.inf:
        raise ConfigError(f"smoothing {smoothing:g} must be a positive number, such as 1")
    weights = smoothing / (smoothing + _relative(counts))
    scaled: NDArray[np.float64] = weights / weights.mean()
    return scaled


def zipfian(counts: ArrayLike) -> NDArray[np.float64]:
    """Return weights (n,) in proportion to counts: each row weighs as much as it occurs.

    Yokoi et al. 2024, "Zipfian whitening": mean and covariance under the empirical distribution,
    where one row a word would be uniform. The weights have mean 1; what never occurs weighs 0.

    Args:
        counts: (n,) occurrences of each row, non-negative, not all zero.

    Raises:
        ConfigError: counts outside these bounds.
    """
    return _relative(counts)


class Weighting(Enum):
    """Map from a row's frequency to its weight."""

    ZIPFIAN = "zipfian"
    INVERSE_FREQUENCY = "inverse-frequency"

    @property
    def function(self) -> Callable[[ArrayLike], NDArray[np.float64]]:
        """Function from frequencies (n,) to weights (n,)."""
        return zipfian if self is Weighting.ZIPFIAN else inverse_frequency


def _relative(counts: ArrayLike) -> NDArray[np.float64]:
    """Return counts/mean(counts), checked."""
    count = np.asarray(counts, dtype=np.float64)
    if count.ndim != 1 or not len(count):
        raise ConfigError(f"counts are one number a row, (n,); these have shape {count.shape}")
    if not np.isfinite(count).all() or (count < 0).any():
        raise ConfigError("counts must be finite and not negative; clean them first")
    if not count.any():
        raise ConfigError("all counts are zero, so there is nothing to weigh by; leave them out")
    count = count / count.max()  # counts near the limit of float64 have a sum beyond it
    relative: NDArray[np.float64] = count / count.mean()
    return relative
