"""Sets of sentence pairs with gold scores: read, named as the papers name them, checked."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.errors import ConfigError, CorpusError
from whiten_index.evaluation.judgements import to_id, to_score
from whiten_index.evaluation.label_table import (
    JSONL,
    PARQUET,
    TSV,
    LabelTable,
    label_files,
    to_text,
)
from whiten_index.evaluation.metrics import rows_by_label

_PAIR, _SCORE = ("sentence1", "sentence2"), "score"
_DATASET, _SUBSET, _SPLIT = "dataset", "subset", "split"
ALL_SPLITS = "all"
_ENDINGS = (PARQUET, JSONL, TSV)


@dataclass(frozen=True)
class _Published:
    """Name and scoring of a public set."""

    name: str
    split: str | None
    subsets: bool


# SICK's rows are scored all together, as MTEB does; its test split is reported too.
_PUBLISHED = {
    **{f"sts{year}": _Published(f"STS{year}", None, True) for year in range(12, 17)},
    "stsb": _Published("STS-B", "test", False),
    "stsbenchmark": _Published("STS-B", "test", False),
    "sickr": _Published("SICK-R", None, False),
}


@dataclass(frozen=True, eq=False)
class StsSet:
    """The n pairs of one set."""

    name: str
    first: list[str]
    second: list[str]
    scores: NDArray[np.float64]  # gold scores, the higher the more alike
    subsets: NDArray[np.object_]  # the subset of each pair, empty if the set has none
    scored: NDArray[np.bool_]  # the pairs whose figure is the set's
    averaged: bool  # whether subsets are files of their own, over which figures are averaged
    dropped: int = 0  # pairs left out because they have no score

    def __len__(self) -> int:
        return len(self.first)

    @property
    def texts(self) -> list[str]:
        """All sentences, first ones first."""
        return [*self.first, *self.second]

    def scored_pairs(self) -> "StsSet":
        """Return the pairs whose figure is the set's, without those of other splits."""
        used = np.flatnonzero(self.scored)
        first, second = ([side[i] for i in used] for side in (self.first, self.second))
        arrays = ("scores", "subsets", "scored")
        kept: dict[str, Any] = {name: getattr(self, name)[used] for name in arrays}
        return replace(self, first=first, second=second, **kept)


def read_sts(
    paths: Iterable[str | Path], *, splits: Mapping[str, str] | None = None, unscored: bool = False
) -> list[StsSet]:
    """Read sets of pairs, in the order in which they occur.

    Args:
        paths: ``.parquet``, ``.jsonl`` or ``.tsv`` files with sentence1, sentence2 and score, and
            where they have them dataset, subset and split; or folders of such files. Without a
            column dataset a file is one set, called as the file. Pairs without a score are
            dropped and counted.
        splits: name of a set -> the split to score, or ``all``. STS-B is scored on test, others
            on all their pairs unless it says so.
        unscored: also take files without a column score, whose pairs are above any score.

    Raises:
        ConfigError: an ending names no format, or a set or split that is not there.
        CorpusError: a file or a row cannot be used, or a set has fewer than 2 pairs to score.

    Examples:
        >>> read_sts(["sts.tsv"])[0].name
        'sts'
    """
    wished = {key_of(name): (name, split) for name, split in (splits or {}).items()}
    found: dict[str, StsSet] = {}
    for path in itertools.chain.from_iterable(label_files(paths, _ENDINGS)):
        for made in _read_file(path, wished, unscored=unscored):
            same = found.setdefault(key_of(made.name), made)
            if same is not made:
                raise CorpusError(
                    f"{path} holds the set {made.name}, and {same.name} is there already; call "
                    "each set by one name, in one file"
                )
    if missing := [name for key, (name, _) in wished.items() if key not in found]:
        raise ConfigError(
            f"--split names {', '.join(missing)}, and the sets are "
            f"{', '.join(each.name for each in found.values())}"
        )
    return list(found.values())


def require_ranked(sets: Sequence[StsSet]) -> None:
    """Refuse, before anything is encoded, gold scores that rank nothing."""
    for each in sets:
        scores = each.scores[each.scored]
        parts = {each.name: scores}
        if each.averaged:
            for subset, rows in rows_by_label(each.subsets[each.scored].tolist()).items():
                parts[f"{each.name}, subset {subset},"] = scores[rows]
        for name, gold in parts.items():
            if len(gold) < 2 or np.ptp(gold) == 0:
                why = f"{len(gold)} pair" if len(gold) < 2 else f"{len(gold)} pairs of equal score"
                raise CorpusError(
                    f"{name} has {why}, which has no correlation; leave it out, or give the set "
                    "without its column subset"
                )


