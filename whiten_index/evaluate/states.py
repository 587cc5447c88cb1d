"""The pooled hidden states of a task's texts: encoded once, then any layers, any pooling."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.atomic import remove_path, scratch_folder
from whiten_index.artifacts.files import list_folder, writing
from whiten_index.artifacts.manifest import (
    Described,
    Schema,
    check_files,
    fingerprint,
    publish_folder,
    read_manifest,
)
from whiten_index.artifacts.tensors import create_tensor, map_tensor, read_tensors, write_tensors
from whiten_index.encoding import (
    EncoderConfig,
    EncoderSpec,
    ModelFolder,
    resolve_encoder,
    states_spec,
)
from whiten_index.errors import ArtifactError, ConfigError
from whiten_index.evaluate.config import EvalConfig
from whiten_index.evaluate.kept import text_digests
from whiten_index.evaluate.texts import encoder_facts
from whiten_index.progress import Stages
from whiten_index.store import TransformerFacts

if TYPE_CHECKING:
    from whiten_index.encoding import Encoder

_KIND, _VERSION, _FILE, _TENSOR = "pooled-states", 1, "states.safetensors", "states"
_TEXTS = "texts.safetensors"


class _States(Described):
    """Manifest of pooled states."""

    encoder: TransformerFacts


_SCHEMA = Schema(_KIND, _VERSION, _States)
_GATHERED = 1024
# What is not to be kept for later goes to a file all the same where it is larger.
_HELD_BYTES = 2 << 30
POOLINGS = ("mean", "cls")


@dataclass(frozen=True, eq=False)
class PooledStates:
    """Pooled states of n distinct texts.

    Attributes:
        values: (n, P, S, d) float32, mapped from a file: pooling, layer 0 (embeddings) … L.
        poolings: the P ways of pooling.
        spec: the model, every layer of it.
        rows: text -> its row.
    """

    values: NDArray[np.floating]
    poolings: tuple[str, ...]
    spec: EncoderSpec
    rows: Mapping[str, int] = field(repr=False)

    @classmethod
    def of(
        cls,
        texts: Sequence[str],
        config: EncoderConfig,
        folder: Path,
        stages: Stages,
        *,
        poolings: Sequence[str] = POOLINGS,
    ) -> PooledStates:
        """Encode distinct texts once, or take what an earlier run left in ``folder``.

        Args:
            texts: of all tasks; each distinct one is encoded once.
            config: the model; its pooling and layers play no part.
            folder: keeps the states, 4·P·S·d bytes a text.
            stages: told of the encoding.
            poolings: ways of pooling to keep.

        Raises:
            EncoderError: the model cannot be found or used.
            StorageError: the folder cannot be written, or the disk has no room.
        """
        distinct = list(dict.fromkeys(texts))
        resolved, model = resolve_encoder(config)
        spec = states_spec(resolved, model, poolings)
        _note_head(model, stages)
        found = _holding(folder, spec, distinct)
        if found is None:
            shape = (len(distinct), len(poolings), model.layers + 1, model.hidden_size)
            digests = text_digests(distinct)
            identity = {"encoder": spec.fingerprint, "texts": digests.tobytes().hex()}
            final = folder / f"states-{fingerprint(identity)}"
            with writing(final):
                # What is there is damaged, or another process has just made it.
                if _holding(folder, spec, distinct) is None:
                    remove_path(final)

            def fill(temporary: Path) -> dict[str, Any]:
                values = create_tensor(
                    temporary / _FILE, _TENSOR, shape, kind=_KIND, version=_VERSION
                )
                _encode(_state_encoder(resolved, model, config, poolings), distinct, values, stages)
                values.flush()  # type: ignore[attr-defined]
                write_tensors(
                    temporary / _TEXTS, {"digests": digests}, kind=_KIND, version=_VERSION
                )
                return {"kind": _KIND, "format_version": _VERSION, "encoder": spec.to_json()}

            publish_folder(final, fill)
            found = final, np.arange(len(distinct))
        final, places = found
        values = map_tensor(final / _FILE, _TENSOR, remedy=f"remove {final} and run again")
        rows = dict(zip(distinct, places.tolist(), strict=True))
        return cls(values, tuple(poolings), spec, rows)

    @property
    def layers(self) -> int:
        """How many states a text has, the embedding layer counted."""
        return int(self.values.shape[2])

    def only(self, texts: Sequence[str], pooling: str) -> PooledStates:
        """Return the states of some of the texts in one pooling, each text once, in memory."""
        names = list(dict.fromkeys(texts))
        rows = np.array([self.rows[text] for text in names], np.int64)
        # In the file's order: a mapped file is read forwards.
        order = np.argsort(rows)
        values = np.empty((len(rows), 1, *self.values.shape[2:]), np.float32)
        for start in range(0, len(order), _GATHERED):
            block = order[start : start + _GATHERED]
            values[block, 0] = self.of_rows(rows[block], pooling)
        own = {text: row for row, text in enumerate(names)}
        return PooledStates(values, (pooling,), self.spec, own)

    def layer(self, number: int) -> int:
        """Return the index of a layer counted from either end.

        Raises:
            ConfigError: the model does not have it.
        """
        index = number if number >= 0 else self.layers + number
        if not 0 <= index < self.layers:
            raise ConfigError(
                f"layer {number} does not exist: {self.spec.model} has layers 0 (embeddings) to "
                f"{self.layers - 1}"
            )
        return index

    def embedder(self, *, pooling: str, layers: Sequence[int]) -> StateTexts:
        """Return an embedder of one pooling and the mean of some layers.

        Raises:
            ConfigError: a layer that the model does not have, or a pooling that was not kept.
        """
        if pooling not in self.poolings:
            raise ConfigError(
                f"pooling {pooling!r} was not kept; use one of {', '.join(self.poolings)}"
            )
        chosen = tuple(sorted({self.layer(number) for number in layers}))
        return StateTexts(self, pooling, chosen)

    def of_rows(self, rows: NDArray[np.int64], pooling: str) -> NDArray[np.floating]:
        """Return all states of some rows in one pooling, (m, S, d)."""
        found: NDArray[np.floating] = self.values[rows, self.poolings.index(pooling)]
        return found


@dataclass(frozen=True, eq=False)
class StateTexts:
    """Embeddings from pooled states; see ``TextEmbedder``."""

    states: PooledStates
    pooling: str
    layers: tuple[int, ...]

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the mean of the chosen layers, (n, d)."""
        rows = np.array([self.states.rows[text] for text in texts], np.int64)
        # In the file's order, each row once: a mapped file is read forwards.
        distinct, places = np.unique(rows, return_inverse=True)
        made = self.of_rows(distinct)
        return made if np.array_equal(rows, distinct) else made[places]

    def of_rows(self, rows: NDArray[np.int64] | slice) -> NDArray[np.float32]:
        """Return the mean of the chosen layers of some rows, (m, d)."""
        kind = self.states.poolings.index(self.pooling)
        first, *others = self.layers
        total = np.array(self.states.values[rows, kind, first], np.float32)
        for layer in others:
            total += self.states.values[rows, kind, layer]
        if others:
            total /= np.float32(len(self.layers))
        return total

    def facts(self) -> dict[str, Any]:
        """Return the encoder's identity with this pooling and these layers."""
        width = int(self.states.values.shape[3])
        spec = replace(self.states.spec, pooling=self.pooling, layers=self.layers, dim=width)
        return encoder_facts(spec)


