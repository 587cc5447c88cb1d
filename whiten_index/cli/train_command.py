"""``whiten-index train``: parse, train, print."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
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
from whiten_index.training.training_config import GROUPS, POOLINGS, TrainingConfig


def _option(name: str, text: str | None = None, *, default: str | None = None) -> Any:
    """Return the option of a field of ``TrainingConfig``, of its type and with its default.

    Args:
        name: of the field.
        text: of the help.
        default: how to call a default that is none of the field's.
    """
    field = next(each for each in dataclasses.fields(TrainingConfig) if each.name == name)
    value = field.default
    help_ = " ".join(part for part in (text, default and f"[default: {default}]") if part) or None
    flag, shown = f"--{name.replace('_', '-')}", value is not None
    if isinstance(value, Enum):
        choice = click.Choice([each.value for each in type(value)])
        return click.option(flag, type=choice, default=value.value, show_default=True, help=help_)
    if isinstance(value, bool):
        both = f"{flag}/--no-{name.replace('_', '-')}" if value else flag
        return click.option(both, is_flag=True, default=value, show_default=value, help=help_)
    kind = type(value) if shown else int
    return click.option(flag, type=kind, default=value, show_default=shown, help=help_)


_options = [
    click.option(
        "--text-column",
        "text_columns",
        multiple=True,
        default=TrainingConfig.text_columns,
        show_default=True,
        help="Of the sentences; several are joined by a space.",
    ),
    _option("limit", "Use only the first N sentences."),
    model_option,
    revision_option,
    trust_option,
    click.option(
        "--pooling",
        type=click.Choice(POOLINGS),
        default=TrainingConfig.pooling,
        show_default=True,
        help="The paper's is cls; models of sentence-transformers are mostly of mean.",
    ),
    _option("max_length", "Tokens."),
    _option("whiten", "Whiten in the head; without, and with --positives 1, this is SimCSE."),
    _option("groups", "Number of groups of channels.", default=str(GROUPS)),
    _option("group_size", "Instead: channels a group."),
    _option("group_map", "What whitens a group; newton is zca by iterated products."),
    _option("shuffle", "Permute the channels at each call."),
    _option("epsilon", "Added to the diagonal of each covariance."),
    _option("shrinkage", "Towards a multiple of I, which a batch not larger than a group needs."),
    _option("momentum", "Weight of a batch in the running moments of --keep-head."),
    _option("positives", "Of a sentence."),
    _option("passes", "Through the encoder for a sentence.", default="positives + 1"),
    _option("positive_sum", "The logarithm: equation 7 or 8."),
    _option("temperature", "Of the similarities."),
    _option("batch_size", "Sentences."),
    _option("epochs", "Over the sentences."),
    _option("max_steps", "Stop after so many steps."),
    _option("learning_rate", "From where it falls to 0 linearly."),
    _option("warmup", "Share of the steps in which the learning rate rises."),
    _option("weight_decay", "Of AdamW."),
    _option("max_grad_norm", "Cut gradients at this length."),
    _option("precision", "Of the encoder; head and loss are in float32."),
    _option("eval_steps", "Steps between evaluations."),
    _option(
        "save_steps", "Steps between checkpoints in OUT.training, from which it is gone on with."
    ),
    _option("seed", "Of everything that is drawn."),
    _option("keep_head", "Write the head too, not the encoder alone."),
    _option("device", "auto, cpu or cuda."),
]


@click.command()
@click.argument("corpus", nargs=-1, required=True)
@click.option("--out", required=True, type=click.Path(readable=False), help="Folder of the model.")
@click.option(
    "--dev",
    type=click.Path(readable=False),
    help="File or folder with STS-B, whose dev split says which checkpoint is best.",
)
@with_options(_options)
@json_option
def train(
    corpus: tuple[str, ...], out: str, dev: str | None, as_json: bool, **options: Any
) -> None:
    """Train an encoder on the sentences of CORPUS, by contrast and shuffled group whitening.

    OUT becomes a folder that build --model takes, and sentence-transformers. What is interrupted is
    gone on with by the same command.
    """
    from whiten_index.training.train import train_encoder

    config = TrainingConfig.from_options({"corpus": corpus, "out": out, **options})
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
