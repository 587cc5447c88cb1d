"""README and documentation: their examples name real options, and the first result is one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from pipelines import reproduce_papers, train_whitenedcse
from pipelines.papers import transfer
from whiten_index.cli import cli

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Of pip, of ray and of what the pages quote of other programs.
OTHERS = {
    "--index-url", "--passages", "--head", "--address", "--check", "--group", "--gpu-price",
    "--cpu-price", "--rm", "--help", "--skip-memory", "--texts", "--rounds",
}  # fmt: skip


def parameters(command: click.Command) -> Iterator[click.Parameter]:
    """Yield the parameters of a command, and of the commands in it."""
    yield from command.params
    for inside in getattr(command, "commands", {}).values():
        yield from parameters(inside)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_option_shown_exists(page: Path) -> None:
    known = {
        spelling
        for command in (cli, reproduce_papers.main, train_whitenedcse.main, transfer.transfer)
        for parameter in parameters(command)
        for spelling in (*parameter.opts, *parameter.secondary_opts)
    }
    shown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", page.read_text(encoding="utf-8")))
    assert shown <= known | OTHERS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_to_a_file_or_a_heading_leads_there(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        name, _, heading = target.partition("#")
        there = (page.parent / name) if name else page
        assert there.exists(), target
        if heading:
            titles = re.findall(r"(?m)^#+ (.*)$", there.read_text(encoding="utf-8"))
            assert heading in {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}


def test_the_readme_fits_a_screen_or_two() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    assert len(text.encode()) <= 14_000


@pytest.mark.slow
def test_the_first_result_is_as_the_readme_shows_it(tmp_path: Path) -> None:
    text = README.read_text(encoding="utf-8")
    shell, python = (
        "\n".join(re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
        for language in ("sh", "python")
    )
    assert max(shell.count("\n"), python.count("\n")) <= 6
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # The path is that of this checkout, whichever one is installed.
    env = {**os.environ, "PATH": programs, "PYTHONPATH": str(ROOT)}
    for command in (("sh", "-e", "-c", shell), (sys.executable, "-c", python)):
        done = subprocess.run(
            command, cwd=tmp_path, env=env, check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert "try" in done.stdout
