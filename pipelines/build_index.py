"""The build as a scheduled job: a TOML job file in, a published index out, log lines for machines.

Run it as ``python -m pipelines.build_index job.toml``.

The keys of the job file are the options of ``whiten-index build``. Every line on standard output
is one JSON object with ``time`` and ``event``; the last is ``published``, ``up_to_date``,
``interrupted`` or ``failed``. The exit status is that of ``whiten-index build``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from whiten_index.cli.log_lines import Ending, LogLines, run_job
from whiten_index.cli.schema_options import read_toml, rename_keys
from whiten_index.cli.signals import stop_on_signals
from whiten_index.options import job_keys
from whiten_index.pipeline.build import build_index
from whiten_index.pipeline.build_config import BuildConfig


def run(job: Path) -> int:
    """Do the job; return the exit status."""
    return run_job(lambda: _build(job), kept="shards")


def _build(job: Path) -> Ending:
    values = rename_keys(read_toml(job), job_keys(BuildConfig), where=f"job file {job}")
    report = build_index(BuildConfig(**values), progress=LogLines())
    return Ending("up_to_date" if report.up_to_date else "published", report.to_json())


@click.command()
@click.argument("job", type=click.Path(dir_okay=False, path_type=Path))
def main(job: Path) -> None:
    """Build and publish the index that JOB (TOML) describes."""
    stop_on_signals()
    sys.exit(run(job))


if __name__ == "__main__":
    main()
