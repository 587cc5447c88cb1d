"""Semantic textual similarity of any model and transform, one figure an aggregation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.evaluation.sts_scores import (
    AGGREGATIONS,
    MEASURES,
    correlate,
    pair_cosines,
)
from whiten_index.evaluation.sts_sets import StsSet, require_ranked
from whiten_index.measure.eval_config import EvalConfig
from whiten_index.measure.measure_options import DISTINCT, TARGET
from whiten_index.measure.spaces import Space, Spaces, report_of, runs_of
from whiten_index.measure.text_embedder import TextEmbedder, open_embedder
from whiten_index.progress import Progress, Silent, Stages

_SILENT = Silent()


def evaluate_sts(
    config: EvalConfig, sets: Sequence[StsSet], *, progress: Progress | None = None
) -> dict[str, Any]:
    """Score sets of pairs by the cosine of their vectors, in each space.

    Returns:
        JSON values: encoder, name, setting and datasets of the first space, ``runs`` of all of
        them; figures times 100.

    Raises:
        WhitenIndexError: the model, the transform or the data cannot be used.

    Example:
        >>> report = evaluate_sts(EvalConfig(), read_sts(["sts.tsv"]))
        >>> list(report["datasets"])
        ['sts']
    """
    require_ranked(sets)
    sets = needed_pairs(config, sets)
    stages = Stages(progress or Silent())
    embedder = open_embedder(config, stages)
    maker = Spaces(config, embedder, stages)
    embedder.embed([text for each in sets for text in each.texts])
    with stages.stage("score", sum(len(each) for each in sets)) as watcher:
        runs = score_sets(sets, embedder, maker, watcher)
    return report_of(embedder.facts(), runs, stages)


def needed_pairs(config: EvalConfig, sets: Sequence[StsSet]) -> list[StsSet]:
    """Return the pairs to encode: those of other splits only if a transform is fitted on them."""
    fitted = bool(config.transforms) and config.index is None
    if fitted and config.fit in (TARGET, DISTINCT):
        return list(sets)
    return [each.scored_pairs() for each in sets]


def score_sets(
    sets: Sequence[StsSet], embedder: TextEmbedder, maker: Spaces, watcher: Progress = _SILENT
) -> list[dict[str, Any]]:
    """Return a run a space: its name, its setting, and the figures of each set."""

    def scored(each: StsSet) -> Iterator[tuple[Space, dict[str, Any]]]:
        first, second = embedder.embed(each.first), embedder.embed(each.second)
        for space in maker.of(each.texts, scored=np.tile(each.scored, 2)):
            yield space, scores_of(each, pair_cosines(space.apply(first), space.apply(second)))
        watcher.advance(len(each))

    runs = runs_of((each.name, scored(each)) for each in sets)
    for run in runs:
        run["average"] = average(run["datasets"])
    return runs


def scores_of(each: StsSet, cosines: NDArray[np.float64]) -> dict[str, Any]:
    """Score the pairs of a set by their cosines (n,).

    Returns:
        Figures times 100: spearman and pearson of the pairs that are scored, ``pairs`` and
        ``dropped``, those of each of several subsets, and spearman of each of several splits, None
        where its pairs cannot be ranked.
    """
    use = each.scored
    measures = {
        measure: correlate(
            each.scores[use],
            cosines[use],
            each.subsets[use],
            measure=measure,
            averaged=each.averaged,
            name=each.name,
        )
        for measure in MEASURES
    }
    sizes, splits = Counter(each.subsets[use].tolist()), list(dict.fromkeys(each.splits.tolist()))
    return {
        **{measure: found.to_json() for measure, found in measures.items()},
        "pairs": int(use.sum()),
        "dropped": each.dropped,
        "subsets": {
            subset: {
                **{name: _percent(found.subsets[subset]) for name, found in measures.items()},
                "pairs": size,
            }
            for subset, size in sizes.items()
            if len(sizes) > 1
        },
        "splits": {
            split: _percent(_of_split(each, cosines, split)) for split in splits if len(splits) > 1
        },
    }


def _of_split(each: StsSet, cosines: NDArray[np.float64], split: str) -> float | None:
    """Return the correlation of a split, None where its gold scores rank nothing."""
    inside = each.splits == split
    gold = each.scores[inside]
    if len(gold) < 2 or np.ptp(gold) == 0:
        return None
    return correlate(gold, cosines[inside], each.splits[inside], name=each.name).all


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def average(datasets: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mean over the sets, of each measure that they have, in each aggregation."""
    found = next(iter(datasets.values()))
    return {
        measure: {
            how: float(np.mean([each[measure][how] for each in datasets.values()]))
            for how in AGGREGATIONS
        }
        for measure in MEASURES
        if measure in found
    }
