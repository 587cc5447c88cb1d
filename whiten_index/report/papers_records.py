"""The results of reproducing the papers' tables, read from JSON and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from whiten_index.artifacts.manifest import read_json
from whiten_index.report.json_part import JsonPart

AGGREGATIONS = ("all", "mean", "wmean")
# Metrics whose figures are hundredths of the whole; those of others are shown to four decimals.
POINTS = ("spearman", "accuracy")


class Status(Enum):
    """Whether a row of a table was computed, and with which model."""

    RAN = "ran"
    STAND_IN = "stand-in"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Cell:
    """The figures of a row on one dataset; None where there is none.

    Attributes:
        published: the paper's.
        ours: by the aggregation that the paper prints.
        by: all, mean, wmean -> ours by each.
        more: name -> a further figure of ours, such as f1.
        notes: on these figures.
    """

    published: float | None
    ours: float | None
    by: Mapping[str, float]
    more: Mapping[str, float]
    notes: tuple[str, ...]

    def difference(self, decimals: int) -> float | None:
        """Return ours less the published one, both as they are shown: a reader's subtraction."""
        if self.ours is None or self.published is None:
            return None
        return round(round(self.ours, decimals) - round(self.published, decimals), decimals)


@dataclass(frozen=True)
class Record:
    """A row of a table.

    Attributes:
        model, setting: as the paper writes them.
        status: whether it ran, and with its own model.
        why: of a stand-in, or of a row that did not run.
        notes: what a reader must know beside.
        aggregation: of this row's figures, which may be another than its table's.
        hub: the model's name on the hub.
        ran_with: the model that ran.
        layers: whose states were averaged.
        command: that gives the row again.
        command_of_own: that with the paper's own model, where another ran.
        cells: dataset -> figures.
    """

    model: str
    setting: str
    status: Status
    why: str | None
    notes: tuple[str, ...]
    aggregation: str | None
    hub: str | None
    ran_with: str | None
    layers: tuple[int, ...]
    command: str | None
    command_of_own: str | None
    cells: Mapping[str, Cell]


@dataclass(frozen=True)
class PaperTable:
    """A table of a paper, with our figures."""

    source: str
    table: str
    title: str
    aggregation: str | None
    metric: str
    datasets: tuple[str, ...]
    rows: tuple[Record, ...]

    @property
    def decimals(self) -> int:
        """How many decimals its figures are shown with."""
        return 2 if self.metric in POINTS else 4


@dataclass(frozen=True)
class PaperFigure:
    """A drawing: ``curves`` (x, series, labels) or ``heat_map`` (matrix, labels, axis)."""

    id: str
    source: str
    title: str
    kind: str
    caption: str
    x: tuple[float | str, ...] = ()
    series: Mapping[str, tuple[float | None, ...]] | None = None
    x_label: str = ""
    y_label: str = ""
    matrix: tuple[tuple[float | None, ...], ...] = ()
    labels: tuple[str, ...] = ()
    axis: str = ""


@dataclass(frozen=True)
class NotRun:
    """A setting of a paper that was not computed, and why."""

    source: str
    table: str
    model: str
    setting: str
    why: str


@dataclass(frozen=True)
class Papers:
    """All of a results file."""

    made: Mapping[str, Any]
    stand_in: Mapping[str, Any] | None
    tables: tuple[PaperTable, ...]
    figures: tuple[PaperFigure, ...]
    not_run: tuple[NotRun, ...]


def read_papers(path: Path) -> Papers:
    """Read the results of reproducing the papers.

    Raises:
        ArtifactError: the file is missing, is no JSON, or lacks a part; the message names it.
    """
    fields = read_json(path, what="a reproduction of the papers")
    top = JsonPart(fields, path, "", "run the reproduction again, or restore the file from a copy")
    stand_in = top.part("stand_in")
    return Papers(
        made=made.fields if (made := top.part("made")) else {},
        stand_in=None if stand_in is None else stand_in.fields,
        tables=tuple(_table(each) for each in top.parts("tables")),
        figures=tuple(_figure(each) for each in top.parts("figures", optional=True)),
        not_run=tuple(
            NotRun(*(each.text(name) for name in ("source", "table", "model", "setting", "why")))
            for each in top.parts("not_run", optional=True)
        ),
    )


