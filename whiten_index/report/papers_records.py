"""The results of reproducing the papers' tables, read from JSON and checked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from whiten_index.errors import ArtifactError
from whiten_index.manifest import read_json

AGGREGATIONS = ("all", "mean", "wmean")


class Status(Enum):
    """Whether a row of a table was computed, and with which model."""

    RAN = "ran"
    STAND_IN = "stand-in"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Cell:
    """The figures of a row on one dataset, times 100; None where there is none.

    Attributes:
        published: the paper's.
        ours: by the aggregation that the paper prints.
        by: all, mean, wmean -> ours by each.
    """

    published: float | None
    ours: float | None
    by: Mapping[str, float]

    @property
    def difference(self) -> float | None:
        """Ours less the published one, both as they are shown: a reader's own subtraction."""
        if self.ours is None or self.published is None:
            return None
        return round(round(self.ours, 2) - round(self.published, 2), 2)


@dataclass(frozen=True)
class Record:
    """A row of a table.

    Attributes:
        model, setting: as the paper writes them.
        status: whether it ran, and with its own model.
        why: of a stand-in, or of a row that did not run.
        hub: the model's name on the hub.
        ran_with: the model that ran.
        layers: whose states were averaged.
        command: that gives the row again.
        cells: dataset -> figures.
    """

    model: str
    setting: str
    status: Status
    why: str | None
    hub: str | None
    ran_with: str | None
    layers: tuple[int, ...]
    command: str | None
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
    top = _Part(fields, path, "")
    stand_in = top.part("stand_in")
    return Papers(
        made=(top.part("made") or _Part({}, path, "made")).fields,
        stand_in=None if stand_in is None else stand_in.fields,
        tables=tuple(_table(each) for each in top.parts("tables")),
        figures=tuple(_figure(each) for each in top.parts("figures", optional=True)),
        not_run=tuple(
            NotRun(*(each.text(name) for name in ("source", "table", "model", "setting", "why")))
            for each in top.parts("not_run", optional=True)
        ),
    )


def _table(part: _Part) -> PaperTable:
    datasets = part.texts("datasets")
    aggregation = part.maybe_text("aggregation")
    if aggregation not in (None, *AGGREGATIONS):
        raise part.wrong("aggregation", f"one of {', '.join(AGGREGATIONS)}")
    return PaperTable(
        source=part.text("source"),
        table=part.text("table"),
        title=part.maybe_text("title") or "",
        aggregation=aggregation,
        metric=part.text("metric"),
        datasets=datasets,
        rows=tuple(_record(each, datasets, aggregation) for each in part.parts("rows")),
    )


def _record(part: _Part, datasets: Sequence[str], aggregation: str | None) -> Record:
    known = [status.value for status in Status]
    if part.text("status") not in known:
        raise part.wrong("status", f"one of {', '.join(known)}")
    figures = part.part("figures") or _Part({}, part.path, f"{part.where}.figures")
    if more := [name for name in figures.fields if name not in datasets]:
        raise part.wrong("figures", f"figures of {', '.join(datasets)} alone, not of {more[0]}")
    cells = {}
    for name in figures.fields:
        if (cell := figures.part(name)) is not None:
            cells[name] = _cell(cell, aggregation)
    return Record(
        model=part.text("model"),
        setting=part.maybe_text("setting") or "",
        status=Status(part.text("status")),
        why=part.maybe_text("why"),
        hub=part.maybe_text("hub"),
        ran_with=part.maybe_text("ran_with"),
        layers=tuple(int(value) for value in part.numbers("layers") if value is not None),
        command=part.maybe_text("command"),
        cells=cells,
    )


def _cell(part: _Part, aggregation: str | None) -> Cell:
    found = {name: part.number(name) for name in AGGREGATIONS}
    by = {name: value for name, value in found.items() if value is not None}
    ours = part.number("ours")
    if ours is None and aggregation is not None:
        ours = by.get(aggregation)
    return Cell(part.number("published"), ours, by)


