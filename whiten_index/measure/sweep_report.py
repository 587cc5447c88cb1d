"""Report of a sweep: one HTML page with its charts, and its table as Markdown."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import whiten_index
from whiten_index.artifacts.cached_storage import place_of
from whiten_index.artifacts.files import writing
from whiten_index.artifacts.object_store import ANY
from whiten_index.artifacts.storage import Place
from whiten_index.measure.charts import charts_of
from whiten_index.measure.database_report import WAYS, answers, cell
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
    fields_of,
    front,
    notes,
    read_sweeps,
    recommend,
    titles,
)
from whiten_index.paths import plain_markdown, without_controls

REPORT = "report.html"


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


def write_report(place: Place) -> Path:
    """Write ``report.md`` and ``report.html`` next to the results of sweeps.

    They may be several sweeps, finished or not. Return the path of the page, one file that loads
    nothing else; without matplotlib and jinja2, return that of ``report.md``.
    """
    folder, mirror = place_of(place)
    mirror.latest(folder / RESULTS)
    with fields_of(folder / RESULTS):
        sweeps = read_sweeps(folder / RESULTS)
        named = titles(sweeps)
        sections = [_Section(sweep, named[sweep.run]) for sweep in sweeps]
        written = {"report.md": "\n\n".join(each.to_markdown() for each in sections) + "\n"}
        if all(map(find_spec, ("matplotlib", "jinja2"))):
            written[REPORT] = _page(sections)
    for name, text in written.items():
        with writing(folder / name):
            data = without_controls(text).encode("utf-8", "replace")
            mirror.replace(folder / name, data, ANY)
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
