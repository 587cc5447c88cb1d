"""The report of sweeps: one HTML file that needs nothing else, and its charts as PNG files."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from whiten_index.artifacts.atomic import replace_file
from whiten_index.artifacts.files import writing
from whiten_index.errors import ConfigError
from whiten_index.report import across, tables, words
from whiten_index.report.advice import Pick, advise
from whiten_index.report.charts import Chart, charts_of
from whiten_index.report.compare import measure_of
from whiten_index.report.records import Sweep, read_results
from whiten_index.report.templates import fill

REPORT = "report.html"
FIGURES = "figures"


def check_report() -> None:
    """Make sure that a report can be made, before the work.

    Raises:
        ConfigError: matplotlib or jinja2 is not installed.
    """
    missing = [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"a report needs {' and '.join(missing)}; pip install 'whiten-index[plot]'"
        )


def write_report(results: Path | str, folder: Path | str) -> Path:
    """Write ``report.html`` and ``figures/*.png`` of a sweep's results into ``folder``.

    Args:
        results: JSON lines, as a sweep writes them; may hold several sweeps, finished or not.
        folder: made where it is missing.

    Returns:
        The path of the page, one file that loads nothing else.

    Raises:
        ArtifactError: the results are missing, damaged or hold no sweep.
        ConfigError: matplotlib or jinja2 is not installed.
        StorageError: the folder cannot be written.
    """
    results, folder = Path(results), Path(folder)
    check_report()
    sweeps = read_results(results)
    pictures = folder / FIGURES
    with writing(pictures):
        pictures.mkdir(parents=True, exist_ok=True)
    slugs = _slugs(sweeps)
    sections = [
        {
            **_section(sweep, slug),
            "title": across.title(sweep, sweeps),
            "charts": [
                _chart(chart, sweep, pictures / f"{slug}-{chart.slug}.png")
                for chart in charts_of(sweep)
            ],
        }
        for sweep, slug in zip(sweeps, slugs, strict=True)
    ]
    path = folder / REPORT
    page = _render(sweeps, sections, results.name)
    with writing(path):
        replace_file(path, page.encode("utf-8", "replace"))
    return path


def _render(sweeps: list[Sweep], sections: list[dict[str, Any]], source: str) -> str:
    names = list(dict.fromkeys(sweep.name for sweep in sweeps))
    points = sum(len(sweep.points) for sweep in sweeps)
    sets = f" on {len(sweeps)} sweeps" if len(sweeps) > 1 else ""
    return fill(
        "page.html.jinja",
        title=f"Sweep of {', '.join(names)}",
        subtitle="Transforms, widths, codecs and indexes compared by quality, bytes and latency: "
        f"{points:,} points{sets}.",
        sections=sections,
        across=across.compare(sweeps),
        source=source,
    )


def _section(sweep: Sweep, slug: str) -> dict[str, Any]:
    advice = advise(sweep)
    return {
        "slug": slug,
        "facts": tables.facts(sweep),
        "advice": advice,
        "cards": [_card(sweep, pick) for pick in advice.picks],
        "budgets": tables.budgets(sweep, advice),
        "table": tables.points(sweep, advice.measure),
        "table_note": tables.note(sweep),
        "skipped": tables.skipped(sweep),
    }


def _card(sweep: Sweep, pick: Pick) -> dict[str, Any]:
    return {
        "titles": pick.titles,
        "name": words.short(pick.point),
        "facts": tables.card_facts(sweep, pick.point),
        "command": words.command(pick.point, sweep.target_recall),
        "candidates": pick.point.candidates,
    }


def _chart(chart: Chart, sweep: Sweep, png: Path) -> dict[str, Any]:
    leading = tables.leading(chart.leading, measure_of(sweep)) if chart.leading else None
    return {**chart.embed(png), "leading": leading}


def _slugs(sweeps: list[Sweep]) -> list[str]:
    """Return a name for files and anchors a sweep, each another."""
    slugs: list[str] = []
    for sweep in sweeps:
        plain = re.sub(r"[^a-z0-9]+", "-", sweep.name.lower()).strip("-")[:60] or "sweep"
        slug, number = plain, 1
        while slug in (*slugs, "words", "across"):
            number += 1
            slug = f"{plain}-{number}"
        slugs.append(slug)
    return slugs
