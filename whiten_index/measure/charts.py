"""Charts of a sweep, and the picture of an index: spectrum and variance kept."""

import io
import re
from collections.abc import Iterator, Mapping
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whiten_index.artifacts.atomic import replacing, require_plain_target
from whiten_index.artifacts.files import writing
from whiten_index.errors import ConfigError, require_installed
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
from whiten_index.paths import without_controls

# Colours that colour-blind readers can distinguish.
BLUE, RED, GREEN = "#0072B2", "#D55E00", "#00835F"
INK, GREY, PALE = "#222222", "#6E6E6E", "#E4E4E4"
SMALL, TEXT, HEAD = 9.5, 10.5, 12  # points
DOTS_PER_INCH = 160
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


def empty_figure(width: float, height: float) -> Any:
    """Return a white figure of ``width`` × ``height`` inches without global state."""
    from matplotlib.figure import Figure as MatplotlibFigure

    return MatplotlibFigure(figsize=(width, height), layout="constrained", facecolor="white")


def dress(axes: Any, title: str, x: str, y: str) -> None:
    """Give ``axes`` a title, labels and a pale grid, without a frame at the top and right."""
    axes.set_title(title, size=HEAD, loc="left", color=INK, pad=10)
    axes.set_xlabel(x, size=TEXT, color=INK)
    axes.set_ylabel(y, size=TEXT, color=INK)
    axes.tick_params(labelsize=SMALL, color=GREY, labelcolor=INK)
    axes.grid(visible=True, color=PALE, lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)


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

    figure = empty_figure(*_INCHES)
    axes = figure.subplots()
    dress(axes, "", f"{unit}, log", f"{named} × 100")
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
    figure = empty_figure(*_INCHES)
    axes = figure.subplots()
    dress(axes, "", "direction", "eigenvalue, log")
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


_ENDINGS = (".png", ".svg", ".pdf")


def check_plot_path(path: Path) -> None:
    """Make sure, before any work, that a plot can be drawn and that its ending names a format."""
    if path.suffix.lower() not in _ENDINGS:
        raise ConfigError(
            f"the ending of {path.name} names no picture format; use {', '.join(_ENDINGS)}"
        )
    require_plain_target(path)
    require_installed("matplotlib", by="a plot", extra="plot")


def draw_spectrum(path: Path | str, description: Mapping[str, Any], eigenvalues: ArrayLike) -> None:
    """Draw what ``describe_index`` returns of an index into a picture, atomically.

    ``eigenvalues`` (d,) are those of the covariance, falling; zeros are not drawn.
    """
    path = Path(path)
    check_plot_path(path)
    values = np.maximum(np.asarray(eigenvalues, dtype=np.float64), 0.0)
    whitening, encoder = description["whitening"], description.get("encoder", {})
    figure = empty_figure(11.8, 5.2)
    # A dollar begins a formula.
    model = without_controls(encoder.get("model") or encoder.get("column") or "")
    facts = (
        f"{whitening['kind']}, k = {whitening['k']} of {whitening['dim']}",
        f"γ = {whitening['exponent']:g}",
        f"{description['rows']:,} rows",
        f"encoder {model}".replace("$", r"\$"),
    )
    figure.suptitle(" · ".join(facts), size=HEAD, color=INK)
    left, right = figure.subplots(1, 2)
    _draw_directions(left, right, values, whitening)
    with writing(path), replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix.lower()[1:], dpi=DOTS_PER_INCH)


def _draw_directions(
    left: Any, right: Any, values: NDArray[np.float64], whitening: Mapping[str, Any]
) -> None:
    """Draw the eigenvalues above 0, and the share of the variance that the first of them keep."""
    rank = min(int(whitening["rank"]), int(np.count_nonzero(values)))
    k, top, dim = whitening["k"], whitening.get("remove_top", 0), len(values)
    dress(left, "Spectrum of the covariance", "direction", "eigenvalue, log")
    dress(right, "Variance kept by k", "k", "share of the variance")
    if rank:
        left.set_yscale("log")
        left.plot(range(1, rank + 1), values[:rank], color=BLUE, lw=2)
        right.plot(range(dim + 1), [0.0, *np.cumsum(values) / values.sum()], color=BLUE, lw=2)
    # Directions that are not the leading ones are below the curve.
    kept = whitening["variance_kept"]
    right.plot([k], [kept], "o", color=RED, ms=7, label=f"k = {k} keeps {kept:.1%}")
    right.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    cut = f"k = {k}, the first {top} left out" if top else f"k = {k}"
    left.axvline(top + k, color=RED, lw=1.2, ls=":", label=cut)
    for axes in (left, right):
        axes.set_xlim(0, dim * 1.02)
        axes.axvline(rank, color=GREY, lw=1.2, ls=":", label=f"rank {rank} of {dim}")
        axes.legend(fontsize=SMALL, edgecolor="none", labelcolor=INK)
