"""Layers compared on pairs: agrees with eval sts layer by layer; what is printed, what is drawn."""

from __future__ import annotations

import html
import itertools
import json
import re
import struct

import numpy as np
import pytest
from click.testing import CliRunner

from tests import tiny_models
from whiten_index.cli import cli
from whiten_index.errors import ArtifactError, ConfigError
from whiten_index.report import page as pages
from whiten_index.report import write_layers
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


def test_the_heat_map_is_symmetric_and_holds_every_pair_once(report):
    for each in report["runs"]:
        maps = maps_of(each, STATES, "mean")
        assert list(maps) == ["average", "<one>", "two"]
        for name, shown in maps.items():
            np.testing.assert_array_equal(shown.matrix, shown.matrix.T)
            for cell in each["combinations"]:
                figures = cell["average"] if name == "average" else cell["datasets"][name]
                i, j = cell["layers"][0], cell["layers"][-1]
                assert shown.matrix[i, j] == figures["spearman"]["mean"]
        np.testing.assert_allclose(
            maps["average"].matrix, (maps["<one>"].matrix + maps["two"].matrix) / 2
        )


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


def test_three_layers_and_one(tiny_model, pairs, tmp_path):
    options = (pairs, "--model", tiny_model, "--set", "two", "--store", tmp_path / "store")
    status, said, _ = run(*options, "--most", 3, "--json")
    assert status == 0
    found = [tuple(c["layers"]) for c in json.loads(said)["runs"][0]["combinations"]]
    assert found == [c for n in (1, 2, 3) for c in itertools.combinations(range(3), n)]
    status, said, _ = run(*options, "--most", 1, "--out", tmp_path / "one")
    assert status == 0
    assert "best of 2" not in said
    assert [p.name for p in (tmp_path / "one" / "figures").iterdir()] == ["layers-1.png"]
    assert "Pairs of layers" not in (tmp_path / "one" / "layers.html").read_text()


def layers_of_cls(model, pairs, out):
    status, said, complaints = run(pairs, "--model", model, "--token", "cls", "--out", out)
    assert status == 0, complaints
    assert "cls pooling of 3 states" in said
    report = json.loads((out / "layers.json").read_text())
    return said.splitlines(), [c["layers"] for c in report["runs"][0]["combinations"]]


def test_the_first_token_of_layer_0_ranks_nothing_and_is_left_out(tiny_model, pairs, tmp_path):
    """Every text starts with [CLS], whose embedding is one and the same."""
    lines, combinations = layers_of_cls(tiny_model, pairs, tmp_path)
    assert combinations == [[1], [2], [0, 1], [0, 2], [1, 2]]
    head = next(n for n, line in enumerate(lines) if line.split()[:2] == ["layer", "0"])
    assert lines[head + 1].split()[:2] == ["0", "-"]
    assert "ranks nothing" in (tmp_path / "layers.html").read_text()


def test_a_first_token_that_differs_between_texts_ranks(pairs, tmp_path):
    """A decoder's texts start with their own first word."""
    _, combinations = layers_of_cls(tiny_models.qwen3(tmp_path / "model"), pairs, tmp_path)
    assert combinations[0] == [0]


# The page


def test_every_figure_shown_is_on_the_page_and_its_names_stay_text(written, report):
    text = (written[1] / "layers.html").read_text(encoding="utf-8")
    assert "<one>" not in text
    assert "&lt;one&gt;" in text
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)
            for row in re.findall(r"<tr.*?</tr>", text, re.S)]  # fmt: skip
    for each in report["runs"]:
        for cell in each["combinations"]:
            figures = [cell["average"], *cell["datasets"].values()]
            wanted = [f"{found['spearman']['wmean']:.2f}" for found in figures]
            joined = "+".join(map(str, cell["layers"]))
            assert [joined, str(len(cell["layers"])), *wanted] in rows
    assert [html.unescape(cell) for cell in rows[0]][2:] == ["average", "<one>", "two"]
    references = re.findall(r'(?:src|srcset|href)="([^"]*)"', text)
    assert all(r.startswith(("data:", "#")) for r in references)


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


def test_a_job_file_of_other_commands_may_name_them(tiny_model, pairs, tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(f'model = "{tiny_model}"\npooling = "max"\nlayers = [1, 2]\n')
    status, said, complaints = run(pairs, "--config", job, "--json")
    assert status == 0, complaints
    found = json.loads(said)
    assert (found["encoder"]["pooling"], found["states"]) == ("mean", STATES)


def test_more_layers_than_the_model_has(tiny_model, pairs):
    status, _, complaints = run(pairs, "--model", tiny_model, "--most", 4)
    assert status == 2
    assert "4 layers cannot be combined: the model has 3 states" in complaints


def test_word_vectors_have_no_layers(pairs):
    status, _, complaints = run(pairs, "--word-vectors", "glove.txt")
    assert status == 2
    assert "No such option" in complaints


def test_a_set_that_is_not_there(tiny_model, pairs):
    status, _, complaints = run(pairs, "--model", tiny_model, "--set", "STS99")
    assert status == 2
    assert "there is no set STS99; the sets are <one>, two" in complaints


@pytest.mark.parametrize("change", [
    lambda r: r.pop("states"), lambda r: r["runs"][0].pop("best"),
    lambda r: r["runs"][1]["combinations"][0].pop("average"),
    lambda r: r["runs"][0]["combinations"][0].update(layers=[9]),
])  # fmt: skip
def test_what_is_no_report_of_layers_is_refused(report, change, tmp_path):
    damaged = json.loads(json.dumps(report))
    change(damaged)
    with pytest.raises(ArtifactError, match="run whiten-index eval layers again"):
        write_layers(damaged, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_extra_is_said_before_the_work(tiny_model, pairs, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "find_spec", lambda name: None)
    status, said, complaints = run(pairs, "--model", tiny_model, "--out", tmp_path / "out")
    assert status == 2
    assert "pip install 'whiten-index[plot]'" in complaints
    assert said == ""
    with pytest.raises(ConfigError, match="a report needs"):
        write_layers({}, tmp_path / "out")
