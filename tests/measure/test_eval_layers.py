"""Combinations of layers: all at once against each of them alone, and the command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from tests.helpers import tiny_models
from whiten_index.cli import cli
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.errors import ConfigError
from whiten_index.evaluation.sts_sets import StsSet, read_sts
from whiten_index.measure.eval_config import EvalConfig
from whiten_index.measure.evaluate_layers import evaluate_layers
from whiten_index.measure.evaluate_sts import evaluate_sts


@pytest.fixture(scope="module")
def folder(tmp_path_factory, write_parquet, tiny_words) -> Path:
    """Two sets of 40 pairs with shared sentences, one with subsets, one with an unscored split."""
    rng = np.random.default_rng(5)
    folder = tmp_path_factory.mktemp("sets")
    for name in ("one", "two"):
        first = [" ".join(rng.choice(tiny_words, rng.integers(2, 9))) for _ in range(40)]
        second = [" ".join(rng.choice(tiny_words, rng.integers(2, 9))) for _ in range(35)]
        columns = {
            "sentence1": first,
            "sentence2": second + first[:5],
            "score": rng.integers(0, 6, 40).astype(float).tolist(),
            "split": ["train"] * 10 + ["test"] * 30,
        }
        if name == "one":
            columns["subset"] = ["x"] * 15 + ["y"] * 25
        write_parquet(folder / f"{name}.parquet", columns)
    return folder


@pytest.fixture(scope="module")
def sets(folder: Path) -> list[StsSet]:
    return read_sts([folder], splits={"two": "test"})


def report(sets: Sequence[StsSet], model: object, *, sizes: Sequence[int] = (1, 2), **options):
    config = EvalConfig.from_options({"model": str(model), **options})
    return evaluate_layers(config, sets, sizes=sizes)


@pytest.mark.parametrize(
    ("pooling", "options"),
    [
        ("mean", {"k": ("full", "6")}),
        ("cls", {"k": ("6",), "fit": "target-distinct"}),
        ("mean", {"k": ("6",), "fit": "target-scored", "exponent": 0.5}),
        ("cls", {"k": ("6",), "normalize_input": True}),
    ],
)
def test_every_cell_is_what_its_layers_give_alone(sets, tiny_model, pooling, options):
    config = EvalConfig.from_options({"model": str(tiny_model), **options})
    together = evaluate_layers(config, sets, pooling=pooling, sizes=(1, 2, 3))
    transformed = together["runs"][1:]
    for cell in range(len(together["runs"][0]["combinations"])):
        layers = together["runs"][0]["combinations"][cell]["layers"]
        encoder = EncoderConfig(model=str(tiny_model), pooling=pooling, layers=tuple(layers))
        raw = evaluate_sts(EvalConfig(encoder=encoder), sets)
        compare(together["runs"][0]["combinations"][cell], raw)
        if not transformed:
            continue
        alone = evaluate_sts(
            EvalConfig(
                encoder=encoder,
                transforms=config.transforms,
                fit=config.fit,
            ),
            sets,
        )
        for run, one in zip(transformed, alone.get("runs", [alone]), strict=True):
            assert run["name"] == one["name"]
            compare(run["combinations"][cell], one)


def compare(cell: dict, alone: dict) -> None:
    """Rounding of float32 means may swap neighbours of a rank."""
    for name, each in alone["datasets"].items():
        ours = cell["datasets"][name]["spearman"]
        assert ours == pytest.approx(each["spearman"], abs=0.05)
    ours = cell["average"]["spearman"]
    assert ours == pytest.approx(alone["average"]["spearman"], abs=0.05)


def test_a_layer_that_ranks_nothing_is_told(sets, tiny_model):
    found = evaluate_layers(
        EvalConfig.from_options({"model": str(tiny_model)}), sets, pooling="cls"
    )
    (left_out,) = found["left_out"]
    assert (left_out["layers"], "same for every text" in left_out["why"]) == ([0], True)
    assert [0] not in [cell["layers"] for cell in found["runs"][0]["combinations"]]
    assert report(sets, tiny_model)["left_out"] == []


def test_what_cannot_be(sets, tiny_model, tmp_path):
    for sizes in ((0,), (4,), (1, 9)):
        with pytest.raises(ConfigError, match="layers cannot be combined: the model has 3 states"):
            report(sets, tiny_model, sizes=sizes)
    with pytest.raises(ConfigError, match="fit on target here"):
        report(sets, tiny_model, k=("6",), fit=str(tmp_path))
    with pytest.raises(ConfigError, match="name it with --model"):
        evaluate_layers(EvalConfig(index="somewhere"), sets)


def test_a_fit_on_scored_pairs_in_another_order_weighs_the_right_sentences(
    tiny_model, tiny_words, tmp_path, write_parquet
):
    """The scored pairs hold all sentences of the set, first met in another order."""
    rng = np.random.default_rng(2)
    texts = [" ".join(rng.choice(tiny_words, 4)) for _ in range(24)]
    first = [texts[0], *texts[1:12], texts[0], texts[1], texts[1], texts[1]]
    second = [texts[12], *texts[13:24], texts[12], texts[13], texts[14], texts[15]]
    table = {
        "sentence1": first,
        "sentence2": second,
        "score": rng.permutation(len(first)).astype(float).tolist(),
        "split": ["train"] + ["test"] * (len(first) - 1),
    }
    sets = read_sts([write_parquet(tmp_path / "p.parquet", table)], splits={"p": "test"})
    options = {"model": str(tiny_model), "k": ("6",), "fit": "target-scored"}
    cell = report(sets, tiny_model, k=("6",), fit="target-scored")["runs"][1]["combinations"][2]
    alone = evaluate_sts(EvalConfig.from_options({**options, "layers": (2,)}), sets)
    assert cell["layers"] == [2]
    compare(cell, alone)


def run(*arguments: Any) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli, ["eval", "layers", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_the_first_token_ranks_where_texts_begin_with_their_own_word(folder, tiny_model, tmp_path):
    for model, first in ((tiny_model, [1]), (tiny_models.qwen3(tmp_path / "model"), [0])):
        status, printed, complaints = run(folder, "--model", model, "--token", "cls", "--json")
        assert status == 0, complaints
        assert json.loads(printed)["runs"][0]["combinations"][0]["layers"] == first
