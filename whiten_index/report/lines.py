"""Line charts of a report: several series over the same places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whiten_index.report.pictures import NARROW, WIDE, Picture
from whiten_index.report.style import BLUE, GREEN, GREY, INK, PURPLE, RED, SMALL, dress

_COLOURS = (BLUE, RED, GREEN, PURPLE, INK)
_MARKERS = ("o", "s", "^", "v", "D", "P", "X")  # of another length: no two series look the same
_DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (1, 1.2)))
_WIDE_RANGE = 8  # last place over the first, from which a scale is logarithmic


@dataclass(frozen=True)
class Lines:
    """Series over x.

    Attributes:
        x: places, numbers or names.
        series: name -> a figure a place, None where there is none.
        x_label, y_label: of the axes.
    """

    x: tuple[float | str, ...]
    series: Mapping[str, Sequence[float | None]]
    x_label: str
    y_label: str

    def alt(self) -> str:
        """Say what the lines show."""
        said = []
        for name, values in self.series.items():
            known = [
                (value, place) for place, value in zip(self.x, values, strict=True)
                if value is not None
            ]  # fmt: skip
            if known:
                high, place = max(known, key=lambda pair: pair[0])
                said.append(f"{name} is highest at {place_text(place)} with {high:.2f}")
        return f"{self.y_label} over {self.x_label}: {'; '.join(said) or 'no figures'}."


def lines_picture(slug: str, title: str, caption: str, shown: Lines) -> Picture:
    """Return the picture of a line chart."""
    rows = -(-len(shown.series) // 3), -(-len(shown.series) // 2)
    sizes = ((WIDE[0], WIDE[1] + 0.2 * rows[0]), (NARROW[0], NARROW[1] - 0.6 + 0.2 * rows[1]))
    return Picture(
        slug=slug, title=title, caption=caption, alt=shown.alt(), sizes=sizes,
        draw=lambda axes, narrow: draw_lines(axes, shown, narrow=narrow),
    )  # fmt: skip


def draw_lines(axes: Any, shown: Lines, *, narrow: bool) -> None:
    """Draw each series in a colour, a marker and a dash of its own, the legend below."""
    numbers = [place for place in shown.x if not isinstance(place, str)]
    log = (
        len(numbers) == len(shown.x) > 1
        and min(numbers) > 0
        and max(numbers) / min(numbers) >= _WIDE_RANGE
    )
    dress(axes, "", shown.x_label + (" (log)" if log else ""), shown.y_label)
    named = len(numbers) < len(shown.x)
    places = range(len(shown.x)) if named else shown.x
    for number, (name, values) in enumerate(shown.series.items()):
        axes.plot(
            places, [np.nan if value is None else value for value in values],
            color=_COLOURS[number % len(_COLOURS)], marker=_MARKERS[number % len(_MARKERS)],
            ls=_DASHES[number % len(_DASHES)], lw=1.8, ms=5, label=name,
        )  # fmt: skip
    if log:
        axes.set_xscale("log", base=2)
    if named or len(shown.x) <= (7 if narrow else 16):
        axes.set_xticks(places, [place_text(place) for place in shown.x])
        axes.minorticks_off()
    if named and narrow and len(shown.x) > 5:
        axes.tick_params(axis="x", labelrotation=90, color=GREY)
    axes.figure.legend(
        loc="outside lower center", ncols=2 if narrow else 3, fontsize=SMALL, frameon=False,
        labelcolor=INK, columnspacing=1.4,
    )  # fmt: skip


def place_text(place: float | str) -> str:
    """Return a place on the x axis as a text."""
    return place if isinstance(place, str) else f"{place:g}"
