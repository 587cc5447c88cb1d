"""The demo: an index of the docstrings of the Python on this machine."""

import ast
import contextlib
import random
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import click

from whiten_index.artifacts.atomic import replacing, require_path, require_replaceable
from whiten_index.artifacts.files import exists, reading, walk_files, writing
from whiten_index.cli import terminal
from whiten_index.cli.schema_options import PATH
from whiten_index.errors import ConfigError

_MOST_OF_A_FILE, _LEAST_LETTERS, _MOST_LETTERS = 30, 60, 600
_MARK = b"whiten-index demo"  # in the corpus, which no other file has
_QUERIES = (
    "how do I parse a date from a string",
    "read a gzip compressed file",
    "run a function in several processes at once",
    "eigenvalues of a symmetric matrix",
    "split a text into tokens for a language model",
)
_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "encodings", "vendor", "_vendor"}


@click.command()
@click.argument("folder", type=PATH)
@click.option("--rows", type=click.IntRange(min=1_000), default=10_000, show_default=True)
def demo(folder: str, rows: int) -> None:
    """Index the docstrings of the Python on this machine in FOLDER, and search them.

    It takes about two minutes on two cores, and needs no network if the embedded model is
    installed.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from whiten_index.pipeline.build import build_index
    from whiten_index.pipeline.build_config import BuildConfig
    from whiten_index.search.search_index import open_index

    corpus, out = require_path(folder) / "docstrings.parquet", Path(folder) / "index"
    require_replaceable(corpus, _is_demo, "a demo's docstrings")
    if exists(out) and not exists(corpus):
        raise ConfigError(f"{out} is no index of a demo, and is left as it is; name another folder")
    table = pa.Table.from_pylist(docstrings(rows))
    with writing(corpus):
        corpus.parent.mkdir(parents=True, exist_ok=True)
        with replacing(corpus) as temporary:
            pq.write_table(table.replace_schema_metadata({_MARK: "1"}), temporary)
    config = BuildConfig(
        corpus=(str(corpus),),
        text_columns=("name", "text"),
        id_column="name",
        keep=("text",),
        max_length=128,
        k=128,
        exponent=0.25,
        out=str(out),
    )
    built = build_index(config, progress=terminal.Bars())
    click.echo(f"{out}: {built.manifest['rows']:,} docstrings, 384 dimensions to 128")
    hits = open_index(out).search(_QUERIES, top_k=3)
    for query, found in zip(_QUERIES, hits, strict=True):
        click.echo(f"\n{query}")
        for hit in found:
            line = terminal.one_line(str(hit.columns["text"]), 60)
            click.echo(f"  {hit.score:.4f}  {hit.id}: {line}")
    click.echo(f"\nThe same in a browser, beside raw embeddings: whiten-index serve {out}")


def _is_demo(path: Path) -> bool:
    import pyarrow.parquet as pq

    with reading(path), contextlib.suppress(ValueError):
        return _MARK in (pq.read_schema(path).metadata or {})
    return False


def docstrings(most: int) -> list[dict[str, str]]:
    """Return names and docstrings of public functions and classes, each once.

    Sources are parsed and never imported.
    """
    roots = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    # The packages are below the standard library.
    files = {path: root for root in roots for path in walk_files(root) if path.suffix == ".py"}
    found, drawn = dict[str, str](), random.Random(0)
    # The best known names are in modules that are in few packages.
    order = sorted(
        (len(path.relative_to(root).parts), drawn.random(), path, root)
        for path, root in files.items()
    )
    for _, _, path, root in order:
        module = path.relative_to(root).with_suffix("").parts
        if not _SKIPPED.isdisjoint(module) or "site-packages" in module:
            continue
        for name, text in _public(path)[:_MOST_OF_A_FILE]:
            found.setdefault(".".join((*module, name)).replace(".__init__", ""), text)
        if len(found) >= most:
            break
    return [{"name": name, "text": text} for name, text in list(found.items())[:most]]


def _public(path: Path) -> list[tuple[str, str]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    return list(_named(tree, ""))


def _named(tree: ast.Module | ast.ClassDef, above: str) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            text = ast.get_docstring(node) or ""
            if len(text) >= _LEAST_LETTERS:
                # UTF-8 does not hold half of a surrogate pair.
                yield above + node.name, text[:_MOST_LETTERS].encode(errors="replace").decode()
            if isinstance(node, ast.ClassDef):
                yield from _named(node, f"{above}{node.name}.")
