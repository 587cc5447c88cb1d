"""The words in which the papers' settings are said: a system, and how its figures are computed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

BERT_WHITENING, WHITENING_BERT = "BERT-whitening", "WhiteningBERT"
WHITENED_CSE, TORCH_PORT = "WhitenedCSE", "BERT-whitening-pytorch README"
AGGREGATION = {BERT_WHITENING: "wmean", WHITENING_BERT: "mean", WHITENED_CSE: "all"}
# The sets whose mean all three print.
SEVEN = ("STS12", "STS13", "STS14", "STS15", "STS16", "STS-B", "SICK-R")
# A fit on the sentences of MNLI and SNLI, which the user gives.
NLI = "nli"
FIRST_LAST, LAST = (1, -1), (-1,)
# Of SimCSE's evaluation until January 2022.
EMBEDDING_LAST = (0, -1)


class Kind(Enum):
    """What a system is: a public encoder, one trained by its paper, or word vectors."""

    ENCODER = "encoder"
    TRAINED = "trained"
    WORDS = "words"


class Measure(Enum):
    """Which evaluation a row's figures are of."""

    STS = "sts"
    TRANSFER = "transfer"
    RTE = "rte"
    RETRIEVAL = "retrieval"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How figures are computed.

    Attributes:
        measure: which evaluation.
        pooling: ``mean`` or ``cls``.
        layers: hidden states averaged, 0 = embeddings, -1 = the last.
        k: kept width of the whitening, ``full``, or None for no transform.
        fit: what the whitening is fitted on: ``NLI``, or as ``eval --fit`` calls it.
        max_length: tokens a text, None for the model's own.
        aggregation: over a set's subsets.
        sif: weigh words by rarity and take the common component off.
    """

    measure: Measure = Measure.STS
    pooling: str = "mean"
    layers: tuple[int, ...] = LAST
    k: str | int | None = None
    fit: str = "target"
    max_length: int | None = None
    aggregation: str = "all"
    sif: bool = False


@dataclass(frozen=True)
class Recipe:
    """What computes a row.

    Attributes:
        kind: of its system.
        hub: the model's name on the hub or its folder, None for word vectors.
        setting: how its figures are computed.
        notes: what a reader must know beside.
        instead: why its model is not the row's own, None where it is.
    """

    kind: Kind
    hub: str | None
    setting: Setting
    notes: tuple[str, ...] = ()
    instead: str | None = None


@dataclass(frozen=True)
class Refusal:
    """Why a row is not computed by any command of this project."""

    why: str


# The plain settings of Su et al. (2021) and of Huang et al. (2021), raw.
SU = Setting(layers=FIRST_LAST, max_length=64, aggregation="wmean")
HUANG = Setting(max_length=128, aggregation="mean")
