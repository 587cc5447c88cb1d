"""README and documentation: their examples name real options, and the first result is one."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from benchmarks import tables
from pipelines import reproduce_papers, train_whitenedcse
from pipelines.papers import transfer
from whiten_index.cli import cli

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
TUTORIALS = ROOT / "docs" / "tutorials"
NOTEBOOK, ANOTHER = tables.NOTEBOOKS
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Of pip, of ray and of what the pages quote of other programs.
OTHERS = {
    "--index-url", "--passages", "--head", "--address", "--check", "--group", "--gpu-price",
    "--cpu-price", "--rm", "--help", "--packed", "--skip-memory", "--texts", "--rounds", "--soak",
    "--edition", "--files",
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


def commands(page: Path) -> str:
    """The shell and Python blocks of a page, or the cells of a notebook, as one shell script."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"(?ms)^```(sh|python)\n(.*?)^```", text)
    if page in tables.NOTEBOOKS:
        cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if "outputs" in cell]
        blocks = [("sh" if cell.startswith("%%sh\n") else "python", cell) for cell in cells]
    python = f"'{sys.executable}' - <<'END_OF_BLOCK'\n{{}}\nEND_OF_BLOCK\n"
    return "".join(
        code.removeprefix("%%sh") + "\n" if kind == "sh" else python.format(code)
        for kind, code in blocks
    )


def lines_of(text: str) -> set[str]:
    """Lines but for what another machine or another day prints: numbers, versions, widths."""
    masked = re.sub(r"-[0-9a-f]{12}\b|[\d.,:+]*\d", "#", text)
    return {" ".join(line.split()) for line in masked.splitlines()}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "pages",
    [
        pytest.param([README], marks=pytest.mark.slow),
        pytest.param([NOTEBOOK, TUTORIALS / "nightly-job.md"], marks=pytest.mark.slow),
        pytest.param([ANOTHER], marks=pytest.mark.slow),
        pytest.param([NOTEBOOK, TUTORIALS / "postgresql.md"], marks=pytest.mark.service),
    ],
)
def test_the_commands_of_a_page_print_what_it_shows(pages: list[Path], tmp_path: Path) -> None:
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # The wheel of this checkout, whichever one is installed; packages are those of this Python.
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation")
    subprocess.run([*pip, "--no-index", "--target", tmp_path / "wheel", ROOT], check=True)
    env = {**os.environ, "PATH": programs, "PYTHONPATH": str(tmp_path / "wheel")}
    for page in pages:
        done = subprocess.run(
            ["sh", "-e", "-c", commands(page)],
            cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        for server in tmp_path.glob("postgres/postmaster.pid"):
            os.kill(int(server.read_text().split()[0]), signal.SIGINT)
        assert done.returncode == 0, done.stdout
        source = tables.NOTEBOOKS.get(page, page).read_text("utf-8")
        if page in tables.NOTEBOOKS:
            assert tables.notebook(source) == page.read_text("utf-8")
        shown = re.findall(r"(?ms)^```text\n(.*?)^```", source)
        if sys.version_info[:2] == (3, 11):  # other versions have other help pages and docstrings
            assert lines_of("".join(shown)) <= lines_of(done.stdout), done.stdout
