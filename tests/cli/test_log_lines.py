"""Log lines of jobs, and the JSON that commands print."""

import json
import sys
from collections.abc import Callable

import pytest

from whiten_index.cli.log_lines import Ending, LogLines, run_job
from whiten_index.cli.terminal import Bars, print_json
from whiten_index.errors import CorpusError


def raising(error: BaseException) -> Callable[[], Ending]:
    def work() -> Ending:
        raise error

    return work


@pytest.mark.parametrize(
    ("work", "status", "event"),
    [
        (lambda: Ending("published", {"version": "000001"}), 0, "published"),
        (lambda: Ending("gate_failed", {}, 9), 9, "gate_failed"),
        (raising(CorpusError("no such column")), 3, "failed"),
        (raising(OSError(28, "No space left on device")), 7, "failed"),
        (raising(MemoryError()), 7, "failed"),
        (raising(ValueError("odd")), 1, "failed"),
        (raising(KeyboardInterrupt()), 130, "interrupted"),
    ],
)
def test_every_job_says_how_it_ended(
    capsys: pytest.CaptureFixture[str], work: Callable[[], Ending], status: int, event: str
) -> None:
    assert run_job(work, kept="shards", lines=LogLines()) == status
    shown = capsys.readouterr()
    (line,) = shown.out.splitlines()
    assert json.loads(line)["event"] == event
    assert ("Traceback" in shown.err) == (status == 1)


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
