"""Report of a sweep: one HTML page with its charts, and its table as Markdown.

Of a sweep inside a database it answers: at equal bytes, codes of raw vectors, or fewer dims?
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import whiten_index
from whiten_index.artifacts.atomic import require_replaceable
from whiten_index.artifacts.cached_storage import place_of
from whiten_index.artifacts.files import writing
from whiten_index.artifacts.object_store import Tag
from whiten_index.artifacts.storage import Place
from whiten_index.measure.charts import charts_of
from whiten_index.measure.results import (
    ABSENT,
    COLUMNS,
    LATENCY,
    PER_ROW,
    RESULTS,
    Measured,
    Sweep,
    by_reason,
    cell_of,
    command_of,
    fields_of,
    front,
    notes,
    read_sweeps,
    recommend,
    titles,
)
from whiten_index.paths import plain_markdown, without_controls

REPORT, _TABLE = "report.html", "report.md"
_MARK = b"<!-- Made from results.jsonl by whiten-index. -->\n"
_CODE, _STORED = "bytes of code", "bytes of table and index"
# Bytes of a row: of the form that searches read first, and of all that is stored.
_BUDGETS = {_CODE: (64, 128, 256, 512), _STORED: (512, 1024, 2048)}
WAYS = ("raw, the database's code", "fewer dims, plain numbers", "fewer dims and a code")


@dataclass(frozen=True)
class Answer:
    """Best points of at most so many bytes a row, one of each way, and the best of all."""

    budget: str  # such as 64 bytes of code
    ways: tuple[Measured | None, ...]
    best: Measured
    command: str


def answers(sweep: Sweep, measure: str) -> list[Answer]:
    """Return an answer for each number of bytes a row; none of a sweep outside databases.

    ``measure`` is the figure that is compared.
    """
    found = list[Answer]()
    if not sweep.header.get("database"):
        return found
    for what, budget in ((what, number) for what, some in _BUDGETS.items() for number in some):
        near = [p for p in sweep.points if 0 < _bytes(p, what) <= budget]
        ways = tuple(_best([p for p in near if _way(p) == way], measure) for way in WAYS)
        known = [point for point in ways if point is not None]
        if known:
            best = _best(known, measure) or known[0]
            found.append(Answer(f"{budget:,} {what}", ways, best, command_of(sweep, best)))
    return found


def _bytes(point: Measured, what: str) -> float:
    """Return bytes of a row, 0 where they are not known."""
    if what == _CODE:
        return point.number(PER_ROW) or 0.0
    index, table = point.number("bytes.index"), point.number("bytes.table")
    return 0.0 if index is None or table is None else index + table


def _way(point: Measured) -> str:
    if point.text("family") == "raw":
        return WAYS[0]
    return WAYS[2] if point.record.get("coded") else WAYS[1]


def _best(points: Sequence[Measured], measure: str) -> Measured | None:
    """Return the point with the most of a figure, of equal ones the fastest."""
    ranked = [
        (-round(point.number(measure) or 0.0, 4), point.number(LATENCY) or 0.0, place)
        for place, point in enumerate(points)
    ]
    return points[min(ranked)[2]] if ranked else None


def cell(point: Measured | None, measure: str) -> str:
    """Return a point as a cell of the answer: figure with interval, name, bytes and latency."""
    if point is None:
        return ABSENT
    beside = []
    for path, words in ((PER_ROW, "code"), ("bytes.index", "index"), ("bytes.table", "table")):
        if (value := point.number(path)) is not None:
            beside.append(f"{words} {value:,.0f}")
    shown = f"{', '.join(beside)} bytes"
    if (price := point.number("dollars")) is not None:
        shown += f"; ${COLUMNS['dollars'][1](price)} a month per million rows"
    if (slow := point.number(LATENCY)) is not None:
        shown += f"; {COLUMNS[LATENCY][1](slow)}"
    return f"{cell_of(point, measure)}: {point.name}; {shown}"


class _Section:
    """Table and recommendation of one sweep. Kinds of rows: recommended, raw, front or empty."""

    def __init__(self, sweep: Sweep, title: str) -> None:
        """Sort the points by bytes per row, and leave out columns that no point fills."""
        self.sweep, self.title, self.advice = sweep, title, recommend(sweep)
        gain = self.advice.measure
        self.answers = answers(sweep, gain)
        self.measure = COLUMNS[gain][0]

        def place(point: Measured) -> tuple[float, float]:
            size = point.number(PER_ROW)
            return float("inf") if size is None else size, -(point.number(gain) or 0.0)

        self.points = points = sorted(sweep.points, key=place)
        columns = {"setting": [point.name for point in points]}
        for path, (name, _) in COLUMNS.items():
            columns[name] = [cell_of(point, path) for point in points]
            if path == gain:
                columns[f"{name} difference, 95%"] = [point.interval or ABSENT for point in points]
        tuned = [(p.record.get("parameters") or {}).items() for p in points]
        columns["tuned to"] = [" ".join(f"{k} {v}" for k, v in each) or ABSENT for each in tuned]
        columns["device"] = [p.text("device").replace("cpu", "") or ABSENT for p in points]
        columns["factory"] = [p.text("factory") or ABSENT for p in points]
        columns = {name: cells for name, cells in columns.items() if {ABSENT} != set(cells)}
        plain = [point for point in points if not point.candidates]
        best, chosen = front(plain, PER_ROW, gain), self.advice.point
        self.columns, self.rows = list(columns), list(zip(*columns.values(), strict=True))
        self.kinds = [
            "recommended" if p is chosen else "raw" if p.is_raw else "front" * (p in best)
            for p in points
        ]

    def answer_table(self) -> list[list[str]]:
        """Return the heading and the rows of the answer of a sweep inside a database."""
        heads = ["a row, at most", *WAYS]
        gain = self.advice.measure
        rows = [[a.budget, *(cell(way, gain) for way in a.ways)] for a in self.answers]
        return [heads, *rows] if rows else []

    def numbers(self) -> list[tuple[str, str, list[str]]]:
        """Return bytes, quality and latency of the recommended point, and each next to raw."""
        point, raw, found = self.advice.point, self.sweep.raw, list[tuple[str, str, list[str]]]()
        for path in (PER_ROW, self.advice.measure, LATENCY):
            name, text = COLUMNS[path]
            value, other = (None if p is None else p.number(path) for p in (point, raw))
            if point is not None and value is not None:
                beside = [] if other is None else [f"raw {text(other)}"]
                if path == self.advice.measure and point.interval:
                    beside.append(f"difference {point.interval} (95%)")
                found.append((name, text(value), beside))
        return found

    def facts(self) -> dict[str, Any]:
        """Return corpus, queries, machine and versions as far as they are known."""
        dataset, header = self.sweep.dataset, self.sweep.header
        held = ", rows held out" if dataset.get("held_out") else ", judged"
        found = {
            "rows": dataset.get("rows"),
            "dimensions": dataset.get("dim"),
            "encoder": dataset.get("encoder"),
            "queries": f"{dataset['queries']}{held}" if dataset.get("queries") else None,
            **{
                group: ", ".join(f"{name} {value}" for name, value in header[group].items())
                for group in ("machine", "versions")
                if header.get(group)
            },
            "measured": str(header.get("time") or "")[:16].replace("T", " "),
        }
        return {name: fact for name, fact in found.items() if fact}

    def to_markdown(self) -> str:
        """Return heading, recommendation and table in GitHub's Markdown."""
        body = [list(map(plain_markdown, row)) for row in self.rows]
        for cells, kind in zip(body, self.kinds, strict=True):
            if kind == "recommended":
                cells[:] = [f"**{cell}**" for cell in cells]
        table = [self.columns, [":---", *["---:"] * (len(self.columns) - 1)], *body]
        said = [self.advice.reason, *notes(self.sweep)]
        lines = [f"## {plain_markdown(self.title)}", *map(plain_markdown, said)]
        if self.answers:
            heads, *rows = [list(map(plain_markdown, row)) for row in self.answer_table()]
            for each, row in zip(self.answers, rows, strict=True):
                place = 1 + each.ways.index(each.best)
                row[place] = f"**{row[place]}**"
            whole = [heads, [":---"] * len(heads), *rows]
            lines.append("\n".join(f"| {' | '.join(row)} |" for row in whole))
            commands = (f"# a row: at most {each.budget}\n{each.command}" for each in self.answers)
            lines.append("\n".join(("```", *commands, "```")))
        if self.points:
            lines.append("\n".join(f"| {' | '.join(row)} |" for row in table))
        return "\n\n".join(lines)


