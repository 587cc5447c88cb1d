"""Combinations of layers of a model on the same pairs, each text encoded once."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from whiten_index.artifacts.atomic import scratch_folder
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.encoding.spec import EncoderSpec, resolve_encoder, states_spec
from whiten_index.errors import ConfigError
from whiten_index.evaluation.sts_scores import AGGREGATIONS, correlate, pair_cosines
from whiten_index.evaluation.sts_sets import StsSet, require_ranked
from whiten_index.measure.eval_config import EvalConfig
from whiten_index.measure.evaluate_sts import average, needed_pairs
from whiten_index.measure.spaces import Scores, Spaces, runs_of
from whiten_index.measure.text_embedder import encoder_facts
from whiten_index.progress import Progress, Silent, Stages

if TYPE_CHECKING:
    from whiten_index.encoding.encoder import StateEncoder

Layers = tuple[int, ...]
MOST_COMBINATIONS = 20_000
# Each worker holds float64 copies of a set's embeddings.
_MOST_WORKERS = 4
_SAME = 1e-5  # of the largest coordinate: the rounding of float32 in equal states


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
    chosen: Layers = (-1,)

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


@contextmanager
def encode_states(
    config: EncoderConfig, texts: Sequence[str], pooling: str, stages: Stages
) -> Iterator[LayerStates]:
    """Encode each distinct text once into a temporary file, all layers in one pass."""
    from whiten_index.encoding.encoder import StateEncoder

    spec, model = resolve_encoder(config)
    if model.head:
        stages.watcher.note(
            f"note: {model.name} ends with layers after pooling, which states leave out"
        )
    distinct = list(dict.fromkeys(texts))
    with scratch_folder() as folder:
        shape = (len(distinct), model.layers + 1, model.hidden_size)
        values = create_array(folder / "states.npy", shape)
        fill_states(
            StateEncoder(spec, model, config, poolings=(pooling,)), distinct, values, stages
        )
        rows = {text: row for row, text in enumerate(distinct)}
        yield LayerStates(values, pooling, states_spec(spec, model, (pooling,)), rows)


def create_array(path: Path, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Create a file of float32 zeros, and map it for writing."""
    values = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
    if hasattr(os, "posix_fallocate"):
        # Writing to a mapped file on a full disk would kill the process.
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return values


def fill_states(
    encoder: StateEncoder, texts: Sequence[str], values: NDArray[np.float32], stages: Stages
) -> None:
    """Encode n texts into ``values``, whose rows hold the states of a text one after the other."""
    flat = values.reshape(len(texts), -1)
    filled = 0
    with stages.stage("encode", len(texts)) as watcher:
        for block in encoder.stream([list(texts)], advance=watcher.advance):
            flat[filled : filled + len(block)] = block
            filled += len(block)


def _combinations(count: int, sizes: Sequence[int]) -> list[Layers]:
    """Return the combinations of ``count`` layers, of each size in turn."""
    total = 0
    for size in sizes:
        if not 1 <= size <= count:
            raise ConfigError(
                f"{size} layers cannot be combined: the model has {count} states, the embeddings "
                "counted"
            )
        total += math.comb(count, size)
    if total > MOST_COMBINATIONS:
        raise ConfigError(
            f"{count} states have {total:,} such combinations, more than {MOST_COMBINATIONS:,}; "
            "combine fewer layers"
        )
    return [layers for size in sizes for layers in itertools.combinations(range(count), size)]


