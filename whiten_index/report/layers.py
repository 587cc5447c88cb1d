"""Combinations of layers compared: heat maps of pairs, and the best of each number of layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from whiten_index.artifacts.atomic import replace_file
from whiten_index.artifacts.files import writing
from whiten_index.errors import ArtifactError
from whiten_index.evaluation import heat_map
from whiten_index.report.heat_maps import HeatMap, heat_map_picture, small_maps_picture
from whiten_index.report.lines import Lines, lines_picture
from whiten_index.report.page import FIGURES, check_report
from whiten_index.report.pictures import Picture
from whiten_index.report.tables import NAME, TEXT, Column, Facts, Row, Table
from whiten_index.report.templates import fill

PAGE = "layers.html"
AVERAGE = "average"
_MEANING = {
    "all": "of all pairs of a set together (all)",
    "mean": "the mean over each set's subsets (mean)",
    "wmean": "the mean over each set's subsets, weighted by their pairs (wmean)",
}


def write_layers(
    report: Mapping[str, Any], folder: Path | str, *, aggregation: str = "mean"
) -> Path:
    """Write ``layers.html`` and ``figures/layers-*.png`` into ``folder``.

    Args:
        report: what ``evaluate_layers`` returned, or the JSON of it.
        folder: made where it is missing.
        aggregation: all, mean or wmean: the figure that is shown.

    Returns:
        The path of the page, one file that loads nothing else.

    Raises:
        ArtifactError: the report is not of that shape.
        ConfigError: matplotlib or jinja2 is not installed.
        StorageError: the folder cannot be written.
    """
    check_report()
    folder = Path(folder)
    try:
        sections = [_section(run, n, report["states"], aggregation)
                    for n, run in enumerate(report["runs"])]  # fmt: skip
        facts = _facts(report["encoder"], report["states"])
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ArtifactError(
            f"this is no report of layers with {aggregation} figures ({error!r}); run whiten-index "
            "eval layers again"
        ) from error
    pictures = folder / FIGURES
    with writing(pictures):
        pictures.mkdir(parents=True, exist_ok=True)
    for section in sections:
        section["pictures"] = [
            picture.embed(pictures / f"{picture.slug}.png") for picture in section["pictures"]
        ]
    path = folder / PAGE
    page = fill(
        "layers.html.jinja", title=f"Layers of {report['encoder'].get('model', 'a model')}",
        subtitle=f"Every combination of layers scored: Spearman × 100, {_MEANING[aggregation]}.",
        facts=facts, sections=sections,
    )  # fmt: skip
    with writing(path):
        replace_file(path, page.encode("utf-8", "replace"))
    return path


def maps_of(run: Mapping[str, Any], states: int, aggregation: str) -> dict[str, HeatMap]:
    """Return the heat maps of a run: the average over several sets, then each set."""
    labels = tuple(str(number) for number in range(states))
    return {
        name: HeatMap(heat_map(figures, states), labels)
        for name, figures in _figures(run, aggregation).items()
    }


def _figures(run: Mapping[str, Any], how: str) -> dict[str, dict[tuple[int, ...], float]]:
    """Return set -> layers -> figure, before them the average where there are several sets."""
    found: dict[str, dict[tuple[int, ...], float]] = {AVERAGE: {}}
    for cell in run["combinations"]:
        layers = tuple(int(layer) for layer in cell["layers"])
        found[AVERAGE][layers] = float(cell["average"]["spearman"][how])
        for name, figures in cell["datasets"].items():
            found.setdefault(name, {})[layers] = float(figures["spearman"][how])
    if len(found) == 2:
        del found[AVERAGE]
    return found


def _section(run: Mapping[str, Any], number: int, states: int, how: str) -> dict[str, Any]:
    figures = _figures(run, how)
    every = list(next(iter(figures.values())))
    return {
        "slug": f"run-{number + 1}",
        "title": "raw embeddings" if run["name"] == "raw" else str(run["name"]),
        "pictures": list(_pictures(run, f"layers-{number + 1}", states, how)),
        "best": _table(figures, [tuple(best["layers"]) for best in run["best"][how].values()]),
        "all": _table(figures, every),
    }


def _pictures(run: Mapping[str, Any], slug: str, states: int, how: str) -> Iterator[Picture]:
    figures = _figures(run, how)
    first, main = next(iter(figures.items()))
    if not any(len(layers) == 2 for layers in main):
        places = sorted(layers for layers in main if len(layers) == 1)
        series = {name: [found[each] for each in places] for name, found in figures.items()}
        lines = Lines(tuple(each[0] for each in places), series, "layer", "Spearman × 100")
        yield lines_picture(slug, "One layer", "Layer 0 is the embedding layer.", lines)
        return
    maps = maps_of(run, states, how)
    of = "the average over the sets" if first == AVERAGE else first
    caption = (
        f"Spearman × 100 of the mean of two layers, {of}; single layers on the diagonal, layer 0 "
        "is the embedding layer. The best cell is framed."
    )
    if (0,) not in main:
        caption += " Layer 0 alone is the same for every text and ranks nothing."
    yield heat_map_picture(slug, "Pairs of layers", caption, maps.pop(first))
    if maps:
        yield small_maps_picture(
            f"{slug}-sets",
            "Pairs of layers, set by set",
            "Colours span each set's own figures: they tell which layers suit a set, not which set "
            "is easier.",
            maps,
        )


def _table(
    figures: Mapping[str, Mapping[tuple[int, ...], float]], rows: Sequence[tuple[int, ...]]
) -> Table:
    """Return the figures of combinations, the best of all marked."""
    first = next(iter(figures.values()))
    best = max(first.values())
    columns = [Column("layers", NAME), Column("how many", TEXT)]
    columns += [Column(name) for name in figures]
    made = [
        Row(
            ("+".join(map(str, layers)), str(len(layers)),
             *(f"{found[layers]:.2f}" for found in figures.values())),
            "front" if first[layers] == best else "",
        )
        for layers in rows
    ]  # fmt: skip
    return Table(tuple(columns), tuple(made))


def _facts(encoder: Mapping[str, Any], states: int) -> Facts:
    pairs = (
        ("model", encoder.get("model")),
        ("token", encoder.get("pooling")),
        ("states", f"{states}: embeddings and {states - 1} layers"),
        ("dimensions", encoder.get("dim")),
        ("at most", f"{encoder['max_length']} tokens" if encoder.get("max_length") else None),
    )
    return [(name, str(value)) for name, value in pairs if value not in (None, "")]
