"""Layers compared on pairs: agrees with eval sts layer by layer; what is printed, what is drawn."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from click.testing import CliRunner

from whiten_index.cli import cli
from whiten_index.report.layers import maps_of
from whiten_index.report.style import DOTS_PER_INCH

pytest.importorskip("matplotlib")
STATES = 3


def run(*arguments, command="layers"):
    result = CliRunner().invoke(cli, ["eval", command, *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def pairs(tmp_path_factory, write_parquet, tiny_words):
    """Two sets of 40 pairs that share some of 6 words, the gold score being how many."""
    rng = np.random.default_rng(3)
    rows = []
    for number in range(80):
        words = rng.choice(tiny_words, 12, replace=False)
        shared = int(rng.integers(6))
        other = [*words[:shared], *words[6 : 12 - shared]]
        rows.append((" ".join(words[:6]), " ".join(rng.permutation(other)), float(shared),
                     "<one>" if number < 40 else "two", "x" if number % 4 else "y"))  # fmt: skip
    names = ("sentence1", "sentence2", "score", "dataset", "subset")
    columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    return write_parquet(tmp_path_factory.mktemp("pairs") / "pairs.parquet", columns)


@pytest.fixture(scope="module")
def written(tmp_path_factory, tiny_model, pairs):
    """What ``--k 4 --out`` prints, and the folder."""
    out = tmp_path_factory.mktemp("layers") / "out"
    status, said, complaints = run(pairs, "--model", tiny_model, "--k", 4, "--out", out,
                                   "--aggregation", "wmean")  # fmt: skip
    assert status == 0, complaints
    return said, out


@pytest.fixture(scope="module")
def report(written):
    return json.loads((written[1] / "layers.json").read_text())


def png_size(path):
    return struct.unpack(">II", path.read_bytes()[16:24])


# Figures


@pytest.mark.parametrize("layers", [(0,), (2,), (0, 1), (1, 2)])
def test_each_cell_is_what_eval_sts_says_of_those_layers(report, tiny_model, pairs, layers):
    """The two come to the states in different ways: pooled of all layers, or the mean of some."""
    options = ("--model", tiny_model, "--pooling", "mean", "--layers", ",".join(map(str, layers)))
    for run_of, more in zip(report["runs"], ((), ("--k", 4)), strict=True):
        status, said, complaints = run(pairs, *options, *more, "--json", command="sts")
        assert status == 0, complaints
        (cell,) = (c for c in run_of["combinations"] if c["layers"] == list(layers))
        for name, found in json.loads(said)["datasets"].items():
            assert cell["datasets"][name]["spearman"] == pytest.approx(found["spearman"], abs=0.02)


# The terminal


def test_the_terminal_shows_a_matrix_a_run_and_the_best_of_each_number(written, report):
    said, out = written
    lines = said.splitlines()
    assert f"page: {out / 'layers.html'}" in lines
    heads = [n for n, line in enumerate(lines) if line.split() == ["layer", "0", "1", "2"]]
    assert len(heads) == 2
    for head, each in zip(heads, report["runs"], strict=True):
        assert each["name"] in lines[head - 1]
        assert ("fitted on target" in lines[head - 1]) == (each["name"] != "raw")
        assert "wmean" in lines[head - 1]
        shown = maps_of(each, STATES, "wmean")["average"].matrix
        for row in range(STATES):
            cells = lines[head + 1 + row].split()
            assert cells == [str(row), *(f"{value:.2f}" for value in shown[row])]
        for size in (1, 2):
            best = max((c for c in each["combinations"] if len(c["layers"]) == size),
                       key=lambda c: c["average"]["spearman"]["wmean"])  # fmt: skip
            joined = "+".join(map(str, best["layers"]))
            figure = best["average"]["spearman"]["wmean"]
            layers = "layer" if size == 1 else f"{size} layers"
            assert f"  best {layers}: {joined}, {figure:.2f}" in lines[head:]


# The page


def test_pictures_are_files_of_the_right_size(written):
    figures = written[1] / "figures"
    names = sorted(path.name for path in figures.iterdir())
    assert names == ["layers-1-sets.png", "layers-1.png", "layers-2-sets.png", "layers-2.png"]
    wide = round(9.4 * DOTS_PER_INCH)
    assert png_size(figures / "layers-1.png") == (wide, round((3 * 0.8 + 0.95) * DOTS_PER_INCH))
    # Two sets stand in one row of panels.
    assert png_size(figures / "layers-1-sets.png")[0] == wide


# What cannot be


@pytest.mark.parametrize(
    ("option", "value", "instead"),
    [("--layers", "1,2", "--most N"), ("--pooling", "cls", "--token")],
)
def test_options_of_one_embedding_are_refused(tiny_model, pairs, option, value, instead):
    status, _, complaints = run(pairs, "--model", tiny_model, option, value)
    assert status == 2
    assert f"{option} has no meaning here, where every layer is tried; use {instead}" in complaints
    status, said, _ = run("--help")
    assert status == 0
    assert f"  {option} " not in said
