"""The wheel has every file of the package and every command that the documentation shows."""

import json
import os
import re
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = "\n".join(
    path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
)
# Runs commands given as JSON with --help, in one process: most of their time is importing.
HELP = """
import json, sys
import whiten_index
from click.testing import CliRunner
from whiten_index.cli import cli
print(whiten_index.__file__)
for words in json.loads(sys.argv[1]):
    result = CliRunner().invoke(cli, [*words, "--help"])
    print(result.exit_code, *words, result.output if result.exit_code else "")
"""


def run(*arguments: Any, **options: Any) -> str:
    done = subprocess.run(
        list(map(str, arguments)), capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without a network by the backend that the group `test` installs."""
    if find_spec("hatchling") is None and not os.environ.get("CI"):
        pytest.skip("needs hatchling, which the group test installs")
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed; its dependencies come from this environment."""
    folder = tmp_path_factory.mktemp("site")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "install", "--no-deps", "--no-index", "--target", folder, wheel)
    return folder


def away(installed: Path) -> dict[str, Any]:
    """Return options of a process that finds the wheel and not the checkout."""
    return {"cwd": installed, "env": {**os.environ, "PYTHONPATH": str(installed)}}


def code(language: str) -> str:
    """Return the fenced blocks of the documentation in a language."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", PAGES, re.MULTILINE | re.DOTALL)
    return "\n".join(block for name, block in blocks if name == language)


def shown_commands() -> list[list[str]]:
    """Return the commands that are shown, groups with their subcommand."""
    from whiten_index.cli import cli

    found = set[tuple[str, ...]]()
    for name, inside in re.findall(r"whiten-index ([a-z][a-z-]*)(?: ([a-z]+))?", PAGES):
        if name in cli.commands:
            group = getattr(cli.commands[name], "commands", {})
            found.add((name, inside) if inside in group else (name,))
    unknown = re.findall(r"^whiten-index ([a-z][a-z-]*)", code(""), re.MULTILINE)
    assert set(unknown) <= set(cli.commands)
    return sorted(map(list, found))


def test_every_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    folder = ROOT / "whiten_index"
    here = {
        path.relative_to(ROOT).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.startswith("whiten_index/")}
    assert names == here


def test_every_command_that_the_documentation_shows_runs_from_the_wheel(installed: Path) -> None:
    commands = shown_commands()
    assert len(commands) > 15
    options = away(installed)
    where, *lines = run(sys.executable, "-c", HELP, json.dumps(commands), **options).splitlines()
    assert Path(where).is_relative_to(installed)
    assert [line.split() for line in lines] == [["0", *words] for words in commands]
    assert "whiten-index" in run(installed / "bin" / "whiten-index", "--version", **options)


def test_what_the_documentation_imports_is_in_the_wheel(installed: Path) -> None:
    """Integrations are left out: their frameworks may not be installed."""
    imports = re.findall(r"^(?:from|import) whiten_index.*$", code("python"), re.MULTILINE)
    assert imports
    lines = [line for line in imports if ".integrations" not in line and "(" not in line]
    run(sys.executable, "-c", "\n".join(lines), **away(installed))


def test_modules_that_the_documentation_runs_are_in_the_checkout() -> None:
    for module in set(re.findall(r"python -m ((?:pipelines|benchmarks)[\w.]*)", PAGES)):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module
