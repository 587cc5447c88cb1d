"""A Parquet corpus from the docstrings of the Python packages on this machine.

Sources are read with ``ast`` and never imported, so a broken, slow or hostile package costs
nothing, and ten thousand passages take seconds. Every machine with Python has this text.

    python -m pipelines.docstrings_corpus OUT_DIR [--passages 10000] [--seed 0] [--max-chars 600]
"""

from __future__ import annotations

import ast
import functools
import heapq
import inspect
import itertools
import os
import random
import re
import sysconfig
import time
import tokenize
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import pyarrow as pa
import pyarrow.parquet as pq

from whiten_index.errors import CorpusError, WhitenIndexError

FILE_NAME = "docstrings.parquet"
ROWS_PER_GROUP = 2_000
MIN_CHARS = 40
"""Shorter docstrings ("Close the file.") say too little to be found by."""

SKIPPED_FOLDERS = frozenset(
    # Other people's packages: they have a root of their own, or are copies.
    ["site-packages", "dist-packages", "_vendor", "vendor", "_distutils"]
    # Nobody's API: tests, generated tables, applications, modules on their way out.
    + ["test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "pydoc_data"]
    + ["encodings", "distutils"]
)
SKIPPED_FILES = re.compile(r"(test_.*|.*_test|tests?|conftest|setup|__main__)\.py")

# The documented Python versions of modules that CPython runs in C.
PUBLIC_NAMES = {
    "_collections_abc": "collections.abc",
    "_pydatetime": "datetime",
    "_pydecimal": "decimal",
    "_pyio": "io",
}

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Exports = Callable[[Path], frozenset[str]]


@dataclass(frozen=True, slots=True)
class Passage:
    """One docstring: a row of the corpus.

    Attributes:
        id: ``module.name``, or the module itself for a module's docstring; unique.
        module: the module a user imports it from.
        name: the qualified name in that module; a module's own last name for its docstring.
        signature: the call as written in the source, without ``self``.
        text: the docstring, unindented and cut between two words.
    """

    id: str
    module: str
    name: str
    signature: str
    text: str


SCHEMA = pa.schema([(column, pa.string()) for column in Passage.__slots__])


@dataclass(frozen=True, slots=True)
class _Source:
    root: Path
    path: Path
    module: str


@dataclass(frozen=True, slots=True)
class _Documented:
    module: str
    name: str
    signature: str
    doc: str


def harvest(
    roots: Iterable[Path],
    *,
    seed: int = 0,
    max_chars: int = 600,
    unreadable: list[Path] | None = None,
) -> Iterator[Passage]:
    """Yield the documented public names under the roots, lazily and spread over the packages.

    The package with the fewest passages so far gives the next of its files, in seeded order:
    small packages come whole, large ones in equal parts, and files that nobody waits for are
    never parsed. No two passages share an id or a first paragraph.

    Args:
        roots: folders that hold packages, such as the standard library's and site-packages.
        seed: of the order of each package's files.
        max_chars: longest text, in characters.
        unreadable: collects the files that do not parse.

    Raises:
        CorpusError: a root is not a folder.
    """
    queues = _queues(roots, seed)
    heap = [(0, package) for package in sorted(queues)]
    exports = functools.cache(_exported_names)
    seen: set[str] = set()
    while heap:
        count, package = heapq.heappop(heap)
        source = queues[package].pop()
        try:
            found = list(_passages(source, exports, max_chars))
        except (SyntaxError, ValueError, RecursionError, MemoryError, OSError):
            found = []
            if unreadable is not None:
                unreadable.append(source.path)
        for passage in found:
            keys = {f"id {passage.id}", f"summary {_summary(passage.text)}"}
            if seen.isdisjoint(keys):
                seen |= keys
                count += 1
                yield passage
        if queues[package]:
            heapq.heappush(heap, (count, package))


def sample(
    roots: Iterable[Path],
    *,
    passages: int,
    seed: int = 0,
    max_chars: int = 600,
    unreadable: list[Path] | None = None,
) -> list[Passage]:
    """Harvest exactly so many passages, in seeded order, so that any prefix is a fair sample.

    Raises:
        CorpusError: the roots hold fewer passages, or one of them is not a folder.
    """
    found = harvest(roots, seed=seed, max_chars=max_chars, unreadable=unreadable)
    chosen = list(itertools.islice(found, passages))
    if len(chosen) < passages:
        raise CorpusError(
            f"{passages:,} passages were asked for, but the packages of this Python hold only "
            f"{len(chosen):,}: ask for fewer with --passages {len(chosen)}, or install more packages."
        )
    random.Random(seed).shuffle(chosen)
    return chosen


def write_corpus(
    passages: Sequence[Passage], out_dir: Path, *, rows_per_group: int = ROWS_PER_GROUP
) -> Path:
    """Write the passages to one Parquet file of several row groups; return its path.

    The file appears whole or not at all, and replaces an earlier one.

    Raises:
        CorpusError: the folder cannot be made or written.
    """
    path = out_dir / FILE_NAME
    unfinished = out_dir / f".{FILE_NAME}.{os.getpid()}.tmp"
    table = pa.Table.from_pylist([asdict(passage) for passage in passages], schema=SCHEMA)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            pq.write_table(table, file, row_group_size=rows_per_group, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        raise CorpusError(f"{out_dir} cannot be written ({error}): choose another folder.") from error
    finally:
        if out_dir.is_dir():
            unfinished.unlink(missing_ok=True)
    return path


def installed_roots() -> list[Path]:
    """List the folders of the standard library and of the installed packages."""
    paths = sysconfig.get_paths()
    roots = {Path(paths[key]).resolve(): None for key in ("stdlib", "purelib", "platlib")}
    return [root for root in roots if root.is_dir()]


def _queues(roots: Iterable[Path], seed: int) -> dict[str, list[_Source]]:
    queues: dict[str, list[_Source]] = defaultdict(list)
    for root in roots:
        if not root.is_dir():
            raise CorpusError(f"{root} is not a folder: give one that holds Python packages.")
        for source in _sources(root):
            queues[source.module.partition(".")[0]].append(source)
    for package, queue in queues.items():
        random.Random(f"{seed} {package}").shuffle(queue)
    return queues


def _sources(root: Path) -> Iterator[_Source]:
    for folder, folders, files in os.walk(root):
        # In place and sorted: os.walk descends what is left, the same on every file system.
        folders[:] = sorted(f for f in folders if f.isidentifier() and f not in SKIPPED_FOLDERS)
        for file in sorted(files):
            path = Path(folder, file)
            if path.suffix == ".py" and path.stem.isidentifier():
                parts = path.relative_to(root).with_suffix("").parts
                module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                if module and not SKIPPED_FILES.fullmatch(file):
                    yield _Source(root, path, PUBLIC_NAMES.get(module, module))


def _passages(source: _Source, exports: Exports, max_chars: int) -> Iterator[Passage]:
    tree = _parse(source.path)
    for item in itertools.chain(_module_doc(source, tree), _attached(source, tree), _defined(source, tree, exports)):
        text = _clean(item)
        if len(text) >= MIN_CHARS and not NOISE.search(text):
            id = item.module if ...
