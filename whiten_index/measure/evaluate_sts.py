"""Semantic textual similarity of any model and transform, and the shape of the embeddings."""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.errors import ConfigError, require_config
from whiten_index.evaluation.geometry_scores import POSITIVE_ABOVE, alignment, geometry
from whiten_index.evaluation.metrics import (
    AGGREGATIONS,
    MEASURES,
    correlate,
    correlation_interval,
    pair_cosines,
)
from whiten_index.evaluation.sts_sets import StsSet, require_ranked
from whiten_index.measure.eval_config import EvalConfig
from whiten_index.measure.measure_options import DISTINCT, TARGET
from whiten_index.measure.spaces import Scores, Spaces, TextEmbedder, evaluate_sets
from whiten_index.progress import Progress


def evaluate_sts(
    config: EvalConfig,
    sets: Sequence[StsSet],
    *,
    embedder: TextEmbedder | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Score sets of pairs by the cosine of their vectors, in each space.

    Args:
        config: the encoder or index, and the transforms, each a space.
        sets: what ``read_sts`` returns.
        embedder: gives the embeddings in place of the encoder of ``config``.
        progress: see ``build_index``.

    Returns:
        JSON values: encoder, name, setting and datasets of the first space, ``runs`` of all of
        them; figures times 100.

    Raises:
        WhitenIndexError: the model, the transform or the data cannot be used.

    Examples:
        >>> report = evaluate_sts(EvalConfig(), read_sts(["sts.tsv"]))
        >>> list(report["datasets"])
        ['sts']
    """
    require_config(config, EvalConfig)
    require_ranked(sets)
    pairs = needed_pairs(config, sets)
    return evaluate_sets(
        config, pairs, _score, stage="score", average=average, embedder=embedder, progress=progress
    )


def needed_pairs(config: EvalConfig, sets: Sequence[StsSet]) -> list[StsSet]:
    """Return the pairs to encode: those of other splits only if a transform is fitted on them."""
    fitted = bool(config.transforms) and config.index is None
    if fitted and config.fit in (TARGET, DISTINCT):
        return list(sets)
    return [each.scored_pairs() for each in sets]


def _score(each: StsSet, embedder: TextEmbedder, spaces: Spaces) -> Scores:
    first, second = embedder.embed(each.first), embedder.embed(each.second)
    for space in spaces.of(each.texts, scored=each.scored):
        yield space, scores_of(each, pair_cosines(space.apply(first), space.apply(second)))


def scores_of(each: StsSet, cosines: NDArray[np.float64]) -> dict[str, Any]:
    """Score the pairs of a set by their cosines (n,).

    Returns:
        Figures times 100: spearman and pearson of the pairs that are scored, the 95 % interval of
        spearman over all of them, ``pairs`` and ``dropped``, and those of each of several subsets.
    """
    use, averaged, name = each.scored, each.averaged, each.name
    gold, found, subsets = each.scores[use], cosines[use], each.subsets[use]
    measures = {
        measure: correlate(gold, found, subsets, measure=measure, averaged=averaged, name=name)
        for measure in MEASURES
    }
    sizes = Counter(subsets.tolist())
    return {
        **{measure: figures for measure, (figures, _) in measures.items()},
        "interval": [100 * limit for limit in correlation_interval(gold, found)],
        "pairs": int(use.sum()),
        "dropped": each.dropped,
        "subsets": {
            subset: {
                **{name: parts[subset] for name, (_, parts) in measures.items()},
                "pairs": size,
            }
            for subset, size in sizes.items()
            if len(sizes) > 1
        },
    }


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


# Uniformity is of all pairs of texts, so its time grows with their square.
_MOST_TEXTS = 10_000


def evaluate_geometry(
    config: EvalConfig,
    sets: Sequence[StsSet],
    *,
    embedder: TextEmbedder | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure each set raw and in each space.

    Alignment is over the pairs scored higher than 4, or all of a set without scores; the
    rest over 10,000 distinct texts at most. Lengths count in IsoScore and effective rank.

    Returns:
        JSON values: encoder, setting and datasets of the raw space, and ``runs``, one for each
        space. Figures are as they are defined, not times 100.
    """
    measure = functools.partial(_measure, seed=config.seed)
    pairs = needed_pairs(config, sets)
    return evaluate_sets(
        config, pairs, measure, stage="measure", embedder=embedder, progress=progress
    )


def _measure(each: StsSet, embedder: TextEmbedder, spaces: Spaces, *, seed: int) -> Scores:
    pairs = each.scored_pairs()
    texts = list(dict.fromkeys(pairs.texts))
    drawn = np.arange(len(texts))
    if len(texts) > _MOST_TEXTS:
        drawn = np.sort(np.random.default_rng(seed).choice(drawn, _MOST_TEXTS, replace=False))
    cloud = embedder.embed([texts[i] for i in drawn])
    positive = np.flatnonzero(pairs.scores > POSITIVE_ABOVE)
    sides = [
        embedder.embed([side[i] for i in positive])
        for side in (pairs.first, pairs.second)
        if len(positive)
    ]
    counts = {
        "positive_pairs": len(positive), "pairs": len(pairs), "dropped": each.dropped,
        "texts": len(texts),
    }  # fmt: skip
    for space in spaces.with_raw(each):
        try:
            figures: dict[str, Any] = {
                "alignment": alignment(*map(space.apply, sides)) if sides else None,
                **geometry(space.apply(cloud)),
            }
        except ConfigError as error:
            raise ConfigError(f"{each.name}, {space.name}: {error}") from error
        yield space, figures | counts