def evaluate_layers(
    config: EvalConfig,
    sets: Sequence[StsSet],
    *,
    pooling: str = "mean",
    sizes: Sequence[int] = (1, 2),
    states: LayerStates | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Score every combination of layers on sets of pairs, raw and in each transform.

    Each distinct text goes through the model once, unless its ``states`` are given. A transform is
    fitted for each combination of as many layers as ``sizes`` names. Pooling is ``mean`` or
    ``cls``; pooling and layers of ``config`` play no part.

    Returns:
        JSON values, Spearman's correlation times 100: ``encoder``, ``states`` (S), and ``runs``,
        each with name, setting, ``combinations`` (layers, datasets, average over the sets) and
        ``best``: aggregation -> number of layers -> layers and figure, chosen on the very pairs it
        is a figure of. ``left_out`` has layer 0 alone if it is the same for every text, as that of
        [CLS] is. ``dropped``: set -> pairs without a score.
    """
    if config.index is not None:
        raise ConfigError("layers are those of a model; name it with --model")
    if config.fit_source is not None:
        raise ConfigError(
            f"--fit {config.fit} would be encoded again for each combination of layers; fit on "
            "target here, and evaluate the layers chosen with: eval sts --layers"
        )
    require_ranked(sets)
    sets = needed_pairs(config, sets)
    stages = Stages(progress or Silent())
    count = resolve_encoder(config.encoder)[1].layers + 1 if states is None else states.count
    # A number of layers that the model does not have is refused before it runs.
    combined = _combinations(count, sizes)
    texts = [text for each in sets for text in each.texts]
    with (
        encode_states(config.encoder, texts, pooling, stages)
        if states is None
        else nullcontext(states)
    ) as states:
        chosen = [layers for layers in combined if layers != (0,) or _ranks(states)]
        runs = _score(config, sets, states, chosen, stages)
        facts = states.embedder(range(count)).facts()
    return {
        "encoder": facts,
        "states": count,
        "runs": runs,
        "left_out": [
            {"layers": list(layers), "why": "it is the same for every text, and ranks nothing"}
            for layers in combined
            if layers not in chosen
        ],
        "dropped": {each.name: each.dropped for each in sets},
        "seconds": dict(stages.seconds),
    }


def _ranks(states: LayerStates) -> bool:
    """Return whether layer 0 differs between texts."""
    embedded = np.asarray(states.values[:, 0])
    return bool(np.ptp(embedded, axis=0).max() > _SAME * np.abs(embedded).max())


def _score(
    config: EvalConfig,
    sets: Sequence[StsSet],
    states: LayerStates,
    chosen: Sequence[Layers],
    stages: Stages,
) -> list[dict[str, Any]]:
    """Return a run for each space.

    One thread a combination, with one thread of BLAS: eigenvectors of a few hundred dims take
    longer on two threads than on one.
    """

    def runs_with(layers: Layers) -> list[dict[str, Any]]:
        embedder = states.embedder(layers)
        spaces = Spaces(config, embedder, stages)
        return runs_of(((each.name, _figures(each, embedder, spaces)) for each in sets), average)

    workers = min(config.encoder.threads or os.cpu_count() or 1, _MOST_WORKERS)
    found = list[list[dict[str, Any]]]()
    with (
        stages.stage("score combinations", len(sets) * len(chosen)) as watcher,
        threadpool_limits(1, user_api="blas"),
        ThreadPoolExecutor(workers) as pool,
    ):
        for runs in pool.map(runs_with, chosen):
            found.append(runs)
            watcher.advance(len(sets))
    scored = []
    for of_space in zip(*found, strict=True):
        cells = [
            {"layers": list(layers), "datasets": run["datasets"], "average": run["average"]}
            for layers, run in zip(chosen, of_space, strict=True)
        ]
        scored.append({
            "name": of_space[0]["name"],
            "setting": of_space[0]["setting"],
            "combinations": cells,
            "best": {how: _best(cells, how) for how in AGGREGATIONS},
        })  # fmt: skip
    return scored


def _figures(each: StsSet, embedder: LayerStates, spaces: Spaces) -> Scores:
    """Yield the correlations in each space, the raw one first."""
    pairs = each.scored_pairs()
    first, second = embedder.embed(pairs.first), embedder.embed(pairs.second)
    for space in spaces.with_raw(each):
        cosines = pair_cosines(space.apply(first), space.apply(second))
        found = correlate(
            pairs.scores, cosines, pairs.subsets, averaged=each.averaged, name=each.name
        )
        yield space, {"spearman": found.to_json()}


def _best(cells: Sequence[Mapping[str, Any]], how: str) -> dict[str, Any]:
    """Return the best combination of each number of layers, by the average over the sets."""
    best: dict[str, Any] = {}
    for cell in cells:
        size, figure = str(len(cell["layers"])), cell["average"]["spearman"][how]
        if size not in best or figure > best[size]["figure"]:
            best[size] = {"layers": cell["layers"], "figure": figure}
    return best
