"""A disk that loses its power: what may be on it afterwards, going by what was flushed.

POSIX promises no more than this: the content of a file is on the disk as it was when the file was
last fsynced, and a folder's names as they were when the folder was. Everything done since may be
there, in part, in any order, or not at all. Here that is taken at its word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.faults.file_operations import Operation
from tests.faults.place import Tree


@dataclass(eq=False)
class File:
    """Content now, and as flushed last."""

    data: bytearray = field(default_factory=bytearray)
    flushed: bytes = b""


@dataclass(eq=False)
class Folder:
    """Names now, and as flushed last."""

    names: dict[str, File | Folder] = field(default_factory=dict)
    flushed: dict[str, File | Folder] = field(default_factory=dict)


class Disk:
    """What is below a root folder, as operations change it.

    Args:
        root: that is read; all that is there is taken for flushed.
    """

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self._top = _read(root)

    def apply(self, operation: Operation) -> None:
        """Do an operation."""
        # A file that has no name any more is nothing to whoever looks later.
        if not operation.path.endswith(" (deleted)"):
            getattr(self, f"_{operation.name}", _nothing)(operation)

    def now(self) -> Tree:
        """Return what whoever looks now sees."""
        return _tree(self._top, lambda folder: folder.names, lambda file: bytes(file.data))

    def after_power_cuts(self, seed: int) -> Iterator[tuple[str, Tree]]:
        """Yield what may be left: only what was flushed; all names and torn files; a mixture."""
        random = np.random.default_rng(seed)
        yield "flushed", _tree(self._top, lambda folder: folder.flushed, lambda file: file.flushed)
        yield (
            "names",
            _tree(self._top, lambda folder: folder.names, lambda file: _torn(file, random)),
        )
        yield (
            "mixed",
            _tree(
                self._top,
                lambda folder: _mixed(folder, random),
                lambda file: _torn(file, random, may_be_whole=True),
            ),
        )

    def _open(self, operation: Operation) -> None:
        folder, name = self._parent(operation.path)
        file = folder.names.setdefault(name, File())
        if operation.empties and isinstance(file, File):
            file.data.clear()

    def _write(self, operation: Operation) -> None:
        data = self._file(operation.path).data
        data.extend(bytes(max(operation.offset - len(data), 0)))
        data[operation.offset : operation.offset + len(operation.data)] = operation.data

    def _truncate(self, operation: Operation) -> None:
        data = self._file(operation.path).data
        data.extend(bytes(max(operation.size - len(data), 0)))
        del data[operation.size :]

    def _allocate(self, operation: Operation) -> None:
        data = self._file(operation.path).data
        data.extend(bytes(max(operation.size - len(data), 0)))

    def _fsync(self, operation: Operation) -> None:
        node = self._place(operation.path)
        if isinstance(node, Folder):
            node.flushed = dict(node.names)
        else:
            node.flushed = bytes(node.data)

    def _mkdir(self, operation: Operation) -> None:
        folder, name = self._parent(operation.path)
        folder.names[name] = Folder()

    def _unlink(self, operation: Operation) -> None:
        folder, name = self._parent(operation.path)
        del folder.names[name]

    _rmdir = _unlink

    def _rename(self, operation: Operation) -> None:
        folder, name = self._parent(operation.path)
        to, named = self._parent(operation.target)
        to.names[named] = folder.names.pop(name)

    def _link(self, operation: Operation) -> None:
        folder, name = self._parent(operation.path)
        to, named = self._parent(operation.target)
        to.names[named] = folder.names[name]

    def _place(self, path: str) -> File | Folder:
        node: File | Folder = self._top
        for name in Path(path).relative_to(self.root).parts:
            assert isinstance(node, Folder), path
            node = node.names[name]
        return node

    def _parent(self, path: str) -> tuple[Folder, str]:
        parent = self._place(str(Path(path).parent))
        assert isinstance(parent, Folder), path
        return parent, Path(path).name

    def _file(self, path: str) -> File:
        node = self._place(path)
        assert isinstance(node, File), path
        return node


def _read(folder: Path) -> Folder:
    found: dict[str, File | Folder] = {}
    for path in folder.iterdir():
        if path.is_dir():
            found[path.name] = _read(path)
        else:
            content = path.read_bytes()
            found[path.name] = File(bytearray(content), content)
    return Folder(found, dict(found))


def _tree(
    top: Folder,
    names_of: Callable[[Folder], Mapping[str, File | Folder]],
    content_of: Callable[[File], bytes],
) -> Tree:
    found: Tree = {}

    def visit(folder: Folder, above: str) -> None:
        for name, node in sorted(names_of(folder).items()):
            if isinstance(node, Folder):
                found[above + name] = None
                visit(node, f"{above}{name}/")
            else:
                found[above + name] = content_of(node)

    visit(top, "")
    return found


def _torn(file: File, random: np.random.Generator, *, may_be_whole: bool = False) -> bytes:
    """Return what may be left of a file that was written and not flushed: it is torn."""
    data = bytes(file.data)
    if data == file.flushed:
        return data
    left = [file.flushed, data[: len(data) // 2], bytes(len(data))] + [data] * may_be_whole
    return left[random.integers(len(left))]


def _mixed(folder: Folder, random: np.random.Generator) -> dict[str, File | Folder]:
    """Return names of which each change since the folder was flushed is there or not."""
    found = {}
    for name in sorted({*folder.names, *folder.flushed}):
        either = (folder.names.get(name), folder.flushed.get(name))
        node = either[random.integers(2)] if either[0] is not either[1] else either[0]
        if node is not None:
            found[name] = node
    return found


def _nothing(operation: Operation) -> None:
    """Do what leaves neither names nor content changed: chmod, utime, flock."""
