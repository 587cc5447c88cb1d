"""Tune an index: the least lists and candidates that reach a recall of its held-out queries."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.index.choice import AUTO, HELD_OUT_SHARE, IndexPlan, OperatingPoint
from whiten_index.index.exact import Rows, Scores, Vectors, rounding
from whiten_index.index.factory import inner_index, is_exact, lists_of
from whiten_index.index.gpu import MOST_ON_GPU
from whiten_index.index.library import load_faiss
from whiten_index.progress import Stages

# Neighbours that are counted, and those that are needed to see ties and to leave out the query.
TOP_K = 10
NEIGHBOURS = TOP_K + 2
# Recall this near to the best that an index can give counts as the best.
_AS_GOOD = 0.002
# Twice the work that gains less than this, below the target, will not reach it.
_PLATEAU = 0.001
_TIED = 1e-6
# Numbers of candidates that scoring again is tried with, from the store.
CANDIDATES = (20, 50, 100, 200, 500, 1_000)


@dataclass(frozen=True, eq=False)
class GroundTruth:
    """Queries held out of the training, and their exact neighbours."""

    queries: Vectors  # (q, k)
    neighbours: Rows  # (q, n) row numbers, without the query itself; −1 is not counted
    # (q,) row numbers of the queries themselves, None if the index lacks them.
    rows: Rows | None = None
    # (m,) rising numbers of rows that are added after the tuning, none by default.
    late: Rows = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    @classmethod
    def of(
        cls, queries: Vectors, scores: Scores, near: Rows, held_out: Rows, *, unseen: bool = False
    ) -> "GroundTruth":
        """Return the truth for held-out rows, of the result of ``exact_neighbours``.

        Queries whose last neighbour is no nearer than the next are left out: of equal rows, such as
        copies of one text, an index may rightly give others. If that leaves few, all are counted.
        ``unseen`` rows are added after the tuning, and ``near`` numbers the others.
        """
        if not unseen:
            near, scores = (without_own(each, near, held_out) for each in (near, scores))
        # With fewer rows than neighbours both may be −∞: no tie, and no difference either.
        clear = ~(scores[:, TOP_K - 1] < scores[:, TOP_K] + rounding(scores, _TIED)[:, 0])
        counted = np.flatnonzero(clear)
        if len(counted) * 2 < len(queries):
            counted = np.arange(len(queries))
        found = queries[counted], near[counted, :TOP_K]
        return cls(*found, None, held_out) if unseen else cls(*found, held_out[counted])


def tune_to_recall(
    inner: Any, truth: GroundTruth | None, plan: IndexPlan, stages: Stages, *, rows: int
) -> tuple[OperatingPoint, int | None]:
    """Tune a filled index to the recall that its plan wants, and note a target not reached.

    Return the setting, and how many candidates are scored again, None for the index's own scores.
    """
    target, rerank, note = plan.target_recall, plan.rerank, stages.watcher.note
    if truth is None:
        exact = is_exact(inner_index(plan.built, int(inner.d)))
        if not exact and has_parameters(inner):
            reason = "it learns from every row; fewer lists leave some to be held out"
            if rows < HELD_OUT_SHARE:
                reason = f"{rows} rows are too few to hold any out"
            note(f"note: {plan.built} is not set to --target-recall {target:g}: {reason}")
        return OperatingPoint(target=target, reached=exact), rerank
    with stages.whole("tune", len(truth.queries)):
        if rerank is None:
            point = tune(inner, truth, target=target)
        else:
            point, rerank = tune_candidates(inner, truth, target=target)
    if not point.reached:
        note(_below_target(plan, point))
    return point, rerank


def _below_target(plan: IndexPlan, point: OperatingPoint) -> str:
    # An index that is re-ranked already takes as many candidates as were tried.
    again = "" if plan.rerank is not None else "scoring candidates again (search --rerank 100), "
    named = plan.asked != AUTO
    larger = "" if plan.budget is None or named else ", or a larger --memory-budget"
    finer = "float32 (Flat)" if "SQ8" in plan.built else "a codec of more bits such as SQ8"
    return (
        f"note: {plan.built} finds {point.recall:.1%} of the exact neighbours at best, below "
        f"--target-recall {plan.target_recall:g} ({point.queries} vectors held out); {again}"
        f"{finer}{larger} finds more"
    )


def tune(inner: Any, truth: GroundTruth, *, target: float, candidates: int = 0) -> OperatingPoint:
    """Set an index to the least work that reaches the target, and return its recall.

    Its parameter goes up a ladder until the target is met and is then narrowed down by halves. If
    no value meets it, the least within 0.002 of the best is taken. ``candidates`` rows are fetched
    for a query if they are scored again.
    """
    measure = partial(recall_of, inner, truth, candidates=candidates)
    parameters, (holder, name, ladder) = dict[str, int](), _parameter(inner)
    if not name:
        recall = measure()
    else:
        parameters[name], recall = _least(partial(setattr, holder, name), ladder, measure, target)
    return OperatingPoint(parameters, recall, target, recall >= target, len(truth.queries))


def tune_candidates(inner: Any, truth: GroundTruth, *, target: float) -> tuple[OperatingPoint, int]:
    """Set an index whose candidates are scored again, and return how many of them are needed.

    Scored by their exact vectors, candidates give every neighbour that is among them. The work of
    the index is set first, with half of the loss allowed, then the number of candidates, of 20 to
    1,000.
    """
    point = tune(inner, truth, target=(1 + target) / 2, candidates=CANDIDATES[-1])
    found = _found(inner, truth, CANDIDATES[-1])
    shares = {most: share_found(found[:, :most], truth.neighbours) for most in CANDIDATES}
    needed = next((most for most in CANDIDATES if shares[most] >= target), CANDIDATES[-1])
    reached = shares[needed] >= target
    recall, queries = shares[needed], len(truth.queries)
    return OperatingPoint(point.parameters, recall, target, reached, queries), needed


def recall_of(inner: Any, truth: GroundTruth, *, candidates: int = 0) -> float:
    """Return the share of the exact neighbours that an index finds; see ``tune``."""
    most = max(truth.neighbours.shape[1], candidates)
    return share_found(_found(inner, truth, most), truth.neighbours)


def _found(inner: Any, truth: GroundTruth, most: int) -> Rows:
    """Return the rows found (q, <= most) without the query's own."""
    own = truth.rows
    wanted = min(most + (0 if own is None else 1), int(inner.ntotal))
    found: Rows = inner.search(truth.queries, wanted)[1]
    return found if own is None else without_own(found, found, own)


