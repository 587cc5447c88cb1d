"""What a query looks at (lists, candidates), set to the least that reaches a recall."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.index.factory import lists_of, search_with
from whiten_index.index.gpu import MOST_ON_GPU
from whiten_index.index.library import load_faiss
from whiten_index.index.unlinked import is_graph, unlinked

# Recall this near to the best that an index can give counts as the best.
_AS_GOOD = 0.002
# Twice the work that gains less than this, below the target, will not reach it.
_PLATEAU = 0.001
_TRUTH_BLOCK_QUERIES = 1_024
_TIED = 1e-6
_GRAPH_LACKS = 200
# Numbers of candidates that scoring again is tried with, from the store.
CANDIDATES = (20, 50, 100, 200, 500, 1_000)


@dataclass(frozen=True)
class OperatingPoint:
    """What an index was set to, and the index recall it has there.

    Attributes:
        parameters: nprobe, efSearch or k_factor; empty where a kind has none.
        recall: share of the exact neighbours found, None where nothing was measured.
        target: recall asked for.
        reached: whether it is met.
        queries: held-out vectors it was measured with.
    """

    parameters: dict[str, int] = field(default_factory=dict)
    recall: float | None = None
    target: float = 0.0
    reached: bool = False
    queries: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the point as JSON values."""
        return dict(vars(self))


@dataclass(frozen=True)
class _Knob:
    """One parameter: its name, the values tried first, and how to set it."""

    name: str
    ladder: tuple[int, ...]
    set: Callable[[int], None]


