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
import sys, whiten_index.cli
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
# Stands for a thread that waits for the network, for which the interpreter waits. Two signals may
# be heard as one where the main thread was just about to wait.
HANGS = """
import os, signal, threading, time
def insist():
    threading.main_thread().join()
    while True:
        os.kill(os.getpid(), signal.{number})
        time.sleep(0.3)
threading.Thread(target=insist).start()
"""
# Stands for what comes after the work and may hang too, such as metrics on a folder elsewhere.
TOLD = """
import sys
from whiten_index.stopping import finish_undisturbed, stop_on_signals
stop_on_signals()
for status in {told}:
    finish_undisturbed(status)
"""
# Its metrics hang, and it is asked twice to end.
METRICS = """
import os, signal, sys, time
from pathlib import Path
from pipelines import nightly_reindex
from whiten_index.errors import CorpusError
from whiten_index.log_lines import Ending, run_job
from whiten_index.stopping import stop_on_signals

class Night(nightly_reindex._Night):
    def _work(self):
        ending

def hang(*_, **__):
    for _ in range(2):
        os.kill(os.getpid(), signal.{number})
        time.sleep(0.3)
    time.sleep(600)

nightly_reindex.check_metrics = Path
nightly_reindex.write_metrics = hang
stop_on_signals()
job = nightly_reindex.Job(index=Path("none"), metrics=Path("none"), update={{}})
sys.exit(run_job(Night(job, nightly_reindex.LogLines()).run, kept="shards"))
"""


def run(script: str, **words: object) -> tuple[int, str]:
    # A shell without job control has what it starts in the background ignore Ctrl-C.
    heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    done = subprocess.run(
        [sys.executable, "-c", heeds + script.format(**words)],
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


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize(("interrupted", "status"), [(False, 0), (True, 130)])
def test_the_second_signal_still_ends_a_job_that_waits_for_a_thread(
    number: str, interrupted: bool, status: int
) -> None:
    found, stdout = run(HANGS + SIGNALS + JOB, number=number, interrupted=interrupted)
    assert found == status
    assert ("interrupted" if interrupted else "published") in stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "status"), [(["--version"], 0), (["verify", "/none/at/all"], 5)]
)
def test_the_second_signal_still_ends_a_command_that_waits_for_a_thread(
    arguments: list[str], status: int
) -> None:
    found, _ = run(HANGS + COMMAND, number="SIGTERM", arguments=arguments)
    assert found == status


@pytest.mark.parametrize(
    ("told", "status"), [([None], 130), ([5], 5), ([5, None], 5), ([None, 0], 0)]
)
def test_a_process_stopped_after_its_work_ends_with_the_status_it_was_told(
    told: list[int | None], status: int
) -> None:
    found, _ = run(HANGS + TOLD, number="SIGTERM", told=told)
    assert found == status


@pytest.mark.parametrize(
    ("ending", "status"),
    [("raise CorpusError('none')", 3), ("return Ending('published', {{}})", 130)],
)
def test_a_job_whose_metrics_hang_is_a_failure_only_where_it_failed(
    ending: str, status: int
) -> None:
    found, stdout = run(METRICS.replace("ending", ending), number="SIGTERM")
    assert (found, stdout) == (status, "")


def test_a_job_is_not_stopped_by_what_came_before_it() -> None:
    """A process may do one after another."""
    again = "os.kill(os.getpid(), signal.{number}); stop_on_signals(); stopping.heed_stop()"
    script = "import os, signal" + TOLD + "from whiten_index import stopping\n" + again
    assert run(script, number="SIGTERM", told=[0]) == (0, "")