def _figure(part: _Part) -> PaperFigure:
    kind = part.text("kind")
    said = {name: part.text(name) for name in ("id", "source", "title")}
    caption = part.maybe_text("caption") or ""
    if kind == "curves":
        x = part.places("x")
        series = {each.text("name"): each.numbers("y") for each in part.parts("series")}
        if odd := [name for name, y in series.items() if len(y) != len(x)]:
            raise part.wrong("series", f"{len(x)} figures each, as x; {odd[0]} has others")
        labels = {name: part.text(name) for name in ("x_label", "y_label")}
        return PaperFigure(**said, kind=kind, caption=caption, x=x, series=series, **labels)
    if kind == "heat_map":
        labels_of = tuple(map(_place, part.places("labels")))
        matrix = tuple(part.matrix("matrix"))
        if {len(matrix), *map(len, matrix)} != {len(labels_of)}:
            raise part.wrong("matrix", f"{len(labels_of)} rows of {len(labels_of)}, as its labels")
        axis = part.maybe_text("axis") or "layer"
        return PaperFigure(
            **said, kind=kind, caption=caption, matrix=matrix, labels=labels_of, axis=axis
        )
    raise part.wrong("kind", "curves or heat_map")


def _place(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


@dataclass(frozen=True)
class _Part:
    """A JSON object and where it stands in its file, for errors that name the place."""

    fields: Mapping[str, Any]
    path: Path
    where: str

    def wrong(self, name: str, expected: str) -> ArtifactError:
        where = f"{self.where}.{name}" if self.where else name
        found = repr(self.fields[name])[:60] if name in self.fields else "nothing"
        return ArtifactError(
            f"{self.path} is damaged or unfinished: {where} should be {expected}, and is {found}; "
            "run the reproduction again, which takes up what was finished"
        )

    def maybe_text(self, name: str) -> str | None:
        value = self.fields.get(name)
        if value is None or isinstance(value, str):
            return value
        raise self.wrong(name, "a text")

    def text(self, name: str) -> str:
        value = self.maybe_text(name)
        if value is None:
            raise self.wrong(name, "a text")
        return value

    def number(self, name: str) -> float | None:
        return self._number(self.fields.get(name), name)

    def _number(self, value: Any, name: str) -> float | None:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "a number or null")
        # NaN and infinity are no figures.
        return float(value) if math.isfinite(value) else None

    def _list(self, name: str) -> list[Any]:
        value = self.fields.get(name)
        if not isinstance(value, list):
            raise self.wrong(name, "a list")
        return value

    def numbers(self, name: str) -> tuple[float | None, ...]:
        if self.fields.get(name) is None and name == "layers":
            return ()
        return tuple(self._number(value, name) for value in self._list(name))

    def matrix(self, name: str) -> Iterator[tuple[float | None, ...]]:
        for row in self._list(name):
            if not isinstance(row, list):
                raise self.wrong(name, "a list of rows")
            yield tuple(self._number(value, name) for value in row)

    def texts(self, name: str) -> tuple[str, ...]:
        values = self._list(name)
        if not all(isinstance(value, str) for value in values):
            raise self.wrong(name, "a list of texts")
        return tuple(values)

    def places(self, name: str) -> tuple[float | str, ...]:
        values = self._list(name)
        good = [isinstance(v, str | int | float) and not isinstance(v, bool) for v in values]
        if not all(good):
            raise self.wrong(name, "a list of numbers or texts")
        return tuple(values)

    def part(self, name: str) -> _Part | None:
        value = self.fields.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return _Part(value, self.path, f"{self.where}.{name}".strip("."))

    def parts(self, name: str, *, optional: bool = False) -> list[_Part]:
        if optional and self.fields.get(name) is None:
            return []
        values = self._list(name)
        if not all(isinstance(value, dict) for value in values):
            raise self.wrong(name, "a list of objects")
        before = f"{self.where}." if self.where else ""
        return [_Part(each, self.path, f"{before}{name}[{i}]") for i, each in enumerate(values)]
