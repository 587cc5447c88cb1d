"""Every file operation of a process, one after the other.

``Tap`` stands between the product, which knows nothing of it, and the system: Python's files, the
functions of ``os`` that change files, and ``flock``. What writes behind Python's back would escape
it; ``disk_model.Disk`` tells, since what it makes of the operations must equal what is on the disk.
"""

import builtins
import fcntl
import io
import os
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CHANGES_OPEN = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_ONE_PATH = {
    "mkdir": "mkdir", "rmdir": "rmdir", "unlink": "unlink", "remove": "unlink",
    "truncate": "truncate", "chmod": "chmod", "utime": "utime",
}  # fmt: skip
_TWO_PATHS = {"rename": "rename", "replace": "rename", "link": "link", "symlink": "link"}
_DESCRIPTOR = {
    "fsync": "fsync",
    "fdatasync": "fsync",
    "ftruncate": "truncate",
    "fchmod": "chmod",
    "posix_fallocate": "allocate",
}


@dataclass(frozen=True)
class Operation:
    """One operation, before it is done.

    Attributes:
        name: open (to write), write, fsync, rename, link, mkdir, rmdir, unlink, truncate,
            allocate, chmod, utime or flock.
        path: of what is changed.
        target: of a rename or link.
        data: written.
        offset: where it is written.
        empties: whether an open leaves nothing of what was in the file.
        size: of the file after truncate or allocate.
    """

    name: str
    path: str
    target: str = ""
    data: bytes = b""
    offset: int = 0
    empties: bool = False
    size: int = 0


