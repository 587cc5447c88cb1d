"""Commands that make, update and show an index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from whiten_index.cli import terminal
from whiten_index.cli.log_lines import log_job
from whiten_index.cli.schema_options import (
    GroupedCommand,
    config_option,
    given,
    json_option,
    log_option,
    plan_option,
    schema_options,
    verify_option,
)
from whiten_index.errors import GateError
from whiten_index.pipeline.build_options import BuildOptions, EncodeOptions
from whiten_index.pipeline.update_config import UpdateConfig
from whiten_index.progress import Progress

corpus_argument = click.argument("corpus", nargs=-1)


@click.command(cls=GroupedCommand)
@corpus_argument
@config_option
@schema_options(BuildOptions)
@plan_option
@log_option
@json_option
def build(plan: bool, log: bool, as_json: bool, **options: Any) -> None:
    """Turn a Parquet CORPUS (files, folders, globs, URIs) into a searchable whitened index.

    Without CORPUS the index is built from --store alone, and no encoder is needed.
    """
    options = given(options)
    if log and (plan or as_json):
        raise click.UsageError("--log prints the report as its last line; leave out --plan, --json")
    if plan:
        _show_plan(options, as_json=as_json)
        return
    from whiten_index.pipeline.build import build_index
    from whiten_index.pipeline.build_config import BuildConfig

    config = BuildConfig(**options)
    if log:
        log_job(lambda lines: build_index(config, progress=lines).to_json())
    if not as_json:
        click.echo(f"raw embeddings: {config.store_place}")
    report = build_index(config, progress=terminal.Bars(facts=not as_json)).to_json()
    terminal.show(report, _version_lines(report), as_json=as_json)


@click.command(cls=GroupedCommand)
@corpus_argument
@config_option
@schema_options(EncodeOptions)
@plan_option
@json_option
def encode(plan: bool, as_json: bool, **options: Any) -> None:
    """Encode a Parquet CORPUS into a store of raw embeddings, to index later or elsewhere."""
    options = given(options)
    if "corpus" not in options:
        raise click.UsageError("name a corpus to encode: a Parquet file, folder, glob or URI")
    if plan:
        _show_plan(options, as_json=as_json)
        return
    from whiten_index.pipeline.build_config import BuildConfig
    from whiten_index.pipeline.encode import encode_corpus

    report = encode_corpus(BuildConfig(**options), progress=terminal.Bars()).to_json()
    terminal.show(report, as_json=as_json)


def _show_plan(options: Mapping[str, Any], *, as_json: bool) -> None:
    from whiten_index.pipeline.build_config import BuildConfig
    from whiten_index.pipeline.plan import plan_build

    plan = plan_build(BuildConfig(**options), progress=terminal.Bars())
    lines = ("plan (nothing was written)", *terminal.describe(plan))
    terminal.show(plan, lines, as_json=as_json)


@click.command(cls=GroupedCommand)
@click.argument("index", type=click.Path(readable=False))
@corpus_argument
@config_option
@schema_options(UpdateConfig, without=("index",))
@log_option
@click.option("--dry-run", is_flag=True, help="Only say what would be done, and how long it takes.")
@json_option
def update(dry_run: bool, log: bool, as_json: bool, **options: Any) -> None:
    """Bring INDEX up to date with its CORPUS; left out, the one that it was built from.

    Rows are identified by id and text; known texts are not encoded again. The new version is
    published only where every gate passes, else kept aside (exit status 9). --dry-run ends with 9
    too where a gate would keep it back for its rows or bytes, or the corpus is that of a version
    which was rolled back. With --json what is refused says why in "refused".
    """
    if log and as_json:
        raise click.UsageError("--log prints the report as its last line; leave --json out")
    from whiten_index.pipeline.plan import plan_update
    from whiten_index.pipeline.update import update_index

    config = UpdateConfig(**given(options))

    def do(progress: Progress) -> dict[str, Any]:
        if dry_run:
            return plan_update(config, progress=progress)
        return update_index(config, progress=progress).to_json()

    if log:
        log_job(do, planned=dry_run)
    try:
        said = do(terminal.Bars(facts=not (as_json or dry_run)))
    except GateError as error:
        found = {"candidate": error.candidate, "gates": error.gates} if error.gates else {}
        lines = terminal.describe({"gates": error.gates})
        terminal.show({"refused": str(error), **found}, lines, as_json=as_json)
        raise
    if dry_run:
        title = f"plan (nothing was written), from version {said['base']}"
        lines = iter((title, *terminal.describe(said)))
    else:
        lines = _version_lines(said)
    terminal.show(said, lines, as_json=as_json)
    if said.get("refused"):
        raise GateError(f"nothing would be published: {said['refused']}")


@click.command()
@click.argument("index", type=click.Path(readable=False))
@click.option(
    "--plot",
    type=click.Path(readable=False),
    help="Draw spectrum, variance kept and choice: .png, .svg or .pdf.",
)
@verify_option()
@json_option
def inspect(index: str, plot: str | None, verify: str, as_json: bool) -> None:
    """Show what is in INDEX: counts, transform and choice, geometry, spectrum, bytes."""
    from whiten_index.versions.retention import describe_index, eigenvalues_of

    if plot is not None:
        from whiten_index.measure.charts import check_plot_path, draw_spectrum

        check_plot_path(Path(plot))
    fields = describe_index(index, verify=verify)
    if plot is not None:
        draw_spectrum(Path(plot), fields, eigenvalues_of(fields))
    terminal.show(fields, _version_lines(fields), as_json=as_json)


def _version_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a report or a manifest says of a version."""
    done = ""
    if "up_to_date" in report:
        done = " is up to date" if report["up_to_date"] else " published"
    yield f"{report.get('out', 'index')}: version {report['version']}{done}"
    if choice := report.get("choice"):
        best = [row for row in choice["candidates"] if row["leads"]]
        report = {**report, "choice": {**choice, "candidates": best}}
    yield from terminal.describe(
        report, "base", "created", "rows", "files", "counts", "corpus", "encoder",
        "runtimes", "whitening", "quality", "choice", "drift", "decision", "update", "gates",
        "factory", "geometry", "spectrum", "seconds", "bytes", "config",
    )  # fmt: skip
