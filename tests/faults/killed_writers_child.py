"""Commands that are killed, or stopped for a while, at each of their file operations.

``python -m tests.faults.killed_writers_child FOLDER`` prints a JSON list of what is wrong, empty
if all is well. Each command runs in a fork of a process that has
imported everything.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.faults.file_operations import Operation, Tap, kill_at
from tests.helpers.builds import build, random_rows, write_rows

# Those of a command that are tried: all of them, or only the ones that put a target in its place.
_ALL = ("open", "fsync", "rename", "mkdir", "rmdir", "flock")
_DECISIVE = ("rename",)
Tree = dict[str, bytes]


class Place:
    """An index, and a folder in which commands write their targets."""

    def __init__(self, root: Path) -> None:
        self.index, self.out, self.log = root / "index", root / "out", root / "log"
        self.corpus, self.queries = root / "c.parquet", str(root / "q.parquet")
        self.out.mkdir()

    def prepare(self) -> None:
        """Build the index, and run each command once."""
        from whiten_index.cli import cli

        rows = random_rows(rows=60)
        build(self.index, write_rows(self.corpus, rows), k=4)
        write_rows(Path(self.queries), rows[:9], id=np.arange(9).astype(str))
        for command in self.commands().values():
            with contextlib.suppress(SystemExit):
                cli.main(command)

    def commands(self) -> dict[str, list[str]]:
        """Return the arguments of the commands, by the name of what they write."""
        search = ["search", "INDEX", "--queries", self.queries, "--embedding-column", "embedding"]
        search += ["--id-column", "id", "--run"]
        found = {name: ["push", "INDEX", "--to", name] for name in ("p.npy", "p.parquet")}
        found |= {name: [*search, name] for name in ("r.trec",)}
        found |= {name: ["export", "INDEX", name] for name in ("m.safetensors", "f.sql")}
        found["folder"] = ["export", "INDEX", "folder", "--as", "query"]
        places = {"INDEX": self.index} | {name: self.out / name for name in found}
        return {name: [str(places.get(e, e)) for e in command] for name, command in found.items()}

    def start(self, command: list[str], *, tap: Tap | None = None, swap: bool = True) -> int:
        """Start a command in a fork; return its process."""
        sys.stdout.flush()
        if pid := os.fork():
            return pid
        log = os.open(self.log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        status = 99
        try:
            if not swap:
                # A system whose library has no renameat2.
                ctypes.CDLL = lambda *_: object()  # type: ignore[assignment,misc]
            if tap is not None:
                tap.install()
            from whiten_index.cli import cli

            cli.main(command)
        except SystemExit as ended:
            status = int(ended.code or 0)
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            os._exit(status)

    def run(self, command: list[str], *, tap: Tap | None = None, swap: bool = True) -> int:
        """Run a command; return its status, negative for a signal."""
        return os.waitstatus_to_exitcode(os.waitpid(self.start(command, tap=tap, swap=swap), 0)[1])

    def tree(self) -> Tree:
        """Return the files and empty folders in the folder of targets."""
        return {
            str(path.relative_to(self.out)): path.read_bytes() if path.is_file() else b"folder"
            for path in sorted(self.out.rglob("*"))
        }

    def clear(self) -> None:
        shutil.rmtree(self.out)
        self.out.mkdir()
        (self.out / ".tmp-mine").write_text("a user's file")
        (self.out / "notes.txt").write_text("a user's file")


def operations(place: Place, command: list[str], swap: bool) -> list[str]:
    """Return the names of the file operations of a command."""
    seen = place.log.with_name("seen")
    seen.write_text("")

    def note(operation: Operation, number: int) -> None:
        os.write(file, f"{operation.name}\n".encode())

    file = os.open(seen, os.O_WRONLY | os.O_APPEND)
    status = place.run(command, tap=Tap(place.out, before=note), swap=swap)
    os.close(file)
    assert status == 0, place.log.read_text()
    return seen.read_text().split()


def stop_at(nth: int) -> Callable[[Operation, int], None]:
    def before(operation: Operation, number: int) -> None:
        if number == nth:
            os.kill(os.getpid(), signal.SIGSTOP)

    return before


def problems(place: Place, name: str, command: list[str], *, swap: bool) -> list[str]:
    """Kill and stop a command, run it again, and return what is wrong then."""
    found = []
    place.clear()
    assert place.run(command, swap=swap) == 0, place.log.read_text()
    whole = place.tree()
    place.clear()
    steps = operations(place, command, swap)
    tried = _ALL if name in ("p.npy", "folder") else _DECISIVE
    for number, step in enumerate(steps, 1):
        if step not in tried:
            continue
        for target_there in (False, True) if name == "folder" else (False,):
            place.clear()
            if target_there:
                assert place.run(command, swap=swap) == 0
            # What an earlier target lets a command skip makes fewer operations.
            status = place.run(command, tap=Tap(place.out, before=kill_at(number)), swap=swap)
            if target_there and swap and not place.tree().keys() >= whole.keys():
                found.append(f"{name}: killed at {number} ({step}), the old target is gone")
            again = place.run(command, swap=swap)
            if (status, again) not in ((-9, 0), (0, 0)) or place.tree() != whole:
                left = sorted(place.tree().keys() ^ whole.keys())
                found.append(f"{name}: killed at {number} ({step}), {status}, {again}: {left}")
    place.clear()
    number = len(steps) - steps[::-1].index("rename")
    stopped = place.start(command, tap=Tap(place.out, before=stop_at(number)), swap=swap)
    os.waitpid(stopped, os.WUNTRACED)
    before = place.tree().keys()
    if place.run(command, swap=swap) != 0 or not place.tree().keys() >= before | whole.keys():
        found.append(f"{name}: beside a stopped writer: {sorted(before - place.tree().keys())}")
    os.kill(stopped, signal.SIGCONT)
    status = os.waitstatus_to_exitcode(os.waitpid(stopped, 0)[1])
    if status or place.tree() != whole:
        found.append(f"{name}: a stopped writer ended with {status}: {place.log.read_text()}")
    return found


def main() -> None:
    place = Place(Path(sys.argv[1]))
    modules = place.log.with_name("modules")
    # The process that forks has imported everything and done nothing: no threads of libraries.
    if pid := os.fork():
        assert os.waitpid(pid, 0)[1] == 0
    else:
        with contextlib.redirect_stdout(io.StringIO()):
            place.prepare()
        modules.write_text("\n".join(sorted(sys.modules)))
        os._exit(0)
    for name in modules.read_text().split():
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    found = []
    for name, command in place.commands().items():
        found += problems(place, name, command, swap=True)
    found += problems(place, "folder", place.commands()["folder"], swap=False)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
