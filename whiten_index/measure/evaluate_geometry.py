"""The shape of embeddings before and after a transform: alignment, uniformity, isotropy, hubs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.files import is_folder, list_folder
from whiten_index.errors import ConfigError, CorpusError
from whiten_index.evaluation.geometry_scores import POSITIVE_ABOVE, Geometry, alignment
from whiten_index.evaluation.judgements import read_pairs
from whiten_index.evaluation.label_table import JSONL, PARQUET, TSV, LabelTable
from whiten_index.evaluation.sts_sets import ALL_SPLITS, StsSet, chosen_sets, key_of, read_sts
from whiten_index.measure.eval_config import EvalConfig
from whiten_index.measure.measure_options import SCORED
from whiten_index.measure.spaces import Space, Spaces, raw_space, report_of, runs_of
from whiten_index.measure.text_embedder import TextEmbedder, open_embedder
from whiten_index.progress import Progress, Silent, Stages

# Geometry is of all pairs of texts, so its time grows with their square.
MOST_TEXTS = 10_000
_LEAST_TEXTS = 3
_ENDINGS = (PARQUET, JSONL, TSV)


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

    Args:
        paths: files or folders as ``read_sts`` takes them; a file of pairs without a score is a
            set too, of which all pairs are positive.
        names: keep only these sets; none keeps all.
        splits: name of a set -> the split to measure, or ``all``.
        above: the score a positive pair exceeds.
    """
    if not math.isfinite(above):
        raise ConfigError(f"positive pairs are to score above {above:g}; give a number such as 4")
    given = [(path, _without_score(path)) for path in _opened(paths)]
    wished = dict(splits or {})
    sets = [_read_unscored(table, wished) for _, table in given if table is not None]
    scored = [path for path, table in given if table is None]
    if scored:
        sets += read_sts(scored, splits=wished)
    elif wished:
        raise ConfigError(
            f"--split names {', '.join(wished)}, and the sets are "
            f"{', '.join(each.name for each in sets)}"
        )
    counts = Counter(key_of(each.name) for each in sets)
    if twice := [each.name for each in sets if counts[key_of(each.name)] > 1]:
        raise CorpusError(
            f"two files hold a set called {twice[-1]}; rename one, or name each set's file once"
        )
    return [_geometry_set(each, above) for each in chosen_sets(sets, names)]


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


def _opened(paths: Iterable[str | Path]) -> Iterator[Path]:
    """Yield files, those of a folder by name; a folder without any, which ``read_sts`` refuses."""
    for path in map(Path, paths):
        inside = list_folder(path) if is_folder(path) else []
        yield from [each for each in inside if each.suffix in _ENDINGS] or [path]


def _without_score(path: Path) -> LabelTable | None:
    """Return the splits of a file of pairs without a score; None where it has one."""
    if is_folder(path):
        return None
    table = LabelTable.read(path, _ENDINGS, {"score", "split"})
    return None if "score" in table.columns else table


def _read_unscored(table: LabelTable, wished: dict[str, str]) -> StsSet:
    """Return the pairs of a file, each above any score; what is wished of it is taken out."""
    path, pairs = table.path, read_pairs(table.path)
    own = [wished.pop(name) for name in list(wished) if key_of(name) == key_of(path.stem)]
    split = own[-1] if own else ALL_SPLITS
    splits = table.columns.get("split")
    measured = np.ones(len(pairs), bool)
    values = [None] * len(pairs) if splits is None else splits
    labels = np.array(["" if each is None else str(each) for each in values], dtype=object)
    if split != ALL_SPLITS:
        if splits is None:
            raise ConfigError(
                f"{path} has no column split; do not ask for split {split!r} of {path.stem}"
            )
        measured = labels == split
    if not measured.any():
        raise ConfigError(
            f"{path} has no pairs of {path.stem} in split {split!r}; its splits are "
            f"{', '.join(sorted(set(labels)))}: name one with --split {path.stem}=SPLIT, or all"
        )
    return StsSet(
        name=path.stem,
        first=pairs.first,
        second=pairs.second,
        scores=np.full(len(pairs), np.inf),
        subsets=np.full(len(pairs), "", dtype=object),
        splits=labels,
        scored=measured,
        averaged=False,
    )


def _geometry_set(each: StsSet, above: float) -> GeometrySet:
    kept = np.flatnonzero(each.scored)
    first, second = ([side[i] for i in kept] for side in (each.first, each.second))
    positive = each.scores[kept] > above
    return GeometrySet(each.name, first, second, positive, each.texts, each.dropped)
