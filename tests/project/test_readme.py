"""The README's figures are those of the stored results, and its examples name real options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click

from pipelines import reproduce_papers, train_whitenedcse
from whiten_index.cli import cli

README = Path(__file__).parents[2] / "README.md"


def parameters(command: click.Command) -> Iterator[click.Parameter]:
    """Yield the parameters of a command, and of the commands in it."""
    yield from command.params
    for inside in getattr(command, "commands", {}).values():
        yield from parameters(inside)


def test_every_option_shown_exists() -> None:
    known = {
        spelling
        for command in (cli, reproduce_papers.main, train_whitenedcse.main)
        for parameter in parameters(command)
        for spelling in (*parameter.opts, *parameter.secondary_opts)
    } | {"--index-url", "--passages", "--head"}
    shown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", README.read_text(encoding="utf-8")))
    assert shown <= known
