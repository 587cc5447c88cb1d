"""The models that rows ask for: found, replaced by a stand-in, and their texts encoded once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipelines.papers import models
from pipelines.papers.data import Data
from pipelines.papers.recipes import Kind, Measure, Recipe, Setting
from pipelines.papers.states import LayerStates, kept_states
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.encoding.load_encoder import local_model
from whiten_index.errors import ConfigError, StorageError, WhitenIndexError
from whiten_index.progress import Stages


@dataclass(frozen=True)
class Model:
    """A model that is at hand.

    Attributes:
        name: by which it is loaded.
        layers: L.
        dim: width of a hidden state.
        longest: tokens it can take.
        stands_in: whether it takes the place of a row's own.
        why: why that one is not taken, where it is not.
        once: whether only one setting is computed with it, so that its states are not kept.
    """

    name: str
    layers: int
    dim: int
    longest: int
    stands_in: bool = False
    why: str | None = None
    once: bool = False

    def numbers(self, layers: Sequence[int]) -> list[int]:
        """Return layers counted from the embeddings on."""
        return sorted({n if n >= 0 else self.layers + 1 + n for n in layers})

    def tokens(self, asked: int | None) -> int | None:
        """Return the limit of tokens, at most what the model can take."""
        return None if asked is None else min(asked, self.longest)

    def width(self, k: str | int | None) -> str | int | None:
        """Return a k that the model has: all directions where it asks for as many or more."""
        return "full" if isinstance(k, int) and k >= self.dim else k

    def encoder(self, setting: Setting) -> EncoderConfig:
        """Return the encoder of a setting."""
        values: dict[str, Any] = {
            "model": self.name,
            "pooling": setting.pooling,
            "layers": setting.layers,
            "max_length": self.tokens(setting.max_length),
        }
        return EncoderConfig(**values)


@dataclass
class Encoders:
    """Finds models, and keeps the pooled states of all their layers.

    Attributes:
        data: the texts.
        folder: of the states.
        stages: told of the encoding.
        stand_in: model in the place of those that are not to be had, or None.
        given: models that were named, by what they are known by.
    """

    data: Data
    folder: Path
    stages: Stages
    stand_in: str | None = None
    given: dict[str, str] = field(default_factory=dict)
    _found: dict[str, Model | str] = field(default_factory=dict, repr=False)
    _states: dict[tuple[str, int | None, Measure], dict[str, LayerStates]] = field(
        default_factory=dict, repr=False
    )

    def of(self, recipe: Recipe) -> Model | str:
        """Return the model of a row or its stand-in, or the sentence that says why there is none.

        What its own paper trained is never stood in for.
        """
        assert recipe.hub is not None
        name = self.given.get(models.short(recipe.hub), recipe.hub)
        found = self._find(name)
        if isinstance(found, Model) or recipe.kind is Kind.TRAINED or self.stand_in is None:
            return found
        return replace(self.substitute(), why=found)

    def substitute(self) -> Model:
        """Return the stand-in.

        Raises:
            ConfigError: it cannot be used.
        """
        found = self._find(str(self.stand_in))
        if isinstance(found, str):
            raise ConfigError(f"the stand-in cannot be used: {found}")
        return replace(found, stands_in=True)

    def usable(self, model: Model) -> bool:
        """Tell whether a model that was found could be used so far."""
        return isinstance(self._find(model.name), Model)

    def states(self, model: Model, setting: Setting, names: list[str]) -> LayerStates:
        """Return the states of all texts of an evaluation, encoded unless they are kept.

        Raises:
            EncoderError: the model cannot be loaded or used.
            StorageError: the folder cannot be written.
        """
        key = (model.name, model.tokens(setting.max_length), setting.measure)
        if key not in self._states:
            config = EncoderConfig(model=model.name, max_length=key[1])
            texts = self.data.texts(setting.measure, names)
            try:
                self._states[key] = kept_states(texts, config, self.folder, self.stages)
            except StorageError:
                raise
            except Exception as error:
                # Not tried again for its other rows.
                self._found[model.name] = str(error) or type(error).__name__
                raise
        return self._states[key][setting.pooling]

    def _find(self, name: str) -> Model | str:
        if name not in self._found:
            try:
                asked = EncoderConfig(model=name, pooling="mean")
                _, folder = local_model(asked, by="a paper")
            except WhitenIndexError as error:
                self._found[name] = str(error)
            else:
                self._found[name] = (
                    f"{name} ends with layers of its own after pooling, which no published setting "
                    "has; name its plain checkpoint"
                    if folder.head
                    else Model(name, folder.layers, folder.hidden_size, folder.longest)
                )
        return self._found[name]
