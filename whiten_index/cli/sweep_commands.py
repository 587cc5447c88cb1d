"""``whiten-index sweep``: measure, write the report, print a summary."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from whiten_index.cli import terminal
from whiten_index.cli.schema_options import (
    GroupedCommand,
    config_option,
    given,
    json_option,
    schema_options,
)
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.measure.sweep_options import SweepOptions
from whiten_index.pipeline.build_options import CorpusOptions, EncodeOptions

if TYPE_CHECKING:
    from whiten_index.measure.sweep_config import SweepConfig

# Stages over points, whose rate means nothing.
_OF_POINTS = ("make indexes", "measure")


@click.command(cls=GroupedCommand)
@click.argument("corpus", nargs=-1)
@config_option
@schema_options(SweepOptions)
@schema_options(CorpusOptions)
@schema_options(EncoderConfig)
@schema_options(EncodeOptions, only=["store_dtype"])
@click.option(
    "--plan", is_flag=True, help="Only print the points to measure and the rows to encode."
)
@json_option
def sweep(plan: bool, as_json: bool, **options: Any) -> None:
    """Measure widths, transforms, codecs and indexes side by side on a CORPUS; recommend one.

    With --queries and --qrels their judgements measure quality. Otherwise rows are held out of the
    indexes, and agreement with exact search of the raw embeddings is measured. Points that are in
    the results already are not measured again.
    """
    options = given(options)
    if "out" not in options:
        raise click.UsageError("say where results and report go: --out DIR")
    config = _config(options)
    if plan:
        _print_plan(config, as_json=as_json)
        return
    from whiten_index.measure.results import RESULTS
    from whiten_index.measure.sweep_report import check_report, write_report
    from whiten_index.measure.sweep_run import run_sweep

    check_report()
    report = run_sweep(config, progress=terminal.Bars()).to_json()
    page = write_report(config.folder / RESULTS, config.folder)
    if as_json:
        terminal.print_json({**report, "report": str(page)})
        return
    _print_report(report)
    click.echo(f"report: {page}")


def _config(options: Mapping[str, Any]) -> SweepConfig:
    from whiten_index.measure.sweep_config import sweep_config

    # A list may be given in parts: --k 32,64 --k 128, or as a list in a job file.
    lists = {
        name: ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
        for name in ("widths", "transforms", "codecs", "indexes")
        if (value := options.get(name)) is not None
    }
    return sweep_config({**options, **lists})


def _print_plan(config: SweepConfig, *, as_json: bool) -> None:
    from whiten_index.measure.formatting import by_reason
    from whiten_index.measure.sweep_run import plan_sweep

    plan = plan_sweep(config, progress=terminal.Bars()).to_json()
    if as_json:
        terminal.print_json(plan)
        return
    click.echo("plan (nothing was written)")
    seconds = plan["encode_seconds"]
    rows = [
        ("rows", f"{plan['rows']:,}"),
        ("rows to encode", f"{plan['to_encode']:,}"),
        ("encoding", "-" if seconds is None else terminal.duration(seconds)),
        ("dims", f"{plan['dim']:,}"),
        ("points", f"{plan['points']:,}"),
        *((f"  {family}", f"{count:,}") for family, count in plan["by_family"].items()),
        ("  measured already", f"{plan['found']:,}"),
        ("bytes of work files", terminal.in_words(plan["work_bytes"])),
        ("bytes of the largest index", terminal.in_words(plan["largest_index_bytes"])),
    ]
    click.echo(terminal.table(rows))
    for line in by_reason(plan["skipped"]):
        click.echo(f"left out: {line}")


def _print_report(report: Mapping[str, Any]) -> None:
    from whiten_index.measure.formatting import by_reason

    dataset = report["dataset"]
    what = "judged queries" if dataset["judged"] else "rows held out as queries"
    click.echo(f"{dataset['name']}: {dataset['rows']:,} rows, {dataset['queries']:,} {what}")
    if dataset["relevant_documents_missing"]:
        click.echo(
            f"  note: {dataset['relevant_documents_missing']:,} relevant documents are not in the "
            "corpus, and count as not found"
        )
    if dataset["judged_queries_without_text"]:
        click.echo(
            f"  note: {dataset['judged_queries_without_text']:,} judged queries have no text and "
            "are left out"
        )
    if dataset["judgement_splits"]:
        click.echo(
            f"  note: the judgements' splits {', '.join(dataset['judgement_splits'])} are used "
            "together; --qrels-split picks one"
        )
    click.echo("points")
    counts = [(name, f"{report[name]:,}") for name in ("measured", "found")]
    counts.append(("skipped", f"{len(report['skipped']):,}"))
    click.echo(terminal.table(counts))
    for line in by_reason(report["skipped"]):
        click.echo(f"  {line}")
    click.echo("time")
    rows = {
        stage: count for stage, count in report["stage_rows"].items() if stage not in _OF_POINTS
    }
    click.echo(terminal.table(terminal.stage_rows(report["seconds"], rows)))
    click.echo(f"results: {report['results']}")


@click.command()
@click.argument("folder", type=click.Path(readable=False, path_type=Path))
def report(folder: Path) -> None:
    """Rebuild the report of a sweep from FOLDER/results.jsonl alone."""
    from whiten_index.measure.sweep_report import write_report

    click.echo(write_report(folder / "results.jsonl", folder))
