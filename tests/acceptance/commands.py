"""The command line as users have it, run in this process or in one of its own."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it said."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output as one JSON value."""
        return json.loads(self.out)


def run(*arguments: object) -> Ended:
    """Run a command in this process; an exception that leaks fails the test."""
    (command,) = entry_points(group="console_scripts", name="whiten-index")
    main: Callable[[], None] = command.load()
    before, out, err = sys.argv, io.StringIO(), io.StringIO()
    sys.argv = ["whiten-index", *map(str, arguments)]
    status = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as ended:
        status = int(ended.code or 0)
    finally:
        sys.argv = before
    return Ended(status, out.getvalue(), err.getvalue())


def done(*arguments: object) -> str:
    """Run a command that must succeed, and return its standard output."""
    ended = run(*arguments)
    assert ended.status == 0, ended.err
    return ended.out


def refused(status: int, *arguments: object) -> str:
    """Run a command that must end with a status and one line of error; return that line."""
    ended = run(*arguments)
    assert ended.status == status, (ended.status, ended.out, ended.err)
    assert "Traceback" not in ended.err
    last = ended.err.strip().splitlines()[-1]
    assert last.startswith("Error: "), ended.err
    return last


def start(*arguments: object, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a command in a process of its own, such as to kill it."""
    program = Path(sys.executable).with_name("whiten-index")
    return subprocess.Popen(
        [program, *map(str, arguments)],
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Ctrl-C ends it also where whoever runs the tests ignores that (nohup, cron).
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
