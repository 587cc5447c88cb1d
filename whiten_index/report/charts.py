"""Which charts a sweep has, with the words beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whiten_index.report import figures, words
from whiten_index.report.compare import measure_of, p50, per_row
from whiten_index.report.fronts import Figure, front, measured
from whiten_index.report.pictures import WIDE, Picture, scaled
from whiten_index.report.records import Point, Sweep
from whiten_index.report.words import NDCG, Measure


@dataclass(frozen=True, kw_only=True)
class Chart(Picture):
    """A chart of a sweep.

    Attributes:
        leading: the points of its front, numbered from 1 in the drawing.
    """

    leading: tuple[Point, ...] = ()


def charts_of(sweep: Sweep) -> list[Chart]:
    """Return the charts for which ``sweep`` has figures."""
    measure = measure_of(sweep)
    made = [
        _front(sweep, measure, per_row, "bytes", "bytes a row"),
        _front(sweep, measure, p50, "latency", "ms a query, median"),
        _curves(sweep, measure),
        _recall(sweep),
        _spectrum(sweep),
    ]
    return [chart for chart in made if chart is not None]


def _front(sweep: Sweep, measure: Measure, cost: Figure, name: str, unit: str) -> Chart | None:
    points = [p for p in measured(sweep.points, cost, measure.of) if (cost(p) or 0.0) > 0]
    if not points:
        return None
    # A re-ranked point leans on bytes outside its index, so it is no rival in bytes a row.
    rivals = points if cost is p50 else [point for point in points if not point.candidates]
    leading = tuple(front(rivals, cost, measure.of))
    quality = "Quality" if measure is NDCG else "Agreement"
    against = "bytes a row" if cost is per_row else "latency"
    caption = "Up and to the left is better. No other point beats those on the line in both figures"
    if cost is per_row and len(rivals) < len(points):
        caption += "; re-ranked points (hollow) read further bytes from the store and are left out"
    caption += ". "
    threads = sorted({point.threads for point in points if point.threads})
    if cost is p50 and threads:
        plural = "" if threads == [1] else "s"
        caption += f"One query at a time on {' or '.join(map(str, threads))} thread{plural}. "
    caption += _below(points, sweep, measure)
    ends = _ends(leading, cost, measure)
    return Chart(
        slug=f"{'quality' if measure is NDCG else 'agreement'}-{name}",
        title=f"{quality} against {against}",
        caption=caption.strip(),
        alt=f"{measure.name} against {unit} of {len(points)} points. The front runs {ends}."
        + _raw_words(sweep, measure),
        draw=lambda axes, narrow: figures.draw_front(
            axes, points, leading, cost=cost, unit=unit, measure=measure, raw=sweep.raw,
            narrow=narrow,
        ),
        leading=leading,
    )  # fmt: skip


def _ends(leading: Sequence[Point], cost: Figure, measure: Measure) -> str:
    shown = words.number if cost is per_row else words.milliseconds
    ends = [leading[0], leading[-1]] if len(leading) > 1 else [leading[0]]
    said = [f"{shown(cost(p))} with {measure.text(measure.of(p))} ({words.short(p)})" for p in ends]
    return f"from {said[0]} to {said[1]}" if len(said) > 1 else f"through one point, {said[0]}"


def _raw_words(sweep: Sweep, measure: Measure) -> str:
    raw = None if sweep.raw is None else measure.of(sweep.raw)
    return "" if raw is None or measure is not NDCG else f" Raw embeddings: {measure.text(raw)}."


def _below(
    points: Sequence[Point], sweep: Sweep, measure: Measure, drop: float = figures.DROP
) -> str:
    """Say how many points are too low to be drawn."""
    values = [measure.of(point) or 0.0 for point in points]
    raw = None if sweep.raw is None else measure.of(sweep.raw)
    low = figures.lowest_drawn(values, raw, drop)
    hidden = sum(value < low - 1e-9 for value in values)
    if not hidden:
        return ""
    one = "point lies" if hidden == 1 else "points lie"
    return f"{hidden} {one} below {measure.text(low)} and outside; the table has them."


def _curves(sweep: Sweep, measure: Measure) -> Chart | None:
    flat = [
        p
        for p in measured(sweep.points, measure.of)
        if p.codec == "fp32" and p.index == "flat" and not p.candidates and p.family != "raw"
    ]
    if len({point.k for point in flat}) < 2:
        return None
    order = list(words.TRANSFORMS)
    flat.sort(key=lambda p: (order.index(p.transform) if p.transform in order else len(order), p.k))
    curves: dict[str, list[Point]] = {}
    for point in flat:
        curves.setdefault(words.transform(point), []).append(point)
    raw = None
    if measure is NDCG and sweep.raw is not None:
        raw = measure.of(sweep.raw)
    said = [
        f"{name} " + ", ".join(f"{measure.text(measure.of(p))} at {p.k}" for p in points)
        for name, points in curves.items()
    ]
    quality = "Quality" if measure is NDCG else "Agreement"
    return Chart(
        slug=f"{'quality' if measure is NDCG else 'agreement'}-k",
        title=f"{quality} over k",
        caption="Exact search of full-precision vectors, so that only transform and width differ. "
        + _below(flat, sweep, measure, figures.DROP_OF_CURVES),
        alt=f"{measure.name} over k: {'; '.join(said)}.{_raw_words(sweep, measure)}",
        draw=lambda axes, narrow: figures.draw_curves(axes, curves, measure, raw, narrow=narrow),
    )


def _recall(sweep: Sweep) -> Chart | None:
    points = measured(sweep.points, lambda p: p.index_recall)
    # Exact search of full-precision vectors finds all by definition.
    points = [p for p in points if not (p.codec == "fp32" and p.index == "flat")]
    if not points:
        return None
    rows: dict[str, list[Point]] = {}
    for point in sorted(points, key=lambda p: (p.index, p.codec, bool(p.candidates))):
        again = " re-ranked" if point.candidates else ""
        codec = words.codec(point)
        if point.codec.startswith("pq"):  # of any number of bytes
            codec = codec.rstrip("0123456789")
        rows.setdefault(f"{words.index(point)} {codec}{again}", []).append(point)
    asked = sweep.target_recall if any(point.parameters for point in points) else None
    said = "; ".join(
        f"{name} {words.share(min(p.index_recall or 0.0 for p in own))} to "
        f"{words.share(max(p.index_recall or 0.0 for p in own))}"
        for name, own in rows.items()
    )
    return Chart(
        slug="index-recall",
        title="Index recall",
        caption="Share of the ten nearest of the same vectors that an index finds, a dot a point. "
        "It tells what codec and index lose, and nothing of the transform: do not read it as "
        f"quality.{_tuning() if asked is not None else ''}",
        alt=f"Index recall@10 by kind of index: {said}.",
        draw=lambda axes, narrow: figures.draw_recall(axes, rows, asked, narrow=narrow),
        sizes=scaled(max(0.55, min(1.6, (len(rows) * 0.34 + 1.7) / WIDE[1]))),
    )


def _tuning() -> str:
    """Say what the line of index recall is."""
    return (
        " The line is what lists and graphs were tuned to, on rows held out of their training; "
        "queries may be harder."
    )


def _spectrum(sweep: Sweep) -> Chart | None:
    values = figures.eigenvalues(sweep)
    if len(values) < 2:
        return None
    share = values.cumsum() / values.sum()
    widths = sorted({p.k for p in sweep.points if p.family == "ours" and 0 < p.k <= len(values)})
    said = "; ".join(f"the first {k} hold {share[k - 1]:.0%} of the variance" for k in widths)
    return Chart(
        slug="spectrum",
        title="Spectrum of the embeddings",
        caption="Eigenvalues of the covariance on which the transforms stand, and the widths "
        "measured.",
        alt=f"{len(values)} eigenvalues, falling from {values[0]:.3g} to {values[-1]:.3g}; {said}.",
        draw=lambda axes, _: figures.draw_spectrum_of(axes, sweep),
        sizes=scaled(0.75),
    )
