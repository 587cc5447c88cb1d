"""``whiten-index push``: parse, call one function, print."""

from __future__ import annotations

from typing import Any

import click

from whiten_index.cli import terminal
from whiten_index.cli.schema_options import (
    GroupedCommand,
    GroupedOption,
    json_option,
    schema_options,
)
from whiten_index.vectordb.push_config import DATABASE, PushConfig


@click.command(cls=GroupedCommand)
@click.argument("index", type=click.Path(readable=False))
@schema_options(PushConfig)
@click.option(
    "--option",
    "options",
    cls=GroupedOption,
    group=DATABASE,
    multiple=True,
    metavar="NAME=VALUE",
    help="Of the database's index and load, such as m=16; may be repeated.",
)
@click.option("--status", is_flag=True, help="Print what is there, and whether INDEX fits it.")
@json_option
def push(options: tuple[str, ...], status: bool, as_json: bool, **given: Any) -> None:
    """Bring a database to the published version of INDEX: rows, whitened vectors, kept columns.

    What the database has of an earlier version by the same transform is changed in place. Else a
    new table is filled, indexed, checked against brute force and swapped in in one step.
    Run again after anything went wrong: it goes on. Passwords come from the
    variables that the database's client reads, never in the URL.
    """
    from whiten_index.vectordb.push import push_index

    named = {name: value for name, value in given.items() if value is not None}
    config = PushConfig(**named, options=_pairs(options))
    if status:
        _print_status(config, as_json=as_json)
        return
    report = push_index(config, progress=terminal.Bars(facts=not as_json)).to_json()
    lines = terminal.describe(
        report, "rows", "rows_before", "k", "dtype", "columns", "query_digest", "pushed", "resumed",
        "deleted", "why", "check", "seconds",
    )  # fmt: skip
    title = f"{report['target']} ({report['engine']}): version {report['version']}"
    terminal.show(report, (title, *lines), as_json=as_json)


def _print_status(config: PushConfig, *, as_json: bool) -> None:
    from whiten_index import QueryTransform, pushed_version

    queries = QueryTransform.of(config.index, k=config.k)
    there = pushed_version(config.to, config.table, options=config.options)
    found: dict[str, Any] = {
        "version": None,
        "rows": 0,
        **({} if there is None else there.to_json()),
        "index_version": queries.version,
        "index_query_digest": queries.query_digest,
        "fits": there is not None and there.query_digest == queries.query_digest,
    }
    nothing = ["nothing is pushed under that name"] * (there is None)
    terminal.show(found, (*nothing, *terminal.describe(found)), as_json=as_json)


def _pairs(options: tuple[str, ...]) -> dict[str, str]:
    pairs = dict[str, str]()
    for option in options:
        name, equals, value = option.partition("=")
        if not name or not equals:
            # What it is may be a secret.
            raise click.UsageError("--option takes NAME=VALUE; one was given without a name or =")
        if name in pairs:
            raise click.UsageError(f"--option {name} was given twice; give it once")
        pairs[name] = value
    return pairs
