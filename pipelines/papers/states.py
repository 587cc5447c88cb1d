"""Pooled states of all layers, encoded once and kept; combinations of layers scored on pairs."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits
from torch import Tensor

from whiten_index.artifacts.atomic import remove_path
from whiten_index.artifacts.manifest import (
    Described,
    Schema,
    check_files,
    fingerprint,
    new_artifact,
    read_manifest,
)
from whiten_index.encoding.encoder import Encoder
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.encoding.load_encoder import local_model
from whiten_index.encoding.models import ModelFolder
from whiten_index.encoding.pooling import pool
from whiten_index.encoding.spec import EncoderFacts, EncoderSpec
from whiten_index.errors import ArtifactError, ConfigError
from whiten_index.evaluation.metrics import correlate, pair_cosines
from whiten_index.evaluation.sts_sets import StsSet
from whiten_index.measure.eval_config import EvalConfig
from whiten_index.measure.evaluate_sts import average
from whiten_index.measure.spaces import Scores, Spaces, encoder_facts, runs_of
from whiten_index.progress import Stages

POOLINGS = ("mean", "cls")
_KIND, _VERSION, _FILE = "pooled states", 1, "states.npy"
# Each worker holds float64 copies of a set's embeddings.
_MOST_WORKERS = 4
_WINDOW_BYTES = 256 << 20
_SAME = 1e-5  # of the largest coordinate: the rounding of float32 in equal states


class _States(Described):
    """Manifest of pooled states."""

    encoder: EncoderFacts


_SCHEMA = Schema(_KIND, _VERSION, _States)


class StateEncoder(Encoder):
    """Encoder of the pooled states of all layers, 0 (embeddings) to L, in one forward pass.

    A text has P·S·d numbers in float32: by pooling, by layer (S = L + 1), by coordinate. Heads and
    normalisations after pooling are not applied: they have no meaning for lower layers.
    """

    def __init__(
        self, spec: EncoderSpec, folder: ModelFolder, config: EncoderConfig, poolings: Sequence[str]
    ) -> None:
        super().__init__(states_spec(spec, folder, poolings), folder, config)
        # Fewer if a text has many numbers.
        self.window_rows = max(min(self.window_rows, _WINDOW_BYTES // (4 * self.dim)), 1)

    def pooled(self, states: Sequence[Tensor], mask: Tensor) -> Tensor:
        """Return the pooled states (n, P·S·d)."""
        poolings = self.spec.pooling.split("+")
        return torch.cat([pool(one, mask, each) for each in poolings for one in states], dim=1)


def states_spec(spec: EncoderSpec, folder: ModelFolder, poolings: Sequence[str]) -> EncoderSpec:
    """Return the identity of all pooled states of a model."""
    return replace(
        spec,
        pooling="+".join(poolings),
        layers=tuple(range(folder.layers + 1)),
        dim=len(poolings) * (folder.layers + 1) * folder.hidden_size,
        head_sha256=None,
        normalizes=False,
    )


@dataclass(frozen=True, eq=False)
class LayerStates:
    """Pooled states (n, S, d) float32 of n distinct texts, layer 0 (embeddings) to L of a model.

    ``rows`` has the row of each text. A text is embedded as the mean of its states of the layers
    ``chosen``; see ``TextEmbedder``.
    """

    values: NDArray[np.floating]
    pooling: str
    spec: EncoderSpec
    rows: Mapping[str, int] = field(repr=False)
    chosen: tuple[int, ...] = (-1,)

    @property
    def count(self) -> int:
        """Number of states of a text, the embedding layer included."""
        return int(self.values.shape[1])

    def embedder(self, layers: Iterable[int]) -> LayerStates:
        """Return the same states, embedded by some layers, counted from either end."""
        for layer in (layers := list(layers)):
            if not -self.count <= layer < self.count:
                raise ConfigError(
                    f"layer {layer} does not exist: {self.spec.model} has layers 0 (embeddings) "
                    f"to {self.count - 1}"
                )
        return replace(self, chosen=tuple(sorted({layer % self.count for layer in layers})))

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the embeddings (n, d) of n texts."""
        # In the file's order, each row once: a mapped file is read forwards.
        rows, places = np.unique([self.rows[text] for text in texts], return_inverse=True)
        first, *others = self.chosen
        total = np.array(self.values[rows, first], np.float32)
        for layer in others:
            total += self.values[rows, layer]
        if others:
            total /= np.float32(len(self.chosen))
        return total[places]

    def facts(self) -> dict[str, Any]:
        """Return the encoder's identity with these layers."""
        width = int(self.values.shape[2])
        spec = replace(self.spec, pooling=self.pooling, layers=self.chosen, dim=width)
        return encoder_facts(spec)

    def ranks(self, layers: Sequence[int]) -> bool:
        """Return False for layer 0 alone if it is the same for every text, as that of [CLS] is."""
        embedded = np.asarray(self.values[:, 0])
        same = np.ptp(embedded, axis=0).max() <= _SAME * np.abs(embedded).max()
        return tuple(layers) != (0,) or not same


