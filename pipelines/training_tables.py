"""Trainings as tables and curves: means over seeds."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.papers.pictures import draw_curves

Rows = Sequence[Mapping[str, Any]]
_DRAWN = {
    "stsb_dev": ("STS-B dev", "The higher the better."),
    "alignment": ("alignment of close pairs", "The lower the closer they are."),
    "uniformity": ("uniformity", "The lower the more evenly embeddings are spread."),
}


def tables(rows: Rows) -> Iterator[str]:
    """Yield the lines of a table for each table: means and deviations over the seeds."""
    for table in dict.fromkeys(row["table"] for row in rows):
        yield f"## {table}\n"
        yield "| | seeds | loss, first and last | STS-B dev | before | mean of the STS sets |"
        yield "|---|---:|---:|---:|---:|---:|"
        own = [row for row in rows if row["table"] == table]
        for name in dict.fromkeys(row["name"] for row in own):
            same = [row for row in own if row["name"] == name]
            first, last = mean_losses(same)
            means = [statistics.mean(row["sts"].values()) for row in same if row["sts"]]
            yield (
                f"| {name} | {len(same)} | {first:.2g} → {last:.2g} "
                f"| {_spread([row['stsb_dev'] for row in same])} "
                f"| {_spread([row['stsb_dev_before'] for row in same])} | {_spread(means)} |"
            )
        yield ""


def mean_losses(rows: Rows) -> tuple[float, float]:
    """Return the mean loss of the first steps, and of the last, over the seeds.

    The first batch, which is told alone, counts among the first steps.
    """
    first, last = list[float](), list[float]()
    for row in rows:
        losses = [(each["step"], each["loss"]) for each in row["curves"] if "loss" in each]
        one, *more = losses
        until, mean = more[0] if more else one
        first.append((one[1] + (until - 1) * mean) / until)
        last.append(losses[-1][1])
    return statistics.mean(first), statistics.mean(last)


def _spread(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    deviation = f" ± {statistics.stdev(known):.2f}" if len(known) > 1 else ""
    return f"{statistics.mean(known):.2f}{deviation}"


def draw(rows: Rows, folder: Path) -> Iterator[str]:
    """Draw each figure of evaluation by step, for each table; yield the Markdown that shows it."""
    for table in dict.fromkeys(row["table"] for row in rows):
        own = [row for row in rows if row["table"] == table]
        for figure, (label, reading) in _DRAWN.items():
            steps = sorted(
                {each["step"] for row in own for each in row["curves"] if figure in each}
            )
            if not steps:
                continue
            series = {
                name: [_mean_at(own, name, figure, step) for step in steps]
                for name in dict.fromkeys(row["name"] for row in own)
            }
            slug = re.sub(r"[^a-z0-9]+", "-", f"{table} {figure}".lower()).strip("-")
            draw_curves(folder / f"{slug}.png", steps, series, x_label="steps", y_label=label)
            yield f"![{table}: {label}]({folder.name}/{slug}.png)\n"
            yield f"{reading} Means over seeds.\n"


def _mean_at(rows: Rows, name: str, figure: str, step: float) -> float | None:
    found = [
        each[figure]
        for row in rows
        if row["name"] == name
        for each in row["curves"]
        if each["step"] == step and figure in each
    ]
    return statistics.mean(found) if found else None
