"""PNG pictures of curves and heat maps, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whiten_index.artifacts.files import writing
from whiten_index.errors import ConfigError

_INK, _RED, _PALE = "#222222", "#D55E00", "#E4E4E4"
# Stay apart for colour-blind eyes; series beyond them differ by marker and dash.
_COLOURS = ("#0072B2", _RED, "#00835F", "#A3528A", _INK)
_MARKERS, _DASHES = ("o", "s", "^", "v", "D", "P", "X"), ("-", "--", ":")
_LOGARITHMIC_FROM = 8  # ratio of the last place to the first
_INCHES = (9.4, 5.6)
Curves = Mapping[str, Sequence[float | None]]


def require_drawing() -> None:
    """Check before the work that pictures can be drawn.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("pictures need matplotlib; pip install 'whiten-index[plot]'")


def heat_matrix(values: Mapping[tuple[int, ...], float], count: int) -> NDArray[np.float64]:
    """Return figures of pairs of layers as a symmetric matrix, single layers on its diagonal."""
    matrix = np.full((count, count), np.nan)
    for layers, value in values.items():
        if len(layers) <= 2:
            i, j = layers[0], layers[-1]
            matrix[i, j] = matrix[j, i] = value
    return matrix


def draw_curves(
    png: Path, x: Sequence[float | str], series: Curves, *, x_label: str, y_label: str
) -> None:
    """Draw one line for each series over the places ``x``, numbers or names."""
    figure = _figure()
    axes = figure.subplots()
    numbers = [place for place in x if not isinstance(place, str)]
    named = len(numbers) < len(x)
    places = range(len(x)) if named else x
    for number, (name, values) in enumerate(series.items()):
        axes.plot(
            places,
            [np.nan if value is None else value for value in values],
            color=_COLOURS[number % len(_COLOURS)],
            marker=_MARKERS[number % len(_MARKERS)],
            ls=_DASHES[number % len(_DASHES)],
            label=name,
        )
    if not named and len(x) > 1 and min(numbers) > 0 and _wide(numbers):
        axes.set_xscale("log", base=2)
    if named or len(x) <= 16:
        axes.set_xticks(places, [place if isinstance(place, str) else f"{place:g}" for place in x])
        axes.minorticks_off()
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.grid(visible=True, color=_PALE)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    _save(figure, png)


def draw_heat_maps(png: Path, maps: Mapping[str, ArrayLike], labels: Sequence[str]) -> None:
    """Draw square matrices of one size next to each other, the best cell of each framed."""
    side = max(3.0, min(0.55 * len(labels), 8.0))
    figure = _figure((side + 1.0) * len(maps), side + 0.8)
    panels = figure.subplots(1, len(maps), squeeze=False)[0]
    for axes, (title, values) in zip(panels, maps.items(), strict=True):
        _heat_map(axes, np.array(values, np.float64), labels)
        axes.set_title(title, loc="left")
    _save(figure, png)


def _heat_map(axes: Any, matrix: NDArray[np.float64], labels: Sequence[str]) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    colours = colormaps["cividis"].with_extremes(bad=_PALE)
    image = axes.imshow(np.ma.masked_invalid(matrix), cmap=colours)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_yticks(range(len(labels)), labels)
    axes.figure.colorbar(image, ax=axes, fraction=0.045, pad=0.02)
    if np.isnan(matrix).all():
        return
    best, middle = np.nanmax(matrix), (np.nanmin(matrix) + np.nanmax(matrix)) / 2
    for (i, j), value in np.ndenumerate(matrix):
        if np.isnan(value):
            continue
        colour = "white" if value < middle else _INK
        axes.text(j, i, f"{value:.1f}", ha="center", va="center", size=7.5, color=colour)
        if value == best:
            frame = Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, ec=_RED, lw=2.4, zorder=3)
            axes.add_patch(frame)


def _wide(places: Sequence[float]) -> bool:
    return max(places) / min(places) >= _LOGARITHMIC_FROM


def _figure(width: float = _INCHES[0], height: float = _INCHES[1]) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def _save(figure: Any, png: Path) -> None:
    with writing(png):
        png.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(png, dpi=160)
