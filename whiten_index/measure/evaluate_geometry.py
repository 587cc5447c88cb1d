"""The shape of embeddings before and after a transform: alignment, uniformity, isotropy, hubs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.errors import ConfigError, CorpusError
from whiten_index.evaluation.geometry_scores import POSITIVE_ABOVE, Geometry, alignment
from whiten_index.evaluation.sts_sets import StsSet, chosen_sets, read_sts
from whiten_index.measure.eval_config import EvalConfig
from whiten_index.measure.measure_options import SCORED
from whiten_index.measure.spaces import Space, Spaces, raw_space, report_of, runs_of
from whiten_index.measure.text_embedder import TextEmbedder, open_embedder
from whiten_index.progress import Progress, Silent, Stages

# Geometry is of all pairs of texts, so its time grows with their square.
MOST_TEXTS = 10_000
_LEAST_TEXTS = 3


@dataclass(frozen=True, eq=False)
class GeometrySet:
    """Texts to measure, and which of them are pairs that belong together."""

    name: str
    first: list[str]
    second: list[str]
    positive: NDArray[np.bool_]
    task: list[str]
    dropped: int = 0

    @property
    def measured(self) -> list[str]:
        """The distinct texts, in their order."""
        return list(dict.fromkeys([*self.first, *self.second]))


def read_geometry_sets(
    paths: Iterable[str | Path],
    *,
    names: Sequence[str] = (),
    splits: Mapping[str, str] | None = None,
    above: float = POSITIVE_ABOVE,
) -> list[GeometrySet]:
    """Read pairs of texts; positive are those with a score above ``above``.

    Paths and splits are as of ``read_sts``. Of a file of pairs without a score all are positive.
    """
    if not math.isfinite(above):
        raise ConfigError(f"positive pairs are to score above {above:g}; give a number such as 4")
    sets = chosen_sets(read_sts(paths, splits=splits, unscored=True), names)
    return [_geometry_set(each, above) for each in sets]


def evaluate_geometry(
    config: EvalConfig,
    sets: Sequence[GeometrySet],
    *,
    most_texts: int = MOST_TEXTS,
    embedder: TextEmbedder | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure each set raw and in each space.

    Alignment is over the positive pairs, None where there are none; the rest over the distinct
    texts, of which ``most_texts`` are drawn where there are more. Lengths of vectors count in
    IsoScore and effective rank alone.

    Args:
        config: embeddings and transforms.
        sets: what to measure.
        most_texts: measured at most.
        embedder: gives the embeddings, by default the one of ``config``.
        progress: receives the stages.

    Returns:
        JSON values: encoder, setting and datasets of the raw space, and ``runs``, one for each
        space. Figures are as they are defined, not times 100.

    Raises:
        WhitenIndexError: the model, the transform or the data cannot be used.
    """
    if most_texts < _LEAST_TEXTS:
        raise ConfigError(f"{most_texts} texts have no geometry; give {_LEAST_TEXTS} or more")
    if few := [each for each in sets if len(each.measured) < _LEAST_TEXTS]:
        raise CorpusError(
            f"{few[0].name} has {len(few[0].measured)} distinct texts to measure; geometry needs "
            f"{_LEAST_TEXTS} or more"
        )
    stages = Stages(progress or Silent())
    embedder = embedder or open_embedder(config, stages)
    maker = Spaces(config, embedder, stages)
    fits = bool(config.transforms) and config.index is None
    embedder.embed([text for each in sets for text in (each.task if fits else each.measured)])
    with stages.stage("measure", sum(len(each.measured) for each in sets)) as watcher:

        def measured(each: GeometrySet) -> Iterator[tuple[Space, dict[str, Any]]]:
            for space in _spaces(each, config, maker):
                yield space, _measure(each, embedder, space, most_texts, config.seed)
            watcher.advance(len(each.measured))

        runs = runs_of((each.name, measured(each)) for each in sets)
    return report_of(embedder.facts(), runs, stages)


def _spaces(each: GeometrySet, config: EvalConfig, maker: Spaces) -> list[Space]:
    raw = raw_space()
    if not (config.transforms or config.index):
        return [raw]
    fitted = [*each.first, *each.second] if config.fit == SCORED else each.task
    return [raw, *maker.of(fitted)]


def _measure(
    each: GeometrySet, embedder: TextEmbedder, space: Space, most_texts: int, seed: int
) -> dict[str, Any]:
    texts = each.measured
    drawn = np.arange(len(texts))
    if len(texts) > most_texts:
        drawn = np.sort(np.random.default_rng(seed).choice(drawn, most_texts, replace=False))
    cloud = space.apply(embedder.embed([texts[i] for i in drawn]))
    positive = np.flatnonzero(each.positive)
    pairs = [
        space.apply(embedder.embed([side[i] for i in positive]))
        for side in (each.first, each.second)
        if len(positive)
    ]
    try:
        figures = {
            "alignment": alignment(*pairs) if pairs else None,
            **Geometry.of(cloud).to_json(),
        }
    except ConfigError as error:
        raise ConfigError(f"{each.name}, {space.name}: {error}") from error
    return {
        **figures,
        "positive_pairs": len(positive),
        "pairs": len(each.first),
        "dropped": each.dropped,
        "texts": len(texts),
    }


def _geometry_set(each: StsSet, above: float) -> GeometrySet:
    kept = np.flatnonzero(each.scored)
    first, second = ([side[i] for i in kept] for side in (each.first, each.second))
    positive = each.scores[kept] > above
    return GeometrySet(each.name, first, second, positive, each.texts, each.dropped)
