"""The charts of a sweep: fronts, curves over k, index recall, spectrum; wide or narrow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from whiten_index.report import words
from whiten_index.report.compare import TOLERANCE
from whiten_index.report.fronts import Figure
from whiten_index.report.labels import Label, place_labels
from whiten_index.report.records import Point, Sweep
from whiten_index.report.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    PALE,
    PURPLE,
    RED,
    SMALL,
    TEXT,
    dress,
)
from whiten_index.report.words import NDCG, Measure

# Family: its name, colour and marker; colour is never the only sign.
FAMILIES = {
    "ours": ("fitted transforms", BLUE, "o"),
    "truncate": ("truncation", GREEN, "^"),
    "faiss": ("FAISS's own PCA", RED, "s"),
    "raw": ("raw embeddings", INK, "D"),
}
_CURVES = {
    "auto": (BLUE, "o", "-"),
    "pca": (GREEN, "^", (0, (6, 2))),
    "whitening": (RED, "s", (0, (3, 1.5))),
    "truncate": (PURPLE, "v", (0, (1, 1.2))),
    "faiss-pca": (GREY, "P", (0, (4, 1, 1, 1))),
    "faiss-pcaw": (GREY, "X", (0, (1, 2))),
}
_FURTHER = ("d", "*", "p", "h", "<", ">")  # markers of transforms beyond these
# Points that lose more than this share of the reference are counted below the chart, not drawn.
DROP, DROP_OF_CURVES = 0.25, 0.5


def lowest_drawn(values: Sequence[float], reference: float | None, drop: float = DROP) -> float:
    """Return the least value that a chart of quality shows, so that small differences stay seen."""
    floor = (1 - drop) * (max(values) if reference is None else reference)
    return max(min(values), floor)


def draw_front(
    axes: Any,
    points: Sequence[Point],
    leading: Sequence[Point],
    *,
    cost: Figure,
    unit: str,
    measure: Measure,
    raw: Point | None,
    narrow: bool,
) -> None:
    """Draw every point by its cost (log) and ``measure``, and join those of the front.

    Args:
        axes: to draw on.
        points: all of them; those without ``cost`` or ``measure`` are left out before.
        leading: the front, in rising order of cost; its points are numbered from 1.
        cost: the figure across.
        unit: label of the axis of costs.
        measure: the figure upwards.
        raw: the raw embeddings, whose measure is a line across.
        narrow: label by number alone, as a phone has room for.
    """
    top = f"{measure.name}" + (" (of 100)" if measure is NDCG else " (%)")
    dress(axes, "", f"{unit} (log)", top)
    axes.set_xscale("log")
    at = {point.key: (cost(point) or 0.0, 100 * (measure.of(point) or 0.0)) for point in points}
    for name, (label, colour, marker) in FAMILIES.items():
        for again, face in ((False, colour), (True, "white")):
            own = [p for p in points if p.family == name and bool(p.candidates) is again]
            if own:
                x, y = zip(*(at[p.key] for p in own), strict=True)
                axes.plot(x, y, marker, ls="none", ms=5.5, color=colour, mfc=face, mew=1.3,
                          alpha=0.75, zorder=3,
                          label="re-ranked: hollow" if again else label)  # fmt: skip
    line = [at[point.key] for point in leading]
    if line:
        x, y = zip(*line, strict=True)
        axes.plot(x, y, color=INK, lw=1.3, zorder=2, label="front")
        axes.plot(x, y, "o", ls="none", ms=10, mfc="none", mec=INK, mew=1.2, zorder=4)
    reference = None if raw is None else measure.of(raw)
    values = [y / 100 for _, y in at.values()]
    low, high = lowest_drawn(values, reference), max([*values, reference or 0.0])
    room = max(0.06 * (high - low), 0.002)
    axes.set_ylim(100 * (low - room), 100 * (high + 2.2 * room))
    _plain_numbers(axes.xaxis, [x for x, _ in at.values()], decades_apart=1.7 if narrow else 2.7)
    if reference is not None and measure is NDCG:
        _raw_line(axes, reference)
    _below(axes, narrow=narrow)
    labels = [
        Label(*at[p.key], (f"{n}  {words.short(p)}", str(n)) if not narrow else (str(n),))
        for n, p in enumerate(leading, 1)
        if at[p.key][1] >= axes.get_ylim()[0]
    ]
    marks = list(at.values())
    if reference is not None and measure is NDCG:
        left, right = axes.get_xlim()
        marks += [(x, 100 * reference) for x in np.geomspace(left, right, 120)]
    place_labels(axes, labels, marks, line)


def _below(axes: Any, *, narrow: bool) -> None:
    """Draw the legend under the axes, each name once, where it covers no point."""
    handles, labels = axes.get_legend_handles_labels()
    seen = dict(zip(labels, handles, strict=True))
    if len(seen) > 1:
        axes.figure.legend(
            seen.values(), seen.keys(), loc="outside lower center", ncols=2 if narrow else 3,
            fontsize=SMALL, frameon=False, labelcolor=INK, columnspacing=1.4,
        )  # fmt: skip


def _raw_line(axes: Any, reference: float) -> None:
    axes.axhline(100 * reference, color=INK, lw=1.2, ls=(0, (5, 3)), zorder=1,
                 label=f"raw, exact: {NDCG.text(reference)}")  # fmt: skip
    axes.axhspan(
        100 * (reference - TOLERANCE), 100 * reference, color=PALE, alpha=0.7, lw=0, zorder=0
    )


def _plain_numbers(axis: Any, values: Sequence[float], *, decades_apart: float) -> None:
    """Label a log axis with plain numbers, at 1, 2 and 5 where it spans few decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    decades = np.log10(max(values) / min(values)) if values and min(values) > 0 else 0.0
    axis.set_major_locator(
        LogLocator(10, subs=(1.0, 2.0, 5.0) if decades < decades_apart else (1.0,))
    )
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def draw_curves(
    axes: Any,
    curves: Mapping[str, Sequence[Point]],
    measure: Measure,
    reference: float | None,
    *,
    narrow: bool,
) -> None:
    """Draw ``measure`` over k, a line a transform; points in rising order of k."""
    dress(axes, "", "k (log)", f"{measure.name}" + (" (of 100)" if measure is NDCG else " (%)"))
    axes.set_xscale("log", base=2)
    values, widths = [], set()
    further = iter(_FURTHER)
    styles = dict(_CURVES)
    for name, points in curves.items():
        default = (INK, next(further, "d") if points[0].transform not in styles else "d", "-")
        colour, marker, style = styles.pop(points[0].transform, default)
        heights = [measure.of(point) or 0.0 for point in points]
        values += heights
        widths |= {point.k for point in points}
        # FAISS's own often lie on ours, which stay on top.
        own = points[0].family != "faiss"
        axes.plot([point.k for point in points], [100 * value for value in heights],
                  color=colour, marker=marker, ls=style, lw=2 if own else 1.3,
                  ms=6 if own else 8, zorder=3 if own else 2,
                  label=name)  # fmt: skip
    low = lowest_drawn(values, reference, DROP_OF_CURVES)
    high = max([*values, reference or 0.0])
    room = max(0.06 * (high - low), 0.002)
    axes.set_ylim(100 * (low - room), 100 * (high + 2 * room))
    axes.set_xticks(sorted(widths), [str(width) for width in sorted(widths)])
    axes.minorticks_off()
    if reference is not None:
        _raw_line(axes, reference)
    _below(axes, narrow=narrow)


