"""The papers' drawings computed: the effect of k, pairs of layers, alignment and uniformity."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.papers import models
from pipelines.papers.bench import Bench
from pipelines.papers.encoders import Model
from pipelines.papers.pictures import heat_matrix
from pipelines.papers.published import Row
from pipelines.papers.recipes import (
    AGGREGATION,
    BERT_WHITENING,
    EMBEDDING_LAST,
    HUANG,
    SU,
    WHITENED_CSE,
    WHITENING_BERT,
    Kind,
    Recipe,
    Setting,
)
from pipelines.papers.settings import recipe_of
from pipelines.papers.states import score_combinations
from whiten_index.cli.log_lines import log
from whiten_index.errors import StorageError, WhitenIndexError
from whiten_index.measure.evaluate_sts import evaluate_geometry, evaluate_sts
from whiten_index.measure.measure_options import SCORED
from whiten_index.measure.spaces import TextEmbedder
from whiten_index.whitening.spectrum import least_share, reciprocal
from whiten_index.whitening.whitening_config import Kind as Transform
from whiten_index.whitening.whitening_config import WhiteningConfig

Figure = dict[str, Any]
_Make = Callable[[Bench, Model], Iterator[Figure]]
_FULL = WhiteningConfig(kind=Transform.WHITENING, k="full")
_WIDTHS, _LEAST_WIDTH = 16, 4
_POINTS = "Spearman × 100"
# All combinations of so few states; of more, only of up to four layers.
_FEW_STATES, _MOST_LAYERS = 7, 4
_RAW, _WHITENED = "raw", "whitened"
_POOLED = {"mean": "token mean", "cls": "[CLS]"}


def figures_of(bench: Bench, rows: Sequence[Row]) -> tuple[list[Figure], list[dict[str, str]]]:
    """Compute the drawings of the sources whose first table is among the rows.

    Returns:
        The drawings, and those that could not be computed with the reason.

    Raises:
        StorageError: the disk cannot be written.
    """
    drawn: list[Figure] = []
    missed: list[dict[str, str]] = []
    for source, title, make, hubs in _JOBS:
        own = [row for row in rows if row.source == source and row.table == "Table 1"]
        done: list[str] = []
        for hub in _hubs(own, hubs):
            model = bench.encoders.of(Recipe(Kind.ENCODER, hub, Setting()))
            if isinstance(model, Model) and model.name in done:
                continue
            found, why = ([], model) if isinstance(model, str) else _drawn(bench, model, make)
            if isinstance(model, Model) and found:
                done.append(model.name)
                drawn += [_about(figure, source, hub, model, len(done)) for figure in found]
            if why is not None:
                place = {"source": source, "table": "figures", "model": hub}
                missed.append({**place, "setting": title, "why": why})
                log("figure_failed", **missed[-1])
    return drawn, missed


def _drawn(bench: Bench, model: Model, make: _Make) -> tuple[list[Figure], str | None]:
    """Return the drawings of one model, and why there are no more."""
    drawn: list[Figure] = []
    try:
        for figure in make(bench, model):
            drawn.append(figure)
            log("figure", id=figure["id"], ran_with=model.name)
    except StorageError:
        raise
    except Exception as error:
        # A drawing that fails does not take the tables with it.
        return drawn, str(error) if isinstance(error, WhitenIndexError) else repr(error)
    return drawn, None


def _hubs(rows: Sequence[Row], wanted: Sequence[str]) -> list[str]:
    """Return the models to draw: those the paper draws, or the first where none of them is left."""
    recipes = [recipe for row in rows if isinstance(recipe := recipe_of(row), Recipe)]
    there = list(dict.fromkeys(r.hub for r in recipes if r.hub and r.kind is Kind.ENCODER))
    return [hub for hub in wanted if hub in there] or there[:1]


def _about(figure: Figure, source: str, hub: str, model: Model, number: int) -> Figure:
    """Return a drawing with what it is of; its id is of it alone."""
    suffix = "" if number == 1 else f"-{models.short(hub)}"
    status = f" Computed with {model.name}" + (
        f", standing in for {hub}." if model.stands_in else "."
    )
    return {
        **figure,
        "id": figure["id"] + suffix,
        "source": source,
        "title": figure["title"] + ("" if number == 1 else f", {models.short(hub)}"),
        "caption": figure["caption"] + status,
        "hub": hub,
        "ran_with": model.name,
        "status": "stand-in" if model.stands_in else "ran",
    }


# --------------------------------------------------------------------------- the effect of k


def _k_effect(bench: Bench, model: Model) -> Iterator[Figure]:
    how, sets = AGGREGATION[BERT_WHITENING], bench.data.sets()
    setting = replace(SU, k="full")
    spread = np.geomspace(min(_LEAST_WIDTH, model.dim), model.dim, _WIDTHS).round().astype(int)
    widths: list[str | int] = [k for k in dict.fromkeys(spread.tolist()) if k < model.dim]
    widths.append("full")

    def make() -> dict[str, Any]:
        transforms = tuple(WhiteningConfig(kind=Transform.WHITENING, k=k) for k in widths)
        config = replace(bench.config(setting, model), transforms=transforms)
        embedder = bench.embedder(setting, model)
        watcher = bench.encoders.stages.watcher
        runs = evaluate_sts(config, sets, embedder=embedder, progress=watcher)["runs"]
        return {
            each.name: [run["datasets"][each.name]["spearman"][how] for run in runs]
            for each in sets
        }

    key = {"figure": "k", "widths": widths, "how": how, **bench.key(setting, model, sets)}
    found = bench.kept.get(key, make)
    raw = bench.figures(replace(setting, k=None), model, [each.name for each in sets])
    mean = float(np.mean([figures[how] for figures in raw.values()]))
    series = [{"name": name, "y": y} for name, y in found.items()]
    series.append({"name": "mean", "y": np.mean(list(found.values()), axis=0).tolist()})
    series.append({"name": "mean, not whitened", "y": [mean] * len(widths)})
    yield {
        "id": "k-effect",
        "title": "The effect of k",
        "kind": "curves",
        "x": [model.dim if k == "full" else k for k in widths],
        "x_label": "k",
        "y_label": _POINTS,
        "series": series,
        "raw": {name: figures[how] for name, figures in raw.items()},
        "caption": "Token mean of the first and the last layer, whitened with the set itself as "
        "target, by the width kept; the last place keeps all directions, as many as the rank of "
        f"the set. The mean over a set's subsets weighted by their pairs ({how}).",
    }


# --------------------------------------------------------------------------- pairs of layers


def _layers(bench: Bench, model: Model) -> Iterator[Figure]:
    how, count = AGGREGATION[WHITENING_BERT], model.layers + 1
    for pooling in _POOLED:
        found = {n: _combined(bench, model, pooling, n) for n in (1, 2)}
        for name in (_RAW, _WHITENED):
            pairs = [pair for n in (1, 2) for pair in found[n][name]]
            values = {tuple(layers): y for layers, y in pairs if y is not None}
            matrix = heat_matrix(values, count).tolist()
            yield {
                "id": f"layer-pairs-{name}-{pooling}",
                "title": f"Pairs of layers, {_POOLED[pooling]}, {name}",
                "kind": "heat_map",
                "matrix": [[None if math.isnan(y) else y for y in row] for row in matrix],
                "labels": [str(layer) for layer in range(count)],
                "axis": "layer",
                "caption": f"{_POINTS}, averaged over the sets ({how}), of the mean of two layers; "
                "single layers on the diagonal, 0 the embedding layer; empty where all texts are "
                "alike, as the [CLS] of that layer.",
            }
    yield _best(bench, model)


def _best(bench: Bench, model: Model) -> Figure:
    count = model.layers + 1
    sizes = list(range(1, (count if count <= _FEW_STATES else _MOST_LAYERS) + 1))
    best: dict[str, list[Any]] = {_RAW: [], _WHITENED: []}
    for size in sizes:
        found = _combined(bench, model, "mean", size)
        for name, chosen in best.items():
            ranked = [pair for pair in found[name] if pair[1] is not None]
            chosen.append(max(ranked, key=lambda pair: pair[1]))
    said = "; ".join(
        f"{name}: " + ", ".join("+".join(map(str, layers)) for layers, _ in chosen)
        for name, chosen in best.items()
    )
    return {
        "id": "best-layers",
        "title": "The best combination of N layers",
        "kind": "curves",
        "x": sizes,
        "x_label": "layers combined",
        "y_label": _POINTS,
        "series": [
            {"name": name, "y": [figure for _, figure in chosen]} for name, chosen in best.items()
        ],
        "caption": "Token mean; the best of all combinations by the average over the sets, which "
        f"is chosen on the scores it shows. The layers, {said}.",
    }


def _combined(bench: Bench, model: Model, pooling: str, size: int) -> dict[str, Any]:
    """Return (layers, average over the sets) of all combinations of a size, raw and whitened.

    The average is None where a combination ranks nothing.
    """
    how, sets = AGGREGATION[WHITENING_BERT], bench.data.sets()
    setting = replace(HUANG, pooling=pooling, k="full", fit=SCORED)

    def make() -> dict[str, Any]:
        states = bench.encoders.states(model, setting, [])
        config, stages = bench.config(setting, model), bench.encoders.stages
        runs = score_combinations(config, sets, states, [size], stages)
        return {
            name: [
                [cell["layers"], _number(cell["average"]["spearman"][how])]
                for cell in run["combinations"]
            ]
            for name, run in zip((_RAW, _WHITENED), runs, strict=True)
        }

    key = {"figure": "layers", "size": size, "how": how, **bench.key(setting, model, sets)}
    return bench.kept.get(key, make)


def _number(value: float | None) -> float | None:
    """Return a figure as JSON has it, None for NaN."""
    return None if value is None or math.isnan(value) else value


# --------------------------------------------------------------------------- geometry


class _Groups:
    """Embeddings whose two halves of channels are whitened by themselves (ZCA)."""

    def __init__(self, embedder: TextEmbedder, texts: Sequence[str], *, shuffle: bool) -> None:
        rows = embedder.embed(texts).astype(np.float64)
        dim, self._embedder, self._mean = rows.shape[1], embedder, rows.mean(axis=0)
        order = np.random.default_rng(0).permutation(dim) if shuffle else np.arange(dim)
        self._matrix = np.zeros((dim, dim))
        for half in np.array_split(order, 2):
            values, vectors = np.linalg.eigh(np.cov(rows[:, half].T))
            scales = reciprocal(np.sqrt(values * (values > least_share(dim) * values[-1])))
            self._matrix[np.ix_(half, half)] = vectors * scales @ vectors.T

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the whitened embeddings (n, d)."""
        found: NDArray[np.float32] = self._embedder.embed(texts) - self._mean
        return (found @ self._matrix).astype(np.float32)

    def facts(self) -> dict[str, Any]:
        """Return the encoder's identity."""
        return self._embedder.facts()


