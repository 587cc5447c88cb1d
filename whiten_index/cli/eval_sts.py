"""``whiten-index eval sts``: parse, evaluate, print."""

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
    print_report,
    with_options,
)
from whiten_index.cli.pair_options import pair_options, read_pairs


@click.command()
@with_options(*pair_options)
@click.option(
    "--measure",
    type=click.Choice(["spearman", "pearson"]),
    default="spearman",
    show_default=True,
    help="What the table shows; --json has both.",
)
@with_options(*eval_options)
def sts(
    data: tuple[str, ...],
    names: tuple[str, ...],
    splits: Mapping[str, str],
    measure: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Correlate the cosines of sentence pairs with gold scores, in all three aggregations.

    DATA are files of pairs (.parquet, .jsonl, or .tsv with a header line: sentence1, sentence2,
    score; dataset, subset, split where they have them) or folders of such. A set's figure is of
    all its pairs together (all), the mean over its subsets (mean), and that weighted by their
    pairs (wmean); papers differ in which they print.
    """
    from whiten_index.measure.eval_config import EvalConfig
    from whiten_index.measure.evaluate_sts import evaluate_sts

    config = EvalConfig.from_options(given(options))
    sets = read_pairs(data, names, splits)
    report = evaluate_sts(config, sets, progress=terminal.Bars(facts=not as_json))
    print_report(report, as_json=as_json, lines=[] if as_json else list(_lines(report, measure)))


def _lines(report: Mapping[str, Any], measure: str) -> Iterator[str]:
    yield encoder_line(report)
    dropped = {name: each["dropped"] for name, each in report["datasets"].items()}
    for name, count in dropped.items():
        if count:
            yield f"  note: {count:,} pairs of {name} have no score and are left out"
    runs = report.get("runs") or [report]
    for run in runs:
        yield f"{measure} × 100, {heading(run)}"
        rows: list[tuple[str, ...]] = [("", "pairs", "all", "mean", "wmean")]
        for name, each in run["datasets"].items():
            rows.append((name, f"{each['pairs']:,}", *_figures(each[measure])))
        if len(run["datasets"]) > 1:
            rows.append(("mean of sets", "", *_figures(run["average"][measure])))
        yield terminal.table(rows)


def _figures(values: Mapping[str, float]) -> tuple[str, ...]:
    return tuple(f"{values[how]:.2f}" for how in ("all", "mean", "wmean"))
