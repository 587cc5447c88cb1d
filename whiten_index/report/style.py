"""The look that drawings share: colours that stay apart for colour-blind eyes, sizes, axes."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from whiten_index.errors import ConfigError

BLUE, RED, GREEN, PURPLE = "#0072B2", "#D55E00", "#00835F", "#A3528A"
INK, GREY, PALE = "#222222", "#6E6E6E", "#E4E4E4"
SMALL, TEXT, HEAD, TITLE = 9.5, 10.5, 12, 14  # points
DOTS_PER_INCH = 160


def require_drawing() -> None:
    """Make sure that a plot can be drawn, before the work.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise missing_drawing()


def missing_drawing() -> ConfigError:
    """Return the error that says what to install for a plot."""
    return ConfigError("a plot needs matplotlib; pip install 'whiten-index[plot]'")


def empty_figure(width: float, height: float) -> Any:
    """Return a white figure of ``width`` × ``height`` inches without a window or a global state.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_drawing() from error
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def dress(axes: Any, title: str, x: str, y: str) -> None:
    """Give ``axes`` their title, labels, a pale grid and no frame above and on the right."""
    if title:
        axes.set_title(title, size=HEAD, loc="left", color=INK, pad=10)
    axes.set_xlabel(x, size=TEXT, color=INK)
    axes.set_ylabel(y, size=TEXT, color=INK)
    axes.tick_params(labelsize=SMALL, color=GREY, labelcolor=INK)
    axes.grid(visible=True, color=PALE, lw=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GREY)


def explain(axes: Any, place: str, **options: Any) -> None:
    """Draw the legend of ``axes`` without a frame."""
    axes.legend(
        loc=place, fontsize=SMALL, framealpha=0.9, edgecolor="none", labelcolor=INK, **options
    )
