"""The documented public names of one Python source file, read with ``ast`` and never imported.

numpy, scipy and scikit-learn define their public names in private modules. Such a name belongs to
the outermost public package that imports it from there, directly or through other private modules.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import itertools
import re
import textwrap
import tokenize
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# Less ("Close the file.") says too little to be found by.
MIN_CHARS = 40
# Some annotations hold whole pages of documentation.
MAX_SIGNATURE = 300
# Docstrings that begin so are code, directives, fields or tables.
NOT_PROSE = (">>>", "```", "..", ":", "#", "|", "{", "<", "@")
# "labels (`torch.LongTensor`, *optional*): ..." is a parameter where a summary should be.
PARAMETER = re.compile(r"[*\w]+ \((`|.*optional)")
# The rulers of titles and tables, and the placeholders of templates, fill whole lines.
RULERS = re.compile(r"^[ \t]*([-=~^*+#|][-=~^*+#| \t]+|\{\w+\}|%\(\w+\)s)$\n?", re.MULTILINE)
# Docstrings of functions that were once written in C begin with the call.
SHOWN_CALL = re.compile(r"(?:\w+\.)*(\w+)\(.*\)(?: *->.*)?\n\s*")
# What reading other people's files can raise; very deep nesting ends in the last two.
UNREADABLE = (OSError, SyntaxError, ValueError, ImportError, RecursionError, MemoryError)

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Source:
    """The file of a module, and the folder in which its top-level package lies."""

    root: Path
    path: Path
    module: str

    @property
    def packages(self) -> list[str]:
        """The public modules along the dotted name, outermost first."""
        public = list(itertools.takewhile(lambda part: part[0] != "_", self.module.split(".")))
        return [".".join(public[:depth]) for depth in range(1, len(public) + 1)]


@dataclass(frozen=True, slots=True)
class Documented:
    """A public name with its docstring; the name is empty for a module's own docstring."""

    module: str
    name: str
    signature: str
    text: str


def documented_names(source: Source) -> Iterator[Documented]:
    """Yield the public names of a file of which the docstrings say what they are.

    Raises:
        OSError, SyntaxError, ValueError, RecursionError, MemoryError: the file is unreadable.
    """
    offers = _offers(source)
    if not offers:
        return
    tree = _parse(source.path)
    if source.module in offers and (text := _prose(tree, "")):
        yield Documented(source.module, "", f"import {source.module}", text)
    listed = _listed_names(tree)
    for name, node in _definitions(tree.body):
        top = name.partition(".")[0]
        home = next((home for home, names in offers.items() if names & {top, "*"}), None)
        if home and (not listed or top in listed) and (text := _prose(node, node.name)):
            signature = _signature(node, method="." in name)
            yield Documented(home, name, textwrap.shorten(signature, MAX_SIGNATURE), text)


def _offers(source: Source) -> dict[str, set[str]]:
    """Map the public modules that offer names of this file to those names; "*" is all."""
    if source.module in source.packages:
        return {source.module: {"*"}}
    exported = {home: _exported(source.root, home) for home in source.packages}
    return {
        home: names[source.module] for home, names in exported.items() if source.module in names
    }


@functools.cache
def _exported(root: Path, package: str) -> dict[str, set[str]]:
    """Map private modules to the names that a package imports from them in one or more steps."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    waiting = [(package, {"*"})]
    while waiting:
        module, wanted = waiting.pop()
        for origin, taken in _imported(root, module).items():
            if "*" in taken:
                taken = wanted
            elif "*" not in wanted:
                taken = taken & wanted
            if taken and not taken <= found[origin]:
                found[origin] |= taken
                waiting.append((origin, taken))
    return {origin: names for origin, names in found.items() if names}


@functools.cache
def _imported(root: Path, module: str) -> dict[str, set[str]]:
    """Map private modules to the names that a module imports from them, under the same name."""
    base = root.joinpath(*module.split("."))
    package = module if base.is_dir() else module.rpartition(".")[0]
    taken: defaultdict[str, set[str]] = defaultdict(set)
    with contextlib.suppress(*UNREADABLE):
        tree = _parse(base / "__init__.py" if base.is_dir() else base.with_suffix(".py"))
        for node in _statements(tree.body):
            if isinstance(node, ast.ImportFrom):
                relative = "." * node.level + (node.module or "")
                origin = importlib.util.resolve_name(relative, package)
                if "._" in origin:
                    taken[origin] |= {a.name for a in node.names if a.asname in (None, a.name)}
    return taken


def _parse(path: Path) -> ast.Module:
    # tokenize.open honours the coding cookie; the warnings are about other people's code.
    with tokenize.open(path) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(file.read())


def _statements(nodes: Iterable[ast.AST]) -> Iterator[ast.stmt]:
    """Yield the statements of a body, and those under its conditions."""
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


def _listed_names(tree: ast.Module) -> set[str]:
    """Collect the strings in the statements that set or extend ``__all__``."""
    listed: set[str] = set()
    for node in _statements(tree.body):
        match node:
            case (
                ast.Assign(targets=[ast.Name(id="__all__")])
                | ast.AnnAssign(target=ast.Name(id="__all__"))
                | ast.AugAssign(target=ast.Name(id="__all__"))
                | ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="__all__"))))
            ):
                constants = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant))
                listed |= {value for value in constants if isinstance(value, str)}
    return listed


def _signature(node: Definition, *, method: bool) -> str:
    if isinstance(node, ast.ClassDef):
        for child in node.body:
            if isinstance(child, ast.FunctionDef) and child.name == "__init__":
                return f"{node.name}({_arguments(child, bound=True)})"
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {node.name}({bases})" if bases else f"class {node.name}"
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    if any(decorator.endswith("property") for decorator in decorators):
        return f"{node.name}{returns}"
    bound = method and "staticmethod" not in decorators
    return f"{node.name}({_arguments(node, bound=bound)}){returns}"


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef, *, bound: bool) -> str:
    """Write the arguments as a caller sees them; of a method, this drops ``self`` from the tree."""
    if bound:
        del (node.args.posonlyargs or node.args.args)[:1]
    return ast.unparse(node.args)


def _prose(node: Definition | ast.Module, name: str) -> str:
    """Return a docstring without its rulers and shown calls, or "" where it is not prose."""
    text = RULERS.sub("", ast.get_docstring(node) or "").strip()
    while (call := SHOWN_CALL.match(text)) and call[1] == name:
        text = text[call.end() :]
    # A first line such as "Example:" or "Parameters" is the heading of something else.
    first = text.partition("\n")[0].rstrip()
    if len(text) < MIN_CHARS or first.endswith(":") or " " not in first:
        return ""
    return "" if text.startswith(NOT_PROSE) or PARAMETER.match(text) else text
