"""What the pages show of a reproduced table: figures beside the published ones, as text cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from whiten_index.report.lines import place_text
from whiten_index.report.papers_records import (
    AGGREGATIONS,
    POINTS,
    Cell,
    NotRun,
    PaperFigure,
    Papers,
    PaperTable,
    Record,
    Status,
)
from whiten_index.report.tables import NAME, NUMBER, TEXT, WRAP, Column, Row, Table
from whiten_index.report.words import ABSENT, signed

FAR = 1.0  # hundredths of difference, from which one stands out
_PRINTED = {
    "all": "of all pairs of a set together",
    "mean": "the mean over a set's subsets",
    "wmean": "the mean over a set's subsets weighted by their pairs",
}
_METRICS = {
    "spearman": "Spearman × 100",
    "accuracy": "accuracy (%)",
    "mrr@10": "MRR@10",
    "ms_per_query": "milliseconds a query",
}


@dataclass(frozen=True)
class Line:
    """One line of a row: ours, published or difference.

    Attributes:
        name: what its figures are.
        cells: a figure a dataset.
        far: whether each is a difference that stands out.
    """

    name: str
    cells: tuple[str, ...]
    far: tuple[bool, ...]


@dataclass(frozen=True)
class Group:
    """A row that was computed, in lines.

    Attributes:
        model, setting: as the paper writes them.
        status: what ran.
        stands_in: whether it was another model than the paper's, whose figures do not compare.
        lines: ours, and where the paper has figures theirs and the difference.
    """

    model: str
    setting: str
    status: str
    stands_in: bool
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class View:
    """A table as it is shown.

    Attributes:
        title: of the table.
        note: its metric and aggregation, and how near the published figures are.
        datasets: its columns.
        groups: the rows that were computed.
        remarks: on those rows, such as why a stand-in ran.
        aggregations: those rows in all aggregations.
        more: further figures of those rows.
        commands: name and command of each row that has one.
        unrun: the rows that were not computed, and why.
    """

    title: str
    note: str
    datasets: tuple[str, ...]
    groups: tuple[Group, ...]
    remarks: tuple[str, ...]
    aggregations: Table | None
    more: Table | None
    commands: tuple[tuple[str, str], ...]
    unrun: Table | None


def view(table: PaperTable) -> View:
    """Return what is shown of a table."""
    ran = [row for row in table.rows if row.status is not Status.NOT_RUN]
    return View(
        title=f"{table.table}: {table.title}" if table.title else table.table,
        note=_note(table),
        datasets=table.datasets,
        groups=tuple(_group(row, table) for row in ran),
        remarks=_remarks(ran),
        aggregations=_aggregations(table, ran),
        more=_more(ran, table.decimals),
        commands=tuple(entry for row in table.rows for entry in _commands(row)),
        unrun=_unrun(table),
    )


def name(row: Record) -> str:
    """Return the model and its setting on one line."""
    return f"{row.model}, {row.setting}" if row.setting else row.model


def summary(papers: Papers) -> str:
    """Say how much of the papers was computed, with what, and how near it is."""
    rows = [row for table in papers.tables for row in table.rows]
    count = {status: sum(row.status is status for row in rows) for status in Status}
    parts = [f"{count[Status.RAN]} of {_many(len(rows), 'row')} ran with the papers' own models"]
    in_points = [table for table in papers.tables if table.metric in POINTS]
    if near := _nearness([row for table in in_points for row in table.rows], 2):
        parts[0] += f": {near}"
    if count[Status.STAND_IN]:
        parts.append(
            f"{_many(count[Status.STAND_IN], 'row')} ran with a stand-in, another model: figures "
            "that do not compare with the published ones and reproduce nothing"
        )
    if count[Status.NOT_RUN]:
        parts.append(f"{_many(count[Status.NOT_RUN], 'row')} did not run")
    return ". ".join(parts) + "."


def unrun(entries: Sequence[NotRun]) -> Table | None:
    """Return settings that were not computed, those of one reason together."""
    if not entries:
        return None
    reasons: dict[tuple[str, str], list[str]] = {}
    for each in entries:
        setting = f"{each.model}, {each.setting}" if each.setting else each.model
        reasons.setdefault((each.table, each.why), []).append(setting)
    rows = tuple(Row((table, "; ".join(names), why)) for (table, why), names in reasons.items())
    return Table((Column("table", TEXT), Column("rows", WRAP), Column("why", WRAP)), rows)


def figure_table(figure: PaperFigure) -> Table:
    """Return the figures of a drawing."""
    if figure.series is not None:
        columns = (Column(figure.x_label, TEXT), *(Column(each) for each in figure.series))
        rows = tuple(
            Row((place_text(place), *map(_figure, values)))
            for place, values in zip(
                figure.x, zip(*figure.series.values(), strict=True), strict=True
            )
        )
        return Table(columns, rows)
    return matrix_table(figure.matrix, figure.labels, figure.axis)


def matrix_table(
    matrix: Sequence[Sequence[float | None]], labels: Sequence[str], axis: str
) -> Table:
    """Return the figures of a heat map."""
    rows = (Row((label, *map(_figure, row))) for label, row in zip(labels, matrix, strict=True))
    return Table((Column(axis, NAME), *(Column(label) for label in labels)), tuple(rows))


def _note(table: PaperTable) -> str:
    parts = [_METRICS.get(table.metric, table.metric)]
    if table.aggregation is not None:
        parts[0] += f", {_PRINTED[table.aggregation]} ({table.aggregation}), as this paper prints"
    if near := _nearness(table.rows, table.decimals):
        parts.append(near[0].upper() + near[1:])
    return ". ".join(parts) + "."


def _nearness(rows: Sequence[Record], decimals: int) -> str:
    """Say how far rows that ran are from the published ones, nothing where none compare."""
    found = [
        (abs(difference), row, dataset)
        for row in rows
        if row.status is Status.RAN
        for dataset, cell in row.cells.items()
        if (difference := cell.difference(decimals)) is not None
    ]
    if not found:
        return ""
    mean = math.fsum(size for size, _, _ in found) / len(found)
    largest, row, dataset = max(found, key=lambda each: each[0])
    return (
        f"{_many(len(found), 'figure')} differ from the published by {mean:.{decimals}f} in the "
        f"mean, and by {largest:.{decimals}f} at most ({name(row)}, {dataset})"
    )


def _group(row: Record, table: PaperTable) -> Group:
    stands_in, decimals = row.status is Status.STAND_IN, table.decimals
    lines = [_line("ours", _texts(row, table, lambda cell: cell.ours))]
    published = _texts(row, table, lambda cell: cell.published)
    if set(published) != {ABSENT}:
        lines.append(_line("published", published))
    cells = [row.cells.get(dataset) for dataset in table.datasets]
    apart = [cell.difference(decimals) if cell else None for cell in cells]
    if any(value is not None for value in apart):
        shown = [ABSENT if value is None else signed(value, decimals) for value in apart]
        if stands_in:
            bracketed = [text if text == ABSENT else f"({text})" for text in shown]
            lines.append(_line("not comparable", bracketed))
        else:
            limit = FAR if decimals == 2 else FAR / 100
            far = tuple(value is not None and abs(value) >= limit for value in apart)
            lines.append(Line("difference", tuple(shown), far))
    other = row.aggregation if row.aggregation != table.aggregation else None
    status = _status(row) + (f", aggregation {other}" if other else "")
    return Group(row.model, row.setting, status, stands_in, tuple(lines))


def _commands(row: Record) -> Iterator[tuple[str, str]]:
    """Yield a row's commands: as it ran, and with its own model where another did."""
    unrun = " (not run here)" if row.status is Status.NOT_RUN else ""
    if row.command:
        by = f", with {row.ran_with}" if row.status is Status.STAND_IN and row.ran_with else ""
        yield f"{name(row)}{by}{unrun}", row.command
    if row.command_of_own and row.command_of_own != row.command:
        yield f"{name(row)}, with its own model (not run here)", row.command_of_own


