"""Transfer tasks: what a linear classifier learns from frozen embeddings, as SentEval asks.

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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whiten_index.errors import ConfigError
from whiten_index.evaluation.sts_scores import pair_cosines

FOLDS = 10
ALL, TRAIN, DEV, TEST = "all", "train", "dev", "test"
# C of SentEval's InnerKFold and Split classifiers, and of its KFold classifier.
_GRID = tuple(2.0**power for power in range(-2, 4))
_GRID_OF_FOLDS = tuple(2.0**power for power in range(-1, 6))
_MOST_STEPS, _LEAST_FOLDS = 2_000, 2
Rows = NDArray[np.intp]
_Part = TypeVar("_Part")
_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class TransferScore:
    """How well a linear classifier does on rows it was not trained on; shares are of 1.

    Attributes:
        accuracy: share of the tested rows it names rightly; over folds, their mean.
        deviation: of the accuracy, see ``deviation_of``.
        deviation_of: ``folds``: sample standard deviation of the accuracies of the folds;
            ``binomial``: √(p(1 − p)/n) of n tested rows.
        f1: harmonic mean of precision and recall of the positive class, over folds their mean;
            None where none was named.
        chosen_by: what chose C: ``nested folds``, ``train folds`` or ``dev``.
        chosen: C, one for each classifier tested.
        rows: rows by split.
        majority: share of the largest class among the tested rows, what guessing it alone scores.
        constant: classifiers tested that predicted one class only.
        classifiers: how many were tested.
        unseen: tested rows whose class no row trained on has, and which are wrong for that.
        unconverged: fits that ended at the last step allowed.
    """

    accuracy: float
    deviation: float
    deviation_of: str
    f1: float | None
    chosen_by: str
    chosen: tuple[float, ...]
    rows: dict[str, int]
    majority: float
    constant: int
    classifiers: int
    unseen: int
    unconverged: int

    def to_json(self) -> dict[str, Any]:
        """Return the figures by name."""
        return {**asdict(self), "chosen": list(self.chosen)}


def score_transfer(
    features: ArrayLike,
    labels: ArrayLike,
    splits: ArrayLike,
    *,
    folds: int = FOLDS,
    seed: int = 0,
    positive: int | None = None,
    threads: int | None = None,
) -> TransferScore:
    """Return how well logistic regression on features (n, d) names the labels (n,).

    Rows of split ``all`` are tested by cross-validation, C chosen within each training part by
    cross-validation of its own. Else the rows of ``test`` are tested, C chosen on ``dev`` where
    there is one, by cross-validation of ``train`` where there is none.

    Args:
        features: one row a text or pair, as it is.
        labels: class numbers.
        splits: ``all`` for every row, or ``train``, ``dev`` and ``test``.
        folds: of every cross-validation.
        seed: of the shuffled folds.
        positive: class that F1 is of.
        threads: fits at once; None takes the machine's cores.
    """
    require_learner()
    learner = Learner.of(features, labels, threads)
    parts = check_splits(learner.labels, splits, folds=folds)
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        # Counted instead, in unconverged; the filter is set here because threads share it.
        warnings.simplefilter("ignore", ConvergenceWarning)
        if ALL in parts:
            return _nested(learner, parts[ALL], Folds(folds, seed), positive)
        return _held_out(learner, parts, Folds(folds, seed), positive)


def check_splits(labels: ArrayLike, splits: ArrayLike, *, folds: int = FOLDS) -> dict[str, Rows]:
    """Return the rows of each split, refusing what ``score_transfer`` could not score."""
    classes = np.asarray(labels, np.int64)
    parts = _by_split(splits, len(classes))
    if folds < 2:
        raise ConfigError(f"{folds} folds leave nothing to train on; give 2 or more")
    trained = parts[ALL] if ALL in parts else parts[TRAIN]
    if len(np.unique(classes[trained])) < 2:
        raise ConfigError(
            f"all {len(trained)} rows to train on have one class, so there is nothing to learn; "
            "give two or more"
        )
    if DEV not in parts:
        check_folds(classes[trained], folds, nested=ALL in parts)
    return parts


def pair_features(first: ArrayLike, second: ArrayLike) -> NDArray[np.float64]:
    """Return |u − v| and u ∘ v side by side, (n, 2d), of pairs of embeddings (n, d).

    SentEval's features of a pair, the same whichever text comes first.
    """
    u, v = np.asarray(first, np.float64), np.asarray(second, np.float64)
    return np.hstack([np.abs(u - v), u * v])


def _by_split(splits: ArrayLike, n: int) -> dict[str, Rows]:
    """Return the rows of each split, refusing what no protocol is for."""
    named = np.asarray(splits).astype(str)
    if named.shape != (n,):
        raise ConfigError(f"splits of shape {named.shape} for {n} rows; give ({n},)")
    parts = {name: np.flatnonzero(named == name) for name in dict.fromkeys(named.tolist())}
    if set(parts) not in ({ALL}, {TRAIN, TEST}, {TRAIN, DEV, TEST}):
        raise ConfigError(
            f"the splits are {', '.join(sorted(parts)) or 'none'}; give all, train and test, or "
            "train, dev and test"
        )
    return parts


def _nested(learner: Learner, rows: Rows, folds: Folds, positive: int | None) -> TransferScore:
    outer = folds.of(rows, learner.labels)
    inner = [part for train, _ in outer for part in folds.of(train, learner.labels)]
    accuracies, lost = learner.paths(inner, _GRID)
    means = accuracies.reshape(len(outer), folds.count, len(_GRID)).mean(axis=1)
    chosen = [_best(each, _GRID) for each in means]
    predicted, lost_last = learner.predictions(outer, chosen)
    right = [
        float(np.mean(found == learner.labels[test]))
        for found, (_, test) in zip(predicted, outer, strict=True)
    ]
    return TransferScore(
        accuracy=float(np.mean(right)),
        deviation=float(np.std(right, ddof=1)),
        deviation_of="folds",
        f1=_mean_f1(predicted, [learner.labels[test] for _, test in outer], positive),
        chosen_by="nested folds",
        chosen=tuple(chosen),
        rows={ALL: len(rows)},
        majority=_majority(learner.labels[rows]),
        constant=sum(map(_constant, predicted)),
        classifiers=len(outer),
        unseen=0,
        unconverged=lost + lost_last,
    )


def _held_out(
    learner: Learner, parts: dict[str, Rows], folds: Folds, positive: int | None
) -> TransferScore:
    train, test = parts[TRAIN], parts[TEST]
    if DEV in parts:
        grid, choosing = _GRID, [(train, parts[DEV])]
    else:
        grid, choosing = _GRID_OF_FOLDS, folds.of(train, learner.labels)
    accuracies, lost = learner.paths(choosing, grid)
    chosen = _best(accuracies.mean(axis=0), grid)
    (found,), lost_last = learner.predictions([(train, test)], [chosen])
    gold = learner.labels[test]
    accuracy = float(np.mean(found == gold))
    return TransferScore(
        accuracy=accuracy,
        deviation=binomial_deviation(accuracy, len(test)),
        deviation_of="binomial",
        f1=_mean_f1([found], [gold], positive),
        chosen_by=DEV if DEV in parts else "train folds",
        chosen=(chosen,),
        rows={name: len(parts[name]) for name in (TRAIN, DEV, TEST) if name in parts},
        majority=_majority(gold),
        constant=int(_constant(found)),
        classifiers=1,
        unseen=int((~np.isin(gold, learner.labels[train])).sum()),
        unconverged=lost + lost_last,
    )


def binomial_deviation(share: float, n: int) -> float:
    """Return √(p(1 − p)/n), the standard error of a share p of n rows."""
    return float(np.sqrt(share * (1 - share) / n))


def _best(accuracies: NDArray[np.float64], grid: Sequence[float]) -> float:
    """Return the smallest C of the best accuracy in points, to two decimals."""
    return grid[int(np.argmax(np.round(100 * accuracies, 2)))]


def _mean_f1(
    predicted: Sequence[NDArray[np.int64]],
    gold: Sequence[NDArray[np.int64]],
    positive: int | None,
) -> float | None:
    if positive is None:
        return None
    from sklearn.metrics import f1_score

    each = [
        f1_score(known == positive, found == positive, zero_division=0.0)
        for known, found in zip(gold, predicted, strict=True)
    ]
    return float(np.mean(each))


def _majority(labels: NDArray[np.int64]) -> float:
    return float(np.unique(labels, return_counts=True)[1].max() / len(labels))


def _constant(predicted: NDArray[np.int64]) -> bool:
    return len(np.unique(predicted)) == 1


def require_learner() -> None:
    """Check that scikit-learn is there."""
    try:
        import sklearn.linear_model  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "transfer tasks need scikit-learn; pip install 'whiten-index[eval]'"
        ) from error


def check_folds(labels: NDArray[np.int64], folds: int, *, nested: bool = False) -> None:
    """Check that each fold can have a row of every class."""
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


THRESHOLD = 0.5


@dataclass(frozen=True, kw_only=True)
class EntailmentScore:
    """How often a threshold on the cosine tells entailment; shares are of 1.

    Attributes:
        accuracy: share of the tested pairs told rightly, a cosine of ``threshold`` or more
            counting as entailment.
        deviation: √(p(1 − p)/n) of the accuracy.
        deviation_of: ``binomial``.
        threshold: the fixed one.
        constant: whether it calls every pair the same.
        tuned_accuracy: accuracy at ``tuned_threshold``.
        tuned_threshold: the threshold that tells most pairs to train on rightly, of equal ones
            the lowest. None, as are the two beside it, where those are not of both classes.
        tuned_constant: whether that one calls every tested pair the same.
        majority: share of the larger class among the tested pairs.
        rows: pairs by split.
    """

    accuracy: float
    deviation: float
    deviation_of: str
    threshold: float
    constant: bool
    tuned_accuracy: float | None
    tuned_threshold: float | None
    tuned_constant: bool | None
    majority: float
    rows: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """Return the figures by name."""
        return asdict(self)


def score_entailment(
    first: ArrayLike,
    second: ArrayLike,
    entailed: ArrayLike,
    tested: ArrayLike,
    *,
    threshold: float = THRESHOLD,
) -> EntailmentScore:
    """Score pairs of embeddings (n, d) by their cosine.

    Huang et al. (2021), "WhiteningBERT: an easy unsupervised sentence embedding approach", take
    the threshold 0.5 on the dev split. The pairs that are not tested tune another one.

    Args:
        first: one row a pair; a row of zeros has cosine 0 with any.
        second: the partner of each.
        entailed: (n,) whether the pair is an entailment.
        tested: (n,) whether the pair is scored; the others, where there are any, tune.
        threshold: the fixed one.
    """
    truth, scored = np.asarray(entailed, dtype=bool), np.asarray(tested, dtype=bool)
    cosines = _checked_cosines(first, second)
    if not cosines.shape == truth.shape == scored.shape:
        raise ConfigError(
            f"{len(cosines)} pairs, {truth.shape} labels and {scored.shape} splits; give one for "
            "each pair"
        )
    if not scored.any():
        raise ConfigError(f"none of {len(scored)} pairs is to be tested; give some to test")
    gold, trained = truth[scored], truth[~scored]
    accuracy, constant = _at(threshold, cosines[scored], gold)
    tuned, tuned_accuracy, tuned_constant = None, None, None
    # Pairs of one class only would be told best by calling every pair the same.
    if trained.any() and not trained.all():
        tuned = tuned_threshold(cosines[~scored], trained)
        tuned_accuracy, tuned_constant = _at(tuned, cosines[scored], gold)
    return EntailmentScore(
        accuracy=accuracy,
        deviation=binomial_deviation(accuracy, len(gold)),
        deviation_of="binomial",
        threshold=threshold,
        constant=constant,
        tuned_accuracy=tuned_accuracy,
        tuned_threshold=tuned,
        tuned_constant=tuned_constant,
        majority=float(max(gold.mean(), 1 - gold.mean())),
        rows={"train": int((~scored).sum()), "dev": len(gold)},
    )


def tuned_threshold(cosines: ArrayLike, entailed: ArrayLike) -> float:
    """Return the t for which ``cosine >= t`` names most of the (n,) pairs rightly.

    Every way to part the pairs by their cosine is tried: below all, halfway between neighbours,
    and above all. Of equal ones the lowest is taken.
    """
    values, truth = np.asarray(cosines, np.float64), np.asarray(entailed, dtype=bool)
    distinct, places = np.unique(values, return_inverse=True)
    gains = np.bincount(places, weights=np.where(truth, -1.0, 1.0), minlength=len(distinct))
    # Raising the threshold over a value loses its entailments and wins its others.
    right = truth.sum() + np.concatenate([[0.0], np.cumsum(gains)])
    best = int(np.argmax(right))
    if best == 0:
        return float(distinct[0])
    if best == len(distinct):
        return float(np.nextafter(distinct[-1], np.inf))
    below, above = distinct[best - 1], distinct[best]
    between = below + (above - below) / 2
    return float(between if between > below else above)


def _checked_cosines(first: ArrayLike, second: ArrayLike) -> NDArray[np.float64]:
    """Return the cosine (n,) of each pair, refusing what has none."""
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if a.ndim != 2 or a.shape != b.shape:
        raise ConfigError(f"pairs of shapes {a.shape} and {b.shape}; give two (n, d) arrays")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ConfigError("the embeddings hold NaN or infinity; drop or mend those pairs first")
    return pair_cosines(a, b)


def _at(
    threshold: float, cosines: NDArray[np.float64], gold: NDArray[np.bool_]
) -> tuple[float, bool]:
    """Return the accuracy at a threshold, and whether all pairs are called the same."""
    called = cosines >= threshold
    return float(np.mean(called == gold)), bool(called.all() or not called.any())