_SHAPES = ("whitening", "group", "shuffled group")


def _geometry(bench: Bench, model: Model) -> Iterator[Figure]:
    sets = bench.data.dev_pairs()
    setting = Setting(layers=EMBEDDING_LAST)

    def make() -> dict[str, Any]:
        embedder, texts = bench.embedder(setting, model), [t for each in sets for t in each.texts]
        config = replace(bench.config(setting, model), transforms=(_FULL,))
        found = list[dict[str, Any]]()
        for each in (embedder, *(_Groups(embedder, texts, shuffle=s) for s in (False, True))):
            report = evaluate_geometry(
                config, sets, embedder=each, progress=bench.encoders.stages.watcher
            )
            found += [next(iter(run["datasets"].values())) for run in report["runs"]]
            config = replace(config, transforms=())
        return {
            name: {figure: each[figure] for figure in ("alignment", "uniformity")}
            for name, each in zip((_RAW, *_SHAPES), found, strict=True)
        }

    digests = [bench.data.digest(each) for each in sets]
    key = {"figure": "geometry", "of": [_RAW, *_SHAPES], "sets": digests}
    found: Mapping[str, Mapping[str, float]] = bench.kept.get(
        {**key, "encoder": bench.encoder_key(setting, model)}, make
    )
    yield {
        "id": "alignment-uniformity",
        "title": "Alignment and uniformity without training",
        "kind": "curves",
        "x": list(found),
        "x_label": "transform",
        "y_label": "lower is better",
        "series": [
            {"name": name, "y": [each[name] for each in found.values()]}
            for name in ("alignment", "uniformity")
        ],
        "caption": "STS-B dev, positive pairs of a score above 4, token mean of the embedding and "
        "the last layer, unit length; transforms fitted on all of STS-B. Groups are two halves of "
        "the channels.",
    }


_BERTS = (models.plain("bert", "base"), models.plain("bert", "large"))
_JOBS: tuple[tuple[str, str, _Make, tuple[str, ...]], ...] = (
    (BERT_WHITENING, "the effect of k", _k_effect, _BERTS),
    (WHITENING_BERT, "pairs of layers", _layers, _BERTS[:1]),
    (WHITENED_CSE, "alignment and uniformity", _geometry, _BERTS[:1]),
)
