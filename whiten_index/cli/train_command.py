"""``whiten-index train``: parse, train, print."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from whiten_index.cli import terminal
from whiten_index.cli.options import (
    json_option,
    model_option,
    revision_option,
    trust_option,
    with_options,
)

# As in training.config, which is not imported: --help answers at once.
train_options = [
    click.option(
        "--text-column",
        "text_columns",
        multiple=True,
        default=("text",),
        show_default=True,
        help="Of the sentences; several are joined by a space.",
    ),
    click.option("--limit", type=int, help="Use only the first N sentences."),
    model_option,
    revision_option,
    trust_option,
    click.option(
        "--pooling",
        type=click.Choice(["cls", "mean"]),
        default="cls",
        show_default=True,
        help="The paper's is cls; models of sentence-transformers are mostly of mean.",
    ),
    click.option("--max-length", type=int, default=32, show_default=True, help="Tokens."),
    click.option(
        "--whiten/--no-whiten",
        default=True,
        show_default=True,
        help="Whiten in the head; without, and with --positives 1, this is SimCSE.",
    ),
    click.option("--groups", type=int, help="Number of groups of channels. [default: 128]"),
    click.option("--group-size", type=int, help="Instead: channels a group."),
    click.option(
        "--group-map",
        type=click.Choice(["zca", "newton", "pca", "cholesky"]),
        default="zca",
        show_default=True,
        help="What whitens a group; newton is zca by iterated products.",
    ),
    click.option(
        "--shuffle/--no-shuffle",
        default=True,
        show_default=True,
        help="Permute the channels at each call.",
    ),
    click.option("--epsilon", type=float, default=1e-5, show_default=True),
    click.option(
        "--shrinkage",
        type=float,
        default=0.0,
        show_default=True,
        help="Towards a multiple of I, which a batch not larger than a group needs.",
    ),
    click.option("--momentum", type=float, default=0.1, show_default=True),
    click.option("--positives", type=int, default=3, show_default=True, help="Of a sentence."),
    click.option(
        "--passes", type=int, help="Through the encoder for a sentence. [default: positives + 1]"
    ),
    click.option(
        "--positive-sum",
        type=click.Choice(["outside", "inside"]),
        default="outside",
        show_default=True,
        help="The logarithm: equation 7 or 8.",
    ),
    click.option("--temperature", type=float, default=0.05, show_default=True),
    click.option("--batch-size", type=int, default=64, show_default=True),
    click.option("--epochs", type=float, default=1.0, show_default=True),
    click.option("--max-steps", type=int, help="Stop after so many steps."),
    click.option("--learning-rate", type=float, default=3e-5, show_default=True),
    click.option("--warmup", type=float, default=0.0, show_default=True, help="Share of steps."),
    click.option("--weight-decay", type=float, default=0.0, show_default=True),
    click.option("--max-grad-norm", type=float, default=1.0, show_default=True),
    click.option(
        "--precision",
        type=click.Choice(["float32", "bf16", "fp16"]),
        default="float32",
        show_default=True,
    ),
    click.option(
        "--eval-steps",
        type=int,
        default=125,
        show_default=True,
        help="Steps between evaluations.",
    ),
    click.option(
        "--save-steps",
        type=int,
        default=500,
        show_default=True,
        help="Steps between checkpoints, from which a training is gone on with.",
    ),
    click.option("--seed", type=int, default=0, show_default=True),
    click.option("--keep-head", is_flag=True, help="Write the head too, not the encoder alone."),
    click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda."),
]


@click.command()
@click.argument("corpus", nargs=-1, required=True)
@click.option("--out", required=True, type=click.Path(), help="Folder of the model.")
@click.option(
    "--dev",
    type=click.Path(),
    help="File or folder with STS-B, whose dev split says which checkpoint is best.",
)
@with_options(train_options)
@json_option
def train(
    corpus: tuple[str, ...], out: str, dev: str | None, as_json: bool, **options: Any
) -> None:
    """Train an encoder on the sentences of CORPUS, by contrast and shuffled group whitening.

    OUT becomes a folder that build --model takes, and sentence-transformers. What is interrupted is
    gone on with by the same command.
    """
    from whiten_index.train import train as train_model
    from whiten_index.training.config import TrainingConfig

    config = TrainingConfig.from_options({"corpus": corpus, "out": out, **options})
    report = train_model(config, pairs=dev, progress=terminal.Bars(facts=not as_json))
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
