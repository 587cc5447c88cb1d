"""Logistic regressions over folds and over a grid of C, side by side. scikit-learn loads late."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whiten_index.errors import ConfigError

FOLDS = 10
_MOST_STEPS = 2_000
_LEAST_FOLDS = 2

Rows = NDArray[np.intp]
_Part = TypeVar("_Part")
_Result = TypeVar("_Result")


def require_learner() -> None:
    """Check that scikit-learn is there.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import sklearn.linear_model  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "transfer tasks need scikit-learn; pip install 'whiten-index[eval]'"
        ) from error


def check_folds(labels: NDArray[np.int64], folds: int, *, nested: bool = False) -> None:
    """Check that each fold can have a row of every class.

    Args:
        labels: classes of the rows.
        folds: of every cross-validation.
        nested: whether the rows trained on fall into as many folds again. Of n rows of a class
            they are n − ⌈n/folds⌉ or more, which is ``folds`` from n = folds + 2 on.

    Raises:
        ConfigError: a class has too few rows; the message has the most folds that it allows.
    """
    number, count = min(Counter(labels.tolist()).items(), key=lambda item: item[1])
    spare = 2 if nested else 0
    if count < folds + spare:
        most = count - spare
        fewer = f"at most {most} folds, or more rows" if most >= _LEAST_FOLDS else "more rows"
        again = f" with {folds} more in each" if nested else ""
        raise ConfigError(
            f"class {number} has {count} of the {len(labels)} rows, and {folds} folds{again} need "
            f"{folds + spare} of every class; give {fewer}, or leave the class out"
        )


@dataclass(frozen=True)
class Folds:
    """Folds that keep the shares of the classes, shuffled by a seed."""

    count: int
    seed: int

    def of(self, rows: Rows, labels: NDArray[np.int64]) -> list[tuple[Rows, Rows]]:
        """Return the stratified folds of some rows, as rows to train on and rows to test."""
        from sklearn.model_selection import StratifiedKFold

        folds = StratifiedKFold(self.count, shuffle=True, random_state=self.seed)
        parts = folds.split(np.zeros((len(rows), 1)), labels[rows])
        return [(rows[train], rows[test]) for train, test in parts]


@dataclass(frozen=True)
class Learner:
    """Fits classifiers on rows of one set of features."""

    features: NDArray[np.float64]
    labels: NDArray[np.int64]
    threads: int

    @classmethod
    def of(cls, features: ArrayLike, labels: ArrayLike, threads: int | None) -> Learner:
        """Check features (n, d) and labels (n,); None threads are the machine's cores."""
        matrix, classes = np.ascontiguousarray(features, np.float64), np.asarray(labels, np.int64)
        if matrix.ndim != 2 or classes.shape != matrix.shape[:1]:
            raise ConfigError(
                f"features of shape {matrix.shape} and labels of shape {classes.shape}; give "
                "(n, d) and (n,)"
            )
        if not np.isfinite(matrix).all():
            raise ConfigError("the features hold NaN or infinity; drop or mend those rows first")
        return cls(matrix, classes, threads or os.cpu_count() or 1)

    def paths(
        self, parts: Sequence[tuple[Rows, Rows]], grid: Sequence[float]
    ) -> tuple[NDArray[np.float64], int]:
        """Return accuracies (parts, grid) and the number of fits that did not converge."""

        def path(part: tuple[Rows, Rows]) -> tuple[list[float], int]:
            train, test = part
            classifier = _classifier(warm_start=True)
            known, asked = self.features[train], self.features[test]
            accuracies, unconverged = [], 0
            for c in grid:
                classifier.set_params(C=c).fit(known, self.labels[train])
                unconverged += _ran_out(classifier)
                accuracies.append(float(np.mean(classifier.predict(asked) == self.labels[test])))
            return accuracies, unconverged

        each = self._each(path, parts)
        return np.array([accuracies for accuracies, _ in each]), sum(lost for _, lost in each)

    def predictions(
        self, parts: Sequence[tuple[Rows, Rows]], chosen: Sequence[float]
    ) -> tuple[list[NDArray[np.int64]], int]:
        """Return the classes of each part's tested rows and the fits that did not converge."""

        def predict(task: tuple[tuple[Rows, Rows], float]) -> tuple[NDArray[np.int64], bool]:
            (train, test), c = task
            classifier = _classifier(C=c).fit(self.features[train], self.labels[train])
            return np.asarray(classifier.predict(self.features[test])), _ran_out(classifier)

        each = self._each(predict, list(zip(parts, chosen, strict=True)))
        return [found for found, _ in each], sum(lost for _, lost in each)

    def _each(self, work: Callable[[_Part], _Result], parts: Iterable[_Part]) -> list[_Result]:
        from threadpoolctl import threadpool_limits

        # A fit's products are too narrow to share: fits side by side are faster.
        with threadpool_limits(1, user_api="blas"):
            pool = ThreadPoolExecutor(self.threads)
            try:
                return list(pool.map(work, parts))
            finally:
                pool.shutdown(cancel_futures=True)


def _classifier(**options: Any) -> Any:
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(solver="lbfgs", max_iter=_MOST_STEPS, **options)


def _ran_out(classifier: Any) -> bool:
    return bool(np.max(classifier.n_iter_) >= _MOST_STEPS)
