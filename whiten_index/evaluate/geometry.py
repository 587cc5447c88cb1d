"""The shape of embeddings before and after a transform: alignment, uniformity, isotropy, hubs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.errors import ConfigError
from whiten_index.evaluate.config import SCORED, EvalConfig
from whiten_index.evaluate.spaces import Space, Spaces
from whiten_index.evaluate.sts import report_of
from whiten_index.evaluate.texts import TextEmbedder, open_embedder
from whiten_index.evaluation import Geometry, alignment
from whiten_index.labels import chosen_sets, read_pairs, read_sts
from whiten_index.labels.table import JSONL, PARQUET, TSV, LabelTable
from whiten_index.progress import Progress, Silent, Stages

# Above it Gao et al. (2021), SimCSE, take the pairs of STS-B as positive.
POSITIVE_ABOVE = 4.0
# Geometry is of all pairs of texts, so its time grows with their square.
MOST_TEXTS = 10_000


@dataclass(frozen=True, eq=False)
class GeometrySet:
    """Texts to measure, and which of them are pairs that belong together.

    Attributes:
        name: of the set.
        first: n texts.
        second: n texts, the partner of each.
        positive: (n,) bool, pairs whose texts should be close.
        task: all texts of the set, measured or not, which transforms are fitted on.
    """

    name: str
    first: list[str]
    second: list[str]
    positive: NDArray[np.bool_]
    task: list[str]

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

    Args:
        paths: files or folders as ``read_sts`` takes them, or files of pairs without a score,
            which are then all positive.
        names: keep only these sets; none keeps all.
        splits: name of a set -> the split to measure, or ``all``.
        above: the score a positive pair exceeds.

    Raises:
        ConfigError: an ending, a set or a split that is not there.
        CorpusError: a file cannot be used.
    """
    given = list(map(Path, paths))
    unscored = [path for path in given if path.is_file() and _has_no_score(path)]
    scored = [path for path in given if path not in unscored]
    made = []
    for path in unscored:
        pairs = read_pairs(path)
        every = np.ones(len(pairs), bool)
        both = [*pairs.first, *pairs.second]
        made.append(GeometrySet(path.stem, pairs.first, pairs.second, every, both))
    for each in chosen_sets(read_sts(scored, splits=splits), names) if scored else ():
        kept = np.flatnonzero(each.scored)
        first, second = ([side[i] for i in kept] for side in (each.first, each.second))
        made.append(GeometrySet(each.name, first, second, each.scores[kept] > above, each.texts))
    return made


def evaluate_geometry(
    config: EvalConfig,
    sets: Sequence[GeometrySet],
    *,
    most_texts: int = MOST_TEXTS,
    embedder: TextEmbedder | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure each set raw and in each space asked for.

    Alignment is over the positive pairs, None where there are none; the rest over the distinct
    texts, of which ``most_texts`` are drawn where there are more. Lengths of vectors count in
    IsoScore and effective rank alone.

    Args:
        config: embeddings and transforms.
        sets: what to measure.
        most_texts: measured at most.
        embedder: gives the embeddings, where they are at hand; else the one of ``config``.
        progress: told of the stages.

    Returns:
        JSON values: encoder, and setting and datasets of the raw space, ``runs`` of all spaces
        where there are several. Figures are as they are defined, not times 100.

    Raises:
        WhitenIndexError: the model, the transform or the data cannot be used.
    """
    if most_texts < 3:
        raise ConfigError(f"{most_texts} texts have no geometry; give 3 or more")
    stages = Stages(progress or Silent())
    embedder = embedder or open_embedder(config, stages)
    fits = bool(config.transforms or config.remove_common) and config.index is None
    embedder.embed([text for each in sets for text in (each.task if fits else each.measured)])
    maker = Spaces(config, embedder, stages)
    runs: dict[int, dict[str, Any]] = {}
    with stages.stage("measure", sum(len(each.measured) for each in sets)) as watcher:
        for each in sets:
            for number, space in enumerate(_spaces(each, config, maker)):
                fresh = {"name": space.name, "setting": space.setting, "datasets": {}}
                found = _measure(each, embedder, space, most_texts, config.seed)
                runs.setdefault(number, fresh)["datasets"][each.name] = found
            watcher.advance(len(each.measured))
    return report_of(embedder.facts(), list(runs.values()), stages)


def _spaces(each: GeometrySet, config: EvalConfig, maker: Spaces) -> list[Space]:
    raw = Space("raw", {"transform": {"kind": "none"}})
    if not (config.transforms or config.remove_common or config.index):
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
    return {
        "alignment": alignment(*pairs) if pairs else None,
        **Geometry.of(cloud).to_json(),
        "positive_pairs": len(positive),
        "pairs": len(each.first),
        "texts": len(texts),
    }


def _has_no_score(path: Path) -> bool:
    table = LabelTable.read(path, (PARQUET, JSONL, TSV), {"score"})
    return "score" not in table.columns