def share_found(found: Rows, right: Rows) -> float:
    """Return the share of the right rows (q, n) that are among those found (q, m)."""
    wanted = right >= 0
    # A query at a time: all at once would be q · n · m comparisons held in memory.
    hits = sum(
        int(np.isin(some, near).sum(where=counted))
        for some, near, counted in zip(right, found, wanted, strict=True)
    )
    return hits / max(int(wanted.sum()), 1)


def without_own(values: NDArray[Any], found: Rows, own: Rows) -> NDArray[Any]:
    """Return values (q, m - 1) of rows found (q, m), without each query's own, or else the last."""
    other = found != own[:, None]
    other[other.all(axis=1), -1] = False
    others: NDArray[Any] = values[other].reshape(len(found), -1)
    return others


def _least(
    set_to: Callable[[int], None],
    ladder: Sequence[int],
    measure: Callable[[], float],
    target: float,
) -> tuple[int, float]:
    """Set a parameter to its least value that reaches the target, or comes near to the best."""
    known: dict[int, float] = {}

    def recall_at(value: int) -> float:
        if value not in known:
            set_to(value)
            known[value] = measure()
        return known[value]

    before = -1.0
    for value in ladder:
        recall = recall_at(value)
        if recall >= target or (value > 4 * ladder[0] and recall - before < _PLATEAU):
            break
        before = recall
    goal = min(target, max(known.values()) - (0 if max(known.values()) >= target else _AS_GOOD))
    high = min(value for value, recall in known.items() if recall >= goal)
    low = max((value for value in known if value < high), default=high - 1)
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (low, middle) if recall_at(middle) >= goal else (middle, high)
    set_to(high)
    return high, recall_at(high)


def has_parameters(inner: Any) -> bool:
    """Return whether there is anything to set: lists, or candidates of a graph."""
    return bool(_parameter(inner)[1])


def _parameter(inner: Any) -> tuple[Any, str, tuple[int, ...]]:
    """Return the holder of an index's parameter, its name, or none, and the values tried first."""
    index = load_faiss().downcast_index(inner)
    # An index on a GPU has lists, but its class is not one of the CPU's.
    lists = index if hasattr(index, "nlist") else lists_of(index)
    if lists is not None:
        most = int(lists.nlist) if lists_of(index) is not None else MOST_ON_GPU
        return lists, "nprobe", _doubled(1, min(int(lists.nlist), most))
    graph = getattr(index, "hnsw", None)
    return graph, "" if graph is None else "efSearch", _doubled(16, 2_048)


def _doubled(first: int, last: int) -> tuple[int, ...]:
    values = []
    while first < last:
        values.append(first)
        first *= 2
    return (*values, last)
