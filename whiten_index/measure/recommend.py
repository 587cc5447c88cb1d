"""Recommendation of one setting of a sweep: the fewest bytes that keep the quality."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from whiten_index.measure.results import AGREEMENT, LATENCY, NDCG, PER_ROW, Measured, Sweep

TOLERANCE = 0.006  # of nDCG@10: a loss this small is within what a choice of queries moves
_LEVELS = (0.95, 0.9, 0.8)  # of agreement, if nothing is judged
# Times whose medians differ by more than this factor from round to round are not compared.
_STEADY = 1.5


def _number(value: float) -> str:
    """Return a count with thousands separators, and one decimal unless it is whole."""
    whole = value >= 1000 or abs(value - round(value)) < 0.05
    return f"{value:,.0f}" if whole else f"{value:,.1f}"


def _share(value: float) -> str:
    """Return a share of 1 as a percentage. Less than all of it never reads 100 %."""
    text = f"{100 * value:.1f}%"
    return "99.9%" if value < 1 and text == "100.0%" else text


def _hundredths(value: float) -> str:
    return f"{100 * value:.2f}"


def _decimal(value: float) -> str:
    return f"{value:.3g}"


def _milliseconds(value: float) -> str:
    """Return a time with three significant digits."""
    decimals = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{decimals}f}\u00a0ms"


def _seconds(value: float) -> str:
    return f"{value:,.0f}\u00a0s" if value >= 100 else f"{value:.2g}\u00a0s"


# Place of a figure in the record -> its name and its format.
COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    PER_ROW: ("bytes per row", _number),
    "bytes.fixed": ("fixed bytes", _number),
    "rerank.bytes_per_row": ("re-rank bytes per row", _number),
    NDCG: ("nDCG@10", _hundredths),
    "quality.recall@100": ("recall@100", _hundredths),
    "quality.mrr@10": ("MRR@10", _hundredths),
    AGREEMENT: ("agreement@10", _share),
    "index_recall@10": ("index recall@10", _share),
    LATENCY: ("query p50", _milliseconds),
    "latency_ms.p95": ("p95", _milliseconds),
    "latency_ms.p99": ("p99", _milliseconds),
    "latency_ms.spread": ("spread", _decimal),
    "throughput.queries_per_second": ("queries/s in batches", _number),
    "seconds.total": ("build", _seconds),
    "exponent": ("γ", _decimal),
}


@dataclass(frozen=True)
class Recommendation:
    """The recommended point of a sweep, by ``NDCG`` or ``AGREEMENT``."""

    measure: str
    point: Measured | None
    reason: str


def recommend(sweep: Sweep) -> Recommendation:
    """Return the point with the fewest bytes per row that loses no more than the tolerance.

    Without judgements it is the highest level of agreement that a point reaches. Points that
    re-rank are taken only if no other one qualifies. If none qualifies, the recommendation is the
    best point, and its reason says so.
    """
    judged = any(point.number(NDCG) is not None for point in sweep.points)
    measure = NDCG if judged else AGREEMENT
    known = [p for p in sweep.points if None not in (p.number(measure), p.number(PER_ROW))]
    others = [point for point in known if not point.is_raw]
    if not others:
        why = "only raw embeddings were measured" if known else "no point has the figures it needs"
        return Recommendation(measure, None, f"There is nothing to recommend: {why}.")

    def value(point: Measured) -> float:
        # Figures are compared as shown, so that a reader who subtracts finds the same.
        return round(100 * (point.number(measure) or 0.0), 2)

    def order(point: Measured) -> tuple[bool, float, float, float]:
        slow, size = point.number(LATENCY), point.number(PER_ROW) or 0.0
        return bool(point.candidates), size, -value(point), float("inf") if slow is None else slow

    if judged:
        raw, name = sweep.raw, "the raw embeddings"
        if raw is None or raw.number(NDCG) is None:
            raw, name = max(known, key=value), "the best point (raw: unknown)"
        reference = value(raw)
        least = reference - 100 * TOLERANCE
        goal = f"within {100 * TOLERANCE:g} points of the nDCG@10 of {name} ({reference:.2f})"
        end = ": keep the raw embeddings, or sweep a larger k."
    else:
        most = max(map(value, others))
        least = 100 * next((level for level in _LEVELS if 100 * level <= most + 1e-9), _LEVELS[-1])
        goal = f"at {least:.0f}% or more of the raw embeddings' ten nearest neighbours"
        end = ". Without judgements quality is unknown."
    if near := [point for point in others if value(point) >= least - 1e-9]:
        point = min(near, key=order)
        said = f"{point.name} takes the fewest bytes per row among the settings {goal}"
        end = "." if judged else end
    else:
        point = max(others, key=lambda p: (value(p), -(p.number(PER_ROW) or 0.0)))
        said = f"No setting is {goal}; the nearest is {point.name}"
    found = COLUMNS[measure][1](point.number(measure) or 0.0)
    return Recommendation(measure, point, f"{said}: {found} at {_bytes(sweep, point)}{end}")


def _bytes(sweep: Sweep, point: Measured) -> str:
    stored, raw = point.number("rerank.bytes_per_row"), sweep.dataset.get("raw_bytes_per_row")
    beside = [f"{_number(stored)} more in the store"] if stored else []
    beside += [f"raw {_number(raw)}"] if raw else []
    shown = f" ({', '.join(beside)})" if beside else ""
    return f"{_number(point.number(PER_ROW) or 0.0)} bytes per row{shown}"


def front(points: Iterable[Measured], cost: str, gain: str) -> list[Measured]:
    """Return the points that no other beats in both figures, in rising order of cost.

    A point is beaten by one that costs no more and gains no less, and differs in one of the two.
    Points without one of the figures take no part; of equal ones the first stays.
    """
    known = [
        (paid, gained, point)
        for point in points
        if (paid := point.number(cost)) is not None and (gained := point.number(gain)) is not None
    ]
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
        if count := sweep.dataset.get(name):
            found.append(f"{count:,} {text}.")
    return found
