"""``whiten-index report``: rebuild the report of a sweep from its results."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("folder", type=click.Path(readable=False, path_type=Path))
def report(folder: Path) -> None:
    """Rebuild the report of a sweep from FOLDER/results.jsonl alone."""
    from whiten_index.sweep.sweep_report import write_report

    click.echo(write_report(folder / "results.jsonl", folder))
