"""Commands that measure settings side by side, and that train an encoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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
from whiten_index.measure.measure_options import SweepOptions
from whiten_index.pipeline.build_options import CorpusOptions, EncodeOptions
from whiten_index.training.training_config import TrainingConfig


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
    from whiten_index.measure.results import RESULTS, read_runs, recommend
    from whiten_index.measure.sweep_config import SweepConfig
    from whiten_index.measure.sweep_report import check_report, write_report
    from whiten_index.measure.sweep_run import plan_sweep, run_sweep

    config = SweepConfig(**given(options))
    if plan:
        found = plan_sweep(config, progress=terminal.Bars())
        lines = ("plan (nothing was written)", *_lines(found))
        terminal.show(found, lines, as_json=as_json)
        return
    check_report()
    said = run_sweep(config, progress=terminal.Bars()).to_json()
    advice = recommend(read_runs(config.folder / RESULTS)[said["run"]])
    made = "" if advice.point is None else advice.point.build_options(config.target_recall)
    command = made and f"{config.build.command()} --out INDEX {made}"
    said["recommended"] = {"why": advice.reason, "command": command or None}
    said["report"] = str(write_report(config.folder / RESULTS, config.folder))
    terminal.show(said, _lines(said), as_json=as_json)


def _lines(said: Mapping[str, Any]) -> Iterator[str]:
    """Yield a report or plan, and the points left out by reason."""
    from whiten_index.measure.results import by_reason

    # Rates of stages over points say nothing.
    yield from terminal.describe({**said, "skipped": None, "stage_rows": None})
    for line in by_reason(said["skipped"]):
        yield f"left out: {line}"


@click.command()
@click.argument("folder", type=click.Path(readable=False, path_type=Path))
def report(folder: Path) -> None:
    """Rebuild the report of a sweep from FOLDER/results.jsonl alone."""
    from whiten_index.measure.sweep_report import write_report

    click.echo(write_report(folder / "results.jsonl", folder))


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
    done = train_encoder(config, pairs=dev, progress=terminal.Bars(facts=not as_json)).to_json()
    terminal.show(done, as_json=as_json)
