"""The papers' tables with our figures beside the published ones: an HTML page and Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from whiten_index.artifacts.atomic import replace_file
from whiten_index.artifacts.files import writing
from whiten_index.report import markdown, papers_tables
from whiten_index.report.heat_maps import HeatMap, heat_map_picture
from whiten_index.report.lines import Lines, lines_picture
from whiten_index.report.page import FIGURES, check_report
from whiten_index.report.papers_records import NotRun, PaperFigure, Papers, PaperTable, read_papers
from whiten_index.report.pictures import Picture
from whiten_index.report.tables import Facts, Table
from whiten_index.report.templates import fill

PAGE, TEXT = "papers.html", "papers.md"
_TITLE = "The papers' tables, run again"
_SUBTITLE = "Each row by one command, our figures beside the published ones."


@dataclass(frozen=True)
class _Drawing:
    """A drawing of a paper: its picture as the page embeds it, its file, and its figures."""

    shown: dict[str, str]
    file: str
    table: Table


@dataclass(frozen=True)
class _Section:
    """What belongs to one source."""

    slug: str
    title: str
    views: tuple[papers_tables.View, ...]
    drawings: tuple[_Drawing, ...]
    unrun: Table | None


def write_papers(results: Path | str, folder: Path | str) -> Path:
    """Write ``papers.html``, ``papers.md`` and ``figures/*.png`` into ``folder``.

    Args:
        results: JSON that reproducing the papers wrote.
        folder: made where it is missing.

    Returns:
        The path of the page, one file that loads nothing else.

    Raises:
        ArtifactError: the results are missing, damaged or unfinished.
        ConfigError: matplotlib or jinja2 is not installed.
        StorageError: the folder cannot be written.
    """
    results, folder = Path(results), Path(folder)
    check_report()
    papers = read_papers(results)
    pictures = folder / FIGURES
    with writing(pictures):
        pictures.mkdir(parents=True, exist_ok=True)
    sections = _sections(papers, pictures)
    facts, summary = _facts(papers), papers_tables.summary(papers)
    page = fill(
        "papers.html.jinja", title=_TITLE, subtitle=_SUBTITLE, summary=summary, facts=facts,
        sections=sections, source=results.name, far=f"{papers_tables.FAR:g}",
    )  # fmt: skip
    text = "\n\n".join(_markdown(sections, facts, summary)) + "\n"
    for path, content in ((folder / TEXT, text), (folder / PAGE, page)):
        with writing(path):
            replace_file(path, content.encode("utf-8", "replace"))
    return folder / PAGE


def picture_of(figure: PaperFigure, slug: str) -> Picture:
    """Return the picture of a paper's drawing."""
    if figure.series is not None:
        lines = Lines(figure.x, figure.series, figure.x_label, figure.y_label)
        return lines_picture(slug, figure.title, figure.caption, lines)
    matrix = np.array(figure.matrix, np.float64).reshape(len(figure.labels), -1)
    shown = HeatMap(matrix, figure.labels, figure.axis)
    caption = f"{figure.caption.rstrip()} The best cell is framed.".strip()
    return heat_map_picture(slug, figure.title, caption, shown)


def _sections(papers: Papers, pictures: Path) -> list[_Section]:
    of_each: tuple[Sequence[PaperTable | PaperFigure | NotRun], ...]
    of_each = (papers.tables, papers.figures, papers.not_run)
    sources = dict.fromkeys(each.source for group in of_each for each in group)
    slugs = _slugs([figure.id for figure in papers.figures])
    drawings: dict[str, list[_Drawing]] = {source: [] for source in sources}
    for figure, slug in zip(papers.figures, slugs, strict=True):
        shown = picture_of(figure, slug).embed(pictures / f"{slug}.png")
        drawing = _Drawing(shown, f"{FIGURES}/{slug}.png", papers_tables.figure_table(figure))
        drawings[figure.source].append(drawing)
    return [
        _Section(
            slug=f"source-{number}",
            title=source,
            views=tuple(papers_tables.view(t) for t in papers.tables if t.source == source),
            drawings=tuple(drawings[source]),
            unrun=papers_tables.unrun([each for each in papers.not_run if each.source == source]),
        )
        for number, source in enumerate(sources, 1)
    ]


def _slugs(ids: Sequence[str]) -> list[str]:
    """Return file names of drawings, each another."""
    made: list[str] = []
    for each in ids:
        plain = re.sub(r"[^a-z0-9]+", "-", each.lower()).strip("-")[:60] or "figure"
        slug, number = plain, 1
        while slug in made:
            number += 1
            slug = f"{plain}-{number}"
        made.append(slug)
    return made


def _facts(papers: Papers) -> Facts:
    """Return when and with what it was made, as far as it is said."""
    made, stand_in = papers.made, papers.stand_in or {}
    model = str(stand_in.get("model") or "")
    shape = [f"{stand_in[name]} {unit}" for name, unit in (("layers", "layers"), ("dim", "dims"))
             if stand_in.get(name)]  # fmt: skip
    pairs = (
        ("made", str(made.get("date") or "")[:16].replace("T", " ")),
        ("versions", _pairs(made.get("versions"))),
        ("seconds", _pairs(made.get("seconds"))),
        ("stand-in", ", ".join([model, *shape]) if model else ""),
    )
    return [(name, value) for name, value in pairs if value]


def _pairs(value: Any) -> str:
    """Return names and values on one line."""
    if not isinstance(value, dict):
        return "" if value is None else str(value)
    shown = {name: f"{v:,.0f}" if isinstance(v, float) else v for name, v in value.items()}
    return ", ".join(f"{name} {each}" for name, each in shown.items())


def _markdown(sections: Sequence[_Section], facts: Facts, summary: str) -> Iterator[str]:
    yield f"# {_TITLE}"
    yield markdown.plain(summary)
    if facts:
        yield "\n".join(f"- {markdown.plain(name)}: {markdown.plain(v)}" for name, v in facts)
    for section in sections:
        yield f"## {markdown.plain(section.title)}"
        for view in section.views:
            yield from _view_markdown(view)
        for drawing in section.drawings:
            yield f"### {markdown.plain(drawing.shown['title'])}"
            yield markdown.plain(drawing.shown["caption"])
            yield f"![{markdown.plain(drawing.shown['alt'])}]({drawing.file})"
            yield markdown.folded("The figures", markdown.of_table(drawing.table))
        if section.unrun is not None:
            yield "### Not run"
            yield markdown.of_table(section.unrun)


def _view_markdown(view: papers_tables.View) -> Iterator[str]:
    yield f"### {markdown.plain(view.title)}"
    yield markdown.plain(view.note)
    rows = []
    for group in view.groups:
        start = [f"**{markdown.plain(group.model)}** {markdown.plain(group.setting)}".strip(),
                 markdown.plain(group.status)]  # fmt: skip
        for line in group.lines:
            cells = [
                f"**{markdown.plain(cell)}**" if far else markdown.plain(cell)
                for cell, far in zip(line.cells, line.far, strict=True)
            ]
            rows.append([*start, line.name, *cells])
            start = ["", ""]
    if rows:
        head = ["row", "status", "", *view.datasets]
        yield markdown.table(head, rows, [False] * 3 + [True] * len(view.datasets))
    if view.remarks:
        remarks = "\n".join(f"- {markdown.plain(remark)}" for remark in view.remarks)
        yield markdown.folded(f"Remarks: {len(view.remarks)}", remarks)
    if view.aggregations is not None:
        yield markdown.folded("All three aggregations", markdown.of_table(view.aggregations))
    if view.more is not None:
        yield markdown.folded("Further figures", markdown.of_table(view.more))
    if view.commands:
        blocks = (f"{markdown.plain(name)}\n\n{markdown.code(c)}" for name, c in view.commands)
        yield markdown.folded("The commands", "\n\n".join(blocks))
    if view.unrun is not None:
        count = len(view.unrun.rows)
        yield markdown.folded(f"Not run: {count}", markdown.of_table(view.unrun))
