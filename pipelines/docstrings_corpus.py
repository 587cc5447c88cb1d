"""A Parquet corpus from the docstrings of the Python packages on this machine.

Sources are read with ``ast`` and never imported, so a broken, slow or hostile package costs
nothing and ten thousand passages take seconds. Every machine with Python has this text.

    python -m pipelines.docstrings_corpus OUT_DIR [--passages 10000] [--seed 0] [--max-chars 600]
"""

from __future__ import annotations

import ast
import functools
import heapq
import inspect
import itertools
import math
import os
import random
import re
import sysconfig
import textwrap
import time
import tokenize
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import click
import pyarrow as pa
import pyarrow.parquet as pq

from whiten_index.errors import CorpusError, WhitenIndexError

FILE_NAME = "docstrings.parquet"
ROWS_PER_GROUP = 2_000
LIBRARY_SHARE = 0.35

# Less ("Close the file.") says too little to be found by.
MIN_CHARS = 40
MIN_WORDS = 6
# Some annotations hold whole pages of documentation.
MAX_SIGNATURE = 300

# Copies of other packages, tests, applications, tables, and modules on their way out.
SKIPPED_FOLDERS = re.compile(
    r"(site|dist)-packages|_vendor|vendor|vendored|_distutils|distutils|tests?|idlelib|lib2to3"
    r"|turtledemo|ensurepip|pydoc_data|encodings|internal"
)
SKIPPED_FILES = re.compile(
    r"(test(ing)?_.*|.*_test|tests?|conftest|setup|__main__|antigravity|this)\.py"
)

# The documented Python versions of modules that CPython runs in C.
PUBLIC_NAMES = {
    "_collections_abc": "collections.abc",
    "_pydatetime": "datetime",
    "_pydecimal": "decimal",
    "_pyio": "io",
}

# Text that opens with a field, a section, code or a directive does not say what it is about.
NO_SUMMARY = re.compile(
    r">>>|```|\.\. |[#{<|@]|:\w+:? |(see|alias (for|of)) +[:`]"
    r"|\*{0,2}\w+\*? \((`|[^)\n]*optional)"
    r"|((args?|arguments|params|parameters|returns?|yields|raises|examples?|attributes|inputs?"
    r"|outputs?|notes?|usage|shapes?|todo|warnings?|see also)\s*(:|$))",
    re.IGNORECASE | re.MULTILINE,
)
LEGAL = re.compile(r"copyright\s*(\(c\)|©|\d)|licensed under|all rights reserved", re.IGNORECASE)
# Rulers of titles and tables, placeholders of templates, boxes that link to a rendered page.
MARKUP = re.compile(
    r"^[ \t]*([=*~^#+|-][=*~^#+| \t-]*|\{\w+\}|%\(\w+\)s|!!! .*(\n[ \t]+.*)*)$\n?", re.MULTILINE
)
# Docstrings of C and C++ functions, and old ones, begin with the call itself.
SHOWN_CALL = re.compile(
    r"(?:\w+\.)*(?P<name>\w+)\((?:[^()]|\([^()]*\))*\)"
    r"[ \t]*(?:->[ \t]*\S+(?:[ \t]+\S+){0,2})?[ \t]*$\s*",
    re.MULTILINE,
)
DOCUMENTING_CALLS = frozenset({"add_docstr", "_add_docstr"})
PROPERTIES = frozenset({"property", "cached_property", "functools.cached_property"})

UNPARSABLE = (SyntaxError, ValueError, RecursionError, MemoryError, OSError)

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
# Of a module under a root: the names it imports from each private module of its own package.
Imports = Callable[[Path, str], dict[str, set[str]]]


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
    seen: set[str] | None = None,
    unreadable: list[Path] | None = None,
) -> Iterator[Passage]:
    """Yield the documented public names under the roots, spread over the packages.

    Packages take turns, in proportion to the square root of their files: one of 2,500 files
    gives 50 passages while a single module gives one. Their files come in a seeded order that
    favours shallow modules, where the best known names are, and are parsed one at a time.

    Args:
        roots: folders that hold packages, such as the standard library's and site-packages.
        seed: of the order in each package.
        max_chars: longest text, in characters.
        seen: ids and first paragraphs already given; no passage repeats either. Updated.
        unreadable: collects the files that do not parse.

    Raises:
        CorpusError: a root is not a folder.
    """
    seen = set() if seen is None else seen
    unreadable = [] if unreadable is None else unreadable
    imports = functools.cache(_imported_names)
    turns, streams = [], {}
    for package, sources in sorted(_packages(roots).items()):
        turns.append((0.0, package, 1 / math.sqrt(len(sources))))
        order = random.Random(f"{seed} {package}")
        streams[package] = _stream(sources, order, imports, max_chars, unreadable)
    while turns:
        turn, package, step = heapq.heappop(turns)
        for passage in streams[package]:
            keys = {f"id: {passage.id}", f"summary: {_summary(passage.text)}"}
            if seen.isdisjoint(keys):
                seen |= keys
                heapq.heappush(turns, (turn + step, package, step))
                yield passage
                break


