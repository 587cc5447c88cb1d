"""The corpus of docstrings: exact in number, seeded, readable, and made without any import."""

import inspect
import json
import shutil
import textwrap
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from pipelines import docstrings_corpus
from pipelines.docstrings_corpus import Passage, harvest, main

TELLING = "Read the {} and give back all that it holds, in order."


def write(root: Path, files: dict[str, str]) -> Path:
    for name, source in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source), encoding="utf-8")
    return root


def function(name: str, doc: str | None = None) -> str:
    return f"def {name}():\n    {doc or TELLING.format(name)!r}\n\n"


def by_id(root: Path, *, max_chars: int = 600) -> dict[str, Passage]:
    return {passage.id: passage for passage in harvest([root], max_chars=max_chars)}


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    """A library of six modules; site-packages with a large and a small package."""
    library = {
        f"lib{i}.py": "".join(function(f"read_lib{i}_{j}") for j in range(5)) for i in range(6)
    }
    large = {
        f"large/part{i}.py": "".join(function(f"read_large{i}_{j}") for j in range(9))
        for i in range(30)
    }
    small = {"small/__init__.py": function("read_small")}
    return [write(tmp_path / "library", library), write(tmp_path / "site", large | small)]


def test_nothing_is_imported(tmp_path: Path) -> None:
    marker = tmp_path / "imported"
    trap = f"open({str(marker)!r}, 'w').close()\nraise RuntimeError\n"
    root = write(tmp_path / "root", {"trap/__init__.py": trap + function("read_trap")})
    assert "trap.read_trap" in by_id(root)
    assert not marker.exists()


def test_functions_of_the_library_agree_with_inspect(tmp_path: Path) -> None:
    assert json.__file__ is not None
    shutil.copytree(Path(json.__file__).parent, tmp_path / "json")
    found = by_id(tmp_path, max_chars=10_000)
    for call in (json.dump, json.dumps, json.load, json.loads):
        passage = found[f"json.{call.__name__}"]
        assert passage.signature == f"{call.__name__}{inspect.signature(call)}"
        assert passage.text == inspect.getdoc(call)


def test_the_command_writes_the_corpus_and_says_so_in_a_line(
    roots: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docstrings_corpus, "installed_roots", lambda: roots)
    out = tmp_path / "out"
    result = CliRunner().invoke(main, [str(out), "--passages", "50", "--max-chars", "45"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("50 passages from 8 packages in ")
    assert result.output.count("\n") == 1
    texts = pq.read_table(out)["text"].to_pylist()
    assert len(texts) == 50
    assert all(text.strip() and len(text) <= 45 for text in texts)
