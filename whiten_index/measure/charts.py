"""Charts of a sweep, and the picture of an index: spectrum, variance kept, choice of γ."""

import io
import re
from collections.abc import Callable, Iterator, Mapping
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
_TITLE = 14  # points
_ROOM = 1.6  # factor between the eigenvalues drawn and the edge of the axis


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

    ``eigenvalues`` (d,) are those of the covariance, falling; zeros are named, not drawn.
    """
    path = Path(path)
    check_plot_path(path)
    values = np.maximum(np.asarray(eigenvalues, dtype=np.float64), 0.0)
    whitening, choice = description["whitening"], description.get("choice") or {}
    panels: list[Callable[[Any], None]] = [
        lambda axes: _draw_eigenvalues(axes, values, whitening),
        lambda axes: _draw_variance(axes, values, whitening),
    ]
    if choice.get("candidates"):
        panels.append(lambda axes: _draw_choice(axes, choice))
    above, below = _title(description)
    figure = empty_figure(5.9 * len(panels), 5.2)
    figure.suptitle(above, size=_TITLE, color=INK)
    figure.supxlabel(below, size=TEXT, color=GREY)
    for axes, draw in zip(figure.subplots(1, len(panels)), panels, strict=True):
        draw(axes)
    with writing(path), replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix.lower()[1:], dpi=DOTS_PER_INCH)


def _title(description: Mapping[str, Any]) -> tuple[str, str]:
    whitening, encoder = description["whitening"], description.get("encoder", {})
    kind = {"none": "no transform", "pca": "PCA"}.get(whitening["kind"], whitening["kind"])
    dim, k = whitening["dim"], whitening["k"]
    facts = [f"{kind}, k = {k} of {dim}", f"γ = {whitening['exponent']:g}"]
    if whitening["kind"] != "none":
        facts.append("centred" if whitening["center"] else "not centred")
    facts.append(f"{description['rows']:,} rows")
    version = description.get("version")
    # A dollar begins a formula.
    model = encoder.get("model") or encoder.get("column") or ""
    model = without_controls(model).replace("$", r"\$")
    condition = whitening.get("condition_number")
    below = [
        f"version {version}" if version else "",
        f"encoder {model}" if model else "",
        f"condition number {condition:,.4g}" if condition else "",
    ]
    return " · ".join(facts), " · ".join(filter(None, below))


def _draw_eigenvalues(axes: Any, values: NDArray[np.float64], whitening: Mapping[str, Any]) -> None:
    rank, k = _rank(values, whitening), whitening["k"]
    dress(axes, "Spectrum of the covariance", "direction", "eigenvalue (log)")
    if rank == 0:
        axes.text(0.5, 0.5, "no variance: all embeddings are equal", ha="center", va="center",
                  transform=axes.transAxes, size=TEXT, color=GREY)  # fmt: skip
        return
    shown, top = values[:rank], whitening.get("remove_top", 0)
    axes.set_yscale("log")
    axes.plot(np.arange(1, rank + 1), shown, color=BLUE, lw=2, marker=".", ms=4)
    # The labels of k and the rank stand in the upper fifth, clear of the line.
    least, most = np.log10(shown.min() / _ROOM), np.log10(shown.max() * _ROOM)
    axes.set_ylim(10**least, 10 ** (least + (most - least) / 0.82))
    text = f"k = {k}, the first {top} left out" if top else f"k = {k}"
    _mark(axes, top + k, rank, len(values), text=text, heights=(0.98, 0.90))


def _rank(values: NDArray[np.float64], whitening: Mapping[str, Any]) -> int:
    return min(int(whitening["rank"]), int((values > 0).sum()))


def _draw_variance(axes: Any, values: NDArray[np.float64], whitening: Mapping[str, Any]) -> None:
    rank, k, total = _rank(values, whitening), whitening["k"], float(values.sum())
    dress(axes, "Variance kept by k", "k", "share of the variance")
    if total == 0:
        return
    most = np.concatenate([[0.0], np.cumsum(values) / total])
    axes.plot(np.arange(len(most)), most, color=BLUE, lw=2, marker=".", ms=4)
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    # Directions that are not the leading ones are below the curve.
    kept = whitening["variance_kept"]
    axes.plot([k], [kept], "o", color=RED, ms=7, zorder=4)
    # The curve is concave, so that the lower right is free of it.
    text = f"k = {k} keeps {kept:.1%}"
    _mark(axes, k, rank, len(values), text=text, heights=(0.17, 0.09))


def _mark(
    axes: Any, cut: int, rank: int, dim: int, *, text: str, heights: tuple[float, float]
) -> None:
    """Draw the cut and the rank as upright lines, and shade the directions without variance."""
    axes.set_xlim(0, dim * 1.02)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if rank < dim:
        axes.axvspan(rank, dim * 1.02, color=PALE, lw=0, zorder=0)
    lines = ((cut, text, RED, "bold"), (rank, f"rank {rank} of {dim}", GREY, "normal"))
    for height, (place, label, colour, weight) in zip(heights, lines, strict=True):
        left = place > 0.5 * dim
        axes.axvline(place, color=colour, lw=1.2, ls=(0, (1, 1.5)), zorder=2 if place == cut else 1)
        axes.annotate(label, (min(place, rank), height),
                      (-6 if left else 6, 0), va="top", xycoords=axes.get_xaxis_transform(),
                      textcoords="offset points", ha="right" if left else "left",
                      size=TEXT, color=colour, weight=weight)  # fmt: skip


def _draw_choice(axes: Any, choice: Mapping[str, Any]) -> None:
    candidates, chosen = choice["candidates"], choice.get("chosen") or {}
    widths = {candidate["k"] for candidate in candidates}
    k = chosen.get("k") if chosen.get("k") in widths else max(widths)
    at_k = sorted((c for c in candidates if c["k"] == k), key=lambda c: c["exponent"])
    dress(axes, f"Choice of the exponent at k = {k}", "exponent γ (0 is PCA, 1 is whitening)",
          "score")  # fmt: skip
    for center, label, colour, marker in (
        (True, "centred", BLUE, "o"), (False, "not centred", GREY, "s"),
    ):  # fmt: skip
        side = [candidate for candidate in at_k if bool(candidate["center"]) is center]
        if side:
            axes.errorbar(
                [candidate["exponent"] for candidate in side],
                [candidate["score"] for candidate in side],
                yerr=[candidate.get("error") or 0.0 for candidate in side],
                color=colour, marker=marker, ms=5, lw=1.8, elinewidth=1, capsize=3, label=label,
            )  # fmt: skip
    for candidate in at_k:
        if all(candidate[name] == chosen.get(name) for name in ("exponent", "center", "k")):
            axes.plot(candidate["exponent"], candidate["score"], "o", ms=14, mfc="none", mec=RED,
                      mew=2, zorder=4, ls="none",
                      label=f"chosen: γ = {candidate['exponent']:g}")  # fmt: skip
    axes.margins(x=0.06, y=0.12)
    axes.legend(fontsize=SMALL, framealpha=0.9, edgecolor="none", labelcolor=INK)