def chosen_sets(sets: Sequence[StsSet], names: Sequence[str]) -> list[StsSet]:
    """Return the sets called ``names``, however they are spelled; all where none are named."""
    if not names:
        return list(sets)
    by_key = {key_of(each.name): each for each in sets}
    asked = {
        name: key_of(_PUBLISHED[key_of(name)].name if key_of(name) in _PUBLISHED else name)
        for name in names
    }
    if unknown := [name for name, key in asked.items() if key not in by_key]:
        raise ConfigError(
            f"there is no set {', '.join(unknown)}; the sets are "
            f"{', '.join(each.name for each in sets)}"
        )
    return [by_key[key] for key in asked.values()]


def _read_file(
    path: Path, wished: Mapping[str, tuple[str, str]], *, unscored: bool
) -> list[StsSet]:
    known = {*_PAIR, _SCORE, _DATASET, _SUBSET, _SPLIT}
    table = LabelTable.read(path, _ENDINGS, known)
    needed = _PAIR if unscored else (*_PAIR, _SCORE)
    if lacking := [name for name in needed if name not in table.columns]:
        raise table.lacks(
            f"no column {' and no '.join(lacking)} (pairs have sentence1, sentence2 and score, and "
            "may have dataset, subset and split)"
        )
    labels = _labels(table, _DATASET, range(len(table)))
    rows = rows_by_label(name or path.stem for name in labels)
    return [_read_set(table, name, chosen, wished) for name, chosen in rows.items()]


def _read_set(
    table: LabelTable, name: str, rows: Sequence[int], wished: Mapping[str, tuple[str, str]]
) -> StsSet:
    published = _PUBLISHED.get(key_of(name), _Published(name, None, _SUBSET in table.columns))
    every = np.full(len(rows), np.inf)
    if _SCORE in table.columns:
        every = np.array([table.parse(_SCORE, row, to_score) for row in rows])
    kept = [row for row, score in zip(rows, every, strict=True) if not np.isnan(score)]
    splits = _labels(table, _SPLIT, kept)
    split = _split_to_score(table, published, wished)
    scored = np.ones(len(kept), bool) if split is None else splits == split
    if split is not None and not scored.any():
        there = ", ".join(sorted(set(splits.tolist())))
        raise ConfigError(
            f"{table.path} has no pairs of {published.name} in split {split!r}; its splits "
            f"are {there}: name one with --split {published.name}=SPLIT, or all"
        )
    if scored.sum() < 2:
        raise CorpusError(
            f"{table.path} has {int(scored.sum())} pairs of {published.name} with a score "
            f"({len(rows) - len(kept)} have none); a correlation needs 2 or more"
        )
    return StsSet(
        name=published.name,
        first=[table.parse(_PAIR[0], row, to_text) for row in kept],
        second=[table.parse(_PAIR[1], row, to_text) for row in kept],
        scores=every[~np.isnan(every)],
        subsets=_labels(table, _SUBSET, kept),
        scored=scored,
        averaged=published.subsets,
        dropped=len(rows) - len(kept),
    )


def _split_to_score(
    table: LabelTable, published: _Published, wished: Mapping[str, tuple[str, str]]
) -> str | None:
    """Return the split whose pairs are scored, None for all of them."""
    asked = wished.get(key_of(published.name))
    if _SPLIT not in table.columns:
        if asked is not None and asked[1] != ALL_SPLITS:
            raise ConfigError(
                f"{table.path} has no column split; do not ask for split {asked[1]!r} of "
                f"{published.name}"
            )
        return None
    split = published.split if asked is None else asked[1]
    return None if split == ALL_SPLITS else split


def _labels(table: LabelTable, column: str, rows: Sequence[int]) -> NDArray[np.object_]:
    there = column in table.columns
    found = [table.parse(column, row, _to_label) if there else "" for row in rows]
    return np.array(found, dtype=object)


def _to_label(value: Any) -> str:
    return "" if value is None or value == "" else to_id(value)


def key_of(name: str) -> str:
    """Return how names of sets are compared: STS-B, STSB and stsb are one."""
    return "".join(letter for letter in name.lower() if letter.isalnum())
