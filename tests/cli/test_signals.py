"""One signal stops a job with status 130; how commands stop and resume is in acceptance tests."""

import json
import subprocess
import sys

import pytest

# A shell without job control has what it starts in the background ignore Ctrl-C.
HEEDS = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
# A library that drops exceptions of its callbacks is stood for by __del__.
JOB = """
import os, signal, sys, time
from whiten_index.cli.log_lines import Ending, LogLines, run_job
from whiten_index.progress import Stages
from whiten_index.cli.signals import stop_on_signals

lines = LogLines()

class Drops:
    def __del__(self):
        os.kill(os.getpid(), signal.{name})
        time.sleep(0.1)

def work():
    with Stages(lines).stage("encode", 10) as watcher:
        {stopped}
        watcher.advance(1)
        time.sleep(60)
    return Ending("published", {{}})

stop_on_signals()
sys.exit(run_job(work, kept="shards", lines=lines))
"""
STOPPED = {
    "once": "os.kill(os.getpid(), signal.{name})",
    # As timeout does, to the process and to its group.
    "twice": "os.kill(os.getpid(), signal.SIGTERM); os.kill(os.getpid(), signal.SIGTERM)",
    "in a callback": "Drops()",
}


def stopped(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HEEDS + script, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert ended.returncode == 130, ended.stderr
    return ended


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("how", STOPPED)
def test_a_job_that_is_stopped_logs_it_and_ends_with_130(name: str, how: str) -> None:
    script = JOB.format(name=name, stopped=STOPPED[how].format(name=name))
    assert json.loads(stopped(script).stdout.splitlines()[-1])["event"] == "interrupted"


@pytest.mark.parametrize(
    ("place", "ending"),
    [("cli.require_plain_environment", "pass"), ("click.Group.invoke", "raise ValueError")],
)
def test_ctrl_c_at_another_moment(place: str, ending: str) -> None:
    """While options are read, and where a library makes another error of it."""
    stop = f"def stop(*_):\n  try: os.kill(os.getpid(), signal.SIGINT)\n  finally: {ending}\n"
    script = f"import click, os\nfrom whiten_index import cli\n{stop}{place} = stop\ncli.main()"
    assert "Traceback" not in stopped(script, "versions", "index").stderr


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_that_a_library_drops_stops_what_reports_no_progress(name: str) -> None:
    script = f"""import click, os, time
from whiten_index import cli

class Drops:
    def __del__(self):
        os.kill(os.getpid(), signal.{name})

def work(*_):
    Drops()
    time.sleep(30)

click.Group.invoke = work
cli.main()
"""
    assert stopped(script, "versions", "index").stderr.startswith("Stopped")
