"""Options of a transform, and checks that they go together. Importing them loads nothing heavy."""

import math
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from whiten_index.errors import ConfigError
from whiten_index.options import TRANSFORM, option, schema

ESTIMATORS = ("empirical", "ledoit-wolf", "oas")
_WIDEST_DEFAULT = 256
# Score of a document: the cosine or the inner product of its vector and the query's.
Similarity = Literal["cosine", "dot"]


@schema
class SimilarityOption:
    """The option of what ranks documents; ``auto`` is settled by ``BuildConfig.settled``."""

    similarity: Literal["auto", "cosine", "dot"] = option(
        "Rank by cosine, or by dot product; auto: as the model's configuration says, else cosine.",
        TRANSFORM,
        default="auto",
    )


@schema
class TransformShape:
    """Shape of a transform of a given kind and width; None leaves it to the kind."""

    exponent: float | None = option(
        "0 is PCA, 1 is whitening, between is soft.",
        TRANSFORM,
        default=None,
        ge=0,
        le=2,
        shown="auto chooses it; else 1, or 0 with pca",
    )
    center: bool | None = option(
        "Subtract the mean.",
        TRANSFORM,
        default=None,
        shown="auto chooses it; else yes, but not for none, truncate and the dot product",
    )
    normalize_input: bool = option("Fit on embeddings of unit length.", TRANSFORM, default=False)
    shrinkage: str | float | None = option(
        "Shrink the covariance: ledoit-wolf, oas, or a coefficient from 0 to 1.",
        TRANSFORM,
        default=None,
    )
    floor: float | None = option(
        "Drop directions whose variance is below this share of the first one's.",
        TRANSFORM,
        default=None,
        ge=0,
        lt=1,
    )
    remove_top: int | None = option("Drop the first N directions.", TRANSFORM, default=None, ge=0)


@dataclass(frozen=True, slots=True)
class WidthSpec:
    """Specification of k: a number, ``full``, a share of variance, or nothing."""

    number: int | None = None  # k itself, or None
    variance: float | None = None  # share in (0, 1) that the kept directions must hold, or None
    full: bool = False  # every direction within the rank

    @classmethod
    def parse(cls, text: str | int | float | None) -> "WidthSpec":
        """Read ``128``, ``full``, ``0.95`` or None."""
        if text is None:
            return cls()
        if str(text).strip().lower() == "full":
            return cls(full=True)
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if number == 1 and (isinstance(text, float) or "." in str(text)):
            return cls(full=True)
        if 0 < number < 1:
            return cls(variance=number)
        if 1 <= number < math.inf and number == int(number):
            return cls(number=int(number))
        raise ConfigError(
            f"--k {text} is not understood; give a whole number from 1, 'full', or a share of "
            "variance such as 0.95"
        )


def default_width(dim: int) -> int:
    """Return the default k: a third of d, at most 256 (Su et al. 2021: 256 of 768)."""
    return min(max(dim // 3, 1), _WIDEST_DEFAULT)


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
    ALL_BUT_THE_TOP = "all-but-the-top"
    TRUNCATE = "truncate"

    @property
    def reads_data(self) -> bool:
        """True if the directions come from the data."""
        return self not in (Kind.NONE, Kind.TRUNCATE)


_CUT = frozenset({"--k", "--no-center", "--normalize-input"})
_SLICED = _CUT | {"--k as a share of variance", "--floor", "--remove-top"}
# The options of each kind, and the reason why others cannot apply.
_KINDS: dict[Kind, tuple[frozenset[str], str]] = {
    Kind.NONE: (frozenset(), "keeps every embedding as it is"),
    Kind.PCA: (_SLICED, "turns the embeddings and scales nothing"),
    Kind.WHITENING: (_SLICED | {"--exponent", "--shrinkage"}, "scales directions"),
    Kind.ALL_BUT_THE_TOP: (_SLICED, "drops the widest directions and scales nothing"),
    Kind.TRUNCATE: (_CUT, "cuts coordinates off without looking at the data"),
}


@schema
class WhiteningConfig(TransformShape):
    """A transform by its kind and width, and what shapes it.

    Attributes:
        kind: which linear map.
        k: kept width: a number, ``full``, a share of variance, or None for the default. The share
            is of the variance left after ``remove_top``.
        similarity: of the vectors; the length of those compared by ``dot`` is kept.

    Raises:
        ConfigError: an option that cannot apply to the kind, or a value outside its bounds.

    Examples:
        >>> WhiteningConfig(kind=Kind.PCA, k=128).gamma
        0.0
    """

    kind: Kind = Kind.WHITENING
    k: str | int | float | None = None
    similarity: Similarity = "cosine"

    def __post_init__(self) -> None:
        if self.kind is Kind.PCA and self.exponent:
            raise ConfigError(
                f"PCA has exponent 0; for exponent {self.exponent:g} use --whiten whitening"
            )
        takes, does = _KINDS[self.kind]
        wish = WidthSpec.parse(self.k)
        share = wish.variance is not None
        given = {
            "--k": wish.number is not None or (share and "--k" not in takes),
            "--k as a share of variance": share and "--k" in takes,
            "--exponent": not (self.exponent is None or self.kind is Kind.PCA),
            # Only False is a wish, so that one default serves all kinds.
            "--no-center": self.center is False,
            "--normalize-input": self.normalize_input,
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

    @property
    def gamma(self) -> float:
        """The exponent γ, settled."""
        if self.exponent is not None:
            return self.exponent
        return 1.0 if self.kind is Kind.WHITENING else 0.0

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

    def width(self, dim: int) -> int | None:
        """Return the k to expect of embeddings of ``dim``, None if a share of variance decides.

        The rank of the data may turn out less.
        """
        wish = WidthSpec.parse(self.k)
        if self.kind is Kind.NONE:
            return dim
        if wish.variance is not None:
            return None
        everything = wish.full or (self.kind is Kind.ALL_BUT_THE_TOP and wish.number is None)
        left = dim - self.removed(dim)
        return left if everything else wish.number or min(default_width(dim), left)

    def require_dim(self, dim: int) -> None:
        """Refuse, before anything is encoded, what embeddings of ``dim`` can never give."""
        number, left = WidthSpec.parse(self.k).number, dim - self.removed(dim)
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
