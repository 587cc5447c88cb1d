"""The options that several commands share, and the job file that gives their defaults."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])
# As in encoding.POOLINGS, which is not imported: --help answers at once.
KINDS = (
    "auto", "none", "pca", "whitening", "zca", "zca-cor", "group", "all-but-the-top", "random",
    "truncate",
)  # fmt: skip
_POOLINGS = (
    "mean", "cls", "max", "last", "weightedmean", "mean_sqrt_len_tokens", "first-last-avg",
)  # fmt: skip


def config_option(also: Mapping[str, str] | None = None) -> Callable[[Command], Command]:
    """Return the option of a job file, whose values become the defaults of the other options.

    A job of a build serves other commands too: what of it they do not know is passed over.

    Args:
        also: what a file may set beside the options of a build -> the parameter that takes it; a
            list is given to it as ``a,b``.
    """
    more = also or {}

    def read(context: click.Context, _: click.Parameter, path: str | None) -> None:
        if path is None:
            return
        from whiten_index.pipeline.build_config import read_job

        names = {parameter.name: parameter for parameter in context.command.params}
        values = {}
        for name, value in read_job(Path(path), also=more).items():
            if name in more:
                joined = ",".join(map(str, value)) if isinstance(value, list) else value
                several = getattr(names[more[name]], "multiple", False)
                values[more[name]] = [joined] if several else joined
            elif name in names:
                several = getattr(names[name], "multiple", False)
                values[name] = [value] if several and not isinstance(value, list) else value
        context.default_map = {**(context.default_map or {}), **values}

    return click.option(
        "--config",
        type=click.Path(dir_okay=False, readable=False),
        is_eager=True,
        expose_value=False,
        callback=read,
        help="Job file (TOML) whose values are the defaults of the options below.",
    )


def _layers(_: click.Context, __: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in str(text).strip("()[] ").split(",") if part.strip())
    except ValueError as error:
        raise click.BadParameter(
            f"{text!r} is no list of layers; write numbers such as 1,12 or 0,-1"
        ) from error


log_option = click.option(
    "--log",
    type=click.Choice(["text", "json"]),
    help="Print events as lines of text or JSON, the last with the report.",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on standard output."
)
threads_option = click.option(
    "--threads", type=click.IntRange(min=1), help="CPU threads of the encoder and of FAISS."
)
device_option = click.option(
    "--device",
    default="auto",
    show_default=True,
    help="auto (every GPU), cpu, cuda:1, mps, or several: cuda:0,cuda:1.",
)
model_option = click.option(
    "--model", help="Hub name or local folder. [default: all-MiniLM-L6-v2, if installed]"
)
revision_option = click.option("--revision", help="Commit or branch on the hub.")
code_revision_option = click.option(
    "--code-revision", help="Commit or branch of code that the model takes from another repository."
)
trust_option = click.option(
    "--trust-remote-code", is_flag=True, help="Run Python code that comes with the model."
)
local_option = click.option(
    "--local-files-only",
    is_flag=True,
    help="Use a model that is on this machine, and fetch none from the hub.",
)
verify_option = click.option(
    "--verify",
    type=click.Choice(["full", "manifest"]),
    default="full",
    show_default=True,
    help="Compare every file's checksum, or only its size, which misses flipped bits.",
)

corpus_options = [
    click.option(
        "--text-column",
        "text_columns",
        multiple=True,
        help="Text to encode; may be repeated, and is joined by a space.",
    ),
    click.option(
        "--embedding-column", help="List column of floats that takes the place of the encoder."
    ),
    click.option("--id-column", help="String or integer column that names the rows."),
    click.option(
        "--keep", multiple=True, help="Metadata column kept beside the index; may be repeated."
    ),
    click.option(
        "--filter", "row_filter", help="Use only rows where this holds, e.g. \"lang == 'en'\"."
    ),
    click.option(
        "--limit", type=click.IntRange(min=1), help="Read only the first N rows, before --filter."
    ),
    click.option(
        "--on-bad-row",
        type=click.Choice(["blank", "skip", "error"]),
        default="blank",
        show_default=True,
        help="skip or stop at unusable rows; blank skips rows without content and stops at "
        "damaged ones (null id, NaN, wrong width).",
    ),
    click.option(
        "--shard-rows",
        type=click.IntRange(min=1),
        default=16_384,
        show_default=True,
        help="Rows a shard at most: the unit of resume and reuse.",
    ),
]
encoder_options = [
    model_option,
    revision_option,
    click.option(
        "--pooling",
        type=click.Choice(_POOLINGS),
        help="[default: what the model's folder says, else mean]",
    ),
    click.option(
        "--layers",
        callback=_layers,
        help="Hidden states to average, 0 = embeddings, -1 = last: e.g. 1,12.",
    ),
    click.option(
        "--max-length", type=int, help="Tokens a text; the rest is cut and counted. [model's own]"
    ),
    click.option(
        "--dtype",
        type=click.Choice(["float32", "bfloat16", "float16"]),
        default="float32",
        show_default=True,
        help="What the model computes in.",
    ),
    device_option,
    threads_option,
    click.option("--document-prompt", help="Text put before every document. [model's own]"),
    click.option("--query-prompt", help="Text put before every query. [model's own]"),
    click.option(
        "--document-prompt-name", help="Name of the model's prompt for documents, not its text."
    ),
    click.option(
        "--query-prompt-name", help="Name of the model's prompt for queries, not its text."
    ),
    trust_option,
    code_revision_option,
    local_option,
]
stored_options = [
    click.option(
        "--passage-tokens",
        type=click.IntRange(min=1),
        help="Cut long texts into passages of N tokens at most; search then shows each document "
        "once, with its best passage.",
    ),
    click.option(
        "--overlap",
        type=click.IntRange(min=0),
        help="Tokens that neighbouring passages share, half a passage at most. [default: 0]",
    ),
    click.option(
        "--store-dtype",
        type=click.Choice(["float16", "float32", "own"]),
        help="How embeddings are kept. [default: float16; own for an embedding column]",
    ),
]
runner_options = [
    click.option(
        "--runner",
        type=click.Choice(["local", "ray"]),
        default="local",
        show_default=True,
        help="Who does the work: this process, or workers on a Ray cluster.",
    ),
    click.option(
        "--address",
        help="Head of the cluster, host:port; auto for that of this machine, local to start one "
        "here. [default: RAY_ADDRESS, else one that runs here, else one started here]",
    ),
    click.option(
        "--workers",
        type=click.IntRange(min=1),
        help="Workers on the cluster. [default: one a GPU, or one a machine without GPUs]",
    ),
]
shape_options = [
    click.option(
        "--exponent",
        type=float,
        help="0 is PCA, 1 is whitening, between is soft. [default: what --whiten says: 1, 0 with "
        "pca; a build's auto chooses it]",
    ),
    click.option(
        "--center/--no-center",
        default=None,
        help="Subtract the mean. [default: what --whiten says: yes, but for none, random and "
        "truncate; a build's auto chooses it]",
    ),
    click.option("--normalize-input", is_flag=True, help="Fit on embeddings of unit length."),
    click.option(
        "--groups", type=click.IntRange(min=1), help="Groups of channels for --whiten group."
    ),
    click.option(
        "--group-size", type=click.IntRange(min=1), help="Or how many channels a group has."
    ),
    click.option("--shuffle", is_flag=True, help="Permute the channels before grouping them."),
    click.option(
        "--shrinkage",
        help="Shrink the covariance: ledoit-wolf, oas, or a coefficient from 0 to 1.",
    ),
    click.option(
        "--floor",
        type=float,
        help="Drop directions whose variance is below this share of the first one's.",
    ),
    click.option("--remove-top", type=click.IntRange(min=0), help="Drop the first N directions."),
]
whitening_options = [
    click.option(
        "--whiten",
        type=click.Choice(KINDS),
        default="auto",
        show_default=True,
        help="The transform; auto chooses k, exponent and centring by the corpus, or by labels.",
    ),
    click.option(
        "--k",
        help="Width kept: a number, full, or a share of variance such as 0.95. "
        "[default: auto chooses it; else a third of the embedding's width, at most 256]",
    ),
    *shape_options,
    click.option(
        "--weight-column", help="Column of frequencies by which rows count in the fit; it is kept."
    ),
    click.option(
        "--weighting",
        type=click.Choice(["zipfian", "inverse-frequency"]),
        default="zipfian",
        show_default=True,
        help="Weigh rows in proportion to the frequencies, or rare rows more.",
    ),
    click.option("--queries", help="File of queries, for auto to choose by; with --qrels."),
    click.option("--qrels", help="Their judgements: .parquet, .tsv, or TREC's .qrels, .txt."),
    click.option("--qrels-split", help="Which judgements, where the file has a column split."),
    click.option("--pairs", help="Or a file of pairs of texts, scored or not."),
    click.option(
        "--choose-sample",
        type=int,
        default=1_000,
        show_default=True,
        help="Documents that auto chooses on at most, where there are no labels.",
    ),
    click.option(
        "--factory",
        default="auto",
        show_default=True,
        help="FAISS factory string; auto: exact search up to 200,000 rows, then lists (IVF), or a "
        "graph (HNSW) for a --target-recall of 0.99 or more where --memory-budget has room for it; "
        "in the most precise codec that fits the budget, float32 without one.",
    ),
    click.option(
        "--target-recall",
        type=float,
        default=0.95,
        show_default=True,
        help="Share of the exact neighbours that searching is set to find, on rows held out.",
    ),
    click.option(
        "--memory-budget",
        help="Bytes the index and making it may hold in memory, such as 512MB or 4GiB; inverted "
        "lists of more than three quarters of it are built and kept on disk. [default: no limit]",
    ),
    click.option(
        "--index-device",
        type=click.Choice(["auto", "cpu", "gpu"]),
        default="auto",
        show_default=True,
        help="Where the index is trained and filled; auto: a GPU that FAISS sees.",
    ),
    click.option(
        "--seed",
        type=int,
        default=0,
        show_default=True,
        help="Of every random sample, and of random directions and groups.",
    ),
]


def with_options(*groups: list[Any]) -> Callable[[Command], Command]:
    """Return a decorator that adds groups of options, shown in the order given."""
    options = [option for group in groups for option in group]
    return lambda command: functools.reduce(
        lambda wrapped, option: option(wrapped), reversed(options), command
    )
