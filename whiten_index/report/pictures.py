"""A picture of a report: drawn in two widths, as PNG for files and as SVG inside a page."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whiten_index.artifacts.atomic import replacing
from whiten_index.artifacts.files import writing
from whiten_index.report.style import DOTS_PER_INCH, empty_figure

WIDE, NARROW = (9.4, 5.4), (4.1, 4.5)  # inches
Size = tuple[float, float]
Draw = Callable[[Any, bool], None]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """What is drawn, and the words beside it.

    Attributes:
        slug: its file name, without ending.
        title: what it shows.
        caption: how to read it, and what is not drawn.
        alt: what it says, for those who do not see it.
        draw: draws it, wide or narrow: on axes, or with ``panels`` on a figure.
        sizes: width and height in inches, wide and narrow.
        panels: whether ``draw`` lays out axes of its own on the figure it is given.
    """

    slug: str
    title: str
    caption: str
    alt: str
    draw: Draw
    sizes: tuple[Size, Size] = (WIDE, NARROW)
    panels: bool = False

    def render(self, png: Path) -> tuple[bytes, bytes]:
        """Write the wide picture to ``png``, whole or not at all; return wide and narrow as SVG.

        The same picture gives the same bytes.
        """
        wide = self.figure(narrow=False)
        with writing(png), replacing(png) as temporary:
            wide.savefig(temporary, format="png", dpi=DOTS_PER_INCH)
        return self._svg(wide), self._svg(self.figure(narrow=True))

    def embed(self, png: Path) -> dict[str, str]:
        """Write the picture to ``png``; return what a page shows of it, pictures in base64."""
        wide, narrow = (base64.b64encode(svg).decode() for svg in self.render(png))
        said = {"title": self.title, "caption": self.caption, "alt": self.alt}
        return {**said, "wide": wide, "narrow": narrow}

    def figure(self, *, narrow: bool) -> Any:
        """Draw the picture in one of its two widths."""
        figure = empty_figure(*self.sizes[narrow])
        self.draw(figure if self.panels else figure.subplots(), narrow)
        return figure

    def _svg(self, figure: Any) -> bytes:
        from matplotlib import rc_context

        buffer = io.BytesIO()
        with rc_context({"svg.hashsalt": self.slug, "svg.fonttype": "path"}):
            figure.savefig(buffer, format="svg", metadata={"Date": None})
        return buffer.getvalue()


def scaled(height: float) -> tuple[Size, Size]:
    """Return the usual sizes with their heights multiplied by ``height``."""
    return (WIDE[0], WIDE[1] * height), (NARROW[0], NARROW[1] * height)
