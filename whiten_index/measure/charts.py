"""Charts of a sweep."""

import io
import re
from collections.abc import Iterator
from itertools import accumulate, product
from typing import Any

from whiten_index.measure.results import (
    AGREEMENT,
    COLUMNS,
    LATENCY,
    NDCG,
    PER_ROW,
    Measured,
    Recommendation,
    Sweep,
    front,
)

# Colours that colour-blind readers can distinguish.
BLUE, RED, GREEN = "#0072B2", "#D55E00", "#00835F"
INK, GREY, PALE = "#222222", "#6E6E6E", "#E4E4E4"
SMALL, TEXT = 9.5, 10.5  # points
_INCHES = (5.0, 4.0)  # small enough to be read on a phone
# A page gives them other values in the dark.
_OF_PAGE = {INK: "ink", GREY: "grey", PALE: "pale", BLUE: "blue", RED: "red", GREEN: "green"}
# Family: name, colour and marker; colour is never the only sign.
_FAMILIES = {
    "ours": ("fitted transforms", BLUE, "o"),
    "truncate": ("truncation", GREEN, "^"),
    "faiss": ("FAISS's own PCA", RED, "s"),
    "raw": ("raw embeddings", INK, "D"),
}

Chart = tuple[str, str, str]  # title, caption, and the picture as an element of a page


def _axes(x: str, y: str) -> tuple[Any, Any]:
    """Return a figure without global state, and its axes with labels and a pale grid."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, layout="constrained", facecolor="white")
    axes = figure.subplots()
    axes.set_xlabel(x, size=TEXT, color=INK)
    axes.set_ylabel(y, size=TEXT, color=INK)
    axes.tick_params(labelsize=SMALL, color=GREY, labelcolor=INK)
    axes.grid(visible=True, color=PALE, lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    return figure, axes


def charts_of(sweep: Sweep, advice: Recommendation) -> Iterator[Chart]:
    """Yield quality against bytes and latency, and the spectrum if nothing was judged."""
    yield from _against(sweep, advice, PER_ROW, "bytes per row")
    yield from _against(sweep, advice, LATENCY, "ms per query (median)")
    if advice.measure != NDCG:
        yield from _spectrum(sweep)


def _against(sweep: Sweep, advice: Recommendation, cost: str, unit: str) -> Iterator[Chart]:
    gain, best = advice.measure, advice.point
    title, named = "Agreement" if gain == AGREEMENT else "Quality", COLUMNS[gain][0]
    points = [p for p in sweep.points if p.number(cost) and p.number(gain) is not None]
    # Re-ranking reads bytes outside the index, so it is no rival in bytes per row.
    rivals = [p for p in points if not p.candidates] if cost == PER_ROW else points
    leading = front(rivals, cost, gain)
    if not leading:
        return

    def places(some: list[Measured]) -> list[list[float]]:
        return [[p.number(cost) or 0.0 for p in some], [100 * (p.number(gain) or 0) for p in some]]

    figure, axes = _axes(f"{unit}, log", f"{named} × 100")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    for (family, (label, colour, marker)), again in product(_FAMILIES.items(), (False, True)):
        own = [p for p in points if (p.text("family"), bool(p.candidates)) == (family, again)]
        if own:
            axes.scatter(
                *places(own), 30, marker=marker, alpha=0.75, zorder=3, edgecolors=colour,
                facecolors="none" if again else colour, urls=[f"#{p.anchor}" for p in own],
                label=f"{label}, re-ranked" if again else label,
            )  # fmt: skip
    axes.plot(*places(leading), color=INK, lw=1.3, zorder=2)
    if best is not None and best.number(cost):
        axes.plot(*places([best]), "*", ls="none", ms=17, color="gold", mec=INK, zorder=5,
                  label="recommended")  # fmt: skip
    figure.legend(loc="outside lower center", ncols=2, fontsize=SMALL, frameon=False,
                  labelcolor=INK)  # fmt: skip
    caption = (
        f"{named} of {len(points)} points. Up and to the left is better; the line joins the points "
        "that no other beats in both."
    )
    yield f"{title} against {unit.partition(' (')[0]}", caption, _svg(figure)


def _spectrum(sweep: Sweep) -> Iterator[Chart]:
    spectrum = sweep.header.get("spectrum") or {}
    values = [v for v in spectrum.get("eigenvalues", [])[: spectrum.get("rank")] if v > 0]
    if len(values) < 2:
        return
    sums = list(accumulate(values))
    widths = {p.k for p in sweep.points if p.text("family") == "ours" and 0 < p.k <= len(values)}
    figure, axes = _axes("direction", "eigenvalue, log")
    axes.set_yscale("log")
    axes.plot(range(1, len(values) + 1), values, color=BLUE, lw=2)
    for k in sorted(widths):
        axes.plot([k], [values[k - 1]], "o", color=RED, ms=6)
        text = f"k={k}: {sums[k - 1] / sums[-1]:.0%}"
        axes.annotate(text, (k, values[k - 1]), (5, 5), size=SMALL, color=INK,
                      textcoords="offset points")  # fmt: skip
    caption = "Eigenvalues of the covariance, and the share of the variance within each k."
    yield "Spectrum of the embeddings", caption, _svg(figure)


def _svg(figure: Any) -> str:
    """Return a figure as an element of a page. The same figure gives the same text."""
    from matplotlib import rc_context

    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with io.StringIO() as file, rc_context({"svg.fonttype": "none", "svg.hashsalt": "page"}):
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
        text = file.getvalue()
    for colour, name in _OF_PAGE.items():
        text = text.replace(colour.lower(), f"var(--{name})")
    # Names of groups, which several charts would share, and windows that links would open.
    return re.sub(r' id="[\w.]+[a-z]_\d+"| target="_blank"', "", text[text.index("<svg") :])
