"""Pareto fronts and least settings: which points no other point beats."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from whiten_index.report.records import Point

Figure = Callable[[Point], float | None]


def front(points: Iterable[Point], cost: Figure, gain: Figure) -> list[Point]:
    """Return the points that no other beats in both figures, in rising order of cost.

    A point is beaten by one that costs no more and gains no less, and differs in one of the two.
    Points without one of the figures take no part; of equal ones the first stays.
    """
    known = measured(points, cost, gain)
    known.sort(key=lambda point: (cost(point), -(gain(point) or 0.0)))
    kept: list[Point] = []
    best = float("-inf")
    for point in known:
        value = gain(point)
        if value is not None and value > best:
            kept.append(point)
            best = value
    return kept


def least(points: Iterable[Point], cost: Figure, gain: Figure) -> Point | None:
    """Return the point of least cost, and of those the one that gains most; None without any."""
    leading = front(points, cost, gain)
    return leading[0] if leading else None


def most(points: Iterable[Point], gain: Figure, cost: Figure) -> Point | None:
    """Return the point that gains most, and of those the one of least cost, known or not."""

    def order(point: Point) -> tuple[float, float]:
        price = cost(point)
        return gain(point) or 0.0, -price if price is not None else float("-inf")

    return max(measured(points, gain), key=order, default=None)


def measured(points: Iterable[Point], *figures: Figure) -> list[Point]:
    """Return the points that have every one of the figures."""
    return [p for p in points if all(figure(p) is not None for figure in figures)]