def require_own_reports(place: Place) -> dict[str, Tag | None]:
    """Refuse a folder with reports that no sweep wrote; return the tags of those there."""
    folder, mirror = place_of(place)
    tags = {name: mirror.latest(folder / name) for name in (_TABLE, REPORT)}
    for name in tags:
        remedy = "move it away, or name another folder"
        require_replaceable(folder / name, _is_ours, "the report of a sweep", remedy=remedy)
    return tags


def _is_ours(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_MARK)) == _MARK


def write_report(place: Place) -> Path:
    """Write ``report.md`` and ``report.html`` next to the results of sweeps.

    They may be several sweeps, finished or not. Return the path of the page, one file that loads
    nothing else; without matplotlib and jinja2, return that of ``report.md``.
    """
    tags = require_own_reports(place)
    folder, mirror = place_of(place)
    mirror.latest(folder / RESULTS)
    with fields_of(folder / RESULTS):
        sweeps = read_sweeps(folder / RESULTS)
        named = titles(sweeps)
        sections = [_Section(sweep, named[sweep.run]) for sweep in sweeps]
        written = {_TABLE: "\n\n".join(each.to_markdown() for each in sections) + "\n"}
        if all(map(find_spec, ("matplotlib", "jinja2"))):
            written[REPORT] = _page(sections)
    for name, text in written.items():
        with writing(folder / name):
            data = _MARK + without_controls(text).encode("utf-8", "replace")
            mirror.replace(folder / name, data, tags[name])
    return folder / next(reversed(written))


def _page(sections: list[_Section]) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("whiten_index", "measure")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    return environment.get_template("sweep_report.html.jinja").render(
        title=f"Sweep of {', '.join(dict.fromkeys(each.sweep.name for each in sections))}",
        sections=sections,
        charts_of=charts_of,
        notes=notes,
        by_reason=by_reason,
        version=whiten_index.__version__,
    )
