"""Signals at the end of a process: its status and its last line say the same, whenever they come.

How a signal stops the work itself is tested with the commands and jobs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What signals the process once the work is over: in an exit handler, and later still, when modules
# are taken apart and the interpreter has taken its handlers away.
SIGNALS = """
import atexit, os, signal, sys

class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.{number}):
        kill(pid, number)
        kill(pid, number)

# The first names that the interpreter takes away, be the collector of cycles at work or not.
sys.last_value = Last()
atexit.register(lambda: os.kill(os.getpid(), signal.{number}))
"""
COMMAND = """
import whiten_index.cli
sys.argv = ["whiten-index", *{arguments!r}]
whiten_index.cli.main()
"""
JOB = """
from whiten_index.log_lines import Ending, run_job
from whiten_index.stopping import stop_on_signals

def work():
    if {interrupted}:
        os.kill(os.getpid(), signal.{number})
    return Ending("published", {{}})

stop_on_signals()
status = run_job(work, kept="shards")
os.kill(os.getpid(), signal.{number}) if not {interrupted} else None
sys.exit(status)
"""
# Stands for a thread that waits for the network, for which the interpreter waits.
HANGS = """
import threading, time
def insist():
    time.sleep(1)
    os.kill(os.getpid(), signal.{number})
    time.sleep(600)
threading.Thread(target=insist).start()
"""


def run(script: str, **words: object) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", script.format(**words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize(
    ("arguments", "status"), [(["--version"], 0), (["verify", "/none/at/all"], 5)]
)
def test_a_command_that_is_done_ends_as_it_did(
    number: str, arguments: list[str], status: int
) -> None:
    found, _ = run(SIGNALS + COMMAND, number=number, arguments=arguments)
    assert found == status


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize(("interrupted", "status"), [(False, 0), (True, 130)])
def test_a_job_that_is_done_ends_as_its_last_line_says(
    number: str, interrupted: bool, status: int
) -> None:
    found, stdout = run(SIGNALS + JOB, number=number, interrupted=interrupted)
    assert found == status
    assert ("interrupted" if interrupted else "published") in stdout.splitlines()[-1]


def test_the_second_signal_still_ends_a_process_that_waits_for_a_thread() -> None:
    hanging = JOB.replace("def work():", "def work():" + HANGS.replace("\n", "\n    "))
    found, stdout = run(SIGNALS + hanging, number="SIGTERM", interrupted=True)
    assert found == 130
    assert "interrupted" in stdout
