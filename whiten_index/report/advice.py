"""What a sweep recommends, in words: from the points alone, and no more than they bear out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whiten_index.report import remarks, words
from whiten_index.report.compare import (
    TOLERANCE,
    Budget,
    budgets,
    has_raw,
    measure_of,
    p50,
    per_row,
    raw_p50,
    reference_of,
    within,
)
from whiten_index.report.fronts import least, measured, most
from whiten_index.report.records import Point, Sweep
from whiten_index.report.words import AGREEMENT, NDCG, Measure

LEVELS = (0.95, 0.9, 0.8)  # of agreement, where there are no judgements
_AGREEMENT = (
    "Agreement is the share of the raw embeddings' ten nearest neighbours that are found. It "
    "says how little changes, not whether results are better or worse: a transform that "
    "improves quality also lowers it. A sweep with judged queries tells."
)


@dataclass(frozen=True)
class Pick:
    """A point worth building, and for what."""

    titles: tuple[str, ...]
    point: Point


@dataclass(frozen=True)
class Advice:
    """The recommendation of one sweep.

    Attributes:
        measure: what points were compared by.
        headline: the recommendation in a sentence or two.
        picks: the points it names, and others worth a look; the first is the headline's.
        remarks: what else the reader should know of them.
        budgets: the best point for each number of bytes a row.
        unmeasured: what the sweep cannot tell.
    """

    measure: Measure
    headline: str
    picks: tuple[Pick, ...]
    remarks: tuple[str, ...]
    budgets: tuple[Budget, ...]
    unmeasured: tuple[str, ...]


@dataclass(frozen=True)
class _Found:
    """A headline, what it picks and what goes with it."""

    headline: str
    picks: Sequence[tuple[str, Point]] = ()
    remarks: Sequence[str] = ()


def advise(sweep: Sweep) -> Advice:
    """Return what the points of ``sweep`` recommend."""
    measure = measure_of(sweep)
    reference = reference_of(sweep, measure)
    others = [point for point in measured(sweep.points, measure.of) if not point.is_raw]
    if not others:
        found = _nothing(sweep, measure)
    elif measure is NDCG:
        found = _by_quality(sweep, others, reference)
    else:
        found = _by_agreement(sweep, others)
    lines = [*remarks.on_the_state(sweep), *found.remarks]
    if found.picks:
        chosen = found.picks[0][1]
        lines += remarks.on_recall(sweep, chosen)
        lines += remarks.on_rivals(others, chosen, measure, reference)
        lines += remarks.on_fixed(sweep, chosen)
    return Advice(
        measure=measure,
        headline=found.headline,
        picks=_merge(found.picks),
        remarks=tuple(lines),
        budgets=budgets(sweep.points, measure) if others else (),
        unmeasured=tuple(remarks.on_the_unmeasured(sweep)),
    )


def _nothing(sweep: Sweep, measure: Measure) -> _Found:
    if not sweep.points:
        return _Found("No point was measured, so there is nothing to recommend.")
    if measured(sweep.points, measure.of):
        return _Found("Only the raw embeddings were measured, so there is nothing to recommend.")
    return _Found("No point has a figure of quality or agreement: nothing can be recommended.")


def _by_quality(sweep: Sweep, others: list[Point], reference: float) -> _Found:
    name = "raw" if has_raw(sweep) else "the best point"
    limit = f"within {100 * TOLERANCE:g} points of {name}"
    best = most(others, NDCG.of, per_row)
    near = [point for point in others if within(point, reference)]
    if best is None or not near:
        return _none_near(sweep, others, reference, limit)
    picks, lines = _least_of(sweep, near, limit, NDCG)
    below = has_raw(sweep) and (best.ndcg or 0.0) < reference
    picks.append((f"Best nDCG@10{' below raw' if below else ''}", best))
    text = _use(sweep, picks[0][1])
    if not has_raw(sweep):
        text += (
            " The quality of the raw embeddings was not measured: this compares points of the "
            "sweep with the best of them, not with raw."
        )
    return _Found(text, picks, lines)


def _none_near(sweep: Sweep, others: list[Point], reference: float, limit: str) -> _Found:
    """Return the advice where everything loses: the nearest, and wider vectors if there are any."""
    best = most(others, NDCG.of, per_row)
    if best is None or best.ndcg is None:
        return _nothing(sweep, NDCG)
    widths = {point.k for point in sweep.points if point.family == "ours"}
    dim = sweep.dataset.get("dim")
    if widths and isinstance(dim, int) and max(widths) < 0.75 * dim:
        then = f"Sweep wider vectors than k = {max(widths)}, or keep the raw embeddings."
    else:
        then = "Keep the raw embeddings where that loss is too much."
    text = (
        f"No setting measured comes {limit} ({NDCG.text(reference)}). The nearest is "
        f"{words.full(best)}: nDCG@10 {NDCG.text(best.ndcg)} "
        f"({NDCG.change(best.ndcg, reference)} points), and {remarks.on_bytes(sweep, best)}"
        f"{remarks.on_speed(sweep, best)}. {then}"
    )
    return _Found(text, [("Nearest to raw", best)])


def _use(sweep: Sweep, point: Point) -> str:
    raw = sweep.raw.ndcg if sweep.raw is not None else None
    against = ""
    if raw is not None and point.ndcg is not None:
        against = f" against {NDCG.text(raw)} raw ({NDCG.change(point.ndcg, raw)} points)"
    return (
        f"Use {words.full(point)}: {remarks.on_bytes(sweep, point)}, and nDCG@10 is "
        f"{NDCG.text(point.ndcg)}{against}{remarks.on_speed(sweep, point)}."
    )


def _by_agreement(sweep: Sweep, others: list[Point]) -> _Found:
    start = "No judgements came with this sweep, so quality was not measured. "
    picks: list[tuple[str, Point]] = []
    lines = [_AGREEMENT]
    for level in LEVELS:
        near = [point for point in others if (point.agreement or 0.0) >= level]
        found, more = _least_of(sweep, near, f"at {level:.0%} agreement or more", AGREEMENT)
        if not picks:
            picks, lines = found, lines + more
        else:  # of a lower level only what is smaller still is worth a word
            picks += [pick for pick in found if pick[0].startswith("Smallest at")]
    best = most(others, AGREEMENT.of, per_row)
    if not picks and best is not None:
        text = (
            f"{start}No setting finds {LEVELS[-1]:.0%} of the raw embeddings' neighbours; the "
            f"nearest is {words.full(best)}: {words.share(best.agreement)} of them, and "
            f"{remarks.on_bytes(sweep, best)}."
        )
        return _Found(text, [("Nearest to raw", best)], lines)
    point = picks[0][1]
    text = (
        f"{start}By agreement with exact search of the raw embeddings, use {words.full(point)}: "
        f"{remarks.on_bytes(sweep, point)}, and {words.share(point.agreement)} of the raw "
        f"neighbours are found{remarks.on_speed(sweep, point)}."
    )
    return _Found(text, picks, lines)


def _least_of(
    sweep: Sweep, near: list[Point], limit: str, measure: Measure
) -> tuple[list[tuple[str, Point]], list[str]]:
    """Return the smallest and the fastest of ``near``, and the smallest with re-ranking."""
    picks: list[tuple[str, Point]] = []
    lines: list[str] = []
    smallest = _smallest([p for p in near if not p.candidates], measure)
    if smallest is not None:
        picks.append((f"Smallest {limit}", smallest))
        if sweep.raw_bytes and (smallest.per_row or 0.0) >= sweep.raw_bytes:
            lines.append(f"Nothing {limit} is smaller than the raw embeddings in float32.")
    fastest = least(near, p50, measure.of)
    if fastest is not None:
        picks.append((f"Fastest {limit}", fastest))
        raw = raw_p50(sweep, fastest)
        if raw and (fastest.p50 or 0.0) >= raw:
            lines.append(f"Nothing {limit} answers faster than exact search of raw embeddings.")
    again = _smallest([p for p in near if p.candidates], measure)
    floor = float("inf") if smallest is None else smallest.per_row or 0.0
    if again is not None and (again.per_row or 0.0) < floor:
        picks.append((f"Smallest with re-ranking {limit}", again))
        lines.append(
            f"Re-ranking reads full embeddings from the store: {words.number(again.rerank_bytes)} "
            "bytes a row beside the index, on disk rather than in memory, and counted apart here."
        )
    return picks, lines


def _smallest(near: list[Point], measure: Measure) -> Point | None:
    """Return the point of fewest bytes a row, and of those the best, as the table of bytes does."""

    def order(point: Point) -> tuple[float, float, float]:
        slow = float("inf") if point.p50 is None else point.p50
        return point.per_row or 0.0, -(measure.of(point) or 0.0), slow

    return min(measured(near, per_row), key=order, default=None)


def _merge(picks: Sequence[tuple[str, Point]]) -> tuple[Pick, ...]:
    """Return one pick a point, with all that it is picked for."""
    titles: dict[str, list[str]] = {}
    points = {point.key: point for _, point in picks}
    for title, point in picks:
        titles.setdefault(point.key, []).append(title)
    return tuple(Pick(tuple(titles[key]), points[key]) for key in titles)
