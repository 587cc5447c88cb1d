"""Layers compared on pairs: agrees with eval sts layer by layer; what is printed, what is drawn."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from whiten_index.cli import cli

pytest.importorskip("matplotlib")


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


# The page


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