def draw_recall(
    axes: Any, rows: Mapping[str, Sequence[Point]], target: float | None, *, narrow: bool
) -> None:
    """Draw index recall, a row a kind of index and a dot a point.

    Args:
        axes: to draw on.
        rows: name of the kind of index, and its points.
        target: the recall that was asked of tuned indexes, as a line.
        narrow: with a legend of two columns.
    """
    names = list(rows)
    dress(axes, "", "index recall@10 (%)", "")
    for place, name in enumerate(names):
        for family, (label, colour, marker) in FAMILIES.items():
            x = [100 * (p.index_recall or 0.0) for p in rows[name] if p.family == family]
            if x:
                axes.plot(x, [place] * len(x), marker, ls="none", ms=7, color=colour, alpha=0.55,
                          mew=0, label=label)  # fmt: skip
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.9)
    low = min(100 * (p.index_recall or 0.0) for points in rows.values() for p in points)
    axes.set_xlim(min(low - 2, 90), 100.8)
    if target is not None:
        axes.axvline(100 * target, color=GREY, lw=1.2, ls=(0, (5, 3)), zorder=1)
        axes.annotate(f"tuned to {100 * target:g}%", (100 * target, 1), (-4, -3), ha="right",
                      va="top", xycoords=axes.get_xaxis_transform(), size=SMALL, color=GREY,
                      textcoords="offset points")  # fmt: skip
    _below(axes, narrow=narrow)


def draw_spectrum_of(axes: Any, sweep: Sweep) -> None:
    """Draw the eigenvalues of the corpus (log) and mark the widths of the sweep."""
    values = eigenvalues(sweep)
    dress(axes, "", "direction", "eigenvalue (log)")
    axes.set_yscale("log")
    axes.plot(np.arange(1, len(values) + 1), values, color=BLUE, lw=2)
    share = np.cumsum(values) / values.sum()
    axes.set_xlim(0, 1.04 * len(values))
    least, most = np.log10(values.min()) - 0.1, np.log10(values.max()) + 0.1
    axes.set_ylim(10**least, 10 ** (least + (most - least) * 1.1))
    for width in sorted({p.k for p in sweep.points if p.family == "ours"}):
        if not 0 < width <= len(values):
            continue
        axes.axvline(width, color=GREY, lw=1, ls=(0, (1, 1.5)), zorder=1)
        axes.plot([width], [values[width - 1]], "o", color=RED, ms=6, zorder=4)
        axes.annotate(f"k={width}: {share[width - 1]:.0%}", (width, values[width - 1]), (5, 5),
                      textcoords="offset points", size=SMALL, color=INK)  # fmt: skip
    axes.annotate("% of the variance is within the first k", (0.99, 0.98), ha="right", va="top",
                  xycoords="axes fraction", size=TEXT, color=GREY)  # fmt: skip


def eigenvalues(sweep: Sweep) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the positive eigenvalues within the rank, in falling order; empty where unknown."""
    spectrum = sweep.header.get("spectrum")
    listed = spectrum.get("eigenvalues") if isinstance(spectrum, dict) else None
    if not isinstance(listed, list):
        return np.empty(0)
    values = np.array([v for v in listed if isinstance(v, int | float)], dtype=np.float64)
    rank = spectrum.get("rank") if isinstance(spectrum, dict) else None
    values = values[np.isfinite(values) & (values > 0)]
    return np.sort(values)[::-1][: rank if isinstance(rank, int) and rank > 0 else None]
