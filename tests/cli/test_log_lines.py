"""Log lines of jobs: every event a line, in both forms, and an end whatever happened."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whiten_index.cli.log_lines import Ending, LogForm, LogLines, run_job
from whiten_index.errors import CorpusError

# A key, then a bare value or a quoted one: what log collectors take a line of logfmt for.
_PAIR = re.compile(r'([^ ="]+)=("(?:[^"\\]|\\.)*"|[^ "]*)(?: |$)')
_NAMES = st.text(min_size=1, max_size=6)
_SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=12)


def pairs(line: str) -> dict[str, str]:
    """Read a line of logfmt; every character of it must belong to a pair."""
    found, at = {}, 0
    while at < len(line):
        match = _PAIR.match(line, at)
        assert match, line[at:]
        key, value = match.groups()
        found[key] = json.loads(value) if value.startswith('"') else value
        at = match.end()
    return found


@given(st.dictionaries(_NAMES, _SCALARS | st.lists(_SCALARS, max_size=3), max_size=4))
def test_text_is_one_line_that_reads_back(fields: dict[str, Any]) -> None:
    line = LogForm.TEXT.line(fields)
    assert "\n" not in line
    assert "\r" not in line
    assert line.isprintable()
    assert LogForm.JSON.line(fields).isprintable()
    assert json.loads(LogForm.JSON.line(fields)) == fields
    values = list(pairs(line).values())
    keys = {re.sub(r'[ ="]', "_", name) for name in fields if name.isprintable()}
    assert keys <= set(pairs(line))
    if len(values) == len(fields):  # else two odd names became one
        for value, given_value in zip(values, fields.values(), strict=True):
            if isinstance(given_value, str):
                assert value == given_value
            elif isinstance(given_value, list):
                assert json.loads(value) == given_value
            else:
                assert json.loads(value) == given_value


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
@pytest.mark.parametrize("form", list(LogForm))
def test_every_job_says_how_it_ended(
    capsys: pytest.CaptureFixture[str],
    work: Callable[[], Ending],
    status: int,
    event: str,
    form: LogForm,
) -> None:
    assert run_job(work, kept="shards", lines=LogLines(form)) == status
    shown = capsys.readouterr()
    (line,) = shown.out.splitlines()
    assert (pairs(line) if form is LogForm.TEXT else json.loads(line))["event"] == event
    assert ("Traceback" in shown.err) == (status == 1)
