"""A training from sentences to a folder: what it comes to, and how that is used."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.bad_input import succeed
from tests.training.helpers import weights
from whiten_index.training.train import train_encoder


def test_the_loss_falls_and_curves_tell_it(
    corpus: Path, tiny_model: Path, pairs: Path, tmp_path: Path
) -> None:
    report = json.loads(
        succeed(
            "train", corpus, "--model", tiny_model, "--groups", 8, "--batch-size", 16,
            "--learning-rate", 0.001, "--max-steps", 40, "--eval-steps", 10, "--save-steps", 20,
            "--device", "cpu", "--dev", pairs, "--out", tmp_path / "model", "--json",
        )
    )  # fmt: skip
    with (tmp_path / "model" / "curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [0, 1, 10, 20, 30, 40]
    losses = [float(row["loss"]) for row in rows[1:]]
    assert losses[-1] < 0.9 * losses[0]
    scores = {int(row["step"]): float(row["stsb_dev"]) for row in rows if row["step"] != "1"}
    best = report["best_step"]
    assert scores[best] == max(scores[step] for step in (10, 20, 30, 40))
    assert report["stsb_dev"] == pytest.approx(scores[best])
    assert report["stsb_dev_before"] == pytest.approx(scores[0])


@pytest.fixture(scope="module")
def plain(config_once: Any, pairs: Path) -> dict[str, torch.Tensor]:
    return weights(train_encoder(config_once(), pairs=pairs))


@pytest.mark.parametrize(
    "options",
    [
        {"whiten": False, "positives": 3}, {"positives": 1},
        {"groups": 1, "shrinkage": 0.3}, {"precision": "bf16"}, {"pooling": "mean"},
        {"max_steps": None, "epochs": 0.5, "eval_steps": 5}, {"seed": 7},
    ],
    ids=lambda options: "-".join(f"{key}={value}" for key, value in options.items()),
)  # fmt: skip
def test_variants_train_other_weights(
    config: Any, pairs: Path, plain: dict[str, torch.Tensor], options: dict[str, Any]
) -> None:
    report = train_encoder(config(**options), pairs=pairs)
    assert report.facts["steps"] == 6
    found = weights(report)
    assert all(each.isfinite().all() for each in found.values())
    assert any(not each.equal(plain[name]) for name, each in found.items())