def sample(
    roots: Sequence[Path],
    *,
    passages: int,
    seed: int = 0,
    max_chars: int = 600,
    unreadable: list[Path] | None = None,
) -> list[Passage]:
    """Harvest exactly so many passages, in seeded order, so that any prefix is a fair sample.

    The first root is the standard library's, which every reader knows: it gives up to its share
    before the others, and again when they run out.

    Raises:
        CorpusError: the roots hold fewer passages, or one of them is not a folder.
    """
    seen: set[str] = set()
    library, others = (
        harvest(group, seed=seed, max_chars=max_chars, seen=seen, unreadable=unreadable)
        for group in (roots[:1], roots[1:])
    )
    first = itertools.islice(library, int(passages * LIBRARY_SHARE))
    chosen = list(itertools.islice(itertools.chain(first, others, library), passages))
    if len(chosen) < passages:
        raise CorpusError(
            f"{passages} passages were asked for and {len(chosen)} found: lower --passages, or run "
            "this with a Python that has more packages installed."
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
    unfinished = out_dir / f".{FILE_NAME}.{os.getpid()}"
    schema = pa.schema([(field.name, pa.string()) for field in fields(Passage)])
    table = pa.Table.from_pylist([asdict(passage) for passage in passages], schema=schema)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        try:
            with unfinished.open("wb") as file:
                pq.write_table(table, file, row_group_size=rows_per_group, compression="zstd")
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise CorpusError(f"{path} cannot be written ({error}): give another folder.") from error
    return path


def installed_roots() -> list[Path]:
    """List the folders of the standard library and of the installed packages."""
    paths = sysconfig.get_paths()
    roots = [Path(paths[key]).resolve() for key in ("stdlib", "purelib", "platlib")]
    return [root for root in dict.fromkeys(roots) if root.is_dir()]


def _packages(roots: Iterable[Path]) -> dict[str, list[_Source]]:
    packages: defaultdict[str, list[_Source]] = defaultdict(list)
    for root in roots:
        if not root.is_dir():
            raise CorpusError(f"{root} is not a folder: give one that holds Python packages.")
        for source in _sources(root):
            packages[source.module.partition(".")[0]].append(source)
    return packages


def _sources(root: Path) -> Iterator[_Source]:
    for folder, folders, files in os.walk(root):
        # Pruned and sorted in place, since file systems list in different orders.
        folders[:] = sorted(
            f for f in folders if f.isidentifier() and not SKIPPED_FOLDERS.fullmatch(f)
        )
        for file in sorted(files):
            path = Path(folder, file)
            if path.suffix != ".py" or SKIPPED_FILES.fullmatch(file):
                continue
            parts = path.relative_to(root).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            if module and parts[-1].isidentifier():
                yield _Source(root, path, PUBLIC_NAMES.get(module, module))


def _stream(
    sources: list[_Source],
    order: random.Random,
    imports: Imports,
    max_chars: int,
    unreadable: list[Path],
) -> Iterator[Passage]:
    # Each file waits a random time, four times as long for every level of depth.
    for source in sorted(sources, key=lambda source: order.expovariate(4.0 ** -_depth(source))):
        if not _is_reachable(source, imports):
            continue
        try:
            found = list(_passages(source, imports, max_chars))
        except UNPARSABLE:
            unreadable.append(source.path)
        else:
            order.shuffle(found)
            yield from found


def _passages(source: _Source, imports: Imports, max_chars: int) -> Iterator[Passage]:
    tree = _parse(source.path)
    for found in itertools.chain(
        _of_module(source, tree), _of_definitions(source, tree, imports), _of_calls(source, tree)
    ):
        text = _clean(found)
        if _tells(text):
            id_ = f"{found.module}.{found.name}" if found.name else found.module
            name = found.name or found.module.rpartition(".")[2]
            signature = textwrap.shorten(found.signature, MAX_SIGNATURE, placeholder=" …")
            yield Passage(id_, found.module, name, signature, _cut(text, max_chars))


def _parse(path: Path) -> ast.Module:
    # tokenize.open honours the coding cookie; the warnings are about other people's code.
    with tokenize.open(path) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(file.read())


def _of_module(source: _Source, tree: ast.Module) -> Iterator[_Documented]:
    doc = ast.get_docstring(tree)
    if doc and not _is_private(source.module):
        yield _Documented(source.module, "", f"import {source.module}", doc)


def _of_definitions(source: _Source, tree: ast.Module, imports: Imports) -> Iterator[_Documented]:
    listed = _listed_names(tree)
    for name, node in _definitions(tree.body):
        doc = ast.get_docstring(node)
        module = _home(source, name.partition(".")[0], listed, imports) if doc else None
        if doc and module:
            yield _Documented(module, name, _signature(node, method="." in name), doc)


def _of_calls(source: _Source, tree: ast.Module) -> Iterator[_Documented]:
    """Read the calls that document, in Python, what torch implements in C++.

    ``add_docstr(torch.abs, "...")`` names its target; ``fft = _add_docstr(_fft, "...")`` binds it.
    """
    for node in tree.body:
        match node:
            case ast.Expr(value=ast.Call(func=ast.Name(id=call), args=[target, text])):
                path = ast.unparse(target)
            case ast.Assign(
                targets=[ast.Name(id=bound)],
                value=ast.Call(func=ast.Name(id=call), args=[_, text]),
            ):
                path = f"{source.module}.{bound}"
            case _:
                continue
        doc = inspect.cleandoc(_leading_string(text))
        module, _, name = path.rpartition(".")
        if call in DOCUMENTING_CALLS and doc and module and not _is_private(path):
            shown = SHOWN_CALL.match(doc)
            yield _Documented(module, name, " ".join(shown[0].split()) if shown else name, doc)


def _leading_string(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.BinOp(left=inner) | ast.Call(func=ast.Attribute(value=inner)):
            return _leading_string(inner)
    return ""


def _statements(nodes: Iterable[ast.AST]) -> Iterator[ast.stmt]:
    for node in nodes:
        if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _statements(ast.iter_child_nodes(node))
        elif isinstance(node, ast.stmt):
            yield node


def _definitions(body: Iterable[ast.AST], owner: str = "") -> Iterator[tuple[str, Definition]]:
    for node in _statements(body):
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield f"{owner}{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from _definitions(node.body, f"{owner}{node.name}.")


def _home(
    source: _Source, name: str, listed: frozenset[str] | None, imports: Imports
) -> str | None:
    """Name the public module that offers a top-level name, or None where none does.

    numpy, scipy and scikit-learn define their public names in private modules; the outermost
    package that imports the name from there, directly or through private ones, is its home.
    """
    if listed is not None and name not in listed:
        return None
    if not _is_private(source.module):
        return source.module
    return next((home for home in _homes(source) if _offers(home, name, source, imports)), None)


def _homes(source: _Source) -> list[str]:
    public = source.module.split(".")[: _depth(source)]
    return [".".join(public[:depth]) for depth in range(1, len(public) + 1)]


def _offers(home: str, name: str, source: _Source, imports: Imports) -> bool:
    waiting, reached = [home], {home}
    while waiting:
        taken = imports(source.root, waiting.pop())
        origins = {origin for origin, names in taken.items() if names & {name, "*"}} - reached
        if source.module in origins:
            return True
        waiting += origins
        reached |= origins
    return False


def _is_reachable(source: _Source, imports: Imports) -> bool:
    """Tell without parsing whether a module can hold public names.

    Most of torch is private packages of which its public ones import nothing.
    """
    parts = source.module.split(".")
    private = ".".join(parts[: _depth(source) + 1])
    return private == source.module or any(
        f"{origin}.".startswith(f"{private}.")
        for home in _homes(source)
        for origin in imports(source.root, home)
    )


def _depth(source: _Source) -> int:
    parts = source.module.split(".")
    return len(list(itertools.takewhile(lambda part: not _is_private(part), parts)))


def _is_private(dotted: str) -> bool:
    return any(part.startswith("_") for part in dotted.split("."))


def _imported_names(root: Path, module: str) -> dict[str, set[str]]:
    base = root.joinpath(*module.split("."))
    try:
        tree = _parse(base / "__init__.py" if base.is_dir() else base.with_suffix(".py"))
    except UNPARSABLE:
        return {}
    package = module.split(".") if base.is_dir() else module.split(".")[:-1]
    taken: defaultdict[str, set[str]] = defaultdict(set)
    for node in _statements(tree.body):
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            if _is_private(origin) and origin.partition(".")[0] == module.partition(".")[0]:
                taken[origin] |= {a.name for a in node.names if a.asname in (None, a.name)}
    return taken


def _listed_names(tree: ast.Module) -> frozenset[str] | None:
    """Read ``__all__``; None where it is absent or computed."""
    listed: set[str] | None = None
    for node in _statements(tree.body):
        match node:
            case (
                ast.Assign(targets=[ast.Name(id="__all__")], value=value)
                | ast.AnnAssign(target=ast.Name(id="__all__"), value=ast.expr() as value)
                | ast.AugAssign(target=ast.Name(id="__all__"), value=value)
                | ast.Expr(
                    value=ast.Call(func=ast.Attribute(value=ast.Name(id="__all__")), args=[value])
                )
            ):
                try:
                    names = ast.literal_eval(value)
                    listed = (listed or set()) | set([names] if isinstance(names, str) else names)
                except (ValueError, TypeError):
                    return None
    return None if listed is None else frozenset(listed)


def _signature(node: Definition, *, method: bool) -> str:
    if isinstance(node, ast.ClassDef):
        for child in node.body:
            if isinstance(child, ast.FunctionDef) and child.name == "__init__":
                return f"{node.name}({_arguments(child.args, bound=True)})"
        bases = ", ".join(ast.unparse(base) for base in [*node.bases, *node.keywords])
        return f"class {node.name}({bases})" if bases else f"class {node.name}"
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    if decorators & PROPERTIES:
        return f"{node.name}{returns}"
    bound = method and "staticmethod" not in decorators
    return f"{node.name}({_arguments(node.args, bound=bound)}){returns}"


def _arguments(args: ast.arguments, *, bound: bool) -> str:
    if not bound:
        return ast.unparse(args)
    first = "posonlyargs" if args.posonlyargs else "args"
    return ast.unparse(ast.arguments(**{**vars(args), first: getattr(args, first)[1:]}))


def _clean(found: _Documented) -> str:
    text = MARKUP.sub("", found.doc).strip()
    own_name = found.name.rpartition(".")[2]
    while (shown := SHOWN_CALL.match(text)) and shown["name"] == own_name:
        text = text[shown.end() :]
    return text


def _cut(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    whole_words = re.match(rf"(?s:.{{1,{max_chars}}})(?=\s)", text)
    return (whole_words[0] if whole_words else text[:max_chars]).rstrip()


def _tells(text: str) -> bool:
    words = re.findall(r"[A-Za-z]{2,}", text)
    long_enough = len(text) >= MIN_CHARS and len(words) >= MIN_WORDS
    return long_enough and not NO_SUMMARY.match(text) and not LEGAL.search(text)


def _summary(text: str) -> str:
    return " ".join(re.split(r"\n\s*\n", text, maxsplit=1)[0].casefold().split())


@click.command()
@click.argument("out_dir", type=click.Path(path_type=Path))
@click.option("--passages", default=10_000, show_default=True, type=click.IntRange(min=1))
@click.option("--seed", default=0, show_default=True)
@click.option("--max-chars", default=600, show_default=True, type=click.IntRange(min=MIN_CHARS))
def main(out_dir: Path, passages: int, seed: int, max_chars: int) -> None:
    """Write a Parquet corpus of the docstrings of the installed packages to OUT_DIR."""
    started = time.perf_counter()
    unreadable: list[Path] = []
    try:
        chosen = sample(
            installed_roots(),
            passages=passages,
            seed=seed,
            max_chars=max_chars,
            unreadable=unreadable,
        )
        path = write_corpus(chosen, out_dir)
    except WhitenIndexError as error:
        click.echo(f"Error: {error}", err=True)
        raise SystemExit(error.exit_code) from error
    packages = len({passage.module.partition(".")[0] for passage in chosen})
    click.echo(
        f"{len(chosen)} passages from {packages} packages in "
        f"{time.perf_counter() - started:.1f} s ({len(unreadable)} files did not parse): {path}"
    )


if __name__ == "__main__":
    main()