def kept_states(
    texts: Sequence[str],
    config: EncoderConfig,
    folder: Path,
    stages: Stages,
    poolings: Sequence[str] = POOLINGS,
) -> dict[str, LayerStates]:
    """Return the states of texts by pooling, encoded unless an earlier run left them in ``folder``.

    They take 4·P·S·d bytes for each distinct text of S states of d numbers under P poolings.

    Raises:
        EncoderError: the model cannot be found or used.
        StorageError: the folder cannot be written, or the disk is full.
    """
    distinct, poolings = list(dict.fromkeys(texts)), tuple(poolings)
    resolved, model = local_model(config, by="states")
    spec = states_spec(resolved, model, poolings)
    final = folder / f"states-{fingerprint({'encoder': spec.fingerprint, 'texts': distinct})}"
    if not _is_whole(final):
        remove_path(final)
        with new_artifact(final) as (temporary, fields):
            shape = (len(distinct), len(poolings), model.layers + 1, model.hidden_size)
            encoder = StateEncoder(resolved, model, config, poolings)
            _encode(encoder, distinct, temporary / _FILE, shape, stages)
            fields |= {"kind": _KIND, "format_version": _VERSION, "encoder": spec.to_json()}
    values = np.load(final / _FILE, mmap_mode="r")
    rows = {text: row for row, text in enumerate(distinct)}
    return {
        pooling: LayerStates(values[:, place], pooling, spec, rows)
        for place, pooling in enumerate(poolings)
    }


def _encode(
    encoder: StateEncoder, texts: list[str], path: Path, shape: tuple[int, ...], stages: Stages
) -> None:
    """Encode n texts into a file whose rows hold the states of a text one after the other."""
    values = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
    if hasattr(os, "posix_fallocate"):
        # Writing to a mapped file on a full disk would kill the process.
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    flat, filled = values.reshape(len(texts), -1), 0
    with stages.stage("encode", len(texts)) as watcher:
        for block in encoder.stream([texts], advance=watcher.advance):
            flat[filled : filled + len(block)] = block
            filled += len(block)
    values.flush()


def _is_whole(folder: Path) -> bool:
    try:
        fields = read_manifest(folder, _SCHEMA)
        check_files(folder, fields, content=True)
    except ArtifactError:
        return False
    return True


def score_combinations(
    config: EvalConfig,
    sets: Sequence[StsSet],
    states: LayerStates,
    sizes: Iterable[int],
    stages: Stages,
) -> list[dict[str, Any]]:
    """Score every combination of so many layers on sets of pairs, raw and in each transform.

    A transform is fitted for each combination. Spearman's correlations are times 100.

    Returns:
        A run for each space: name, setting, and ``combinations``: layers, datasets, average.
    """

    def figures(each: StsSet, embedder: LayerStates, spaces: Spaces) -> Scores:
        pairs = each.scored_pairs()
        first, second = embedder.embed(pairs.first), embedder.embed(pairs.second)
        for space in spaces.with_raw(each):
            cosines = pair_cosines(space.apply(first), space.apply(second))
            found, _ = correlate(
                pairs.scores, cosines, pairs.subsets, averaged=each.averaged, name=each.name
            )
            yield space, {"spearman": found}

    def runs_with(layers: tuple[int, ...]) -> list[dict[str, Any]]:
        embedder = states.embedder(layers)
        spaces = Spaces(config, embedder, stages)
        return runs_of(((each.name, figures(each, embedder, spaces)) for each in sets), average)

    every = [c for size in sizes for c in itertools.combinations(range(states.count), size)]
    chosen = list(filter(states.ranks, every))
    # One thread a combination, with one thread of BLAS: eigenvectors of a few hundred dims take
    # longer on two threads than on one.
    workers = min(config.encoder.threads or os.cpu_count() or 1, _MOST_WORKERS)
    with (
        stages.stage("score combinations", len(chosen)) as watcher,
        threadpool_limits(1, user_api="blas"),
        ThreadPoolExecutor(workers) as pool,
    ):
        found = []
        for runs in pool.map(runs_with, chosen):
            found.append(runs)
            watcher.advance(1)
    return [
        {
            "name": of_space[0]["name"],
            "setting": of_space[0]["setting"],
            "combinations": [
                {"layers": list(layers), "datasets": run["datasets"], "average": run["average"]}
                for layers, run in zip(chosen, of_space, strict=True)
            ],
        }
        for of_space in zip(*found, strict=True)
    ]
