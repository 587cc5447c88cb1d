"""The papers' published figures: a CSV file of them, read into the rows of their tables."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.papers.data import VARIABLE as DATA_VARIABLE
from whiten_index.errors import ConfigError, CorpusError

VARIABLE = "WHITEN_INDEX_PUBLISHED"
COLUMNS = ("source", "table", "model", "setting", "metric", "dataset", "value")
AVERAGE = "Avg"
_BESIDE_DATA = Path("reference") / "published_scores.csv"
_FORM = f"a CSV file with the columns {', '.join(COLUMNS)}, one published figure a row"


@dataclass(frozen=True)
class Row:
    """A row of a published table.

    Attributes:
        source: the paper.
        table: which of its tables.
        metric: what its figures are.
        model: as the table calls it.
        setting: what the table says of it beside.
        figures: set -> published figure, in the table's order.
    """

    source: str
    table: str
    metric: str
    model: str
    setting: str
    figures: dict[str, float]

    @property
    def names(self) -> list[str]:
        """The sets of the row, without their average."""
        return [name for name in self.figures if name != AVERAGE]


def published_path(given: str | None) -> Path:
    """Return the file of published figures: the one given, named by a variable, or by the data.

    Raises:
        ConfigError: there is none.
    """
    named = given or os.environ.get(VARIABLE)
    if named:
        if not Path(named).is_file():
            raise ConfigError(f"there is no file {named} of published figures; give {_FORM}")
        return Path(named)
    data = os.environ.get(DATA_VARIABLE)
    if data and (beside := Path(data).parent / _BESIDE_DATA).is_file():
        return beside
    raise ConfigError(
        f"no published figures to compare with; give --published, or set {VARIABLE} to {_FORM}"
    )


def read_published(path: Path) -> list[Row]:
    """Read the rows of the tables, in the order in which they begin.

    Raises:
        CorpusError: the file cannot be read, lacks a column, or has a figure that is no number, is
            of nothing or is there twice.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            names = reader.fieldnames or []
            if lacking := [name for name in COLUMNS if name not in names]:
                raise CorpusError(
                    f"{path} has no column {', '.join(lacking)}; published figures are {_FORM}"
                )
            rows: dict[tuple[str, ...], Row] = {}
            for values in reader:
                _add(rows, values, f"{path}, line {reader.line_num}")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise CorpusError(f"{path} cannot be read ({error}); give {_FORM}") from error
    if not rows:
        raise CorpusError(f"{path} holds no figure; give {_FORM}")
    return list(rows.values())


def chosen_rows(rows: Sequence[Row], only: Iterable[str]) -> list[Row]:
    """Return the rows of the tables asked for, each ``SOURCE`` or ``SOURCE:TABLE``; all for none.

    Raises:
        ConfigError: there is no such table.
    """
    wanted = [name.partition(":") for name in only]
    if not wanted:
        return list(rows)
    tables = dict.fromkeys((row.source, row.table) for row in rows)
    for source, colon, table in wanted:
        if not any(source == s and table in ("", t) for s, t in tables):
            known = ", ".join(f"{s}:{t}" for s, t in tables)
            raise ConfigError(f"there is no table {source}{colon}{table}; the tables are {known}")
    return [
        row
        for row in rows
        if any(row.source == source and table in ("", row.table) for source, _, table in wanted)
    ]


def _add(rows: dict[tuple[str, ...], Row], values: dict[str, str], place: str) -> None:
    key = tuple((values[name] or "").strip() for name in COLUMNS[:5])
    dataset, text = (values["dataset"] or "").strip(), (values["value"] or "").strip()
    source, table, model, setting, metric = key
    if not (source and table and model and metric and dataset):
        raise CorpusError(f"{place}: a figure needs source, table, model, metric and dataset")
    try:
        value = float(text)
    except ValueError as error:
        raise CorpusError(f"{place}: {text!r} is no number; write it as 62.97") from error
    row = rows.setdefault(key, Row(source, table, metric, model, setting, {}))
    if dataset in row.figures:
        raise CorpusError(f"{place}: {model} has a figure for {dataset} already; keep one of them")
    row.figures[dataset] = value
