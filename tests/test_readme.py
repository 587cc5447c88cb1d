"""The README's figures are those of the stored results, and its examples name real options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click

from benchmarks import tables
from pipelines import reproduce_papers, train_whitenedcse
from whiten_index.cli import cli

README = Path(__file__).parents[1] / "README.md"


def test_tables_are_made_from_the_stored_results() -> None:
    assert tables.main(["--check"]) == 0, "run: python -m benchmarks.tables"


def test_a_changed_figure_is_noticed(monkeypatch, tmp_path) -> None:
    text = README.read_text(encoding="utf-8")
    changed = tmp_path / "README.md"
    changed.write_text(re.sub(r"exact \| 1,536", "exact | 1,537", text))
    others = [path for path in tables.DOCUMENTS if path != README]
    monkeypatch.setattr(tables, "DOCUMENTS", [changed, *others])
    assert tables.main(["--check"]) == 1


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
