"""Every combination of layers of a model on the same pairs, each text encoded once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from whiten_index.encoding import resolve_encoder
from whiten_index.errors import ConfigError
from whiten_index.evaluate.config import DISTINCT, SCORED, TARGET, EvalConfig
from whiten_index.evaluate.layer_scores import Layers, layer_scores
from whiten_index.evaluate.states import POOLINGS, PooledStates, kept_states
from whiten_index.evaluate.sts import needed_pairs
from whiten_index.evaluation import (
    AGGREGATIONS,
    combinations,
)
from whiten_index.labels import StsSet, require_ranked
from whiten_index.progress import Progress, Silent, Stages

_SAME = 1e-5  # of the largest coordinate, what float32 makes of equal states


@dataclass
class _Run:
    """The figures of all combinations in one space, set after set."""

    name: str
    setting: dict[str, Any]
    datasets: dict[Layers, dict[str, dict[str, float]]]

    def to_json(self) -> dict[str, Any]:
        cells = []
        for layers, datasets in self.datasets.items():
            average = {
                how: float(np.mean([figures[how] for figures in datasets.values()]))
                for how in AGGREGATIONS
            }
            named = {name: {"spearman": figures} for name, figures in datasets.items()}
            cells.append(
                {"layers": list(layers), "datasets": named, "average": {"spearman": average}}
            )
        return {
            "name": self.name,
            "setting": self.setting,
            "combinations": cells,
            "best": {how: _best(cells, how) for how in AGGREGATIONS},
        }


def evaluate_layers(
    config: EvalConfig,
    sets: Sequence[StsSet],
    *,
    pooling: str = "mean",
    sizes: Sequence[int] = (1, 2),
    states: PooledStates | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Score every combination of layers on sets of pairs, raw and in each transform asked for.

    Each distinct text goes through the model once; the pooled states of all its layers are kept in
    a file. Raw cosines of means of layers come from the inner products of layers, which each pair
    of texts gives once. A transform needs Cov(mean of C) = Σᵢⱼ Covᵢⱼ / |C|², i, j in C: for a heat
    map the d² cross-moments of all pairs of layers cost as many products as the moments of the
    means of those pairs, and S²d² memory, so the latter are taken, from the kept states, in d².

    Args:
        config: the model and the transforms; its own pooling and layers play no part.
        sets: the pairs.
        pooling: ``mean`` or ``cls``.
        sizes: how many layers are combined: 1 and 2 make a heat map.
        states: of all texts, where they are at hand; else they are encoded, or found in the
            store.
        progress: told of the stages.

    Returns:
        JSON values, Spearman's correlation times 100: ``encoder``, ``states`` (S), and ``runs``,
        each with name, setting, ``combinations`` (layers, datasets, average over the sets) and
        ``best``: aggregation -> number of layers -> layers and figure, chosen on the very pairs it
        is a figure of. Layer 0 alone is left out where it is the same for every text, as that of
        [CLS] is, and told in ``left_out``. ``dropped``: set -> pairs without a score.

    Raises:
        WhitenIndexError: the model, a transform or the data cannot be used.
    """
    if config.word_vectors is not None or config.index is not None:
        raise ConfigError("layers are those of a model; name it with --model")
    if config.transforms and config.fit not in (TARGET, DISTINCT, SCORED):
        raise ConfigError(
            f"--fit {config.fit} would be encoded again for each combination of layers; fit on "
            "target here, and evaluate the layers chosen with: eval sts --layers"
        )
    require_ranked(sets)
    sets = needed_pairs(config, sets)
    if states is None:
        # A number of layers that the model does not have is refused before it runs.
        combinations(resolve_encoder(config.encoder)[1].layers + 1, sizes=sizes)
    stages = Stages(progress or Silent())
    texts = [text for each in sets for text in each.texts]
    # Where they are kept for later, they are kept for every question about layers.
    poolings = (pooling,) if config.store is None else POOLINGS
    kept = kept_states(config, texts, poolings, stages) if states is None else nullcontext(states)
    with kept as states:
        asked = combinations(states.layers, sizes=sizes)
        chosen = _telling(asked, states, pooling)
        runs: dict[str, _Run] = {}
        total = len(sets) * len(chosen)
        with stages.stage("score combinations", total) as watcher:
            for each, scored in layer_scores(config, sets, states, pooling, chosen, stages):
                for layers, found in zip(chosen, scored, strict=True):
                    for name, setting, figures in found:
                        run = runs.setdefault(name, _Run(name, setting, {}))
                        run.datasets.setdefault(layers, {})[each.name] = figures
                    watcher.advance(1)
        facts = states.embedder(pooling=pooling, layers=range(states.layers)).facts()
    return {
        "encoder": facts,
        "states": states.layers,
        "runs": [run.to_json() for run in runs.values()],
        "left_out": [
            {"layers": list(layers), "why": "it is the same for every text, and ranks nothing"}
            for layers in asked
            if layers not in chosen
        ],
        "dropped": {each.name: each.dropped for each in sets},
        "seconds": dict(stages.seconds),
    }


def _telling(chosen: list[Layers], states: PooledStates, pooling: str) -> list[Layers]:
    """Leave layer 0 alone out where it is one and the same for every text, and ranks nothing."""
    embedded = np.asarray(states.values[:, states.poolings.index(pooling), 0])
    if np.ptp(embedded, axis=0).max() > _SAME * np.abs(embedded).max():
        return chosen
    return [layers for layers in chosen if layers != (0,)]


def _best(cells: Sequence[Mapping[str, Any]], how: str) -> dict[str, Any]:
    """Return the best combination of each number of layers, by the average over the sets."""
    best: dict[str, Any] = {}
    for cell in cells:
        size, figure = str(len(cell["layers"])), cell["average"]["spearman"][how]
        if size not in best or figure > best[size]["figure"]:
            best[size] = {"layers": cell["layers"], "figure": figure}
    return best