def _table(part: JsonPart) -> PaperTable:
    datasets, aggregation = part.texts("datasets"), _aggregation(part)
    return PaperTable(
        source=part.text("source"),
        table=part.text("table"),
        title=part.maybe_text("title") or "",
        aggregation=aggregation,
        metric=part.text("metric"),
        datasets=datasets,
        rows=tuple(_record(each, datasets, aggregation) for each in part.parts("rows")),
    )


def _aggregation(part: JsonPart) -> str | None:
    aggregation = part.maybe_text("aggregation")
    if aggregation not in (None, *AGGREGATIONS):
        raise part.wrong("aggregation", f"one of {', '.join(AGGREGATIONS)}")
    return aggregation


def _record(part: JsonPart, datasets: Sequence[str], aggregation: str | None) -> Record:
    known = [status.value for status in Status]
    if part.text("status") not in known:
        raise part.wrong("status", f"one of {', '.join(known)}")
    aggregation = _aggregation(part) or aggregation
    figures = part.part("figures") or replace(part, fields={})
    if more := [name for name in figures.fields if name not in datasets]:
        raise part.wrong("figures", f"figures of {', '.join(datasets)} alone, not of {more[0]}")
    found = {name: figures.part(name) for name in figures.fields}
    return Record(
        model=part.text("model"),
        setting=part.maybe_text("setting") or "",
        status=Status(part.text("status")),
        why=part.maybe_text("why"),
        notes=part.texts("notes", optional=True),
        aggregation=aggregation,
        hub=part.maybe_text("hub"),
        ran_with=part.maybe_text("ran_with"),
        layers=tuple(int(v) for v in part.numbers("layers", optional=True) if v is not None),
        command=part.maybe_text("command"),
        command_of_own=part.maybe_text("command_of_own"),
        cells={name: _cell(cell, aggregation) for name, cell in found.items() if cell is not None},
    )


def _cell(part: JsonPart, aggregation: str | None) -> Cell:
    known = (*AGGREGATIONS, "published", "ours", "difference", "notes")
    numbers = {name: part.number(name) for name in part.fields if name != "notes"}
    present = {name: value for name, value in numbers.items() if value is not None}
    ours = present.get("ours")
    if ours is None and aggregation is not None:
        ours = present.get(aggregation)
    return Cell(
        published=present.get("published"),
        ours=ours,
        by={name: present[name] for name in AGGREGATIONS if name in present},
        more={name: value for name, value in present.items() if name not in known},
        notes=part.texts("notes", optional=True),
    )


def _figure(part: JsonPart) -> PaperFigure:
    made = PaperFigure(
        id=part.text("id"),
        source=part.text("source"),
        title=part.text("title"),
        kind=part.text("kind"),
        caption=part.maybe_text("caption") or "",
    )
    if made.kind == "curves":
        return _curves(part, made)
    if made.kind == "heat_map":
        return _heat_map(part, made)
    raise part.wrong("kind", "curves or heat_map")


def _curves(part: JsonPart, made: PaperFigure) -> PaperFigure:
    x = part.places("x")
    named = [(each.text("name"), each.numbers("y")) for each in part.parts("series")]
    series = dict(named)
    if odd := [name for name, y in named if len(y) != len(x)]:
        raise part.wrong("series", f"{len(x)} figures each, as x; {odd[0]} has others")
    if len(series) < len(named) or not named:
        raise part.wrong("series", "one or more, each of another name")
    x_label, y_label = part.text("x_label"), part.text("y_label")
    return replace(made, x=x, series=series, x_label=x_label, y_label=y_label)


def _heat_map(part: JsonPart, made: PaperFigure) -> PaperFigure:
    labels = tuple(map(_place, part.places("labels")))
    matrix = tuple(part.matrix("matrix"))
    if not labels or {len(matrix), *map(len, matrix)} != {len(labels)}:
        raise part.wrong("matrix", f"{len(labels)} rows of {len(labels)}, as its labels")
    axis = part.maybe_text("axis") or "layer"
    return replace(made, matrix=matrix, labels=labels, axis=axis)


def _place(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"
