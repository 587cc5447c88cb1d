"""Transfer tasks: texts or pairs with classes, scored by a linear classifier as SentEval does.

Conneau and Kiela (2018), "SentEval: an evaluation toolkit for universal sentence
representations": embeddings as they are, under an L2-regularised logistic regression; C in powers
of 2 from 1/4 to 8 (from 1/2 to 32 where folds of the train split choose); 10 folds, stratified and
shuffled by one seed, outer and inner alike; mean accuracies rounded to 0.01 points, and of equal
ones the smallest C. These differ:

- The solver is L-BFGS run until it converges, along the path of C; SentEval takes scikit-learn's
  default (100 steps, every fit from the start) or, in most papers' runs, a PyTorch classifier
  trained by Adam with its own grid of weight decays.
- Several classes are one multinomial regression; SentEval's of 2018 was one against the rest.
- The texts are those of the rows given; SentEval trains SST-2 on 67 thousand phrases of its
  sentences, and these files hold the sentences alone.
- Standard deviations are reported.
"""

from __future__ import annotations

import itertools
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whiten_index.errors import ConfigError, CorpusError
from whiten_index.evaluation.label_table import (
    JSONL,
    PARQUET,
    TSV,
    LabelTable,
    label_files,
    to_text,
)
from whiten_index.paths import shown

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


FOLDS = 10
ALL, TRAIN, DEV, TEST = "all", "train", "dev", "test"
# C of SentEval's InnerKFold and Split classifiers, and of its KFold classifier.
_GRID = tuple(2.0**power for power in range(-2, 4))
_GRID_OF_FOLDS = tuple(2.0**power for power in range(-1, 6))
_MOST_STEPS, _LEAST_FOLDS = 2_000, 2
_Rows = NDArray[np.intp]
# Rows to train on, and rows to test.
_Part = tuple[_Rows, _Rows]