class Tap:
    """Sees the operations below some folders, of all threads, one at a time.

    Args:
        roots: folders.
        after: called with each that was done.
    """

    def __init__(self, *roots: Path, after: Callable[[Operation], None]) -> None:
        self.roots, self.after = tuple(str(root) for root in roots), after
        self._lock = threading.RLock()

    def install(self) -> None:
        """Stand in for the functions; for the rest of the process, which is to be a fork."""
        plain_open = io.open

        def opened(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
            path = self._path(file)
            # An opener, which is tempfile's, opens by os.open.
            by_other = options.get("opener") is not None
            if by_other or not set(mode) & set("wax+") or not self.watches(path):
                return plain_open(file, mode, *rest, **options)
            return _opened(self, file, path, mode, *rest, **options)

        plain_unlink = os.unlink
        io.open = builtins.open = opened  # type: ignore[assignment]
        for name, called in _ONE_PATH.items():
            self._stand_in(name, called, self._one_path)
        for name, called in _TWO_PATHS.items():
            self._stand_in(name, called, self._two_paths)
        for name, called in _DESCRIPTOR.items():
            self._stand_in(name, called, self._of_descriptor)
        self._stand_in("open", "open", self._os_open)
        self._stand_in("write", "write", self._os_write)
        self._stand_in("sendfile", "write", self._sendfile)
        self._stand_in("flock", "flock", self._of_descriptor, module=fcntl)
        # What removes a temporary file took the function for a default value long ago.
        for function in vars(tempfile._TemporaryFileCloser).values():
            if defaults := getattr(function, "__defaults__", None):
                function.__defaults__ = tuple(
                    os.unlink if value is plain_unlink else value for value in defaults
                )

    def do(self, operation: Operation, real: Callable[[], Any]) -> Any:
        """Do an operation, and tell of it."""
        with self._lock:
            result = real()
            self.after(operation)
            return result

    def watches(self, path: str) -> bool:
        """Tell whether a path is below one of the folders."""
        return any(path == root or path.startswith(f"{root}/") for root in self.roots)

    def _stand_in(
        self, name: str, called: str, call: Callable[..., Any], *, module: Any = os
    ) -> None:
        real = getattr(module, name)

        def stand_in(*arguments: Any, **options: Any) -> Any:
            return call(called, real, *arguments, **options)

        setattr(module, name, stand_in)

    def _one_path(self, called: str, real: Any, path: Any, *rest: Any, **options: Any) -> Any:
        where = self._path(path, options.get("dir_fd"))

        def work() -> Any:
            return real(path, *rest, **options)

        if not self.watches(where):
            return work()
        size = int(rest[0]) if called == "truncate" else 0
        return self.do(Operation(called, where, size=size), work)

    def _two_paths(
        self, called: str, real: Any, path: Any, target: Any, *rest: Any, **options: Any
    ) -> Any:
        where = self._path(path, options.get("src_dir_fd"))
        to = self._path(target, options.get("dst_dir_fd"))

        def work() -> Any:
            return real(path, target, *rest, **options)

        if not self.watches(where) and not self.watches(to):
            return work()
        return self.do(Operation(called, where, to), work)

    def _of_descriptor(self, called: str, real: Any, file: Any, *rest: Any) -> Any:
        where = self._path(file if isinstance(file, int) else file.fileno())

        def work() -> Any:
            return real(file, *rest)

        if not self.watches(where):
            return work()
        sizes = {"truncate": rest[:1], "allocate": rest[:2]}
        return self.do(Operation(called, where, size=sum(sizes.get(called, ()))), work)

    def _os_open(
        self, called: str, real: Any, path: Any, flags: int, *rest: Any, **options: Any
    ) -> Any:
        where = self._path(path, options.get("dir_fd"))

        def work() -> Any:
            return real(path, flags, *rest, **options)

        if not flags & _CHANGES_OPEN or not self.watches(where):
            return work()
        return self.do(Operation(called, where, empties=bool(flags & os.O_TRUNC)), work)

    def _os_write(self, called: str, real: Any, descriptor: int, data: Any) -> Any:
        where = self._path(descriptor)
        if not self.watches(where):
            return real(descriptor, data)
        offset = os.lseek(descriptor, 0, os.SEEK_CUR)
        operation = Operation(called, where, data=bytes(data), offset=offset)
        return self.do(operation, lambda: real(descriptor, data))

    def _sendfile(
        self, called: str, real: Any, out: int, source: int, offset: int, count: int
    ) -> Any:
        where = self._path(out)
        data = os.pread(source, count, offset) if self.watches(where) else b""
        if not data:
            return real(out, source, offset, count)
        at = os.lseek(out, 0, os.SEEK_CUR)
        operation = Operation(called, where, data=data, offset=at)
        return self.do(operation, lambda: real(out, source, offset, len(data)))

    def _path(self, path: Any, folder: int | None = None) -> str:
        if isinstance(path, int):
            return str(Path(f"/proc/self/fd/{path}").readlink())
        found = os.fsdecode(path)
        if folder is not None:
            found = os.path.join(self._path(folder), found)  # noqa: PTH118
        return os.path.abspath(found)  # noqa: PTH100 (Path.absolute keeps the dots)


class _Raw(io.FileIO):
    """A file whose operations are told."""

    def __init__(self, tap: Tap, file: Any, path: str, mode: str) -> None:
        self._tap, self._path = tap, path

        def create() -> None:
            super(_Raw, self).__init__(file, mode)

        if isinstance(file, int):
            create()
        else:
            tap.do(Operation("open", path, empties="w" in mode), create)

    def write(self, data: Any) -> int:
        content = bytes(data)
        at_end = "a" in self.mode
        offset = os.fstat(self.fileno()).st_size if at_end else self.tell()
        operation = Operation("write", self._path, data=content, offset=offset)
        written = self._tap.do(operation, lambda: super(_Raw, self).write(content))
        assert written == len(content), "the rest would be another operation"
        return len(content)

    def truncate(self, size: int | None = None) -> int:
        wanted = self.tell() if size is None else size
        operation = Operation("truncate", self._path, size=wanted)
        return int(self._tap.do(operation, lambda: super(_Raw, self).truncate(wanted)))


def _opened(
    tap: Tap,
    file: Any,
    path: str,
    mode: str,
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    **options: Any,
) -> Any:
    """Do as ``open`` does, of a file that is written."""
    assert all(value in (True, None) for value in options.values()), options
    raw = _Raw(tap, file, path, mode.replace("b", "").replace("t", ""))
    if buffering == 0:
        return raw
    size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
    buffered: Any = io.BufferedRandom(raw, size) if "+" in mode else io.BufferedWriter(raw, size)
    if "b" in mode:
        return buffered
    return io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)
