"""Recommendation of one setting of a sweep: the fewest bytes that keep the quality."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from whiten_index.measure.formatting import hundredths, number, point_name, share
from whiten_index.measure.results import Measured, Sweep

Figure = Callable[[Measured], float | None]

TOLERANCE = 0.006  # of nDCG@10: a loss this small is within what a choice of queries moves
_LEVELS = (0.95, 0.9, 0.8)  # of agreement, if nothing is judged
# Times whose medians differ by more than this factor from round to round are not compared.
_STEADY = 1.5


@dataclass(frozen=True)
class Measure:
    """Figure by which points are compared."""

    name: str
    slug: str
    of: Figure
    text: Callable[[float | None], str]


NDCG = Measure("nDCG@10", "quality", lambda point: point.ndcg, hundredths)
AGREEMENT = Measure("agreement@10", "agreement", lambda point: point.agreement, share)


@dataclass(frozen=True)
class Recommendation:
    """The recommended point of a sweep."""

    measure: Measure
    point: Measured | None
    reason: str


def recommend(sweep: Sweep) -> Recommendation:
    """Return the point with the fewest bytes per row that loses no more than the tolerance.

    Points that re-rank are taken only if no other one qualifies. If none qualifies, the
    recommendation is the best point, and its reason says so.
    """
    measure = NDCG if any(point.ndcg is not None for point in sweep.points) else AGREEMENT
    known = [p for p in sweep.points if measure.of(p) is not None and p.per_row is not None]
    others = [point for point in known if not point.is_raw]
    if not others:
        why = "only raw embeddings were measured" if known else "no point has the figures it needs"
        return Recommendation(measure, None, f"There is nothing to recommend: {why}.")
    if measure is NDCG:
        return _by_quality(sweep, known, others)
    return _by_agreement(sweep, others)


def _by_quality(sweep: Sweep, known: list[Measured], others: list[Measured]) -> Recommendation:
    raw = sweep.raw
    if raw is not None and raw.ndcg is not None:
        reference, name = raw.ndcg, "the raw embeddings"
    else:
        reference, name = max(point.ndcg or 0.0 for point in known), "the best point (raw: unknown)"
    # Figures are compared as shown, so that a reader who subtracts finds the same.
    near = [p for p in others if _shown(p.ndcg) >= _shown(reference) - 100 * TOLERANCE - 1e-9]
    if near:
        point = min(near, key=lambda p: _order(p, NDCG))
        return Recommendation(NDCG, point, (
            f"{point_name(point)} takes the fewest bytes per row ({_bytes(sweep, point)}) among "
            f"the settings within {100 * TOLERANCE:g} points of the nDCG@10 of {name}: "
            f"{hundredths(point.ndcg)} against {hundredths(reference)}."
        ))  # fmt: skip
    point = max(others, key=lambda p: (p.ndcg or 0.0, -(p.per_row or 0.0)))
    return Recommendation(NDCG, point, (
        f"No setting is within {100 * TOLERANCE:g} points of the nDCG@10 of {name} "
        f"({hundredths(reference)}); the nearest is {point_name(point)} with "
        f"{hundredths(point.ndcg)} and {_bytes(sweep, point)} bytes per row: keep the raw "
        "embeddings, or sweep a larger k."
    ))  # fmt: skip


def _by_agreement(sweep: Sweep, others: list[Measured]) -> Recommendation:
    for level in _LEVELS:
        near = [point for point in others if (point.agreement or 0.0) >= level]
        if near:
            point = min(near, key=lambda p: _order(p, AGREEMENT))
            return Recommendation(AGREEMENT, point, (
                f"{point_name(point)} takes the fewest bytes per row ({_bytes(sweep, point)}) "
                f"among the settings that find {level:.0%} of the raw embeddings' ten nearest "
                f"neighbours: {share(point.agreement)}. Without judgements quality is unknown."
            ))  # fmt: skip
    point = max(others, key=lambda p: (p.agreement or 0.0, -(p.per_row or 0.0)))
    return Recommendation(AGREEMENT, point, (
        f"No setting finds {_LEVELS[-1]:.0%} of the raw embeddings' ten nearest neighbours; the "
        f"nearest is {point_name(point)} with {share(point.agreement)} and "
        f"{_bytes(sweep, point)} bytes per row. Without judgements quality is unknown."
    ))  # fmt: skip


def _order(point: Measured, measure: Measure) -> tuple[bool, float, float, float]:
    slow = float("inf") if point.p50 is None else point.p50
    return bool(point.candidates), point.per_row or 0.0, -(measure.of(point) or 0.0), slow


def _bytes(sweep: Sweep, point: Measured) -> str:
    stored = point.number("rerank.bytes_per_row")
    text = number(point.per_row) + (f" and {number(stored)} in the store" if stored else "")
    return text + (f", raw {number(sweep.raw_bytes)}" if sweep.raw_bytes else "")


def _shown(value: float | None) -> float:
    return round(100 * (value or 0.0), 2)


def front(found: Iterable[Measured], cost: Figure, gain: Figure) -> list[Measured]:
    """Return the points that no other beats in both figures, in rising order of cost.

    A point is beaten by one that costs no more and gains no less, and differs in one of the two.
    Points without one of the figures take no part; of equal ones the first stays.
    """
    known = [(c, g, p) for p in found if (c := cost(p)) is not None and (g := gain(p)) is not None]
    kept: list[Measured] = []
    best = float("-inf")
    for _, value, point in sorted(known, key=lambda each: (each[0], -each[1])):
        if value > best:
            kept.append(point)
            best = value
    return kept


def notes(sweep: Sweep) -> Sequence[str]:
    """Return what limits the figures of a sweep: a busy machine, incomplete judgements."""
    found = []
    if busy := sum((p.number("latency_ms.spread") or 0.0) > _STEADY for p in sweep.points):
        found.append(
            f"The machine was busy: the times of {busy} of the {len(sweep.points)} points differ "
            "from round to round. Do not compare times; sweep again on a quiet machine."
        )
    for name, text in (
        ("relevant_documents_missing", "relevant documents are not in the corpus"),
        ("judged_queries_without_text", "judged queries have no text and were left out"),
    ):
        count = sweep.dataset.get(name)
        if isinstance(count, int) and count > 0:
            found.append(f"{count:,} {text}.")
    return found
