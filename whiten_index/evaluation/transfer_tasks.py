"""Transfer tasks: texts or pairs of texts with the class of each, split as their authors did."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.errors import ConfigError, CorpusError
from whiten_index.evaluation.judgements import to_text
from whiten_index.evaluation.label_table import JSONL, PARQUET, TSV, LabelTable, label_files, shown

_TEXT, _PAIR, _LABEL, _SPLIT = "text", ("sentence1", "sentence2"), "label", "split"
_ENDINGS = (PARQUET, JSONL, TSV)
_EXPECTED = "a task has text, or sentence1 and sentence2, with label and split"
# What a set may be split into: folds of all rows, or parts.
_LAYOUTS = (
    ("all",), ("train", "test"), ("train", "dev", "test"), ("train", "dev"),
)  # fmt: skip
# The order of the papers' tables; other sets follow in the alphabet's.
_PUBLISHED = ("mr", "cr", "subj", "mpqa", "sst2", "sst5", "trec", "mrpc", "rte")
# Longer ones are names: Python makes no number of thousands of digits.
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
# GLUE gives it to rows whose label it keeps back.
_HIDDEN = "-1"


@dataclass(frozen=True, eq=False)
class Task:
    """The n texts of a file, or pairs of texts, and their classes.

    Attributes:
        labels: class numbers, places in ``classes``.
        classes: names in the file; numbers in their order, names in the alphabet's.
        splits: ``all`` for every row (its folds are drawn), or ``train``, ``dev``, ``test``.
        dropped: rows left out, by what they lacked: ``text`` or ``label``, hidden ones too.
    """

    name: str
    first: list[str]
    second: list[str] | None
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    splits: NDArray[np.str_]
    dropped: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.first)

    @property
    def texts(self) -> list[str]:
        """All texts, first ones first."""
        return [*self.first, *(self.second or ())]


def read_task(path: str | Path) -> Task:
    """Read one transfer task; rows without a text or a label are dropped and counted.

    A label −1 is a hidden one, as in GLUE, where no split has both it and others.

    The file is ``.parquet``, ``.jsonl`` or ``.tsv`` with text, or sentence1 and sentence2; label
    (whole numbers or names); and split: ``all`` for every row (10-fold cross-validation), or train
    and test, train, dev and test, or train and dev.
    """
    table = LabelTable.read(Path(path), _ENDINGS, {_TEXT, *_PAIR, _LABEL, _SPLIT})
    columns = _text_columns(table)
    if lacking := [name for name in (_LABEL, _SPLIT) if name not in table.columns]:
        raise table.lacks(f"no column {' and no '.join(lacking)} ({_EXPECTED})")
    rows, dropped = _usable(table, columns)
    if not rows:
        raise CorpusError(
            f"{path} has no row with a text and a label ({dropped['text']:,} lack a text, "
            f"{dropped['label']:,} a label); give some"
        )
    labels, classes = _classes(table, rows)
    texts = [[table.parse(name, row, to_text) for row in rows] for name in columns]
    return Task(
        name=Path(path).stem,
        first=texts[0],
        second=texts[1] if len(texts) == 2 else None,
        labels=labels,
        classes=classes,
        splits=_splits(table, rows),
        dropped=dropped,
    )


def task_files(paths: Iterable[str | Path], names: Sequence[str] = ()) -> list[Path]:
    """Return the files of tasks, those of a folder in the order of the papers' tables."""
    files = [file for inside in label_files(paths, _ENDINGS) for file in sorted(inside, key=_place)]
    found = [file.stem.lower() for file in files]
    if twice := [str(file) for file in files if found.count(file.stem.lower()) > 1]:
        raise CorpusError(f"{' and '.join(twice)} are tasks of one name; name each task once")
    wanted = [name.lower() for name in names]
    if unknown := [name for name in names if name.lower() not in found]:
        raise ConfigError(
            f"there is no task {', '.join(unknown)}; the tasks are {', '.join(found) or 'none'}"
        )
    return [file for file in files if not wanted or file.stem.lower() in wanted]


def _place(file: Path) -> tuple[int, str]:
    name = file.stem.lower()
    return (_PUBLISHED.index(name) if name in _PUBLISHED else len(_PUBLISHED), name)


def _text_columns(table: LabelTable) -> tuple[str, ...]:
    pair = [name for name in _PAIR if name in table.columns]
    if _TEXT in table.columns and pair:
        raise CorpusError(
            f"{table.path} has the columns text and {' and '.join(pair)}; {_EXPECTED}: take one "
            "of the two out"
        )
    if _TEXT in table.columns:
        return (_TEXT,)
    if len(pair) == 2:
        return _PAIR
    raise table.lacks(f"no column text, and not both sentence1 and sentence2 ({_EXPECTED})")


def _usable(table: LabelTable, columns: Sequence[str]) -> tuple[list[int], dict[str, int]]:
    """Return the rows that have texts and a label, and how many lack which of the two."""
    rows, dropped = [], {"text": 0, "label": 0}
    for row in range(len(table)):
        if any(_is_blank(table.columns[name][row]) for name in columns):
            dropped["text"] += 1
        elif _is_blank(table.columns[_LABEL][row]):
            dropped["label"] += 1
        else:
            rows.append(row)
    if hidden := _hidden(table, rows):
        dropped["label"] += len(hidden)
        rows = [row for row in rows if row not in hidden]
    return rows, dropped


def _hidden(table: LabelTable, rows: Sequence[int]) -> set[int]:
    """Return the rows whose label is kept back: −1, unless it is a class as others are."""
    hidden = {row for row in rows if table.parse(_LABEL, row, _to_label) == _HIDDEN}
    mixed = [{str(table.columns[_SPLIT][row]) for row in part} for part in
             (hidden, set(rows) - hidden)]  # fmt: skip
    return set() if mixed[0] & mixed[1] or not mixed[1] else hidden


def _is_blank(value: Any) -> bool:
    blank = isinstance(value, str) and not value.strip()
    return value is None or blank or (isinstance(value, float) and value != value)


def _classes(table: LabelTable, rows: Sequence[int]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    names = [table.parse(_LABEL, row, _to_label) for row in rows]
    distinct = set(names)
    if all(_WHOLE.fullmatch(name) for name in distinct):
        classes = sorted(distinct, key=lambda name: (int(name), name))
    else:
        classes = sorted(distinct)
    if len(classes) < 2:
        raise CorpusError(
            f"all {len(rows):,} rows of {table.path} have the label {shown(classes[0])}, so there "
            "is nothing to tell apart; give two classes or more"
        )
    numbers = {name: number for number, name in enumerate(classes)}
    return np.array([numbers[name] for name in names], dtype=np.int64), tuple(classes)


def _to_label(value: Any) -> str:
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return str(int(value))
    if isinstance(value, str):
        return value.strip()
    raise ValueError("a class: a whole number or a name")


def _splits(table: LabelTable, rows: Sequence[int]) -> NDArray[np.str_]:
    splits = [table.columns[_SPLIT][row] for row in rows]
    found = {str(split) for split in splits}
    if not any(found == set(layout) for layout in _LAYOUTS):
        known = "; or ".join(" and ".join(layout) for layout in _LAYOUTS)
        raise CorpusError(
            f"{table.path} has the splits {', '.join(sorted(found))}; a task has {known}"
        )
    return np.array(splits, dtype=np.str_)
