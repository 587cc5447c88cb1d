"""Labels of points that keep clear of each other, of the points and of the line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.report.style import INK, SMALL

Points = Sequence[tuple[float, float]]

_ASIDE = 9.0  # points of type between a mark and its label
_CLEAR = 3.0  # pixels that a label keeps from marks and lines
# Steps aside, to the right and up in units of _ASIDE; far ones get a thin line to their point.
_PLACES = (
    (0, 1), (1, 0.6), (-1, 0.6), (1, -0.6), (0, -1), (-1, -0.6), (1, 0), (-1, 0),
    (2.5, -1.5), (-2.5, 1.8), (1.5, -3.2), (-1.5, 3.2), (0, 3.2), (0, -3.2), (2.5, -5), (-2.5, 5),
)  # fmt: skip
Pixels = NDArray[np.float64]


@dataclass(frozen=True)
class Label:
    """A label at a point of the data, in spellings from the longest to the shortest."""

    x: float
    y: float
    texts: tuple[str, ...]


def place_labels(
    axes: Any,
    labels: Sequence[Label],
    marks: Points,
    line: Points,
) -> None:
    """Write each label where it covers least, in the longest spelling that covers no other label.

    A label for which there is no place at all is left out: what it names stands in a table too.

    Args:
        axes: with its limits, legend and other texts set; they stay.
        labels: in order of importance.
        marks: points that labels should not cover.
        line: corners of a line that labels should not cover.
    """
    if not labels:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(axes.figure)
    canvas.draw()  # the layout is final from here on
    renderer = canvas.get_renderer()
    spots = _spots(axes, marks, line)
    at = axes.transData.transform([(label.x, label.y) for label in labels])
    inside = np.add(axes.get_window_extent(renderer).extents, [0, 0, 12, 4])
    taken = [np.array(text.get_window_extent(renderer).extents) for text in axes.texts]
    for place, label in enumerate(labels):
        for text in label.texts:
            box_of = _boxes(axes, text, at[place], renderer)
            found = _best(box_of, spots, taken, inside, at, place)
            if found is not None:
                taken.append(box_of[found])
                _write(axes, label, text, _PLACES[found])
                break


def _spots(axes: Any, marks: Points, line: Points) -> Pixels:
    """Return the pixels to keep clear of: marks, and the line every few pixels."""
    pixels = [axes.transData.transform(mark) for mark in marks]
    corners = [axes.transData.transform(corner) for corner in line]
    for start, end in pairwise(corners):
        pixels += list(np.linspace(start, end, max(2, int(np.hypot(*(end - start)) / 6))))
    return np.array(pixels).reshape(-1, 2)


def _boxes(axes: Any, text: str, at: Pixels, renderer: Any) -> list[Pixels]:
    """Return where ``text`` would stand at each of the places: left, bottom, right, top."""
    sample = axes.annotate(text, (0, 0), xycoords="figure pixels", size=SMALL)
    extent = sample.get_window_extent(renderer)
    sample.remove()
    unit = _ASIDE * axes.figure.dpi / 72
    boxes = []
    for right, up in _PLACES:
        x = at[0] + right * unit - extent.width * (1 - np.sign(right)) / 2
        y = at[1] + up * unit - extent.height * (1 - np.sign(up)) / 2
        boxes.append(np.array([x, y, x + extent.width, y + extent.height]))
    return boxes


def _best(
    boxes: list[Pixels], spots: Pixels, taken: list[Pixels], inside: Pixels, at: Pixels, own: int
) -> int | None:
    """Return the number of the box that covers least and meets no other label, or None."""
    costs = {}
    for number, box in enumerate(boxes):
        within = (box[:2] >= inside[:2]).all() and (box[2:] <= inside[2:]).all()
        if within and not any(_meet(box, other) for other in taken):
            # A label nearer to another point than to its own would name the wrong one.
            away = np.hypot(*(np.clip(at, box[:2], box[2:]) - at).T)
            costs[number] = _covered(box, spots) + 0.3 * number + 4.0 * (away.argmin() != own)
    return min(costs, key=costs.__getitem__, default=None)


def _meet(box: Pixels, other: Pixels) -> bool:
    return bool((box[:2] < other[2:]).all() and (other[:2] < box[2:]).all())


def _covered(box: Pixels, spots: Pixels) -> float:
    hit = (spots > box[:2] - _CLEAR) & (spots < box[2:] + _CLEAR)
    return float(hit.all(axis=1).sum())


def _write(axes: Any, label: Label, text: str, place: tuple[float, float]) -> None:
    right, up = place
    far = max(abs(right), abs(up)) > 1
    axes.annotate(
        text, (label.x, label.y), (right * _ASIDE, up * _ASIDE), textcoords="offset points",
        ha=("right", "center", "left")[int(np.sign(right)) + 1],
        va=("top", "center", "bottom")[int(np.sign(up)) + 1], size=SMALL, color=INK, zorder=6,
        arrowprops={"arrowstyle": "-", "color": INK, "lw": 0.6, "shrinkA": 0, "shrinkB": 6}
        if far else None,
        bbox={"boxstyle": "square,pad=0.1", "fc": "white", "lw": 0, "alpha": 0.65},
    )  # fmt: skip
