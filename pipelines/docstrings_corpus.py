"""A Parquet corpus from the docstrings of the Python packages on this machine.

Sources are parsed and never imported, so a broken, slow or hostile package costs nothing and ten
thousand passages take seconds. Every machine with Python has this text.

    python -m pipelines.docstrings_corpus OUT_DIR [--passages 10000] [--seed 0] [--max-chars 600]
"""

from __future__ import annotations

import heapq
import itertools
import math
import os
import random
import sysconfig
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.docstrings_source import MIN_CHARS, UNREADABLE, Documented, Source, documented_names
from whiten_index.artifacts.atomic import replacing
from whiten_index.artifacts.files import writing
from whiten_index.errors import CorpusError, WhitenIndexError

FILE_NAME = "docstrings.parquet"
# A shard reads the row groups it needs, so one group would make each shard read all of the file.
ROWS_PER_GROUP = 2_000
# Copies of other packages, tests, tables, and applications that come with Python.
SKIPPED_FOLDERS = {"distutils", "encodings", "idlelib", "lib2to3", "test", "tests", "vendor"}
# CPython runs these modules in C; their documented versions in Python have other names.
PUBLIC_NAMES = {"_pydatetime": "datetime", "_pydecimal": "decimal", "_pyio": "io"}


@dataclass(frozen=True, slots=True)
class Passage:
    """One docstring: a row of the corpus.

    Attributes:
        id: ``module.name``, or the module alone for a module's docstring; unique.
        module: the module from which a user imports it.
        name: the qualified name in that module; for a module, the last part of its own.
        signature: the call as the source writes it, without ``self``; shortened when very long.
        text: the docstring, unindented and cut between two words.
    """

    id: str
    module: str
    name: str
    signature: str
    text: str


def harvest(
    roots: Iterable[Path], *, seed: int = 0, max_chars: int = 600, broken: list[Path] | None = None
) -> Iterator[Passage]:
    """Yield the documented public names under the roots, spread over the packages.

    Packages take turns, in proportion to the cube root of their files: one of 1,000 files
    gives 10 passages while a single module gives one. No id and no first paragraph comes twice.
    The files that do not parse are added to ``broken``.

    Raises:
        CorpusError: a root is not a folder.
    """
    broken = [] if broken is None else broken
    seen: set[str] = set()
    turns: list[tuple[float, str, float, Iterator[Documented]]] = []
    for package, sources in _packages(roots).items():
        names = _in_order(sources, random.Random(f"{seed} {package}"), broken)
        heapq.heappush(turns, (0.0, package, 1 / math.cbrt(len(sources)), names))
    while turns:
        turn, package, step, names = heapq.heappop(turns)
        for found in names:
            passage = _passage(found, max_chars)
            summary = " ".join(found.text.partition("\n\n")[0].casefold().split())
            if seen.isdisjoint({passage.id, summary}):
                seen |= {passage.id, summary}
                heapq.heappush(turns, (turn + step, package, step, names))
                yield passage
                break


def sample(
    roots: Iterable[Path],
    *,
    passages: int,
    seed: int = 0,
    max_chars: int = 600,
    broken: list[Path] | None = None,
) -> list[Passage]:
    """Harvest exactly so many passages, in seeded order, so that any prefix is a fair sample.

    Raises:
        CorpusError: the roots hold fewer passages, or one of them is not a folder.
    """
    found = harvest(roots, seed=seed, max_chars=max_chars, broken=broken)
    chosen = list(itertools.islice(found, passages))
    if len(chosen) < passages:
        raise CorpusError(
            f"{passages} passages were asked for and {len(chosen)} found: lower --passages, or run "
            "this with a Python that has more packages installed."
        )
    random.Random(seed).shuffle(chosen)
    return chosen


def write_corpus(passages: Sequence[Passage], out_dir: Path) -> Path:
    """Write the passages to one Parquet file of several row groups; return its path.

    The file appears whole or not at all, and replaces an earlier one.

    Raises:
        StorageError: the folder cannot be made or written.
    """
    path = out_dir / FILE_NAME
    table = pa.Table.from_pylist([asdict(passage) for passage in passages])
    with writing(path):
        out_dir.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            pq.write_table(table, temporary, row_group_size=ROWS_PER_GROUP)
    return path


def installed_roots() -> list[Path]:
    """List the folders of the standard library and of the installed packages."""
    paths = sysconfig.get_paths()
    roots = [Path(paths[key]).resolve() for key in ("stdlib", "purelib", "platlib")]
    return [root for root in dict.fromkeys(roots) if root.is_dir()]


def _packages(roots: Iterable[Path]) -> dict[str, list[Source]]:
    packages: defaultdict[str, list[Source]] = defaultdict(list)
    for root in roots:
        if not root.is_dir():
            raise CorpusError(f"{root} is not a folder: give one that holds Python packages.")
        for source in _sources(root):
            packages[source.module.partition(".")[0]].append(source)
    return packages


def _sources(root: Path) -> Iterator[Source]:
    for folder, folders, files in os.walk(root):
        # Pruned and sorted in place, since file systems list in different orders.
        folders[:] = sorted(f for f in folders if f.isidentifier() and f not in SKIPPED_FOLDERS)
        for file in sorted(files):
            path = Path(folder, file)
            if path.suffix != ".py" or not path.stem.isidentifier() or file.startswith("test_"):
                continue
            parts = path.relative_to(root).with_suffix("").parts
            module = ".".join(parts[:-1] if path.stem == "__init__" else parts)
            if module:
                yield Source(root, path, PUBLIC_NAMES.get(module, module))


def _in_order(
    sources: list[Source], order: random.Random, broken: list[Path]
) -> Iterator[Documented]:
    """Yield the names of one file after another; the best known are in shallow modules."""
    for source in sorted(sources, key=lambda source: order.random() * 4 ** len(source.packages)):
        try:
            found = list(documented_names(source))
        except UNREADABLE:
            broken.append(source.path)
        else:
            order.shuffle(found)
            yield from found


def _passage(found: Documented, max_chars: int) -> Passage:
    id_ = f"{found.module}.{found.name}" if found.name else found.module
    name = found.name or found.module.rpartition(".")[2]
    return Passage(id_, found.module, name, found.signature, _cut(found.text, max_chars))


def _cut(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    words = text[: max_chars + 1].rsplit(maxsplit=1)
    return words[0] if len(words) == 2 else text[:max_chars]


@click.command()
@click.argument("out_dir", type=click.Path(path_type=Path))
@click.option("--passages", default=10_000, show_default=True, type=click.IntRange(min=1))
@click.option("--seed", default=0, show_default=True)
@click.option("--max-chars", default=600, show_default=True, type=click.IntRange(min=MIN_CHARS))
def main(out_dir: Path, passages: int, seed: int, max_chars: int) -> None:
    """Write a Parquet corpus of the docstrings of the installed packages to OUT_DIR."""
    started = time.perf_counter()
    broken: list[Path] = []
    try:
        roots = installed_roots()
        chosen = sample(roots, passages=passages, seed=seed, max_chars=max_chars, broken=broken)
        path = write_corpus(chosen, out_dir)
    except WhitenIndexError as error:
        click.echo(f"Error: {error}", err=True)
        raise SystemExit(error.exit_code) from error
    packages = len({passage.module.partition(".")[0] for passage in chosen})
    click.echo(
        f"{len(chosen)} passages from {packages} packages in "
        f"{time.perf_counter() - started:.1f} s ({len(broken)} files did not parse): {path}"
    )


if __name__ == "__main__":
    main()
