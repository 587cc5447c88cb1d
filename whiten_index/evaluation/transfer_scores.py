"""Transfer tasks scored by a linear classifier on frozen embeddings, as SentEval does.

Conneau and Kiela (2018), "SentEval: an evaluation toolkit for universal sentence
representations". What it does is done here: embeddings as they are, neither standardised nor
scaled, under an L2-regularised logistic regression; C in powers of 2 from 1/4 to 8 (from 1/2 to
32 where folds of the train split choose); 10 folds, stratified and shuffled by one seed, outer
and inner alike; mean accuracies rounded to 0.01 points, and of equal ones the smallest C. What
differs:

- The solver is L-BFGS run until it converges, along the path of C; SentEval takes scikit-learn's
  default (100 steps, every fit from the start) or, in most papers' runs, a PyTorch classifier
  trained by Adam with its own grid of weight decays.
- Where there are several classes, the regression is multinomial; SentEval's of 2018 was one
  against the rest.
- The texts are those of the rows given; SentEval trains SST-2 on 67 thousand phrases of its
  sentences, and these files hold the sentences alone.
- Standard deviations are reported.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whiten_index.errors import ConfigError
from whiten_index.evaluation.label_table import shown

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
    positive: int | None = None,
    threads: int | None = None,
) -> dict[str, Any]:
    """Return how well logistic regression on features (n, d) names the labels (n,).

    Rows of split ``all`` are tested by cross-validation, C chosen within each training part by
    another cross-validation. Else the rows of ``test`` are tested, C chosen on ``dev`` where
    there is one, else by cross-validation of ``train``.

    ``folds`` are those of every cross-validation, shuffled by ``seed``. F1 is of the class
    ``positive``. So many ``threads`` fit at once, by default one a core.

    Returns:
        JSON values, shares of 1: ``accuracy`` (over folds their mean), its ``deviation``, and
        ``deviation_of``: ``folds`` (standard deviation of their accuracies) or ``binomial``,
        √(p(1 − p)/n). ``f1``, over folds their mean, None without ``positive``. ``chosen_by``:
        ``nested folds``, ``train folds`` or ``dev``, and the C ``chosen``, one for each classifier
        tested. ``rows`` by split, ``majority``, the share of the largest class among the tested
        rows, and ``unconverged`` fits.
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

    def fit(classifier: Any, rows: _Rows) -> bool:
        """Fit a classifier, and return whether it converged."""
        classifier.fit(matrix[rows], labels[rows])
        return bool(np.max(classifier.n_iter_) < _MOST_STEPS)

    def path(part: _Part) -> tuple[list[float], int]:
        """Return the accuracy at each C, and how many fits did not converge."""
        train, test = part
        classifier = LogisticRegression(solver="lbfgs", max_iter=_MOST_STEPS, warm_start=True)
        accuracies, lost = [], 0
        for c in grid:
            lost += not fit(classifier.set_params(C=c), train)
            accuracies.append(float(np.mean(classifier.predict(matrix[test]) == labels[test])))
        return accuracies, lost

    def predict(part: _Part, c: float) -> tuple[NDArray[np.int64], int]:
        classifier = LogisticRegression(solver="lbfgs", max_iter=_MOST_STEPS, C=c)
        lost = not fit(classifier, part[0])
        return np.asarray(classifier.predict(matrix[part[1]])), lost

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
            paths = list(pool.map(path, [part for each in choosing for part in each]))
            found = np.array([accuracies for accuracies, _ in paths])
            means = found.reshape(len(choosing), -1, len(grid)).mean(axis=1)
            # The smallest C of the best accuracy in points, to two decimals.
            chosen = [grid[int(np.argmax(np.round(100 * each, 2)))] for each in means]
            last = list(pool.map(predict, tested, chosen))
    finally:
        pool.shutdown(cancel_futures=True)
    predicted = [classes for classes, _ in last]
    gold = [labels[test] for _, test in tested]
    right = [float(np.mean(a == b)) for a, b in zip(predicted, gold, strict=True)]
    accuracy, every = float(np.mean(right)), np.concatenate(gold)
    deviation = np.std(right, ddof=1) if ALL in parts else binomial_error(accuracy, len(every))
    return {
        "accuracy": accuracy,
        "deviation": float(deviation),
        "deviation_of": "folds" if ALL in parts else "binomial",
        "f1": None if positive is None else _mean_f1(predicted, gold, positive),
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
        raise ConfigError(
            "transfer tasks need scikit-learn; pip install 'whiten-index[eval]'"
        ) from error


def pair_features(first: ArrayLike, second: ArrayLike) -> NDArray[np.float64]:
    """Return |u − v| and u ∘ v side by side, (n, 2d), of pairs of embeddings (n, d).

    SentEval's features of a pair, the same whichever text comes first.
    """
    u, v = np.asarray(first, np.float64), np.asarray(second, np.float64)
    return np.hstack([np.abs(u - v), u * v])


def binomial_error(share: float, n: int) -> float:
    """Return √(p(1 − p)/n), the standard error of a share p of n rows."""
    return float(np.sqrt(share * (1 - share) / n))


def _mean_f1(
    predicted: Sequence[NDArray[np.int64]], gold: Sequence[NDArray[np.int64]], positive: int
) -> float:
    from sklearn.metrics import f1_score

    each = [
        f1_score(known == positive, found == positive, zero_division=0.0)
        for known, found in zip(gold, predicted, strict=True)
    ]
    return float(np.mean(each))
