"""``whiten-index eval layers``: parse, evaluate, print."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click
from click.core import ParameterSource

from whiten_index.cli import terminal
from whiten_index.cli.eval_commands import given, heading, layer_options, print_report, with_options
from whiten_index.cli.pair_options import pair_options, read_pairs

# What every evaluation takes, and what says the same here.
_ELSEWHERE = {"pooling": "--token mean or cls", "layers": "--most N"}


@click.command()
@with_options(*pair_options)
@click.option(
    "--token",
    type=click.Choice(["mean", "cls"]),
    default="mean",
    show_default=True,
    help="Pool the tokens of each layer by their mean, or take the first one.",
)
@click.option(
    "--most",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Combine at most this many layers.",
)
@click.option(
    "--aggregation",
    type=click.Choice(["all", "mean", "wmean"]),
    default="mean",
    show_default=True,
    help="Correlation that the tables show; --json has all three.",
)
@with_options(*layer_options)
@click.pass_context
def layers(
    context: click.Context,
    /,
    data: tuple[str, ...],
    names: tuple[str, ...],
    splits: Mapping[str, str],
    token: str,
    most: int,
    aggregation: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Score every combination of a model's layers on sentence pairs, each text encoded once.

    DATA are files of pairs, as of sts. The embedding of a text is the mean of some layers'
    states, 0 the embedding layer; all combinations of up to --most of them are scored raw and,
    with --whiten or --k, in each transform, fitted for each combination and set.
    """
    from whiten_index.measure.eval_config import EvalConfig
    from whiten_index.measure.evaluate_layers import evaluate_layers

    _refuse_elsewhere(context)
    # A job file of a build names both, for other commands.
    config = EvalConfig.from_options({**given(options), **dict.fromkeys(_ELSEWHERE)})
    sets, sizes = read_pairs(data, names, splits), range(1, most + 1)
    bars = terminal.Bars(facts=not as_json)
    report = evaluate_layers(config, sets, pooling=token, sizes=sizes, progress=bars)
    lines = [] if as_json else list(_lines(report, aggregation))
    print_report(report, as_json=as_json, lines=lines)


for _parameter in layers.params:
    if isinstance(_parameter, click.Option) and _parameter.name in _ELSEWHERE:
        _parameter.hidden = True


def _refuse_elsewhere(context: click.Context) -> None:
    """Refuse options of one embedding, which this command varies itself."""
    for name, instead in _ELSEWHERE.items():
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.BadOptionUsage(
                f"--{name}",
                f"--{name} has no meaning here, where every layer is tried; use {instead}",
            )


def _lines(report: Mapping[str, Any], how: str) -> Iterator[str]:
    encoder, count = report["encoder"], report["states"]
    yield (
        f"{encoder['model']}: {encoder['pooling']} pooling of {count} states, at most "
        f"{encoder['max_length']} tokens, {encoder['dim']} dims"
    )
    sets = list(report["runs"][0]["combinations"][0]["datasets"])
    of = f"mean of {', '.join(sets)}" if len(sets) > 1 else sets[0]
    for run in report["runs"]:
        yield f"spearman × 100, {how}, {of}: {heading(run)}"
        cells = {
            tuple(cell["layers"]): cell["average"]["spearman"][how] for cell in run["combinations"]
        }
        yield terminal.table(_matrix(cells, count))
        for size, best in run["best"][how].items():
            joined = "+".join(map(str, best["layers"]))
            layers = "layer" if size == "1" else f"{size} layers"
            yield f"  best {layers}: {joined}, {best['figure']:.2f}"


def _matrix(cells: Mapping[tuple[int, ...], float], count: int) -> Iterator[tuple[str, ...]]:
    """Return the figures of single layers and pairs as rows; one row where there are no pairs."""
    numbers = range(count)
    yield ("layer", *map(str, numbers))
    if not any(len(layers) == 2 for layers in cells):
        yield ("", *(_cell(cells, (i,)) for i in numbers))
        return
    for i in numbers:
        pairs = ((min(i, j), max(i, j)) if i != j else (i,) for j in numbers)
        yield (str(i), *(_cell(cells, pair) for pair in pairs))


def _cell(cells: Mapping[tuple[int, ...], float], layers: tuple[int, ...]) -> str:
    return f"{cells[layers]:.2f}" if layers in cells else "-"
