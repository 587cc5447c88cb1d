"""Tables of databases: how fast they are filled, what they keep, what they find."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.results_file import read
from whiten_index.measure.results import COLUMNS, Measured, Sweep, recommend
from whiten_index.measure.sweep_report import WAYS, answers, cell

Row = Mapping[str, Any]
# The cheapest setting that finds so much is shown.
_ENOUGH = 0.95


def sinks_files() -> str:
    """Return the table of databases that are a file."""
    return sinks("sinks_files")


def sinks(name: str = "sinks") -> str:
    """Return the table of databases by width, and what is to be known of it."""
    rows = read(name)
    setup = next(row for row in rows if row["figure"] == "setup")
    measured = dict.fromkeys(_key(row) for row in rows if row["figure"] == "push")
    parts = [[row for row in rows if _key(row) == key] for key in measured]
    lines = [
        "| database | rows | k | load, rows/s | of its own best way | push, s (index) "
        "| table, bytes a row | index, bytes a row | recall@10 | ms a query (exact) |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|---:|",
        *map(_line, parts),
    ]
    return "\n".join([*lines, "", _caption(setup, parts)])


def qdrant_folder() -> str:
    """Return the table of how fast a folder of Qdrant's client is filled and searched."""
    lines = [
        "| rows | push, rows/s | `upload_collection`, rows/s | ms a query |",
        "|---:|---:|---:|---:|",
    ]
    for row in read("qdrant_folder"):
        cells = [
            f"{statistics.median(each):,.0f} ({min(each):,.0f}–{max(each):,.0f})"
            for each in (row["rounds"][way] for way in ("push", "upload_collection"))
        ]
        lines.append(f"| {row['rows']:,} | {' | '.join(cells)} | {row['milliseconds']:.2f} |")
    facts = row["client"], row["k"], len(row["rounds"]["push"])
    told = "qdrant-client {}, {} dims, {} rounds by turns: median (least–greatest)."
    return "\n".join([*lines, "", told.format(*facts)])


def database_codes() -> str:
    """Return the tables of the best points of each way at equal bytes, of each database one."""
    found = list[str]()
    points = [row for name in ("SciFact", "Wikinews") for row in read(f"database_codes_{name}")]
    for name, engine in dict.fromkeys((row["set"], row["engine"]) for row in points):
        sweep = Sweep(engine, {"database": {"release": engine}})
        for row in points:
            if (row["set"], row["engine"]) == (name, engine):
                sweep.add({**row, "type": "point"})
        measure = recommend(sweep).measure
        rows = f"{sweep.points[0].record['rows']:,} rows"
        found += [
            f"{name}, {rows}, {engine}: {COLUMNS[measure][0]}",
            "",
            f"| a row, at most | {' | '.join(WAYS)} |",
            "|---:|---|---|---|",
        ]
        for answer in answers(sweep, measure):
            cells = [answer.budget, *(_lines(way, measure, answer.best) for way in answer.ways)]
            found.append(f"| {' | '.join(cells)} |")
        found.append("")
    return "\n".join(found[:-1])


def _lines(way: Measured | None, measure: str, best: Measured) -> str:
    """Return a point as the lines of a cell: figure, form and search, bytes, milliseconds."""
    figure, _, rest = cell(way, measure).partition(": ")
    figure = f"**{figure}**" if way is best else figure
    return "<br>".join([figure, *filter(None, rest.split("; "))])


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("database", "dtype", "width"))


def _one(rows: Sequence[Row], figure: str, **values: Any) -> Row:
    (found,) = (
        row
        for row in rows
        if row["figure"] == figure and all(row[name] == each for name, each in values.items())
    )
    return found


def _line(rows: Sequence[Row]) -> str:
    push = _one(rows, "push")
    wall = _one(rows, "ratio", clock="wall")
    loaded = _one(rows, "rate", path=wall["name"])
    sizes: Mapping[str, int] = next((row["bytes"] for row in rows if row["figure"] == "bytes"), {})
    cells = [
        _name(push),
        f"{push['rows']:,}",
        str(push["k"]),
        f"{loaded['rows_per_second']:,.0f}",
        f"{wall['median']:.2f} ({wall['least']:.2f}–{wall['greatest']:.2f})",
        f"{push['wall']:.1f} ({push['stages']['index']:.1f})",
        *(
            f"{sizes[part] / push['rows']:,.0f}" if part in sizes else "–"
            for part in ("table", "index")
        ),
        *_found(rows),
    ]
    return f"| {' | '.join(cells)} |"


def _name(push: Row) -> str:
    """Return the database with its release and the type of its vectors."""
    engine, type_ = push["engine"].split(", which")[0], push["dtype"]
    own = push["database"].partition(", ")[2]
    return f"{engine}, {own or type_}"


def _found(rows: Sequence[Row]) -> tuple[str, str]:
    """Return recall by the index, with its setting, and the milliseconds of both searches."""
    searches = [row for row in rows if row["figure"] == "search"]
    exact = next(row for row in searches if row["setting"] is None)
    by_index = [row for row in searches if row["setting"] is not None]
    if not by_index:
        return "exact", f"({exact['milliseconds']:.1f})"
    shown = next((row for row in by_index if row["recall"] >= _ENOUGH), by_index[-1])
    setting = ", ".join(f"{name} {value}" for name, value in shown["setting"].items())
    both = f"{shown['milliseconds']:.1f} ({exact['milliseconds']:.1f})"
    return f"{shown['recall']:.3f} ({setting})", both


def _caption(setup: Row, parts: Sequence[Sequence[Row]]) -> str:
    best: dict[str, dict[str, None]] = {}
    for rows in parts:
        wall = _one(rows, "ratio", clock="wall")
        best.setdefault(wall["database"].partition(",")[0], {})[wall["best"]] = None
    ways = "; ".join(f"{name}: {' or '.join(found)}" for name, found in best.items())
    asked = next(row["queries"] for rows in parts for row in rows if row["figure"] == "search")
    builds = dict.fromkeys(
        f"{row['database'].partition(',')[0]} {_told(row['options'])}"
        for rows in parts
        for row in rows
        if row["figure"] == "push" and row["options"]
    )
    toasted = [
        row["bytes"]["of table, TOAST"] / row["bytes"]["table"]
        for rows in parts
        for row in rows
        if row["figure"] == "bytes" and "of table, TOAST" in row["bytes"]
    ]
    lines = [
        f"The rows are ids and texts of {' and '.join(setup['texts'])}, embedded by "
        f"{setup['model']} ({setup['dim']} dims). Client and database run on one machine.",
        "",
        f"- **Load** is `append` of all rows to a table without an index, {setup['rounds']} times. "
        f"The ratio compares its wall time with the fastest way of the database itself ({ways}), "
        "which gets its rows ready-made: median (least–greatest).",
        "- **Push** is everything from the store of embeddings to the swap, with "
        f"{', '.join(builds)}.",
        f"- **Recall** is measured against exact search at the same width, with {asked} queries "
        "that are in no table. It is that of the cheapest setting tried that finds "
        f"{_ENOUGH:.0%}, or of the last one. Latency is the median of single queries.",
    ]
    if toasted:
        lines.append(
            "- **Bytes** of a PostgreSQL table include TOAST, where it stores rows above about "
            f"2 kB: at most {max(toasted):.1%} here."
        )
    return "\n".join(lines)


def _told(options: Mapping[str, str]) -> str:
    return " ".join(f"`{name}={value}`" for name, value in options.items())