def _more(rows: Sequence[Record], decimals: int) -> Table | None:
    """Return the further figures of rows, one a row of the table."""
    made = [
        Row((name(row), dataset, what.replace("_", " "), _figure(value, decimals)))
        for row in rows
        for dataset, cell in row.cells.items()
        for what, value in cell.more.items()
    ]
    if not made:
        return None
    columns = (Column("row", WRAP), Column("dataset", TEXT), Column("what", TEXT), Column("figure"))
    return Table(columns, tuple(made))


def _line(title: str, cells: Sequence[str]) -> Line:
    return Line(title, tuple(cells), (False,) * len(cells))


def _status(row: Record) -> str:
    text = row.status.value
    model = row.ran_with or row.hub
    parts = [model] if model else []
    if row.layers:
        plural = "s" if len(row.layers) > 1 else ""
        parts.append(f"layer{plural} {'+'.join(map(str, row.layers))}")
    return text + (f": {', '.join(parts)}" if parts else "")


def _remarks(rows: Sequence[Record]) -> tuple[str, ...]:
    """Return what was said of rows, each once with the number of rows it was said of."""
    said: dict[tuple[str, str], int] = {}
    for row in rows:
        notes = dict.fromkeys((*row.notes, *(n for c in row.cells.values() for n in c.notes)))
        whys = [(row.status.value, row.why)] if row.why else []
        for key in (*whys, *(("note", note) for note in notes)):
            said[key] = said.get(key, 0) + 1
    return tuple(f"{status}, {_many(count, 'row')}: {why}" for (status, why), count in said.items())


def _aggregations(table: PaperTable, rows: Sequence[Record]) -> Table | None:
    made = []
    for row in rows:
        for how in AGGREGATIONS:
            if not any(how in cell.by for cell in row.cells.values()):
                continue
            figures = _texts(row, table, _by(how))
            printed = "front" if how == row.aggregation else ""
            model = f" ({row.ran_with})" if row.status is Status.STAND_IN and row.ran_with else ""
            made.append(Row((name(row) + model, how, *figures), printed))
    if not made:
        return None
    named = (Column("row", WRAP), Column("aggregation", TEXT))
    return Table((*named, *(Column(dataset) for dataset in table.datasets)), tuple(made))


def _unrun(table: PaperTable) -> Table | None:
    rows = []
    for row in table.rows:
        if row.status is Status.NOT_RUN:
            published = _texts(row, table, lambda cell: cell.published)
            rows.append(Row((name(row), row.why or "not said", *published)))
    if not rows:
        return None
    columns = [Column("row", WRAP), Column("why", WRAP)]
    columns += [Column(f"{dataset}, published", NUMBER) for dataset in table.datasets]
    return Table(tuple(columns), tuple(rows))


def _texts(row: Record, table: PaperTable, take: Callable[[Cell], float | None]) -> list[str]:
    """Return one figure of a row on every dataset."""
    cells = (row.cells.get(dataset) for dataset in table.datasets)
    return [_figure(take(cell) if cell else None, table.decimals) for cell in cells]


def _by(how: str) -> Callable[[Cell], float | None]:
    return lambda cell: cell.by.get(how)


def _figure(value: float | None, decimals: int = 2) -> str:
    return ABSENT if value is None else f"{value:.{decimals}f}".replace("-", "−")


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
