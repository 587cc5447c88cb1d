"""Every combination of layers of a model on the same pairs, each text encoded once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.errors import ConfigError
from whiten_index.evaluate.config import DISTINCT, SCORED, TARGET, EvalConfig
from whiten_index.evaluate.spaces import Spaces
from whiten_index.evaluate.states import PooledStates, kept_states
from whiten_index.evaluation import (
    AGGREGATIONS,
    LayerProducts,
    combinations,
    correlate,
    pair_cosines,
)
from whiten_index.labels import StsSet
from whiten_index.progress import Progress, Silent, Stages

Layers = tuple[int, ...]
RAW = "raw"


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
    of texts gives once. A transform needs Cov(mean of C) = Σᵢⱼ Covᵢⱼ / |C|², i, j in C: a d²
    cross-moment for each pair of layers costs as many products as the moments of the mean of that
    pair, and S²d² memory, so those are taken, from the kept states, in d² memory.

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
        ``best``: aggregation -> number of layers -> layers and figure.

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
    stages = Stages(progress or Silent())
    texts = [text for each in sets for text in each.texts]
    kept = kept_states(config, texts, (pooling,), stages) if states is None else nullcontext(states)
    with kept as states:
        chosen = combinations(states.layers, sizes=sizes)
        runs: dict[str, _Run] = {}
        total = len(sets) * len(chosen)
        with stages.stage("score combinations", total) as watcher:
            for each in sets:
                inside = states.only(each.texts)
                _score_raw(runs, each, inside, pooling, chosen)
                for layers in chosen:
                    if config.transforms or config.remove_common:
                        _score(runs, config, each, inside, pooling, layers, stages)
                    watcher.advance(1)
        facts = states.embedder(pooling=pooling, layers=range(states.layers)).facts()
    return {
        "encoder": facts,
        "states": states.layers,
        "runs": [run.to_json() for run in runs.values()],
        "seconds": dict(stages.seconds),
    }


def _score_raw(
    runs: dict[str, _Run],
    each: StsSet,
    states: PooledStates,
    pooling: str,
    chosen: Sequence[Layers],
) -> None:
    """Score all combinations of a set from the inner products of its layers."""
    products = LayerProducts.of(
        states.of_texts(each.first, pooling), states.of_texts(each.second, pooling)
    )
    run = runs.setdefault(RAW, _Run(RAW, {"transform": {"kind": "none"}}, {}))
    for layers in chosen:
        figures = run.datasets.setdefault(layers, {})
        figures[each.name] = _figures(each, products.cosines(layers))


def _score(
    runs: dict[str, _Run],
    config: EvalConfig,
    each: StsSet,
    states: PooledStates,
    pooling: str,
    layers: Layers,
    stages: Stages,
) -> None:
    """Score one combination of a set in each transform, fitted on it."""
    embedder = states.embedder(pooling=pooling, layers=layers)
    spaces = Spaces(config, embedder, stages).of(each.texts, scored=np.tile(each.scored, 2))
    embeddings = embedder.embed(list(states.rows))
    first, second = (
        np.array([states.rows[text] for text in side]) for side in (each.first, each.second)
    )
    for number, space in enumerate(spaces):
        vectors = space.apply(embeddings)
        # The width of ``full`` is each combination's own rank.
        name = f"{number}"
        run = runs.setdefault(name, _Run(space.name, space.setting, {}))
        figures = run.datasets.setdefault(layers, {})
        figures[each.name] = _figures(each, pair_cosines(vectors[first], vectors[second]))


def _figures(each: StsSet, cosines: NDArray[np.float64]) -> dict[str, float]:
    use = each.scored
    found = correlate(
        each.scores[use],
        cosines[use],
        each.subsets[use],
        averaged=each.averaged,
        name=each.name,
    )
    return found.to_json()


def _best(cells: Sequence[Mapping[str, Any]], how: str) -> dict[str, Any]:
    """Return the best combination of each number of layers, by the average over the sets."""
    best: dict[str, Any] = {}
    for cell in cells:
        size, figure = str(len(cell["layers"])), cell["average"]["spearman"][how]
        if size not in best or figure > best[size]["figure"]:
            best[size] = {"layers": cell["layers"], "figure": figure}
    return best
