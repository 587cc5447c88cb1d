"""``papers.md`` and ``figures/*.png``: our figures next to the published ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.papers.pictures import draw_curves, draw_heat_maps
from pipelines.papers.tables import NOT_RUN, RAN, STAND_IN
from whiten_index.artifacts.atomic import replace_file
from whiten_index.artifacts.files import writing
from whiten_index.evaluation.metrics import AGGREGATIONS

TEXT, FIGURES = "papers.md", "figures"
_ABSENT = "–"
_PRINTED = {
    "all": "of all pairs of a set together",
    "mean": "the mean over a set's subsets",
    "wmean": "the mean over a set's subsets weighted by their pairs",
}
# Metrics in hundredths; figures of others are shares of one.
_HUNDREDTHS = ("spearman", "accuracy")
_OF_A_CELL = ("published", "ours", "difference", "notes", *AGGREGATIONS)


def write_papers(results: Mapping[str, Any], folder: Path) -> Path:
    """Write the tables as Markdown and the drawings as PNG; return the path of the Markdown.

    Args:
        results: the content of ``papers.json``.
        folder: made if it does not exist.

    Raises:
        StorageError: the folder cannot be written.
    """
    for figure in results["figures"]:
        _draw(figure, folder / FIGURES / f"{figure['id']}.png")
    path = folder / TEXT
    with writing(path):
        replace_file(path, ("\n\n".join(_page(results)) + "\n").encode("utf-8", "replace"))
    return path


def _draw(figure: Mapping[str, Any], png: Path) -> None:
    if figure["kind"] == "heat_map":
        draw_heat_maps(png, {"": figure["matrix"]}, figure["labels"])
        return
    series = {each["name"]: each["y"] for each in figure["series"]}
    draw_curves(png, figure["x"], series, x_label=figure["x_label"], y_label=figure["y_label"])


def _page(results: Mapping[str, Any]) -> Iterator[str]:
    tables = results["tables"]
    yield "# The papers' tables, run again"
    counts = [row["status"] for table in tables for row in table["rows"]]
    yield (
        f"{counts.count(RAN)} of {len(counts)} rows ran with the papers' own models, "
        f"{counts.count(STAND_IN)} with a stand-in, another model, whose figures do not compare "
        f"with the published ones, and {counts.count(NOT_RUN)} did not run."
    )
    sources = dict.fromkeys(each["source"] for each in (*tables, *results["figures"]))
    for source in sources:
        yield f"## {plain(source)}"
        for table in tables:
            if table["source"] == source:
                yield from _table(table)
        for figure in results["figures"]:
            if figure["source"] == source:
                yield f"### {plain(figure['title'])}"
                yield f"![{plain(figure['title'])}]({FIGURES}/{figure['id']}.png)"
                yield plain(figure["caption"])
    undrawn = [each for each in results["not_run"] if each["table"] == "figures"]
    if undrawn:
        yield "## Not drawn"
        yield "\n".join(f"- {plain(each['setting'])}: {plain(each['why'])}" for each in undrawn)


def _table(table: Mapping[str, Any]) -> Iterator[str]:
    yield f"### {plain(table['table'])}: {plain(table['title'])}"
    aggregation = table["aggregation"]
    of = f", {_PRINTED[aggregation]} ({aggregation})" if aggregation else ""
    yield f"{plain(table['metric'])}{of}."
    decimals = 2 if table["metric"] in _HUNDREDTHS else 4
    ran = [row for row in table["rows"] if row["status"] != NOT_RUN]
    lines = [line for row in ran for line in _lines(row, table["datasets"], decimals)]
    if lines:
        yield markdown_table(["row", "status", "", *table["datasets"]], lines)
    remarks = dict.fromkeys(remark for row in ran for remark in _remarks(row))
    if remarks:
        yield "\n".join(f"- {plain(remark)}" for remark in remarks)
    unrun = [[_name(row), row["why"]] for row in table["rows"] if row["status"] == NOT_RUN]
    if unrun:
        yield _folded(f"Not run: {len(unrun)}", markdown_table(["row", "why"], unrun))
    every = [line for row in ran for line in _aggregations(row, table["datasets"])]
    if every:
        head = ["row", "aggregation", *table["datasets"]]
        yield _folded("All aggregations", markdown_table(head, every))
    commands = [f"# {_name(row)}\n{row['command']}" for row in table["rows"] if row["command"]]
    if commands:
        yield _folded("The commands", "\n".join(["```sh", *commands, "```"]))


def _lines(
    row: Mapping[str, Any], datasets: Sequence[str], decimals: int
) -> Iterator[Sequence[str]]:
    """Yield the lines of a row: our figures, the published ones, and how far they are apart."""
    cells = [row["figures"].get(name, {}) for name in datasets]
    status = row["status"] + (f": {row['ran_with']}" if row["ran_with"] else "")
    apart = "not comparable" if row["status"] == STAND_IN else "difference"
    start = [_name(row), status]
    for name, key in (("ours", "ours"), ("published", "published"), (apart, "difference")):
        sign = "+" if key == "difference" else ""
        yield [*start, name, *(_figure(cell.get(key), decimals, sign) for cell in cells)]
        start = ["", ""]


def _remarks(row: Mapping[str, Any]) -> Iterator[str]:
    if row["why"]:
        yield f"{row['status']}: {row['why']}"
    yield from row["notes"]
    for name, cell in row["figures"].items():
        yield from (f"{_name(row)}, {name}: {note}" for note in cell.get("notes", ()))
        for what, value in cell.items():
            if what not in _OF_A_CELL:
                yield f"{_name(row)}, {name}: {what.replace('_', ' ')} {_figure(value)}"


def _aggregations(row: Mapping[str, Any], datasets: Sequence[str]) -> Iterator[Sequence[str]]:
    cells = [row["figures"].get(name, {}) for name in datasets]
    for how in AGGREGATIONS:
        if any(how in cell for cell in cells):
            yield [_name(row), how, *(_figure(cell.get(how)) for cell in cells)]


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['model']}, {row['setting']}" if row["setting"] else str(row["model"])


def _figure(value: float | None, decimals: int = 2, sign: str = "") -> str:
    return _ABSENT if value is None else f"{value:{sign}.{decimals}f}"


def plain(text: str) -> str:
    """Return text of one line in which nothing is Markdown's or a table's."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>#|~$&" else c for c in " ".join(text.split()))


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of plain texts."""
    lines = [list(map(plain, head)), ["---"] * len(head), *(list(map(plain, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _folded(summary: str, content: str) -> str:
    return f"<details>\n<summary>{summary}</summary>\n\n{content}\n\n</details>"
