"""Charts of a sweep as PNG files, and the style that all drawings share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

from whiten_index.artifacts.atomic import replacing
from whiten_index.artifacts.files import writing
from whiten_index.errors import ConfigError
from whiten_index.measure.recommend import COLUMNS, Recommendation, front
from whiten_index.measure.results import LATENCY, NDCG, PER_ROW, Measured, Sweep

# Colours that colour-blind readers can distinguish.
BLUE, RED, GREEN = "#0072B2", "#D55E00", "#00835F"
INK, GREY, PALE = "#222222", "#6E6E6E", "#E4E4E4"
SMALL, TEXT, HEAD = 9.5, 10.5, 12  # points
DOTS_PER_INCH = 160
_INCHES = (6.6, 4.8)  # small enough to be read on a phone
# Family: name, colour and marker; colour is never the only sign.
_FAMILIES = {
    "ours": ("fitted transforms", BLUE, "o"),
    "truncate": ("truncation", GREEN, "^"),
    "faiss": ("FAISS's own PCA", RED, "s"),
    "raw": ("raw embeddings", INK, "D"),
}


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
    draw: Callable[[Any], None]

    def save(self, png: Path) -> None:
        """Draw the chart to ``png``. The same chart gives the same bytes."""
        figure = empty_figure(*_INCHES)
        axes = figure.subplots()
        self.draw(axes)
        handles, labels = axes.get_legend_handles_labels()
        if labels:
            figure.legend(
                handles, labels, loc="outside lower center", ncols=2, fontsize=SMALL,
                frameon=False, labelcolor=INK,
            )  # fmt: skip
        with writing(png), replacing(png) as temporary:
            figure.savefig(temporary, format="png", dpi=DOTS_PER_INCH)


def charts_of(sweep: Sweep, advice: Recommendation) -> list[Chart]:
    """Return quality against bytes and latency, and the spectrum if nothing was judged."""
    drawn = [
        _against(sweep, advice, PER_ROW, "bytes", "bytes per row"),
        _against(sweep, advice, LATENCY, "latency", "ms per query (median)"),
    ]
    if advice.measure != NDCG:
        drawn.append(_spectrum(sweep))
    return [chart for chart in drawn if chart is not None]


def _against(sweep: Sweep, advice: Recommendation, cost: str, name: str, unit: str) -> Chart | None:
    gain, best = advice.measure, advice.point
    slug, named = "quality" if gain == NDCG else "agreement", COLUMNS[gain][0]
    points = [p for p in sweep.points if p.number(cost) and p.number(gain) is not None]
    # Re-ranking reads bytes outside the index, so it is no rival in bytes per row.
    rivals = [p for p in points if not p.candidates] if cost == PER_ROW else points
    leading = front(rivals, cost, gain)
    if not leading:
        return None

    def draw(axes: Any) -> None:
        def plot(some: Iterable[Measured], *form: str, **style: Any) -> None:
            found = [(p.number(cost), 100 * (p.number(gain) or 0.0)) for p in some]
            if found:
                axes.plot(*zip(*found, strict=True), *form, **style)

        dress(axes, "", f"{unit}, log", f"{named} × 100")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        for family, (label, colour, marker) in _FAMILIES.items():
            own = [p for p in points if p.text("family") == family]
            style = {"ls": "none", "ms": 5.5, "color": colour, "alpha": 0.75, "zorder": 3}
            plot([p for p in own if not p.candidates], marker, label=label, **style)
            again = [p for p in own if p.candidates]
            plot(again, marker, label=f"{label}, re-ranked", mfc="none", **style)
        plot(leading, color=INK, lw=1.3, zorder=2)
        if best is not None and best.number(cost):
            plot([best], "*", ls="none", ms=17, color="gold", mec=INK, zorder=5,
                 label=f"recommended: {best.name}")  # fmt: skip

    return Chart(
        slug=f"{slug}-{name}",
        title=f"{slug.capitalize()} against {unit.partition(' (')[0]}",
        caption=f"{named} of {len(points)} points. Up and to the left is better; the line "
        "joins the points that no other beats in both.",
        draw=draw,
    )


def _spectrum(sweep: Sweep) -> Chart | None:
    spectrum = sweep.header.get("spectrum") or {}
    values = [v for v in spectrum.get("eigenvalues", [])[: spectrum.get("rank")] if v > 0]
    if len(values) < 2:
        return None
    sums = list(accumulate(values))
    widths = {p.k for p in sweep.points if p.text("family") == "ours" and 0 < p.k <= len(values)}

    def draw(axes: Any) -> None:
        dress(axes, "", "direction", "eigenvalue, log")
        axes.set_yscale("log")
        axes.plot(range(1, len(values) + 1), values, color=BLUE, lw=2)
        for k in sorted(widths):
            axes.plot([k], [values[k - 1]], "o", color=RED, ms=6)
            text = f"k={k}: {sums[k - 1] / sums[-1]:.0%}"
            axes.annotate(text, (k, values[k - 1]), (5, 5), size=SMALL, color=INK,
                          textcoords="offset points")  # fmt: skip

    return Chart(
        slug="spectrum",
        title="Spectrum of the embeddings",
        caption="Eigenvalues of the covariance, and the share of the variance within each k.",
        draw=draw,
    )
