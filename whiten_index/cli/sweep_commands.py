"""``whiten-index sweep``: measure, write the report, print a summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from whiten_index.cli import terminal
from whiten_index.cli.options import (
    config_option,
    corpus_options,
    encoder_options,
    json_option,
    stored_options,
    with_options,
)

if TYPE_CHECKING:
    from whiten_index.sweep import SweepConfig

sweep_options = [
    click.option("--queries", help="File of judged queries: .parquet or .jsonl, id and text."),
    click.option("--qrels", help="Their judgements: .parquet, .tsv, or TREC's .qrels, .txt."),
    click.option("--qrels-split", help="Which judgements, where the file has a column split."),
    click.option(
        "--k",
        "widths",
        multiple=True,
        default=("32,64,128,256",),
        show_default=True,
        help="Widths, separated by commas; this and the next three may be repeated.",
    ),
    click.option(
        "--transforms",
        multiple=True,
        default=("auto,pca,whitening,truncate",),
        show_default=True,
        help="Also all-but-the-top, random, and whitening with an exponent: whitening:0.25.",
    ),
    click.option(
        "--codecs",
        multiple=True,
        default=("fp32,fp16,sq8,pq",),
        show_default=True,
        help="Also sq6, sq4, pqfs, rabitq, rabitq2, rabitq4, pqN for N bytes a vector, and FAISS's "
        "own names such as PRQ16x3x8.",
    ),
    click.option(
        "--indexes",
        multiple=True,
        default=("flat,ivf,hnsw",),
        show_default=True,
        help="Structures; a graph is built of the first codec at the two middle widths only.",
    ),
    click.option(
        "--baselines/--no-baselines",
        default=True,
        show_default=True,
        help="Also measure raw embeddings and FAISS's own PCA and whitening.",
    ),
    click.option(
        "--rerank",
        type=click.IntRange(min=0),
        default=100,
        show_default=True,
        help="Candidates per query that coarse codecs rank again from the store; 0: none.",
    ),
    click.option(
        "--target-recall",
        type=float,
        default=0.95,
        show_default=True,
        help="Index recall that lists and graphs are tuned for.",
    ),
    click.option(
        "--choose-sample",
        type=int,
        default=1_000,
        show_default=True,
        help="Documents that the transform auto is chosen on at most.",
    ),
    click.option(
        "--sample",
        type=click.IntRange(min=30),
        default=500,
        show_default=True,
        help="Rows held out as queries, if there are no judged ones.",
    ),
    click.option(
        "--index-device",
        type=click.Choice(["cpu", "gpu", "auto"]),
        default="cpu",
        show_default=True,
        help="Where indexes are filled and searched; kinds that no GPU takes stay on the CPU.",
    ),
    click.option("--seed", type=int, default=0, show_default=True, help="Of every random sample."),
    click.option("--name", help="What the report calls the corpus. [default: its file or folder]"),
]

# Stages over points, whose rate means nothing.
_OF_POINTS = ("make indexes", "measure")
# Key of a job file that only a sweep has -> the parameter.
_IN_JOB_FILES = {
    "k": "widths",
    "transforms": "transforms",
    "codecs": "codecs",
    "indexes": "indexes",
    "baselines": "baselines",
    "rerank": "rerank",
    "sample": "sample",
    "name": "name",
}


@click.command()
@click.argument("corpus", nargs=-1)
@config_option(_IN_JOB_FILES)
@click.option("--out", help="Folder of results.jsonl and report.html, .md and .json.")
@click.option("--store", help="Folder of raw embeddings, shared by builds. [default: OUT/store]")
@with_options(sweep_options, corpus_options, encoder_options, stored_options)
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
    if options["out"] is None:
        raise click.UsageError("say where results and report go: --out DIR")
    config = _config(options)
    if plan:
        _print_plan(config, as_json=as_json)
        return
    from whiten_index.sweep import check_report, run_sweep, write_report
    from whiten_index.sweep.results import RESULTS

    check_report()
    report = run_sweep(config, progress=terminal.Bars()).to_json()
    page = write_report(config.folder / RESULTS, config.folder)
    if as_json:
        terminal.print_json({**report, "report": str(page)})
        return
    _print_report(report)
    click.echo(f"report: {page}")


def _config(options: Mapping[str, Any]) -> SweepConfig:
    from whiten_index.sweep import sweep_config

    several = ("widths", "transforms", "codecs", "indexes")
    return sweep_config({**options, **{name: ",".join(options[name]) for name in several}})


def _print_plan(config: SweepConfig, *, as_json: bool) -> None:
    from whiten_index.sweep import plan_sweep
    from whiten_index.sweep.formatting import by_reason

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
    from whiten_index.sweep.formatting import by_reason

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
