"""Options of a transform, and checks that they go together."""

import math
from enum import Enum
from typing import Annotated

from pydantic import Field

from whiten_index.errors import ConfigError
from whiten_index.options import schema
from whiten_index.whitening.spectrum import WidthSpec, default_width
from whiten_index.whitening.transform_options import Exponent, Similarity, TransformShape

ESTIMATORS = ("empirical", "ledoit-wolf", "oas")


def parse_shrinkage(text: str | float | None) -> tuple[str, float]:
    """Read ``empirical``, ``ledoit-wolf``, ``oas``, a coefficient 0 … 1, or None (empirical).

    Return the estimator, ``fixed`` for a coefficient, and the coefficient; 0 is empirical.
    """
    name = "empirical" if text is None else str(text).strip().lower()
    if name in ESTIMATORS:
        return name, 0.0
    try:
        coefficient = float(name)
    except ValueError:
        coefficient = math.nan
    if 0 <= coefficient <= 1:
        return ("fixed" if coefficient else "empirical"), coefficient
    raise ConfigError(
        f"--shrinkage {text} is not understood; give {', '.join(ESTIMATORS)}, or a number 0 to 1"
    )


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


_BASELINE = frozenset({"--k", "--no-center", "--normalize-input"})
_SLICED = _BASELINE | {"--k as a share of variance", "--floor", "--remove-top"}
_WHITENED = frozenset({"--no-center", "--normalize-input", "--exponent", "--shrinkage", "--floor"})
_TEMPERING = "--exponent spectral-tempering"
# The options of each kind, and the reason why others cannot apply.
_KINDS: dict[Kind, tuple[frozenset[str], str]] = {
    Kind.NONE: (frozenset(), "keeps every embedding as it is"),
    Kind.PCA: (_SLICED, "turns the embeddings and scales nothing"),
    Kind.WHITENING: (_SLICED | _WHITENED | {_TEMPERING}, "takes all coordinates together"),
    Kind.ZCA: (_WHITENED, "keeps all coordinates, taken together"),
    Kind.ZCA_COR: (_WHITENED, "keeps all coordinates, taken together"),
    Kind.GROUP: (_WHITENED | {"--groups", "--group-size", "--shuffle"}, "keeps all coordinates"),
    Kind.ALL_BUT_THE_TOP: (_SLICED, "drops the widest directions and scales nothing"),
    Kind.RANDOM: (_BASELINE, "draws its directions without looking at the data"),
    Kind.TRUNCATE: (_BASELINE, "cuts coordinates off without looking at the data"),
}


