"""``whiten-index nightly``."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("job", type=click.Path(dir_okay=False, readable=False, path_type=Path))
@click.option("--dry-run", is_flag=True, help="Only say what would be done, and how long it takes.")
@click.option(
    "--log",
    "form",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Form of the log lines: key=value pairs, or JSON objects.",
)
@click.pass_context
def nightly(context: click.Context, job: Path, dry_run: bool, form: str) -> None:
    """Run the nightly JOB (TOML) of an index: update, push, prune, compact, gc, metrics.

    JOB has the options of update, keep-versions, gc, compact, metrics, and a [[push]] for each
    database. Steps after the update cannot undo it; the last line names those that failed.
    """
    from whiten_index.cli.nightly_job import run_nightly

    context.exit(run_nightly(job, dry_run=dry_run, form=form))
