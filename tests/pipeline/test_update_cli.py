"""``whiten-index update``: what it prints, what it exits with, what a dry run foretells."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from tests.helpers import updates
from tests.helpers.bad_input import run
from tests.helpers.updates import Place, some_rows, tree

OPTIONS, CORPUS, ARTIFACT, GATE = 2, 3, 5, 9


indexed, place = updates.indexed, updates.place


def update(place: Place, *options: Any) -> tuple[int, str, str]:
    return run("update", "--index", place.out, *options)


def published(place: Place, *options: Any) -> dict[str, Any]:
    """Return the report that is printed, which is one object and nothing else."""
    status, stdout, stderr = update(place, "--json", *options)
    assert status == 0, stderr
    assert stdout.endswith("}\n")

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    found: dict[str, Any] = json.loads(stdout, parse_constant=refuse)
    return found


CHANGES = {
    "changed": lambda place: place.change(),
    "nothing": lambda place: None,
    "one file": lambda place: file(place, "c.parquet", range(900, 930)),
    "another order": lambda place: file(place, "a.parquet", reversed(range(150))),
    "gone": lambda place: file(place, "b.parquet", range(150, 280)),
}


def file(place: Place, name: str, numbers: Any) -> None:
    place.files = {**place.files, name: some_rows(numbers)}
    place.write()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("options", [(), ("--read-all",), ("--refit", "always")], ids=str)
def test_a_dry_run_foretells_the_update_and_writes_nothing(
    place: Place, change: str, options: tuple[str, ...]
) -> None:
    CHANGES[change](place)
    before = tree(place.root)
    plan = published(place, "--dry-run", *options)
    assert tree(place.root) == before
    report = published(place, *options)
    for name in ("base", "rows", "files", "up_to_date"):
        assert plan[name] == report[name], name
    assert plan["to_encode"] == report["counts"]["encoded"]
    assert plan["refit"] == (options[1] if "--refit" in options else "auto")
    assert plan["encode_seconds"] is None
    if not report["up_to_date"]:
        (index,) = (size for path, size in plan["bytes"].items() if path == str(place.out))
        used = sum(report["bytes"][name] for name in ("index_file", "documents_file"))
        assert used * 0.9 <= index <= used * 1.6
    assert all(free > 0 for free in plan["free"].values())


# Log lines


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


# Exit statuses
