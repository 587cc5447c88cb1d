"""``whiten-index eval``: how good embeddings and their transforms are, on judged data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import click

from whiten_index.cli import terminal
from whiten_index.cli.schema_options import (
    config_option,
    given,
    json_option,
    schema_options,
    with_options,
)
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.pipeline.build_options import SHAPES, TransformName, TransformOptions

_INDEX = [
    click.option("--index", help="Evaluate the encoder and the transform of a published index."),
]
_STORE = [
    click.option(
        "--store", help="Folder that keeps the embeddings for later runs. [default: none kept]"
    ),
]
_KINDS = [
    click.option(
        "--whiten",
        type=click.Choice([name for name in get_args(TransformName) if name != "auto"]),
        help="The transform. [default: none; whitening with --k]",
    ),
    click.option(
        "--k",
        multiple=True,
        help="Width kept: a number, full, or a share of variance; repeated, all of them side by "
        "side. [default: a third of the embedding's width, at most 256]",
    ),
]
_FITS = [
    click.option(
        "--fit",
        help="What transforms are fitted on: target (all texts of the task, as often as they "
        "occur), target-distinct (each once), target-scored (those of the pairs that are scored), "
        "or a Parquet file of sentences.",
    ),
    click.option(
        "--fit-column",
        "fit_columns",
        multiple=True,
        help="Its column of sentences; may be repeated. [default: those known by name]",
    ),
]
_SHAPES = [
    schema_options(TransformOptions, only=SHAPES),
    click.option("--seed", type=int, help="Seed of every random draw. [default: 0]"),
]
_encoded = [schema_options(EncoderConfig), *_KINDS]
eval_options = [config_option, *_INDEX, *_STORE, *_encoded, *_FITS, *_SHAPES, json_option]
# Layers are those of a model.
layer_options = [config_option, *_encoded, *_FITS, *_SHAPES, json_option]
# A search encodes its corpus, and fits on it.
search_options = [config_option, *_INDEX, *_STORE, *_encoded, *_SHAPES, json_option]


@click.group(name="eval")
def evaluate() -> None:
    """Evaluate embeddings and their transforms: sts, retrieval, transfer, geometry, layers.

    Without DATA the sets are read from the folder that WHITEN_INDEX_DATA names (but for those of
    retrieval, of which there are many). Correlations, accuracies and shares are times 100.
    """


def parse_splits(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    """Return set -> split of options ``SET=SPLIT``; the callback of ``--split``."""
    splits = {}
    for text in given:
        name, equals, split = text.partition("=")
        if not equals or not name or not split:
            raise click.BadParameter(f"{text!r} is no SET=SPLIT, such as SICK-R=test")
        splits[name] = split
    return splits


def print_report(report: Mapping[str, Any], *, as_json: bool, lines: Sequence[str]) -> None:
    """Print an evaluation as one JSON object, or as the lines of a terminal."""
    if as_json:
        terminal.print_json(report)
        return
    for line in lines:
        click.echo(line)


def encoder_line(report: Mapping[str, Any]) -> str:
    """Return what was evaluated, on one line."""
    facts = report["encoder"]
    layers = "+".join(map(str, facts["layers"]))
    return (
        f"{facts['model']}: {facts['pooling']} pooling of layer {layers}, at most "
        f"{facts['max_length']} tokens, {facts['dim']} dims"
    )


def heading(run: Mapping[str, Any]) -> str:
    """Return what a space is called with all that decides its figures: width, fit, what is off."""
    setting = run["setting"]
    name, k = str(run["name"]), setting["transform"].get("k")
    if k is not None and not name.endswith(f"= {k}"):
        name += f" ({k})"
    if setting.get("fit") not in (None, "index"):
        name += f", fitted on {setting['fit']}"
    return name


__all__ = [
    "encoder_line",
    "eval_options",
    "evaluate",
    "given",
    "heading",
    "layer_options",
    "parse_splits",
    "print_report",
    "search_options",
    "with_options",
]
