"""Semantic textual similarity of any model and transform, one figure an aggregation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.evaluation.sts_scores import (
    AGGREGATIONS,
    MEASURES,
    Correlation,
    correlate,
    pair_cosines,
)
from whiten_index.evaluation.sts_sets import StsSet, require_ranked
from whiten_index.measure.eval_config import DISTINCT, TARGET, EvalConfig
from whiten_index.measure.spaces import Space, Spaces
from whiten_index.measure.text_embedder import TextEmbedder, open_embedder
from whiten_index.progress import Progress, Silent, Stages


@dataclass(frozen=True)
class StsScores:
    """The figures of one set in one space.

    Attributes:
        measures: spearman and pearson, of the pairs that are scored.
        pairs: how many those are.
        dropped: pairs without a gold score.
        splits: split -> spearman of its pairs together, where a set has several; None where they
            cannot be ranked.
        sizes: subset -> how many of its pairs are scored.
    """

    measures: Mapping[str, Correlation]
    pairs: int
    dropped: int
    splits: Mapping[str, float | None]
    sizes: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """Return the figures times 100."""
        facts: dict[str, Any] = {name: c.to_json() for name, c in self.measures.items()}
        spearman = self.measures["spearman"].subsets
        return {
            **facts,
            "pairs": self.pairs,
            "dropped": self.dropped,
            "subsets": {
                subset: {
                    **{name: _percent(c.subsets[subset]) for name, c in self.measures.items()},
                    "pairs": self.sizes[subset],
                }
                for subset in spearman
                if len(spearman) > 1
            },
            "splits": {split: _percent(value) for split, value in self.splits.items()},
        }


def evaluate_sts(
    config: EvalConfig, sets: Sequence[StsSet], *, progress: Progress | None = None
) -> dict[str, Any]:
    """Score sets of pairs by the cosine of their vectors, in each space asked for.

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
        runs = score_sets(sets, embedder, maker, watcher=watcher)
    return report_of(embedder.facts(), runs, stages)


def needed_pairs(config: EvalConfig, sets: Sequence[StsSet]) -> list[StsSet]:
    """Return the pairs to encode: those of other splits only if a transform is fitted on them."""
    fitted = bool(config.transforms) and config.index is None
    if fitted and config.fit in (TARGET, DISTINCT):
        return list(sets)
    return [each.scored_pairs() for each in sets]


def score_sets(
    sets: Sequence[StsSet],
    embedder: TextEmbedder,
    maker: Spaces,
    *,
    watcher: Progress | None = None,
) -> list[dict[str, Any]]:
    """Return a run a space: its name, its setting, and the figures of each set."""
    runs: dict[int, dict[str, Any]] = {}
    for each in sets:
        first, second = embedder.embed(each.first), embedder.embed(each.second)
        spaces = maker.of(each.texts, scored=np.tile(each.scored, 2))
        for number, space in enumerate(spaces):
            run = runs.setdefault(
                number, {"name": space.name, "setting": space.setting, "datasets": {}}
            )
            run["datasets"][each.name] = score(each, first, second, space).to_json()
        if watcher is not None:
            watcher.advance(len(each))
    for run in runs.values():
        run["average"] = average(run["datasets"])
    return list(runs.values())


def score(
    each: StsSet, first: NDArray[np.floating], second: NDArray[np.floating], space: Space
) -> StsScores:
    """Score the pairs of a set, whose embeddings are (n, d) and (n, d)."""
    return scores_of(each, pair_cosines(space.apply(first), space.apply(second)))


def scores_of(each: StsSet, cosines: NDArray[np.float64]) -> StsScores:
    """Score the pairs of a set by their cosines (n,)."""
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
    names = list(dict.fromkeys(each.splits.tolist()))
    splits = {split: _of_split(each, cosines, split) for split in names if len(names) > 1}
    sizes = Counter(each.subsets[use].tolist())
    return StsScores(measures, int(use.sum()), each.dropped, splits, sizes)


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


def report_of(
    encoder: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], stages: Stages
) -> dict[str, Any]:
    """Return what an evaluation found: the first run on top, all of them in ``runs``.

    The settings of one run differ between sets in what the data gave; the first set's stand.
    """
    return {
        "encoder": dict(encoder),
        **runs[0],
        "runs": list(runs),
        "seconds": dict(stages.seconds),
    }
