"""The shape of embeddings before and after a transform: alignment, uniformity, isotropy, hubs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from whiten_index.errors import ConfigError
from whiten_index.evaluation.geometry_scores import POSITIVE_ABOVE, Geometry, alignment
from whiten_index.evaluation.sts_sets import StsSet
from whiten_index.measure.eval_config import EvalConfig
from whiten_index.measure.evaluate_sts import needed_pairs
from whiten_index.measure.spaces import Scores, Spaces, TextEmbedder, evaluate_sets
from whiten_index.progress import Progress

# Geometry is of all pairs of texts, so its time grows with their square.
MOST_TEXTS = 10_000


def evaluate_geometry(
    config: EvalConfig,
    sets: Sequence[StsSet],
    *,
    above: float = POSITIVE_ABOVE,
    most_texts: int = MOST_TEXTS,
    embedder: TextEmbedder | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure each set raw and in each space.

    Alignment is over the positive pairs, None where there are none; the rest over the distinct
    texts, of which ``most_texts`` are drawn where there are more. Lengths of vectors count in
    IsoScore and effective rank alone. Pairs with a score higher than ``above`` are positive; all
    are if a set has no scores.

    Returns:
        JSON values: encoder, setting and datasets of the raw space, and ``runs``, one for each
        space. Figures are as they are defined, not times 100.
    """
    measure = functools.partial(_measure, above=above, most_texts=most_texts, seed=config.seed)
    return evaluate_sets(
        config,
        needed_pairs(config, sets),
        measure,
        stage="measure",
        embedder=embedder,
        progress=progress,
    )


def _measure(
    each: StsSet,
    embedder: TextEmbedder,
    spaces: Spaces,
    *,
    above: float,
    most_texts: int,
    seed: int,
) -> Scores:
    pairs = each.scored_pairs()
    texts = list(dict.fromkeys(pairs.texts))
    drawn = np.arange(len(texts))
    if len(texts) > most_texts:
        drawn = np.sort(np.random.default_rng(seed).choice(drawn, most_texts, replace=False))
    cloud = embedder.embed([texts[i] for i in drawn])
    positive = np.flatnonzero(pairs.scores > above)
    sides = [
        embedder.embed([side[i] for i in positive])
        for side in (pairs.first, pairs.second)
        if len(positive)
    ]
    for space in spaces.with_raw(each):
        try:
            aligned = alignment(*map(space.apply, sides)) if sides else None
            shape = Geometry.of(space.apply(cloud)).to_json()
        except ConfigError as error:
            raise ConfigError(f"{each.name}, {space.name}: {error}") from error
        yield (
            space,
            {
                "alignment": aligned,
                **shape,
                "positive_pairs": len(positive),
                "pairs": len(pairs),
                "dropped": each.dropped,
                "texts": len(texts),
            },
        )
