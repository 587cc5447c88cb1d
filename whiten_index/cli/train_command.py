"""``whiten-index train``: parse, train, print."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from whiten_index.cli import terminal
from whiten_index.cli.schema_options import GroupedCommand, given, json_option, schema_options
from whiten_index.training.training_config import TrainingConfig


@click.command(cls=GroupedCommand)
@click.argument("corpus", nargs=-1, required=True)
@click.option("--out", required=True, type=click.Path(readable=False), help="Folder of the model.")
@click.option(
    "--dev",
    type=click.Path(readable=False),
    help="File or folder with STS-B, whose dev split says which checkpoint is best.",
)
@schema_options(TrainingConfig)
@json_option
def train(
    corpus: tuple[str, ...], out: str, dev: str | None, as_json: bool, **options: Any
) -> None:
    """Train an encoder on the sentences of CORPUS, with contrast and group whitening.

    OUT becomes a folder that build --model and sentence-transformers load. Run the same command
    again to resume an interrupted training.
    """
    from whiten_index.training.train import train_encoder

    config = TrainingConfig(corpus=corpus, out=out, **given(options))
    report = train_encoder(config, pairs=dev, progress=terminal.Bars(facts=not as_json))
    if as_json:
        terminal.print_json(report.to_json())
        return
    click.echo(f"{report.out}: {_summary(report.facts)}{' (it was there)' * report.again}")


def _summary(facts: Mapping[str, Any]) -> str:
    told = f"{facts['encoder']}, {facts['steps']:,} steps over {facts['sentences']:,} sentences"
    if facts["stsb_dev"] is None:
        return f"{told}; the last checkpoint"
    best, before = facts["stsb_dev"], facts["stsb_dev_before"]
    worse = "; no checkpoint is better than the model was before" * (best <= before)
    step = facts["best_step"]
    return f"{told}; checkpoint {step:,}, STS-B dev {best:.2f} ({before:.2f} before){worse}"
