"""What a training is asked to do, checked when it is made."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from whiten_index.artifacts.paths import require_no_secret
from whiten_index.errors import ConfigError

POOLINGS, DEVICES = ("cls", "mean"), ("auto", "cpu", "cuda")
# What checkpoints are compared by, as results call it: Spearman's correlation × 100.
BEST = "stsb_dev"
# Of the published code.
GROUPS = 128
# What is no part of what is trained, or is told by fingerprints.
_NO_PART = ("corpus", "out", "text_columns", "model", "revision", "trust_remote_code", "device",
            "limit", "save_steps")  # fmt: skip

_LAST_SEED, _MOST_EPOCHS = 2**32 - 1, 1e6
_OF_WHITENING = ("group_map", "shuffle", "epsilon", "shrinkage", "momentum")


class GroupMap(Enum):
    """What whitens a group: all give covariance I, and differ by a rotation.

    ``ZCA`` is UΛ^(-1/2)Uᵀ, nearest to what it is given; ``NEWTON`` the same by iterated products;
    ``PCA`` is Λ^(-1/2)Uᵀ, whose rotation counts as constant in the gradient, since that of
    eigenvectors does not exist where eigenvalues are equal; ``CHOLESKY`` is L⁻¹ of Σ = LLᵀ.
    """

    ZCA = "zca"
    NEWTON = "newton"
    PCA = "pca"
    CHOLESKY = "cholesky"


class PositiveSum(Enum):
    """Where the positives are summed: ``OUTSIDE`` the logarithm (eq. 7) or ``INSIDE`` (eq. 8)."""

    OUTSIDE = "outside"
    INSIDE = "inside"


class Precision(Enum):
    """What the encoder computes in while it is trained; weights are float32 in any case."""

    FLOAT32 = "float32"
    BF16 = "bf16"
    FP16 = "fp16"


_CHOICES: dict[str, type[Enum]] = {
    "group_map": GroupMap,
    "positive_sum": PositiveSum,
    "precision": Precision,
}


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Everything a training can be told; the defaults are the paper's for BERT-base.

    Attributes:
        corpus: Parquet files, folders, globs or URIs with the sentences.
        out: folder of the model.
        text_columns: of the sentences, joined by a space.
        limit: use only the first so many sentences.
        model, revision, trust_remote_code: what is trained, see ``EncoderConfig``.
        pooling: cls or mean; None for the model's own.
        max_length: tokens of a sentence.
        whiten: whether the head whitens; without, and with one positive, this is SimCSE.
        groups: how many groups of channels (the published code's reading); 128 by default.
        group_size: channels a group (the paper's text); one of the two where ``whiten``.
        group_map: zca, newton, pca or cholesky.
        shuffle: permute the channels at each call.
        epsilon, shrinkage, momentum: see ``ShuffledGroupWhitening``.
        positives: m, of each sentence.
        passes: through the encoder for a sentence's m + 1 views; as many as views by default.
        positive_sum: outside (eq. 7) or inside (eq. 8) the logarithm.
        temperature: of the similarities.
        batch_size: sentences.
        epochs: over the sentences.
        max_steps: stop after so many, None for whole epochs.
        learning_rate: at the end of the warm-up, from where it falls to 0 linearly.
        warmup: share of the steps in which it rises.
        weight_decay: of AdamW.
        max_grad_norm: gradients are cut to this length.
        precision: float32, bf16 or fp16, of the encoder's products; head and loss are in float32.
        eval_steps: steps between evaluations, of which the best one's weights are kept.
        save_steps: steps between checkpoints, which are three times as large: the last one is gone
            on from.
        seed: of everything drawn.
        keep_head: write the head too, whitening by its running moments; else the encoder alone.
        device: auto, cpu or cuda.
    """

    corpus: tuple[str, ...]
    out: str
    text_columns: tuple[str, ...] = ("text",)
    limit: int | None = None
    model: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    pooling: str | None = "cls"
    max_length: int = 32
    whiten: bool = True
    groups: int | None = None
    group_size: int | None = None
    group_map: GroupMap = GroupMap.ZCA
    shuffle: bool = True
    epsilon: float = 1e-5
    shrinkage: float = 0.0
    momentum: float = 0.1
    positives: int = 3
    passes: int | None = None
    positive_sum: PositiveSum = PositiveSum.OUTSIDE
    temperature: float = 0.05
    batch_size: int = 64
    epochs: float = 1.0
    max_steps: int | None = None
    learning_rate: float = 3e-5
    warmup: float = 0.0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    precision: Precision = Precision.FLOAT32
    eval_steps: int = 125
    save_steps: int = 500
    seed: int = 0
    keep_head: bool = False
    device: str = "auto"

    def __post_init__(self) -> None:
        """Take single paths for lists and choices by their names; refuse what cannot be.

        Raises:
            ConfigError: a value is out of its range, or two do not go together.
        """
        require_no_secret(vars(self), what="an option of a training")
        for name in ("corpus", "text_columns"):
            given = getattr(self, name)
            listed = (given,) if isinstance(given, str | os.PathLike) else given
            if isinstance(listed, list | tuple):
                places = tuple(str(e) if isinstance(e, os.PathLike) else e for e in listed)
                object.__setattr__(self, name, places)
        if isinstance(self.out, os.PathLike):
            object.__setattr__(self, "out", str(self.out))
        for name, choice in _CHOICES.items():
            known = {each.value: each for each in choice}
            given = getattr(self, name)
            if isinstance(given, str) and given in known:
                object.__setattr__(self, name, known[given])
        if not self.corpus:
            raise ConfigError("no sentences are named; name Parquet files or folders")
        self._require_kinds()
        self._require_numbers()
        self._require_together()

    def _require_kinds(self) -> None:
        for name in ("whiten", "shuffle", "keep_head", "trust_remote_code"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ConfigError(f"{name} is {value!r}; give true or false")
        for name in ("out", "model", "revision", "pooling", "device"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{name} is {value!r}; give text")
        for name in ("corpus", "text_columns"):
            value = getattr(self, name)
            if not isinstance(value, tuple) or not all(isinstance(each, str) for each in value):
                raise ConfigError(f"{name} is {value!r}; give text, or a list of it")
        for name, choice in _CHOICES.items():
            value = getattr(self, name)
            if not isinstance(value, choice):
                known = ", ".join(each.value for each in choice)
                raise ConfigError(f"{name} is {value!r}; give one of {known}")

    def _require_numbers(self) -> None:
        for name, least, why in (
            ("positives", 1, ""),
            ("batch_size", 2, ": sentences are told from the others of their batch"),
            ("max_length", 3, ": two of the tokens are the model's own"),
            ("eval_steps", 1, ""),
            ("save_steps", 1, ""),
            ("limit", 1, ""),
            ("max_steps", 1, ""),
            ("groups", 1, ""),
            ("group_size", 1, ""),
            ("passes", 1, ""),
            ("seed", 0, ""),
        ):
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                raise ConfigError(f"{name} is {value!r}; give a whole number")
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}; give {least} or more{why}")
        if self.seed > _LAST_SEED:
            raise ConfigError(f"seed is {self.seed}; give {_LAST_SEED} or less")
        for name, low, high in (
            ("epsilon", 0.0, None), ("shrinkage", 0.0, 1.0), ("momentum", 0.0, 1.0),
            ("warmup", 0.0, 1.0), ("weight_decay", 0.0, None), ("epochs", 0.0, _MOST_EPOCHS),
        ):  # fmt: skip
            value = getattr(self, name)
            self._require_number(name)
            if not low <= value <= (math.inf if high is None else high) or value == math.inf:
                wish = "0 or more" if high is None else f"a number from 0 to {high:g}"
                raise ConfigError(f"{name} is {value}; give {wish}")
        for name in ("temperature", "epochs", "learning_rate", "max_grad_norm"):
            value = getattr(self, name)
            self._require_number(name)
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}; give a number above 0")

    def _require_number(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{name} is {value!r}; give a number")

    def _require_together(self) -> None:
        if self.device not in DEVICES:
            raise ConfigError(f"device is {self.device}; give one of {', '.join(DEVICES)}")
        if self.pooling is not None and self.pooling not in POOLINGS:
            raise ConfigError(f"pooling is {self.pooling}; give one of {', '.join(POOLINGS)}")
        if self.groups is not None and self.group_size is not None:
            raise ConfigError("give either the number of groups or the channels of a group")
        if not self.whiten and (self.groups or self.group_size):
            raise ConfigError("groups are of a head that whitens; leave them out, or let it whiten")
        if self.passes is not None and not 1 <= self.passes <= self.views:
            raise ConfigError(
                f"passes is {self.passes}; a sentence has {self.views} views, so give 1 to "
                f"{self.views}"
            )

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> TrainingConfig:
        """Return a configuration of options by name, as of a command or a sweep.

        Raises:
            ConfigError: an unknown name, or see ``TrainingConfig``.
        """
        if unknown := sorted(options.keys() - cls.__dataclass_fields__.keys()):
            raise ConfigError(f"{', '.join(unknown)}: no such option of a training")
        return cls(**options)

    @property
    def views(self) -> int:
        """An anchor and its positives."""
        return self.positives + 1

    def chosen_groups(self) -> dict[str, int]:
        """Return the one reading of the group parameter that counts."""
        if self.group_size is not None:
            return {"group_size": self.group_size}
        return {"groups": GROUPS if self.groups is None else self.groups}

    def identity(self) -> dict[str, Any]:
        """Return what the trained weights depend on, as JSON values, but the model and corpus."""
        values = {key: value for key, value in vars(self).items() if key not in _NO_PART}
        # What is said in two ways is the same, and so is what has no effect.
        values |= {"passes": self.passes or self.views, "groups": None, "group_size": None}
        values |= self.chosen_groups() if self.whiten else dict.fromkeys(_OF_WHITENING)
        values |= {"epochs": None} if self.max_steps else {}
        return {
            key: value.value if isinstance(value, Enum) else value for key, value in values.items()
        }
