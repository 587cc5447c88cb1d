"""The tables and lists of facts of a report, as text cells."""

from __future__ import annotations

from dataclasses import dataclass

TEXT, NAME, WRAP, NUMBER = "text", "text name", "text wrap", ""
Facts = list[tuple[str, str]]


@dataclass(frozen=True)
class Column:
    """A column's name, and whether it holds text, running text or numbers."""

    name: str
    kind: str = NUMBER


@dataclass(frozen=True)
class Row:
    """The cells of a row, and how it stands out."""

    cells: tuple[str, ...]
    kind: str = ""


@dataclass(frozen=True)
class Table:
    """A table of text."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
