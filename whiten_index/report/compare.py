"""By what the points of a sweep are compared, and which are best for a number of bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from whiten_index.report.fronts import front, measured, most
from whiten_index.report.records import Point, Sweep
from whiten_index.report.words import AGREEMENT, NDCG, Measure

TOLERANCE = 0.006  # of nDCG@10: a loss this small is within what a choice of queries moves


@dataclass(frozen=True)
class Budget:
    """The best point whose rows take no more than so many bytes.

    Attributes:
        limit: bytes a row.
        best: of all points.
        own: the best fitted transform, where that is another and no smaller budget has it.
    """

    limit: int
    best: Point
    own: Point | None


def per_row(point: Point) -> float | None:
    """Return the bytes a row of a point."""
    return point.per_row


# Medians that differ more than so many times from round to round tell nothing.
_STEADY = 1.5


def steady(point: Point) -> bool:
    """Tell whether a query took about as long in each round, so that times can be compared."""
    return point.spread is None or point.spread <= _STEADY


def raw_p50(sweep: Sweep, point: Point) -> float | None:
    """Return the milliseconds of exact search of raw embeddings to compare a point with.

    None where there are none, or where the machine was too busy to tell.
    """
    if not steady(point):
        return None
    if point.raw_p50 is not None:
        return point.raw_p50
    return None if sweep.raw is None else sweep.raw.p50


def p50(point: Point) -> float | None:
    """Return the median milliseconds of a single query of a point."""
    return point.p50


def measure_of(sweep: Sweep) -> Measure:
    """Return quality where any point has it, else agreement: the two never share a comparison."""
    return NDCG if measured(sweep.points, NDCG.of) else AGREEMENT


def reference_of(sweep: Sweep, measure: Measure) -> float:
    """Return the measure of the raw embeddings, else of the best point.

    The agreement of the raw embeddings with themselves is 1 by definition.
    """
    if measure is AGREEMENT:
        return 1.0
    if sweep.raw is not None and sweep.raw.ndcg is not None:
        return sweep.raw.ndcg
    best = most(sweep.points, NDCG.of, per_row)
    return 1.0 if best is None or best.ndcg is None else best.ndcg


def has_raw(sweep: Sweep) -> bool:
    """Tell whether points can be compared with the quality of the raw embeddings."""
    return sweep.raw is not None and sweep.raw.ndcg is not None


def within(point: Point, reference: float) -> bool:
    """Tell whether a point loses no more than the tolerance of quality, by figures as shown."""
    if point.ndcg is None:
        return False
    return NDCG.difference(point.ndcg, reference) >= -100 * TOLERANCE - 1e-9


def best_in(
    points: Iterable[Point],
    limit: float | None,
    measure: Measure,
    families: Collection[str] | None = None,
) -> Point | None:
    """Return the best point of ``limit`` bytes a row at most, without re-ranking.

    Args:
        points: to choose from.
        limit: None, of a point without bytes, is met by none.
        measure: by which.
        families: the families allowed; None allows all.
    """
    if limit is None:
        return None
    fitting = [
        point
        for point in measured(points, per_row)
        if not point.candidates
        and (point.per_row or 0.0) <= limit
        and (families is None or point.family in families)
    ]
    return most(fitting, measure.of, per_row)


def budgets(points: Iterable[Point], measure: Measure) -> tuple[Budget, ...]:
    """Return the best point for each power of two of bytes a row, where it changes."""
    fitting = [point for point in measured(points, per_row, measure.of) if not point.candidates]
    leading = front(fitting, per_row, measure.of)
    largest = (leading[-1].per_row or 0.0) if leading else 0.0
    found: list[Budget] = []
    shown: set[str] = set()
    limit = 4
    while limit < 2 * largest:
        best = best_in(fitting, limit, measure)
        if best is not None and (not found or found[-1].best.key != best.key):
            own = None if best.family == "ours" else best_in(fitting, limit, measure, {"ours"})
            own = own if own is not None and own.key not in shown else None
            shown |= {point.key for point in (best, own) if point is not None}
            found.append(Budget(limit, best, own))
        limit *= 2
    return tuple(found)
