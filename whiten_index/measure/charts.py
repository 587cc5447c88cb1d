"""Charts of a sweep as PNG files and inline SVG, and the style that all drawings share."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

from whiten_index.artifacts.atomic import replacing
from whiten_index.artifacts.files import writing
from whiten_index.errors import ConfigError
from whiten_index.measure.formatting import milliseconds, number, point_name
from whiten_index.measure.recommend import NDCG, TOLERANCE, Figure, Recommendation, front
from whiten_index.measure.results import Measured, Sweep

# Colours that colour-blind readers can tell apart.
BLUE, RED, GREEN = "#0072B2", "#D55E00", "#00835F"
INK, GREY, PALE = "#222222", "#6E6E6E", "#E4E4E4"
SMALL, TEXT, HEAD = 9.5, 10.5, 12  # points
DOTS_PER_INCH = 160
_WIDE, _NARROW = (9.4, 5.0), (4.1, 4.3)  # inches: a desk and a phone
# Family: name, colour and marker; colour is never the only sign.
_FAMILIES = {
    "ours": ("fitted transforms", BLUE, "o"),
    "truncate": ("truncation", GREEN, "^"),
    "faiss": ("FAISS's own PCA", RED, "s"),
    "raw": ("raw embeddings", INK, "D"),
}
_DROP = 0.25  # share of the best below which points are not drawn, so that differences stay visible


def require_drawing() -> None:
    """Make sure, before any work, that matplotlib is installed."""
    if find_spec("matplotlib") is None:
        raise ConfigError("a plot needs matplotlib; pip install 'whiten-index[plot]'")


def empty_figure(width: float, height: float) -> Any:
    """Return a white figure of ``width`` × ``height`` inches without global state."""
    from matplotlib.figure import Figure as MatplotlibFigure

    return MatplotlibFigure(figsize=(width, height), layout="constrained", facecolor="white")


def dress(axes: Any, title: str, x: str, y: str) -> None:
    """Give ``axes`` a title, labels and a pale grid, without a frame at the top and right."""
    if title:
        axes.set_title(title, size=HEAD, loc="left", color=INK, pad=10)
    axes.set_xlabel(x, size=TEXT, color=INK)
    axes.set_ylabel(y, size=TEXT, color=INK)
    axes.tick_params(labelsize=SMALL, color=GREY, labelcolor=INK)
    axes.grid(visible=True, color=PALE, lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)


@dataclass(frozen=True)
class Chart:
    """A chart of a sweep."""

    slug: str
    title: str
    caption: str
    alt: str
    draw: Callable[[Any], None]

    def embed(self, png: Path) -> dict[str, str]:
        """Write the chart to ``png`` and return its texts and base64 SVGs, wide and narrow.

        The same chart gives the same bytes.
        """
        wide, narrow = (self._figure(size) for size in (_WIDE, _NARROW))
        with writing(png), replacing(png) as temporary:
            wide.savefig(temporary, format="png", dpi=DOTS_PER_INCH)
        texts = {"title": self.title, "caption": self.caption, "alt": self.alt}
        return {**texts, "wide": self._svg(wide), "narrow": self._svg(narrow)}

    def _figure(self, size: tuple[float, float]) -> Any:
        figure = empty_figure(*size)
        axes = figure.subplots()
        self.draw(axes)
        handles, labels = axes.get_legend_handles_labels()
        if labels:
            figure.legend(
                handles, labels, loc="outside lower center", ncols=3 if size is _WIDE else 2,
                fontsize=SMALL, frameon=False, labelcolor=INK,
            )  # fmt: skip
        return figure

    def _svg(self, figure: Any) -> str:
        from matplotlib import rc_context

        buffer = io.BytesIO()
        with rc_context({"svg.hashsalt": self.slug, "svg.fonttype": "path"}):
            figure.savefig(buffer, format="svg", metadata={"Date": None})
        return base64.b64encode(buffer.getvalue()).decode()


def charts_of(sweep: Sweep, advice: Recommendation) -> list[Chart]:
    """Return quality against bytes and latency, and the spectrum if nothing was judged."""
    drawn = [
        _against(sweep, advice, lambda p: p.per_row, "bytes", "bytes per row", number),
        _against(sweep, advice, lambda p: p.p50, "latency", "ms per query (median)", milliseconds),
    ]
    if advice.measure is not NDCG:
        drawn.append(_spectrum(sweep))
    return [chart for chart in drawn if chart is not None]


def _against(
    sweep: Sweep,
    advice: Recommendation,
    cost: Figure,
    name: str,
    unit: str,
    text: Callable[[float | None], str],
) -> Chart | None:
    measure = advice.measure
    points = [p for p in sweep.points if (cost(p) or 0) > 0 and measure.of(p) is not None]
    # Re-ranking reads bytes outside the index, so it is no rival in bytes per row.
    rivals = [p for p in points if not p.candidates] if name == "bytes" else points
    leading = front(rivals, cost, measure.of)
    if not leading:
        return None
    values = [100 * (measure.of(point) or 0.0) for point in points]
    low = max(min(values), (1 - _DROP) * max(values))
    hidden = sum(value < low for value in values)
    caption = "Up and to the left is better; the line joins the points that no other beats in both."
    if hidden:
        caption += f" {hidden} of {len(points)} points lie below the chart; the table has them."
    ends = " to ".join(
        f"{text(cost(p))} with {measure.text(measure.of(p))} ({point_name(p)})"
        for p in (leading[0], leading[-1])[: len(leading)]
    )

    def draw(axes: Any) -> None:
        dress(axes, "", f"{unit}, log", f"{measure.name} × 100")
        _draw_points(axes, points, leading, cost, measure.of)
        if advice.point is not None and cost(advice.point):
            at = cost(advice.point), 100 * (measure.of(advice.point) or 0.0)
            axes.plot(*at, "*", ls="none", ms=17, color="gold", mec=INK, zorder=5,
                      label=f"recommended: {point_name(advice.point)}")  # fmt: skip
        raw = None if sweep.raw is None else measure.of(sweep.raw)
        if raw is not None and measure is NDCG:
            axes.axhline(100 * raw, color=INK, lw=1.2, ls=(0, (5, 3)), zorder=1,
                         label=f"raw, exact: {measure.text(raw)}")  # fmt: skip
            axes.axhspan(100 * (raw - TOLERANCE), 100 * raw, color=PALE, alpha=0.7, lw=0, zorder=0)
        room = max(0.06 * (max(values) - low), 0.2)
        axes.set_ylim(low - room, max([*values, 100 * (raw or 0.0)]) + room)

    return Chart(
        slug=f"{measure.slug}-{name}",
        title=f"{measure.slug.capitalize()} against {unit.partition(' (')[0]}",
        caption=caption,
        alt=f"{measure.name} against {unit} of {len(points)} points; the best trade-offs run from "
        f"{ends}.",
        draw=draw,
    )


def _draw_points(
    axes: Any, points: Sequence[Measured], leading: Sequence[Measured], cost: Figure, gain: Figure
) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    costs = [cost(point) or 1.0 for point in points]
    few_decades = max(costs) < 100 * min(costs)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few_decades else (1,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    for family, (label, colour, marker) in _FAMILIES.items():
        for again in (False, True):
            own = [p for p in points if p.text("family") == family and bool(p.candidates) is again]
            if own:
                axes.plot([cost(p) for p in own], [100 * (gain(p) or 0.0) for p in own], marker,
                          ls="none", ms=5.5, color=colour, mfc="none" if again else colour,
                          alpha=0.75, zorder=3,
                          label=f"{label}, re-ranked" if again else label)  # fmt: skip
    axes.plot([cost(p) for p in leading], [100 * (gain(p) or 0.0) for p in leading],
              color=INK, lw=1.3, zorder=2)  # fmt: skip


def _spectrum(sweep: Sweep) -> Chart | None:
    values = sweep.eigenvalues
    if len(values) < 2:
        return None
    sums = list(accumulate(values))
    widths = sorted(
        {p.k for p in sweep.points if p.text("family") == "ours" and 0 < p.k <= len(values)}
    )
    shares = {k: sums[k - 1] / sums[-1] for k in widths}

    def draw(axes: Any) -> None:
        dress(axes, "", "direction", "eigenvalue, log")
        axes.set_yscale("log")
        axes.plot(range(1, len(values) + 1), values, color=BLUE, lw=2)
        for k, kept in shares.items():
            axes.plot([k], [values[k - 1]], "o", color=RED, ms=6)
            axes.annotate(f"k={k}: {kept:.0%}", (k, values[k - 1]), (5, 5), size=SMALL, color=INK,
                          textcoords="offset points")  # fmt: skip

    kept = "; ".join(f"the first {k} hold {kept:.0%} of the variance" for k, kept in shares.items())
    return Chart(
        slug="spectrum",
        title="Spectrum of the embeddings",
        caption="Eigenvalues of the covariance, and the share of the variance within each k.",
        alt=f"{len(values)} eigenvalues, falling from {values[0]:.3g} to {values[-1]:.3g}. {kept}",
        draw=draw,
    )
