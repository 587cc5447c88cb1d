"""The papers' tables as Markdown and pictures: every figure, and names that stay text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.papers.pictures import draw_heat_maps, heat_matrix, require_drawing
from pipelines.papers.report import write_papers
from whiten_index.errors import ConfigError, StorageError

pytest.importorskip("matplotlib")
SETS = ["STS-B", "a|b <i>"]


def row(model: str, status: str, ours: float | None = None, **more: Any) -> dict[str, Any]:
    cell: dict[str, Any] = {"published": 60.25, "ours": ours, "difference": None}
    if ours is not None:
        cell |= {"all": ours - 1, "mean": ours, "wmean": ours + 1, "difference": ours - 60.25}
    made = {"model": model, "setting": "token=AVG", "status": status, "why": None, "notes": []}
    made |= {"command": None, "ran_with": None if ours is None else "MiniLM"}
    return {**made, "figures": {name: dict(cell) for name in SETS}, **more}


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    rows = [
        row("own <b>model</b>", "ran", 61.5, command="whiten-index eval sts --model 'a `b`'"),
        row("BERT_base", "stand-in", 58.0, why="bert is <far> away", notes=["a | note"]),
        row("GPT_3", "not run", why="no weights"),
    ]
    table = {"source": "Paper & Co", "table": "Table 1", "title": "a title", "datasets": SETS}
    table |= {"aggregation": "mean", "metric": "spearman", "rows": rows}
    about = {"source": "Paper & Co", "caption": "Raw."}
    curves = {"id": "k", "title": "Effect of k", "kind": "curves", "x": [16, 64, 256], **about}
    curves |= {"x_label": "k", "y_label": "Spearman", "series": [{"name": "a", "y": [None, 1, 2]}]}
    heat = {"id": "pairs", "title": "Pairs", "kind": "heat_map", "labels": ["0", "1"], **about}
    heat |= {"matrix": [[None, 2.0], [2.0, 3.0]]}
    missed = {
        "source": "A third",
        "table": "figures",
        "model": "m",
        "setting": "k",
        "why": "no <m>",
    }
    return {"tables": [table], "figures": [curves, heat], "not_run": [missed]}


@pytest.fixture(scope="module")
def text(results: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = write_papers(results, tmp_path_factory.mktemp("papers"))
    for name in ("k", "pairs"):
        assert (path.parent / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"(figures/{name}.png)" in path.read_text()
    return path.read_text()


def test_names_stay_text_and_commands_stay_whole(text: str) -> None:
    assert r"own \<b\>model" in text
    assert r"a \| note" in text
    assert "whiten-index eval sts --model 'a `b`'" in text.splitlines()
    widths = {len(re.split(r"(?<!\\)\|", line)) for line in text.splitlines() if "STS-B |" in line}
    assert len(widths) == 2


def test_pairs_of_layers_make_a_symmetric_matrix(tmp_path: Path) -> None:
    values = {(0,): 1.0, (1,): 2.0, (0, 1): 3.0, (0, 1, 2): 9.0}
    matrix = heat_matrix(values, 3)
    assert matrix[:2, :2].tolist() == [[1, 3], [3, 2]]
    assert np.isnan(matrix[2]).all()
    draw_heat_maps(tmp_path / "m.png", {"raw": matrix, "none": np.full((3, 3), np.nan)}, "012")
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_extra_and_a_file_for_a_folder_are_errors(
    results: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="a file stands where a folder is needed"):
        write_papers(results, tmp_path / "file")
    monkeypatch.setattr("pipelines.papers.pictures.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'whiten-index\[plot\]'"):
        require_drawing()