@contextmanager
def kept_states(
    config: EvalConfig, texts: Sequence[str], poolings: Sequence[str], stages: Stages
) -> Iterator[PooledStates]:
    """Give the pooled states of texts, from the store where one is named, else for a while.

    Raises:
        WhitenIndexError: as ``PooledStates.of``.
    """
    if config.store is not None:
        yield PooledStates.of(texts, config.encoder, Path(config.store), stages, poolings=poolings)
        return
    resolved, model = resolve_encoder(config.encoder)
    distinct = list(dict.fromkeys(texts))
    shape = (len(distinct), len(poolings), model.layers + 1, model.hidden_size)
    if 4 * math.prod(shape) <= _HELD_BYTES:
        spec = states_spec(resolved, model, poolings)
        _note_head(model, stages)
        values = np.empty(shape, np.float32)
        _encode(_state_encoder(resolved, model, config.encoder, poolings), distinct, values, stages)
        rows = {text: row for row, text in enumerate(distinct)}
        yield PooledStates(values, tuple(poolings), spec, rows)
        return
    with scratch_folder() as folder:
        yield PooledStates.of(texts, config.encoder, folder, stages, poolings=poolings)


def _note_head(model: ModelFolder, stages: Stages) -> None:
    if model.head:
        stages.watcher.note(
            f"note: {model.name} ends with layers after pooling, which pooled states leave out"
        )


def _state_encoder(
    spec: EncoderSpec, model: ModelFolder, config: EncoderConfig, poolings: Sequence[str]
) -> Encoder:
    from whiten_index.encoding import StateEncoder

    return StateEncoder(spec, model, config, poolings=poolings)


def _encode(
    encoder: Encoder, texts: list[str], values: NDArray[np.float32], stages: Stages
) -> None:
    flat = values.reshape(len(texts), -1)
    filled = 0
    with stages.stage("encode", len(texts)) as watcher:
        for block in encoder.stream([texts], advance=watcher.advance):
            flat[filled : filled + len(block)] = block
            filled += len(block)


def _holding(
    folder: Path, spec: EncoderSpec, texts: list[str]
) -> tuple[Path, NDArray[np.int64]] | None:
    """Return whole states that hold all of these texts, and the row of each; None without any."""
    wanted = [digest.tobytes() for digest in text_digests(texts)]
    for final in list_folder(folder, "states-*"):
        try:
            fields = read_manifest(final, _SCHEMA)
            if EncoderSpec.from_json({**fields["encoder"]}).fingerprint != spec.fingerprint:
                continue
            kept, _ = read_tensors(
                final / _TEXTS, kind=_KIND, version=_VERSION, shapes={"digests": "nb"}
            )
            places = {digest.tobytes(): row for row, digest in enumerate(kept["digests"])}
            if not places.keys() >= set(wanted):
                continue
            check_files(final, fields, content=True)
        except ArtifactError:
            continue
        return final, np.array([places[digest] for digest in wanted], np.int64)
    return None
