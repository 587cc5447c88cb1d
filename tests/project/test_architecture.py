"""The rules of the house: who imports whom, and what loads late."""

import ast
import re
import tomllib
from pathlib import Path

from tests.helpers.bad_input import run_python

ROOT = Path(__file__).parents[2]
HEAVY = "{'torch', 'transformers', 'tokenizers', 'faiss', 'pyarrow', 'numpy', 'tqdm'}"


def loaded_by(code: str) -> set[str]:
    """Return which heavy packages a fresh interpreter has loaded after ``code``."""
    script = f"import sys; {code}; print(*({HEAVY} & set(sys.modules)))"
    return set(run_python("-c", script).split())


def test_every_module_of_the_library_is_under_the_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(c["layers"] for c in contracts["contracts"] if c["type"] == "layers")
    placed = {name.strip() for layer in layers for name in layer.split("|")}
    modules = {
        f"whiten_index.{path.stem}"
        for path in (ROOT / "whiten_index").iterdir()
        if (path.suffix == ".py" and path.stem != "__init__") or (path / "__init__.py").exists()
    }
    assert modules == placed


def test_the_library_never_imports_its_jobs() -> None:
    for path in (ROOT / "whiten_index").rglob("*.py"):
        lines = path.read_text(encoding="utf-8").splitlines()
        imports = [line for line in lines if line.lstrip().startswith(("import ", "from "))]
        assert not [x for x in imports if x.split()[1].split(".")[0] in ("pipelines", "benchmarks")]


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_by("import whiten_index") == set()


def test_the_numerics_need_numpy_only() -> None:
    assert loaded_by("from whiten_index import Moments, Whitening") == {"numpy"}


def test_torch_and_faiss_load_when_they_are_used() -> None:
    names = "ParquetCorpus, EmbeddingStore, build_index, encode_corpus, open_index"
    loaded = loaded_by(f"from whiten_index import {names}")
    assert not loaded & {"torch", "transformers", "tokenizers", "faiss"}


# Looks and lists that take errors of the system for "no" or for "nothing".
_SWALLOWING = {
    *("exists", "is_dir", "is_file", "is_mount", "is_symlink", "isdir", "isfile", "islink"),
    *("ismount", "lexists", "glob", "iglob", "rglob", "iterdir", "listdir", "scandir", "walk"),
    "ignore_errors",
}
_ALLOWED = {
    ("artifacts/files.py", "scandir"): "the one place that lists",
    ("corpus/row_filter.py", "walk"): "of a syntax tree",
}


def test_files_are_looked_at_and_listed_in_one_place() -> None:
    """Everything else takes the functions of artifacts/files, which raise what the system says."""
    package, used = ROOT / "whiten_index", set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Attribute):
                names = [node.attr]
            elif isinstance(node, ast.keyword):
                names = [node.arg]
            elif isinstance(node, ast.ImportFrom) and node.module in ("glob", "os", "os.path"):
                names = [alias.name for alias in node.names]
            file = path.relative_to(package).as_posix()
            used |= {(file, name) for name in names if name in _SWALLOWING}
    assert used == set(_ALLOWED)


def test_the_page_on_the_architecture_names_files_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_]+/[a-z_]+\.py)`", page))
    assert len(named) > 25
    assert {name for name in named if not (ROOT / "whiten_index" / name).exists()} == set()
    rooms = {
        path.name for path in (ROOT / "whiten_index").iterdir() if (path / "__init__.py").exists()
    }
    assert rooms == set(re.findall(r"\| `([a-z]+)/` \|", page))
