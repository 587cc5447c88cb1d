"""States of all layers: kept for later runs, and combinations against each of them alone."""

import numpy as np
import pytest

from pipelines.papers.kept import Kept
from pipelines.papers.states import kept_states, score_combinations
from tests.helpers.flipped import flip
from whiten_index import EvalConfig, evaluate_sts, read_sts
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.progress import Progress, Stages


def test_a_second_run_finds_the_states_and_a_damaged_file_is_made_again(
    tiny_model, texts, tmp_path
):
    config = EncoderConfig(model=str(tiny_model), max_length=32)
    first, again, mended = (Stages(Progress()) for _ in range(3))
    kept = np.array(kept_states(texts, config, tmp_path, first)["cls"].values)
    kept_states(texts, config, tmp_path, again)
    assert "encode" in first.seconds
    assert "encode" not in again.seconds
    (file,) = tmp_path.glob("*/states.npy")
    flip(file, -5)
    found = kept_states(texts, config, tmp_path, mended)
    assert "encode" in mended.seconds
    np.testing.assert_array_equal(np.array(found["cls"].values), kept)


def test_a_result_is_found_again_and_made_again_where_its_file_is_damaged_or_of_another(tmp_path):
    kept = Kept(tmp_path)
    assert kept.get({"row": 1}, lambda: {"spearman": 71.34}) == {"spearman": 71.34}
    (file,) = tmp_path.iterdir()
    assert kept.get({"row": 1}, dict) == {"spearman": 71.34}
    whole = file.read_text()
    file.write_text(whole.replace("71.34", "91.34"))
    assert kept.get({"row": 1}, lambda: {"spearman": 71.34}) == {"spearman": 71.34}
    kept.get({"row": 2}, lambda: {"spearman": 1.0})
    (other,) = set(tmp_path.iterdir()) - {file}
    other.write_text(whole)
    assert kept.get({"row": 2}, lambda: {"spearman": 1.0}) == {"spearman": 1.0}
    assert (kept.computed, kept.found) == (4, 1)
    # Figures take their order from it.
    for _ in range(2):
        assert [*kept.get({"row": 3}, lambda: {"raw": 1.0, "group": 2.0})] == ["raw", "group"]


def test_other_lengths_have_other_states(tiny_model, texts, tmp_path):
    for length in (32, 8):
        config = EncoderConfig(model=str(tiny_model), max_length=length)
        kept_states(texts, config, tmp_path, Stages(Progress()))
    assert len(list(tmp_path.glob("states-*"))) == 2


@pytest.fixture(scope="module")
def sets(tmp_path_factory, write_parquet, tiny_words):
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
    return read_sts([folder], splits={"two": "test"})


@pytest.mark.parametrize(
    ("pooling", "options"),
    [
        ("mean", {"k": ("full", "6")}),
        ("cls", {"k": ("6",), "fit": "target-scored", "exponent": 0.5, "normalize_input": True}),
    ],
)
def test_every_cell_is_what_its_layers_give_alone(sets, tiny_model, pooling, options, tmp_path):
    config = EvalConfig.from_options({"model": str(tiny_model), **options})
    stages = Stages(Progress())
    texts = [text for each in sets for text in each.texts]
    states = kept_states(texts, config.encoder, tmp_path, stages)[pooling]
    raw, *transformed = score_combinations(config, sets, states, (1, 2, 3), stages)
    chosen = [tuple(cell["layers"]) for cell in raw["combinations"]]
    # Layer 0 of [CLS] is the same for every text, and ranks nothing.
    assert ((0,) in chosen) is (pooling == "mean")
    assert len(chosen) == len(set(chosen)) == 7 - (pooling == "cls")
    for cell, layers in enumerate(chosen):
        encoder = EncoderConfig(model=str(tiny_model), pooling=pooling, layers=layers)
        compare(raw["combinations"][cell], evaluate_sts(EvalConfig(encoder=encoder), sets))
        alone = EvalConfig(encoder=encoder, transforms=config.transforms, fit=config.fit)
        for run, one in zip(transformed, evaluate_sts(alone, sets)["runs"], strict=True):
            assert run["name"] == one["name"]
            compare(run["combinations"][cell], one)


def compare(cell: dict, alone: dict) -> None:
    """Rounding of float32 means may swap neighbours of a rank."""
    for name, each in alone["datasets"].items():
        ours = cell["datasets"][name]["spearman"]
        assert ours == pytest.approx(each["spearman"], abs=0.05)
    ours = cell["average"]["spearman"]
    assert ours == pytest.approx(alone["average"]["spearman"], abs=0.05)
