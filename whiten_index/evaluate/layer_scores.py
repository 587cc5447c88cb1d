"""Combinations of layers of one set after the other, scored several at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from whiten_index.evaluate.config import EvalConfig
from whiten_index.evaluate.spaces import Spaces, raw_space
from whiten_index.evaluate.states import PooledStates, StateTexts
from whiten_index.evaluation import LayerProducts, correlate, cosines_between
from whiten_index.labels import StsSet
from whiten_index.progress import Stages

Layers = tuple[int, ...]
Scored = tuple[str, dict[str, Any], dict[str, float]]
# Float64 copies of a set's embeddings that a combination takes, and what all may take together.
_COPIES, _WORKERS_BYTES = 5, 4 << 30


def layer_scores(
    config: EvalConfig,
    sets: Sequence[StsSet],
    states: PooledStates,
    pooling: str,
    chosen: Sequence[Layers],
    stages: Stages,
) -> Iterator[tuple[StsSet, Iterator[list[Scored]]]]:
    """Yield each set with what its combinations score: name, setting and figures of each space.

    One thread a combination, with one thread of BLAS: eigenvectors of a few hundred dims take
    longer on two threads than on one.
    """
    rows, width = max(len(set(each.texts)) for each in sets), states.values.shape[3]
    room = _WORKERS_BYTES // (_COPIES * 8 * rows * width) or 1
    workers = min(config.encoder.threads or os.cpu_count() or 1, room)
    transformed = bool(config.transforms or config.remove_common)
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(workers) as pool:
        for each in sets:
            task = _SetLayers(config, each, states.only(each.texts, pooling), pooling, stages)
            raw = pool.submit(task.raw, chosen)
            others = pool.map(task.transformed, chosen) if transformed else ([] for _ in chosen)
            yield each, ([raw.result()[i], *more] for i, more in enumerate(others))


class _Once:
    """The embeddings of all texts of a set in one choice of layers, made once."""

    def __init__(self, embedder: StateTexts) -> None:
        self._embedder = embedder
        self.all = embedder.of_rows(slice(None))

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        rows = self._embedder.states.rows
        # All of them in their order is what a fit on the task asks for.
        if list(texts) == list(rows):
            return self.all
        return self.all[[rows[text] for text in texts]]

    def facts(self) -> dict[str, Any]:
        return self._embedder.facts()


class _SetLayers:
    """Scores combinations of layers of one set."""

    def __init__(
        self,
        config: EvalConfig,
        each: StsSet,
        states: PooledStates,
        pooling: str,
        stages: Stages,
    ) -> None:
        self._config, self._each, self._states = config, each, states
        self._pooling, self._stages = pooling, stages
        self._rows = [
            np.array([states.rows[text] for text in side])[each.scored]
            for side in (each.first, each.second)
        ]
        # Only what is scored is projected; the fit sees all.
        self._used, places = np.unique(np.concatenate(self._rows), return_inverse=True)
        self._places = np.split(places, 2)

    def raw(self, chosen: Sequence[Layers]) -> list[Scored]:
        """Score all combinations as they are, from the inner products of the layers."""
        states, pooling, space = self._states, self._pooling, raw_space()
        products = LayerProducts.of(lambda rows: states.of_rows(rows, pooling), *self._rows)
        return [
            (space.name, space.setting, self._figures(products.cosines(layers)))
            for layers in chosen
        ]

    def transformed(self, layers: Layers) -> list[Scored]:
        """Score one combination in each transform, fitted on it."""
        embedder = _Once(self._states.embedder(pooling=self._pooling, layers=layers))
        maker = Spaces(self._config, embedder, self._stages)
        scored = []
        for space in maker.of(self._each.texts, scored=np.tile(self._each.scored, 2)):
            vectors = space.apply(embedder.all[self._used])
            figures = self._figures(cosines_between(vectors, *self._places))
            scored.append((space.name, space.setting, figures))
        return scored

    def _figures(self, cosines: NDArray[np.float64]) -> dict[str, float]:
        """Return the correlations of the scored pairs' cosines."""
        each, use = self._each, self._each.scored
        found = correlate(
            each.scores[use],
            cosines,
            each.subsets[use],
            averaged=each.averaged,
            name=each.name,
        )
        return found.to_json()
