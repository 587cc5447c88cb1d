"""Standard output and error: full or closed, read as JSON, and free of control characters."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tests.acceptance.commands import run
from tests.helpers.builds import build, random_rows, write_rows
from whiten_index.cli import cli
from whiten_index.cli.terminal import Bars, print_json

# Runs each command in a fork, which ends as an interpreter does.
_CODE = """
import json, os, sys
import numpy, pyarrow, faiss
from whiten_index.cli import main

commands, where = json.load(sys.stdin), sys.argv[1]
found = []
for command in commands:
    sys.stdout.flush()
    err, errors = os.pipe()
    if not (pid := os.fork()):
        os.dup2(errors, 2)
        if where == "full":
            os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
        elif where == "closed":
            os.close(1)
            sys.stdout = None
        elif where == "pipe":
            end, other = os.pipe()
            os.close(end)
            os.dup2(other, 1)
        else:
            os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
        sys.argv[1:] = command
        main()
        os._exit(99)
    os.close(errors)
    with os.fdopen(err) as file:
        said = file.read()
    found.append([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said])
print("\\n" + json.dumps(found))
"""
EVIL = ("\x1b]0;owned\x07", "\x9b31m", "a\rb", "\u202eabc", "x\ny", "\x7f", "\x1b[31mred", "\u2066")
CONTROLS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def run_in_forks(commands: list[list[str]], where: str) -> list[tuple[int, str]]:
    done = subprocess.run(
        [sys.executable, "-c", _CODE, where],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [(status, said) for status, said in json.loads(done.stdout.splitlines()[-1])]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus with control characters in its name, ids and columns, and an index of it."""
    place = tmp_path_factory.mktemp("evil") / "a\x1b[31m\rb\u202e"
    ids = [f"{EVIL[row % len(EVIL)]}{row}" for row in range(40)]
    rows = random_rows(rows=40)
    corpus = write_rows(place / "c\x9b.parquet", rows, id=ids, kept=ids)
    write_rows(place / "q.parquet", rows[:3])
    build(place / "index", corpus, k=4, keep=("kept",))
    return place


def commands_of(place: Path) -> list[list[str]]:
    index = str(place / "index")
    corpus = [str(place / "c\x9b.parquet"), "--embedding-column", "embedding", "--id-column", "id"]
    like = ["search", index, "--like", f"{EVIL[0]}0"]
    found = [
        ["inspect", index],
        ["versions", index],
        ["verify", index],
        ["gc", str(place / "index" / "store"), "--dry-run"],
        ["build", *corpus, "--keep", "kept", "--k", "4", "--out", str(place / "index")],
        ["build", *corpus, "--out", str(place / "other"), "--plan"],
        [*like, "--top-k", "40"],
    ]
    return [*found, *([*each, "--json"] for each in found if each[0] in ("inspect", "search"))]


def all_helps(command: click.Command = cli, path: tuple[str, ...] = ()) -> Iterator[list[str]]:
    yield [*path, "--help"]
    if isinstance(command, click.Group):
        for name, each in command.commands.items():
            yield from all_helps(each, (*path, name))


@pytest.mark.parametrize(
    ("where", "status", "reason"),
    [("full", 7, "the disk is full"), ("closed", 7, "it is closed"), ("pipe", 141, "")],
)
def test_output_that_cannot_be_written_ends_every_command_with_a_status_and_one_line(
    place: Path, where: str, status: int, reason: str
) -> None:
    commands = commands_of(place)
    # The shorter ones stand for all.
    commands = [["--version"], commands[1], commands[-1]] if where != "full" else commands
    commands += all_helps() if where == "full" else []
    for command, (ended, said) in zip(commands, run_in_forks(commands, where), strict=True):
        assert ended == status, (command, said)
        last = said.splitlines()[-1:] if reason else said.splitlines()
        assert [f"cannot write standard output: {reason};" in line for line in last] == (
            [True] if reason else []
        ), (command, said)
        assert "Traceback" not in said
        assert "Exception ignored" not in said


def test_an_error_keeps_its_status_where_nothing_can_be_written(place: Path) -> None:
    commands = [["inspect", str(place / "gone")], ["inspect"], ["--version"]]
    assert [status for status, _ in run_in_forks(commands, "full")] == [5, 2, 7]
    assert [status for status, _ in run_in_forks(commands, "errors full")] == [5, 2, 0]


def test_no_control_character_reaches_the_terminal(place: Path) -> None:
    gone = [["inspect", str(place / "gone")], ["build", str(place / "gone"), "--out", "x"]]
    for command in [*commands_of(place), *gone, [f"--{EVIL[6]}"]]:
        ended = run(*command)
        said = ended.out + ended.err
        assert said
        assert not CONTROLS.search(said), (command, CONTROLS.search(said))
        if "search" in command and "--json" in command:
            hits = ended.json["results"][0]["hits"]
            assert {hit["id"] for hit in hits} == {hit["columns"]["kept"] for hit in hits}
            assert f"{EVIL[1]}1" in {hit["id"] for hit in hits}
        elif "search" in command:
            assert len(ended.out.splitlines()) == 1 + 39
            assert r"\x1b]0;owned\x07" in said
            assert r"x\ny" in said
            assert r"\x1b[31mred" in said


# Writes lines while the index is opened again and again.
_WRITES = """
import itertools, os, sys, threading, time
from whiten_index import open_index

open_index(sys.argv[1])
over = threading.Event()
written = itertools.count()

def write():
    while not over.is_set():
        os.write(1, b"line %d\\n" % next(written))
        time.sleep(1e-5)

writer = threading.Thread(target=write)
writer.start()
for _ in range(100):
    open_index(sys.argv[1], verify="manifest")
over.set()
writer.join()
print(next(written), file=sys.stderr)
"""


def test_no_line_is_lost_while_an_index_with_lists_on_disk_is_opened(tmp_path: Path) -> None:
    rows = random_rows(rows=3000, dim=64)
    corpus = write_rows(tmp_path / "c.parquet", rows)
    build(tmp_path / "built", corpus, k=32, factory="IVF8,Flat", memory_budget="500KB")
    # FAISS notes that the lists are elsewhere than they were written.
    (tmp_path / "built").rename(tmp_path / "moved")
    assert list((tmp_path / "moved").rglob("*.ivfdata"))
    done = subprocess.run(
        [sys.executable, "-c", _WRITES, str(tmp_path / "moved")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = int(done.stderr)
    assert lines > 100
    assert done.stdout.splitlines() == [f"line {number}" for number in range(lines)]


def test_json_holds_null_for_what_json_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": float("nan"), "b": [1.5, float("inf"), {"c": -float("inf")}], "d": "NaN"})
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found == {"a": None, "b": [1.5, None, {"c": None}], "d": "NaN"}


def test_a_notebook_shows_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    bars = Bars()
    bars.start("encode", 10)
    bars.advance(10)
    bars.finish("encode", 0.1)
    assert "| 0.00/10.0 [" in capsys.readouterr().err
