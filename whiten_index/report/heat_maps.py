"""Heat maps of figures by pairs of layers: the numbers in the cells, the best cell marked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.report.pictures import NARROW, WIDE, Picture, Size
from whiten_index.report.style import GREY, HEAD, INK, PALE, RED, SMALL, TEXT

# Even in lightness and the same to colour-blind eyes: dark blue is low, yellow is high.
_COLOURS = "cividis"
_LEAST = 7.0  # points of the smallest number that is drawn
_LETTER = 0.6  # width of a digit, in its size
_BESIDE, _ABOVE = 1.3, 0.95  # inches of a picture that are not cells


@dataclass(frozen=True, eq=False)
class HeatMap:
    """Figures by two layers.

    Attributes:
        matrix: (n, n) float64, NaN where there is no figure.
        labels: n names of the layers.
        axis: what the labels are.
    """

    matrix: NDArray[np.float64]
    labels: tuple[str, ...]
    axis: str = "layer"

    def best(self) -> list[tuple[int, int]]:
        """Return the cells of the highest figure: two where the matrix is symmetric."""
        if np.isnan(self.matrix).all():
            return []
        highest = np.nanmax(self.matrix)
        return [(int(i), int(j)) for i, j in np.argwhere(self.matrix == highest)]

    def best_words(self) -> str:
        """Return the best cell as a short text: 1+6, 62.31."""
        if not (cells := self.best()):
            return "no figures"
        i, j = min(cells)
        pair = self.labels[i] if i == j else f"{self.labels[i]}+{self.labels[j]}"
        return f"{pair}, {self.matrix[i, j]:.2f}"

    def alt(self) -> str:
        """Say what the map shows."""
        size = len(self.labels)
        if not self.best():
            return f"Heat map of {size} × {size} cells, without a figure."
        low, high = np.nanmin(self.matrix), np.nanmax(self.matrix)
        return (
            f"Heat map of {size} × {size} cells by {self.axis}, from {low:.2f} to {high:.2f}; the "
            f"highest, {self.best_words()}, is marked."
        )


def heat_map_picture(slug: str, title: str, caption: str, shown: HeatMap) -> Picture:
    """Return the picture of one heat map."""
    sizes = _size(WIDE[0], len(shown.labels)), _size(NARROW[0], len(shown.labels))

    def draw(axes: Any, narrow: bool) -> None:
        width, height = sizes[narrow]
        side = min(width - _BESIDE, height - _ABOVE) / max(len(shown.labels), 1)
        image = draw_heat_map(axes, shown, cell=side)
        axes.set_xlabel(shown.axis, size=TEXT, color=INK)
        axes.set_ylabel(shown.axis, size=TEXT, color=INK)
        bar = axes.figure.colorbar(image, ax=axes, fraction=0.045, pad=0.02)
        bar.ax.tick_params(labelsize=SMALL, color=GREY, labelcolor=INK)
        bar.outline.set_visible(False)

    return Picture(slug=slug, title=title, caption=caption, alt=shown.alt(), draw=draw, sizes=sizes)


def small_maps_picture(slug: str, title: str, caption: str, maps: Mapping[str, HeatMap]) -> Picture:
    """Return one picture of several small heat maps, each with colours of its own range."""
    columns = (min(3, len(maps)), min(2, len(maps)))
    rows = tuple(-(-len(maps) // count) for count in columns)
    full = WIDE[0] / 3, NARROW[0] / 2
    sizes = tuple(
        (width, down * (side + 0.45))
        for width, down, side in zip((WIDE[0], NARROW[0]), rows, full, strict=True)
    )

    def draw(figure: Any, narrow: bool) -> None:
        panels = figure.subplots(rows[narrow], columns[narrow], squeeze=False).ravel()
        for axes, (name, shown) in zip(panels, maps.items(), strict=False):
            side = (full[narrow] - (0.45 if narrow else 0.6)) / max(len(shown.labels), 1)
            draw_heat_map(axes, shown, cell=side, size=SMALL - 2.5 if narrow else SMALL - 1)
            axes.set_title(
                f"{name}\nbest {shown.best_words()}" if narrow else f"{name}: {shown.best_words()}",
                size=SMALL - 1 if narrow else HEAD - 1.5, loc="left", color=INK, pad=5,
            )  # fmt: skip
        for axes in panels[len(maps) :]:
            axes.set_axis_off()

    said = "; ".join(f"{name} is best at {shown.best_words()}" for name, shown in maps.items())
    return Picture(
        slug=slug, title=title, caption=caption, alt=f"{len(maps)} heat maps: {said}.",
        draw=draw, sizes=(sizes[0], sizes[1]), panels=True,
    )  # fmt: skip


def draw_heat_map(axes: Any, shown: HeatMap, *, cell: float, size: float = SMALL) -> Any:
    """Draw the cells, their numbers as far as they fit, and a frame around the best.

    Args:
        axes: to draw on.
        shown: the figures.
        cell: side of a cell in inches, by which the numbers are cut.
        size: of the labels, in points.

    Returns:
        matplotlib's image, for a bar of colours.
    """
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    matrix = np.ma.masked_invalid(shown.matrix)
    colours = colormaps[_COLOURS].with_extremes(bad=PALE)
    image = axes.imshow(matrix, cmap=colours, aspect="equal")
    places = range(0, len(shown.labels), 1 if cell >= 0.16 else 2)
    names = [shown.labels[place] for place in places]
    axes.set_xticks(places, names)
    axes.set_yticks(places, names)
    axes.tick_params(labelsize=size, length=0, labelcolor=INK)
    for side in axes.spines.values():
        side.set_visible(False)
    best = shown.best()
    decimals, points = _fitting(shown.matrix, cell)
    if decimals is not None:
        for (i, j), value in np.ndenumerate(shown.matrix):
            if np.isfinite(value):
                axes.text(
                    j, i, f"{value:.{decimals}f}", ha="center", va="center", size=points,
                    color=_readable(image, value), weight="bold" if (i, j) in best else "normal",
                )  # fmt: skip
    for i, j in best:
        axes.add_patch(
            Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, ec=RED, lw=2.4, zorder=3, clip_on=False)
        )
    return image


def _fitting(matrix: NDArray[np.float64], cell: float) -> tuple[int | None, float]:
    """Return how many decimals fit into a cell at a size that can be read, and that size."""
    finite = matrix[np.isfinite(matrix)]
    for decimals in (2, 1, 0):
        longest = max((len(f"{value:.{decimals}f}") for value in finite), default=1)
        points = min(SMALL, 0.9 * cell * 72 / (_LETTER * longest))
        if points >= _LEAST:
            return decimals, points
    return None, 0.0


def _readable(image: Any, value: float) -> str:
    """Return white or ink, whichever stands out more on the colour of a cell."""
    shares = np.array(image.cmap(image.norm(value))[:3])
    linear = np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)
    # Relative luminance and contrast as of WCAG 2; ink has 0.016.
    light = float(linear @ (0.2126, 0.7152, 0.0722))
    return "white" if 1.05 / (light + 0.05) > (light + 0.05) / 0.066 else INK


def _size(width: float, count: int) -> Size:
    cell = min((width - _BESIDE) / max(count, 1), 0.8)
    return width, count * cell + _ABOVE