def score_transfer(
    features: NDArray[np.floating],
    labels: NDArray[np.int64],
    splits: NDArray[np.str_],
    *,
    folds: int = FOLDS,
    seed: int = 0,
    threads: int | None = None,
) -> dict[str, Any]:
    """Return how well logistic regression on features (n, d) names the labels (n,).

    Rows of split ``all`` are tested by cross-validation, C chosen within each training part by
    another cross-validation. Else the rows of ``test`` are tested, C chosen on ``dev`` where
    there is one, else by cross-validation of ``train``.

    ``folds`` are those of every cross-validation, shuffled by ``seed``. So many
    ``threads`` fit at once, by default one a core.

    Returns:
        JSON values, shares of 1: ``accuracy`` (over folds their mean), its ``deviation``, and
        ``deviation_of``: ``folds`` (standard deviation of their accuracies) or ``binomial``,
        √(p(1 − p)/n). ``chosen_by``: ``nested folds``, ``train folds`` or ``dev``, and the C
        ``chosen``, one for each classifier tested. ``rows`` by split, ``majority``, the share of
        the largest class among the tested rows, and ``unconverged`` fits.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold
    from threadpoolctl import threadpool_limits

    matrix, parts = np.ascontiguousarray(features, np.float64), check_splits(labels, splits, folds)
    cut = StratifiedKFold(folds, shuffle=True, random_state=seed)

    def folds_of(rows: _Rows) -> list[_Part]:
        cuts = cut.split(np.zeros((len(rows), 1)), labels[rows])
        return [(rows[train], rows[test]) for train, test in cuts]

    def predict(part: _Part, path: Sequence[float]) -> tuple[list[NDArray[np.int64]], int]:
        """Return the classes at each C along a path, and how many fits did not converge."""
        train, test = part
        classifier = LogisticRegression(solver="lbfgs", max_iter=_MOST_STEPS, warm_start=True)
        classes, lost = [], 0
        for c in path:
            classifier.set_params(C=c).fit(matrix[train], labels[train])
            lost += int(np.max(classifier.n_iter_) >= _MOST_STEPS)
            classes.append(np.asarray(classifier.predict(matrix[test])))
        return classes, lost

    if ALL in parts:
        tested, grid, chosen_by = folds_of(parts[ALL]), _GRID, "nested folds"
        choosing = [folds_of(train) for train, _ in tested]
    else:
        tested, grid, chosen_by = [(parts[TRAIN], parts[TEST])], _GRID_OF_FOLDS, "train folds"
        if DEV in parts:
            grid, chosen_by, choosing = _GRID, DEV, [[(parts[TRAIN], parts[DEV])]]
        else:
            choosing = [folds_of(parts[TRAIN])]
    pool = ThreadPoolExecutor(threads or os.cpu_count() or 1)
    try:
        # A fit's products are too narrow to share: fits side by side are faster.
        with threadpool_limits(1, user_api="blas"), warnings.catch_warnings():
            # Counted instead; the filter is set here because threads share it.
            warnings.simplefilter("ignore", ConvergenceWarning)
            inner = [part for each in choosing for part in each]
            paths = list(pool.map(predict, inner, itertools.repeat(grid)))
            found = np.array(
                [
                    [float(np.mean(each == labels[test])) for each in classes]
                    for (_, test), (classes, _) in zip(inner, paths, strict=True)
                ]
            )
            means = found.reshape(len(choosing), -1, len(grid)).mean(axis=1)
            # The smallest C of the best accuracy in points, to two decimals.
            chosen = [grid[int(np.argmax(np.round(100 * each, 2)))] for each in means]
            last = list(pool.map(predict, tested, zip(chosen, strict=True)))
    finally:
        pool.shutdown(cancel_futures=True)
    predicted = [classes for (classes,), _ in last]
    gold = [labels[test] for _, test in tested]
    right = [float(np.mean(a == b)) for a, b in zip(predicted, gold, strict=True)]
    accuracy, every = float(np.mean(right)), np.concatenate(gold)
    deviation = np.std(right, ddof=1) if ALL in parts else binomial_error(accuracy, len(every))
    return {
        "accuracy": accuracy,
        "deviation": float(deviation),
        "deviation_of": "folds" if ALL in parts else "binomial",
        "chosen_by": chosen_by,
        "chosen": chosen,
        "rows": {name: len(rows) for name, rows in parts.items()},
        "majority": float(np.unique(every, return_counts=True)[1].max() / len(every)),
        "unconverged": sum(lost for _, lost in (*paths, *last)),
    }


def check_splits(labels: NDArray[Any], splits: NDArray[np.str_], folds: int) -> dict[str, _Rows]:
    """Return the rows of each split, refusing what ``score_transfer`` could not score."""
    parts = {name: np.flatnonzero(splits == name) for name in (ALL, TRAIN, DEV, TEST)}
    parts = {name: rows for name, rows in parts.items() if len(rows)}
    trained = parts[ALL] if ALL in parts else parts[TRAIN]
    if len(np.unique(labels[trained])) < 2:
        raise ConfigError(
            f"all {len(trained)} rows to train on have one class, so there is nothing to learn; "
            "give two or more"
        )
    if DEV not in parts:
        check_folds(labels[trained], folds, nested=ALL in parts)
    return parts


def check_folds(labels: NDArray[Any], folds: int, *, nested: bool = False) -> None:
    """Check that each fold can have a row of every class."""
    name, count = min(Counter(labels.tolist()).items(), key=lambda item: item[1])
    spare = 2 if nested else 0
    if count < folds + spare:
        most = count - spare
        fewer = f"at most {most} folds, or more rows" if most >= _LEAST_FOLDS else "more rows"
        again = f" with {folds} more in each" if nested else ""
        raise ConfigError(
            f"class {shown(name)} has {count} of the {len(labels)} rows, and {folds} folds{again} "
            f"need {folds + spare} of every class; give {fewer}, or leave the class out"
        )


def require_learner() -> None:
    """Check that scikit-learn is there."""
    try:
        import sklearn.linear_model  # noqa: F401
    except ImportError as error:
        raise ConfigError("transfer tasks need scikit-learn; pip install scikit-learn") from error


def pair_features(first: ArrayLike, second: ArrayLike) -> NDArray[np.float64]:
    """Return |u − v| and u ∘ v side by side, (n, 2d), of pairs of embeddings (n, d).

    SentEval's features of a pair, the same whichever text comes first.
    """
    u, v = np.asarray(first, np.float64), np.asarray(second, np.float64)
    return np.hstack([np.abs(u - v), u * v])


def binomial_error(share: float, n: int) -> float:
    """Return √(p(1 − p)/n), the standard error of a share p of n rows."""
    return float(np.sqrt(share * (1 - share) / n))