@schema
class WhiteningConfig(TransformShape):
    """A transform by its kind and width, and what shapes it.

    Attributes:
        kind: which linear map.
        k: kept width: a number, ``full``, a share of variance, or None for the default. The share
            is of the variance left after ``remove_top``. Kinds that rotate back keep all d.
        seed: of the shuffle, and of the directions of ``random``.
        similarity: of the vectors; the length of those compared by ``dot`` is kept.

    Raises:
        ConfigError: an option that cannot apply to the kind, or a value outside its bounds.

    Examples:
        >>> WhiteningConfig(kind=Kind.PCA, k=128).gamma
        0.0
    """

    kind: Kind = Kind.WHITENING
    k: str | int | float | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    similarity: Similarity = "cosine"

    def __post_init__(self) -> None:
        self._require_applicable()
        if self.kind is Kind.GROUP and (self.groups is None) == (self.group_size is None):
            raise ConfigError(
                "--whiten group needs one of --groups (how many groups) and --group-size (channels "
                f"a group); {'both are' if self.groups is not None else 'neither is'} given"
            )

    @property
    def gamma(self) -> Exponent:
        """The exponent γ, settled, or the name of the rule for it."""
        if self.exponent is not None:
            return self.exponent
        return 1.0 if self.kind.whitens else 0.0

    @property
    def centered(self) -> bool:
        """True if the mean is subtracted, settled."""
        if self.kind is Kind.NONE:
            return False
        # Without the mean, an inner product gains or loses by how near a document is to it.
        by_default = self.kind.reads_data and self.similarity == "cosine"
        return by_default if self.center is None else self.center

    def removed(self, dim: int) -> int:
        """Return how many of the widest of ``dim`` directions are dropped.

        All-but-the-top drops about d/100 (Mu and Viswanath 2018).
        """
        if self.remove_top is not None:
            return self.remove_top
        return max(1, round(dim / 100)) if self.kind is Kind.ALL_BUT_THE_TOP else 0

    def channels(self, dim: int) -> int:
        """Return the channels a group, of ``dim`` in all."""
        given = self.groups is not None
        option, asked = ("--groups", self.groups) if given else ("--group-size", self.group_size)
        if asked is None:
            return dim
        if dim % asked:
            raise ConfigError(
                f"{option} {asked} does not divide the {dim} dims of the embeddings; "
                f"use {option} {near_divisors(dim, asked)}"
            )
        return dim // asked if given else asked

    def width(self, dim: int) -> int | None:
        """Return the k to expect of embeddings of ``dim``, None if a share of variance decides.

        The rank of the data may turn out less.
        """
        wish = WidthSpec.parse(self.k)
        if self.kind is Kind.NONE or self.kind.rotates_back:
            return dim
        if wish.variance is not None:
            return None
        everything = wish.full or (self.kind is Kind.ALL_BUT_THE_TOP and wish.number is None)
        left = dim - self.removed(dim)
        return left if everything else wish.number or min(default_width(dim), left)

    def require_dim(self, dim: int) -> None:
        """Refuse, before anything is encoded, what embeddings of ``dim`` can never give."""
        number, left = WidthSpec.parse(self.k).number, dim - self.removed(dim)
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
        named = isinstance(self.exponent, str)
        if self.kind is Kind.PCA and self.exponent and not named:
            raise ConfigError(
                f"PCA has exponent 0; for exponent {self.exponent:g} use --whiten whitening"
            )
        takes, does = _KINDS[self.kind]
        wish = WidthSpec.parse(self.k)
        share = wish.variance is not None
        # Whether a number is the d that a kind keeps is checked when d is known.
        number = wish.number is not None and not self.kind.rotates_back
        given = {
            "--k": number or (share and "--k" not in takes),
            "--k as a share of variance": share and "--k" in takes,
            "--exponent": not (named or self.exponent is None or self.kind is Kind.PCA),
            _TEMPERING: named,
            # Only False is a wish, so that one default serves all kinds.
            "--no-center": self.center is False,
            "--normalize-input": self.normalize_input,
            "--groups": self.groups is not None,
            "--group-size": self.group_size is not None,
            "--shuffle": self.shuffle,
            "--shrinkage": parse_shrinkage(self.shrinkage)[0] != "empirical",
            "--floor": self.floor is not None,
            "--remove-top": self.remove_top is not None,
        }
        asked = [name for name, is_given in given.items() if is_given]
        if unfit := [name for name in asked if name not in takes]:
            others = [kind.value for kind, (known, _) in _KINDS.items() if known >= set(asked)]
            instead = f", or use --whiten {' or '.join(others)}" if others else ""
            raise ConfigError(
                f"--whiten {self.kind.value} {does}, so {' and '.join(unfit)} "
                f"cannot apply; leave it out{instead}"
            )


def divisors(dim: int) -> list[int]:
    """Return the numbers of equal groups that ``dim`` channels can be cut into."""
    return [n for n in range(1, dim + 1) if dim % n == 0]


def near_divisors(dim: int, asked: int) -> str:
    """Return the divisors next below and next above ``asked``, as a choice."""
    known = divisors(dim)
    below, above = [n for n in known if n < asked], [n for n in known if n > asked]
    return " or ".join(str(n) for n in below[-1:] + above[:1])
