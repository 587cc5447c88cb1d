"""``whiten-index report``: the report of a sweep, made again from its results alone."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("folder", type=click.Path(readable=False, path_type=Path))
def report(folder: Path) -> None:
    """Make the report of a sweep again, from FOLDER/results.jsonl alone."""
    from whiten_index.report import write_report

    click.echo(write_report(folder / "results.jsonl", folder))
