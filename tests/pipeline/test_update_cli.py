"""Log lines of ``whiten-index update``."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from tests.helpers import updates
from tests.helpers.bad_input import run
from tests.helpers.updates import Place

indexed, place = updates.indexed, updates.place


def update(place: Place, *options: Any) -> tuple[int, str, str]:
    return run("update", "--index", place.out, *options)


def lines(stdout: str, form: str) -> list[dict[str, str]]:
    if form == "json":
        return [json.loads(line) for line in stdout.splitlines()]
    return [dict(pair.split("=", 1) for pair in shlex.split(line)) for line in stdout.splitlines()]


@pytest.mark.parametrize("form", ["text", "json"])
def test_events_are_lines_and_the_last_is_the_report(place: Place, form: str) -> None:
    place.change()
    for options, ending in (
        (("--dry-run",), "planned"), ((), "published"), ((), "up_to_date"),
    ):  # fmt: skip
        status, stdout, stderr = update(place, "--log", form, *options)
        assert (status, stderr) == (0, "")
        events = lines(stdout, form)
        assert all({"time", "event"} <= event.keys() for event in events)
        assert events[-1]["event"] == ending
        assert [event["event"] for event in events].count("stage_finished") > 0
        new = events[-1]["rows"]["new"] if form == "json" else events[-1]["rows.new"]  # type: ignore[index]
        assert int(new) == (0 if ending == "up_to_date" else 4)
