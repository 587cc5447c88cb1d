"""What ``inspect`` and ``build`` show of a choice."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import faiss
import pytest

from tests import choosing_helpers
from tests.choosing_helpers import OPTIONS, Place, assert_refused, choice, embedded, run, setting_of
from whiten_index import BuildConfig, build_index
from whiten_index.build import BuildReport


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    faiss.omp_set_num_threads(1)


place = choosing_helpers.place


def table_rows(stdout: str, after: str) -> Iterator[list[str]]:
    lines = stdout.splitlines()
    for line in lines[lines.index(after) + 1 :]:
        if not line.startswith(" "):
            return
        yield re.split(r"\s{2,}", line.strip())


def test_inspect_shows_the_choice_and_the_geometry(chosen: tuple[Place, BuildReport]) -> None:
    report = chosen[1]
    status, stdout, stderr = run("inspect", report.out)
    assert status == 0, stderr
    found = choice(report)
    assert f"chosen by pieces: {found['why']}" in stdout
    assert found["measure"] in stdout
    (starred,) = (line for line in stdout.splitlines() if line.strip().startswith("*"))
    k, exponent, center = setting_of(found["chosen"])
    (score,) = (
        row["score"] for row in found["candidates"] if setting_of(row) == (k, exponent, center)
    )
    shown = [str(k), f"{exponent:g}", "yes" if center else "no", f"{score:.3f}"]
    assert starred.split()[1:5] == shown
    # Each width has its leader there, and PCA beside it.
    for width in {row["k"] for row in found["candidates"]}:
        assert re.search(rf"^\s+\*?\s+{width}\s+0\s+yes\s", stdout, re.MULTILINE)
    geometry = report.manifest["geometry"]
    rows = {row[0]: row[1:] for row in table_rows(stdout, "geometry")}
    assert len(rows) == 6
    for figures in rows.values():
        assert len(figures) == 2
    (isoscore,) = (figures for name, figures in rows.items() if name.startswith("IsoScore"))
    assert isoscore == [f"{geometry[kind]['isoscore']:.3f}" for kind in ("raw", "vectors")]


def test_inspect_gives_choice_and_geometry_as_json(chosen: tuple[Place, BuildReport]) -> None:
    report = chosen[1]
    status, stdout, _ = run("inspect", report.out, "--json")
    assert status == 0
    shown = json.loads(stdout)
    assert shown["choice"] == choice(report)
    assert shown["geometry"] == report.manifest["geometry"]


def test_build_prints_what_it_chose(place: Place) -> None:
    status, stdout, stderr = run(*place.arguments())
    assert status == 0, stderr
    assert "chosen by pieces: " in stdout
    status, stdout, _ = run(*place.arguments("--json"))
    assert json.loads(stdout)["choice"]["rule"] == "pieces"
    status, stdout, _ = run(*place.arguments("--whiten", "pca", "--k", 4))
    assert status == 0
    assert "chosen by" not in stdout


def test_inspect_draws_a_picture(tmp_path: Path, chosen: tuple[Place, BuildReport]) -> None:
    pytest.importorskip("matplotlib")
    out = chosen[1].out
    status, _, stderr = run("inspect", out, "--plot", tmp_path / "x.png")
    assert status == 0, stderr
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert_refused(OPTIONS, r"\.png", "inspect", out, "--plot", tmp_path / "x.docx")
    assert not (tmp_path / "x.docx").exists()


def test_inspect_shows_what_the_spectrum_chose(tmp_path: Path) -> None:
    options = embedded(tmp_path / "c.parquet")
    build_index(BuildConfig(out=str(tmp_path / "out"), **options))
    status, stdout, _ = run("inspect", tmp_path / "out")
    assert status == 0
    assert "chosen by spectrum: " in stdout
    assert "scores:" not in stdout
