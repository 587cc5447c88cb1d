"""``whiten-index eval geometry``: parse, evaluate, print."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from whiten_index.cli import terminal
from whiten_index.cli.eval_commands import (
    encoder_line,
    eval_options,
    given,
    heading,
    parse_splits,
    print_report,
    with_options,
)

_FIGURES = (
    ("alignment", "alignment"),
    ("uniformity", "uniformity"),
    ("IsoScore", "isoscore"),
    ("mean cosine", "mean_cosine"),
    ("effective rank", "effective_rank"),
    ("hubness", "hubness"),
)


@click.command()
@click.argument("data", nargs=-1)
@click.option("--set", "names", multiple=True, help="Only this set, such as STS12; repeatable.")
@click.option(
    "--split",
    "splits",
    multiple=True,
    callback=parse_splits,
    help="SET=SPLIT, the split measured, or all; repeatable. [default: STS-B=dev without DATA, "
    "STS-B=test with it; all pairs of others]",
)
@click.option(
    "--positive-above",
    type=float,
    default=4.0,
    show_default=True,
    help="Alignment is over the pairs with a higher gold score; all, where there are no scores.",
)
@click.option(
    "--most-texts",
    type=click.IntRange(min=3),
    default=10_000,
    show_default=True,
    help="Texts measured at most; more are drawn from. The time grows with their square.",
)
@with_options(*eval_options)
def geometry(
    data: tuple[str, ...],
    names: tuple[str, ...],
    splits: Mapping[str, str],
    positive_above: float,
    most_texts: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure how embeddings fill their space, raw and transformed.

    DATA are files of sentence pairs, as of sts, scored or not; without DATA it is STS-B dev.
    Alignment is the mean squared distance of positive pairs, uniformity log E exp(-2‖u - v‖²),
    both on unit length; lower is better. IsoScore is 0 (one direction) to 1 (all even). The
    effective rank, 1 to the width, is how many directions are in use; hubness the skewness of how
    often a text is among another's neighbours, 0 where none is a hub. A transform is fitted on all
    splits of a set, which are encoded too.
    """
    from whiten_index.measure.eval_config import EvalConfig, data_path
    from whiten_index.measure.evaluate_geometry import evaluate_geometry, read_geometry_sets

    config = EvalConfig.from_options(given(options))
    if data:
        sets = read_geometry_sets(data, names=names, splits=splits, above=positive_above)
    else:
        public = (data_path("sts/sts_raw.parquet"),)
        names, splits = names or ("STS-B",), {"STS-B": "dev", **splits}
        sets = read_geometry_sets(public, names=names, splits=splits, above=positive_above)
    bars = terminal.Bars(facts=not as_json)
    report = evaluate_geometry(config, sets, most_texts=most_texts, progress=bars)
    print_report(report, as_json=as_json, lines=[] if as_json else list(_lines(report)))


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    yield encoder_line(report)
    runs = report.get("runs") or [report]
    for name, first in report["datasets"].items():
        drawn = f" of {first['texts']:,}, drawn" if _measured(first) < first["texts"] else ""
        yield (
            f"{name}: {_measured(first):,} texts{drawn}, {first['positive_pairs']:,} positive pairs"
        )
        if not first["positive_pairs"]:
            yield "  note: no pair is positive; --positive-above sets the gold score that makes one"
        if first["dropped"]:
            yield f"  note: {first['dropped']:,} pairs of {name} have no score and are left out"
        if first["zero_rows"]:
            yield f"  note: {first['zero_rows']:,} embeddings are zero and are left out"
        rows = [("", *(title for title, _ in _FIGURES))]
        for run in runs:
            found = run["datasets"][name]
            rows.append((heading(run), *(_three(found[figure]) for _, figure in _FIGURES)))
        yield terminal.table(rows)


def _measured(found: Mapping[str, Any]) -> int:
    return int(found["rows"] + found["zero_rows"])


def _three(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