def exact_neighbours(
    blocks: Iterable[NDArray[np.float32]], queries: NDArray[np.float32], top_k: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return scores and row numbers of the nearest rows by inner product, both (q, top_k).

    Memory is that of one block and the result, however many blocks there are.

    Args:
        blocks: float32 vectors (m, k), rows numbered as they come.
        queries: (q, k).
        top_k: neighbours; −1 and −inf fill up where there are fewer rows.
    """
    faiss = load_faiss()
    scores = np.full((len(queries), top_k), -np.inf, dtype=np.float32)
    rows = np.full((len(queries), top_k), -1, dtype=np.int64)
    start = 0
    for block in blocks:
        for first in range(0, len(queries), _TRUTH_BLOCK_QUERIES):
            part = slice(first, first + _TRUTH_BLOCK_QUERIES)
            most = min(top_k, len(block))
            near, places = faiss.knn(queries[part], block, most, faiss.METRIC_INNER_PRODUCT)
            merged = np.concatenate([scores[part], near], axis=1)
            numbers = np.concatenate([rows[part], places + start], axis=1)
            # Stable: of equal scores those of the block that came first stay first.
            order = np.argsort(-merged, axis=1, kind="stable")[:, :top_k]
            scores[part] = np.take_along_axis(merged, order, axis=1)
            rows[part] = np.take_along_axis(numbers, order, axis=1)
        start += len(block)
    return scores, rows


def tune(
    inner: Any,
    queries: NDArray[np.float32],
    truth: NDArray[np.int64],
    *,
    target: float,
    top_k: int = 10,
    exclude_self: NDArray[np.int64] | None = None,
    candidates: int | None = None,
) -> OperatingPoint:
    """Set an index to the least work that reaches the target, and say what it gives.

    Each parameter goes up a ladder until the target is met and is then narrowed down by halves.
    Where nothing meets it, it is the least within 0.002 of the best.

    Args:
        inner: a filled index, which is changed.
        queries: (q, k) vectors.
        truth: (q, >= top_k) row numbers of their exact neighbours, without themselves.
        target: index recall wanted, 0 … 1.
        top_k: neighbours counted.
        exclude_self: (q,) row numbers of the queries where they are rows themselves.
        candidates: rows a query asks for, where it asks for more than are counted: those that are
            scored again.
    """

    def measure() -> float:
        return recall_of(
            inner, queries, truth, top_k=top_k, exclude_self=exclude_self, candidates=candidates
        )

    knobs = _knobs(inner)
    for knob in knobs:
        knob.set(knob.ladder[-1])
    parameters, recall = {}, measure() if not knobs else 0.0
    for knob in knobs:
        parameters[knob.name], recall = _least(knob, measure, target)
    return OperatingPoint(parameters, recall, target, recall >= target, len(queries))


def tune_candidates(
    inner: Any,
    queries: NDArray[np.float32],
    truth: NDArray[np.int64],
    *,
    target: float,
    top_k: int = 10,
    exclude_self: NDArray[np.int64] | None = None,
) -> tuple[OperatingPoint, int]:
    """Set an index whose candidates are scored again, and return how many of them are needed.

    Scored by their exact vectors, candidates give every neighbour that is among them. What an
    index looks at is set first, with half of the loss allowed, then the number of candidates, of
    20 to 1,000. Arguments as of ``tune``.
    """
    point = tune(
        inner, queries, truth, target=(1 + target) / 2, top_k=top_k, exclude_self=exclude_self,
        candidates=CANDIDATES[-1],
    )  # fmt: skip
    found, right = _found(inner, queries, truth[:, :top_k], CANDIDATES[-1], exclude_self)
    shares = {most: _share_found(found[:, :most], right) for most in CANDIDATES}
    needed = next((most for most in CANDIDATES if shares[most] >= target), CANDIDATES[-1])
    reached = shares[needed] >= target
    tuned = OperatingPoint(point.parameters, shares[needed], target, reached, len(queries))
    return tuned, needed


def recall_of(
    inner: Any,
    queries: NDArray[np.float32],
    truth: NDArray[np.int64],
    *,
    top_k: int = 10,
    exclude_self: NDArray[np.int64] | None = None,
    candidates: int | None = None,
) -> float:
    """Return the share of the exact neighbours that an index finds; arguments as of ``tune``."""
    most = max(top_k, candidates or 0)
    return _share_found(*_found(inner, queries, truth[:, :top_k], most, exclude_self))


def _found(
    inner: Any,
    queries: NDArray[np.float32],
    truth: NDArray[np.int64],
    most: int,
    own: NDArray[np.int64] | None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows found (q, <= most) without the query's own, and the right ones (q, n).

    Right rows that the index did not hold meanwhile are -1.
    """
    wanted = min(most + (0 if own is None else 1), int(inner.ntotal))
    right, found = truth.copy(), np.empty((len(queries), wanted), dtype=np.int64)
    for part in _groups(inner, own, len(queries)):
        _, found[part] = search_with(inner, queries[part], wanted)
        if own is not None and is_graph(inner):
            right[part][np.isin(right[part], own[part])] = -1
    return (found if own is None else _without(found, own)), right


def _groups(inner: Any, own: NDArray[np.int64] | None, queries: int) -> Iterator[slice]:
    """Yield the queries in groups, none of which a graph holds meanwhile; else all at once."""
    if own is None or not is_graph(inner):
        yield slice(0, queries)
        return
    # A graph that lacks more of its rows than this would be another one.
    size = max(int(inner.ntotal) // _GRAPH_LACKS, 1)
    for start in range(0, queries, size):
        part = slice(start, start + size)
        with unlinked(inner, own[part]):
            yield part


def _share_found(found: NDArray[np.int64], right: NDArray[np.int64]) -> float:
    """Return the share of the right rows (q, n) that are among those found (q, m)."""
    wanted = right >= 0
    # A query at a time: all at once would be q · n · m comparisons held in memory.
    hits = sum(
        int(np.isin(some, near).sum(where=there))
        for some, near, there in zip(right, found, wanted, strict=True)
    )
    return hits / max(int(wanted.sum()), 1)


def _without(found: NDArray[np.int64], own: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return (q, m - 1) rows found, each query's own left out, or else the last one."""
    is_own = found == own[:, None]
    is_own[~is_own.any(axis=1), -1] = True
    others: NDArray[np.int64] = found[~is_own].reshape(len(found), -1)
    return others


def truth_of_rows(
    scores: NDArray[np.float32], near: NDArray[np.int64], own: NDArray[np.int64], *, top_k: int = 10
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the neighbours (m, top_k) of rows without themselves, and which of them are counted.

    Left out are rows whose last neighbour is no nearer than the next: of equal rows, such as
    copies of one text, an index may rightly give others. Where that leaves few, all are counted.

    Args:
        scores: (q, top_k + 2) of ``exact_neighbours``.
        near: their row numbers.
        own: (q,) row numbers of the queries.
        top_k: neighbours counted.
    """
    truth = _without(near, own)
    kept_scores = np.where(near == own[:, None], np.nan, scores)
    # Its own place goes to the end; a row that did not find itself loses its last neighbour.
    order = np.argsort(np.isnan(kept_scores), axis=1, kind="stable")
    kept_scores = np.take_along_axis(kept_scores, order, axis=1)
    # Where there are no more rows, both may be −∞: no tie, and no difference either.
    clear = ~(kept_scores[:, top_k - 1] < kept_scores[:, top_k] + _TIED)
    counted = np.flatnonzero(clear)
    if len(counted) * 2 < len(own):
        counted = np.arange(len(own))
    return truth[counted, :top_k], counted


def _least(knob: _Knob, measure: Callable[[], float], target: float) -> tuple[int, float]:
    """Set a knob to its least value that reaches the target, or comes near to the best."""
    known: dict[int, float] = {}

    def recall_at(value: int) -> float:
        if value not in known:
            knob.set(value)
            known[value] = measure()
        return known[value]

    before = -1.0
    for value in knob.ladder:
        recall = recall_at(value)
        if recall >= target or (value > 4 * knob.ladder[0] and recall - before < _PLATEAU):
            break
        before = recall
    goal = min(target, max(known.values()) - (0 if max(known.values()) >= target else _AS_GOOD))
    high = min(value for value, recall in known.items() if recall >= goal)
    low = max((value for value in known if value < high), default=high - 1)
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (low, middle) if recall_at(middle) >= goal else (middle, high)
    knob.set(high)
    return high, recall_at(high)


def has_parameters(inner: Any) -> bool:
    """Return whether there is anything to set: lists, candidates of a graph or of a re-ranking."""
    return bool(_knobs(inner))


def is_exact(inner: Any) -> bool:
    """Return whether an index finds the exact neighbours by its structure: flat, in float32."""
    faiss = load_faiss()
    return isinstance(faiss.downcast_index(inner), faiss.IndexFlat)


def _knobs(inner: Any) -> list[_Knob]:
    """Return what can be set, what costs most first; the others stand at their most meanwhile."""
    faiss = load_faiss()
    index = faiss.downcast_index(inner)
    if isinstance(index, faiss.IndexPreTransform):
        return _knobs(faiss.downcast_index(index.index))
    if isinstance(index, faiss.IndexRefine):
        factor = _Knob("k_factor", _doubled(1, 64), lambda value: setattr(index, "k_factor", value))
        return [*_knobs(faiss.downcast_index(index.base_index)), factor]
    # An index on a GPU has lists, and is none of the CPU's kinds.
    lists = index if hasattr(index, "nlist") else lists_of(index)
    if lists is not None:
        most = int(lists.nlist) if lists_of(index) is not None else MOST_ON_GPU
        ladder = _doubled(1, min(int(lists.nlist), most))
        return [_Knob("nprobe", ladder, lambda value: setattr(lists, "nprobe", value))]
    graph = getattr(index, "hnsw", None)
    if graph is not None:
        ladder = _doubled(16, 2_048)
        return [_Knob("efSearch", ladder, lambda value: setattr(graph, "efSearch", value))]
    return []


def _doubled(first: int, last: int) -> tuple[int, ...]:
    values = []
    while first < last:
        values.append(first)
        first *= 2
    return (*values, last)
