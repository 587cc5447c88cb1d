"""A damaged file is refused with one line or does not matter; it never changes an answer."""

import json
from pathlib import Path

import pytest

from tests.helpers.bad_input import run_python


def try_out(kind: str, folder: Path, count: int) -> None:
    """Try out damages in a process that has no threads, and fail with what is wrong."""
    arguments = ("-m", "tests.damage.damages", kind, folder, count)
    output = run_python(*arguments, OMP_NUM_THREADS="1")
    *wrong, counts = map(json.loads, output.splitlines())
    print(counts)
    assert counts["cases"] >= max(count, 1)
    assert not wrong, "\n".join(f"{len(wrong)} of {counts['cases']}: {each}" for each in wrong[:20])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("column", 25), ("text", 10)])
def test_a_sample_of_damages(tmp_path: Path, kind: str, count: int) -> None:
    try_out(kind, tmp_path / "made", count)


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["column", "text"])
def test_every_damage(tmp_path: Path, kind: str) -> None:
    try_out(kind, tmp_path / "made", 0)
