"""Trainings, alone and in a sweep: what they come to, and how that is used and shown."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner, Result

from pipelines.train_whitenedcse import main
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


SWEEP = """
seeds = [0, 1]
[base]
batch_size = 8
max_steps = 2
eval_steps = 2
groups = 8
device = "cpu"
[[runs]]
table = "A"
name = "m={positives}"
grid = { positives = [1, 2] }
[[runs]]
table = "B"
name = "whitened"
positives = 1
"""


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> Any:
    texts = [f"the {a} {b} on the mat" for a in ("cat", "dog", "king") for b in ("sat", "ran")] * 4
    pq.write_table(pa.table({"text": texts}), tmp_path / "s.parquet")
    scores = [float(n // 2 % 6) for n in range(20)]
    pq.write_table(
        pa.table(
            {
                "dataset": ["STS-B"] * 20, "split": ["dev", "test"] * 10,
                "sentence1": (texts * 2)[:20], "sentence2": (texts * 2)[3:23], "score": scores,
            }
        ),
        tmp_path / "sts.parquet",
    )  # fmt: skip
    (tmp_path / "sweep.toml").write_text(SWEEP)

    pairs = str(tmp_path / "sts.parquet")

    def run(*more: str, model: Path = tiny_model, sts: str | None = pairs) -> Result:
        return CliRunner().invoke(
            main,
            [
                str(tmp_path / "sweep.toml"), str(tmp_path / "s.parquet"), "--out",
                str(tmp_path / "out"), "--dev", pairs, *(["--sts", sts] if sts else []),
                "--set", f"model={model}", *more,
            ],
        )  # fmt: skip

    return run


def events(done: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


def trained(done: Result) -> list[tuple[str, str, int]]:
    assert done.exit_code == 0, done.output
    logged = [each for each in events(done) if each["event"] == "training"]
    return [(each["table"], each["name"], each["seed"]) for each in logged]


def test_a_sweep_trains_scores_and_shows_each_setting_once(run: Any, tmp_path: Path) -> None:
    assert trained(run("--only", "B")) == [("B", "whitened", 0), ("B", "whitened", 1)]
    # The weights of a whole sweep would fill a disk.
    assert not list((tmp_path / "out").rglob("*.safetensors"))
    # The row of table B is one of table A.
    others = [("A", "m=2", 0), ("A", "m=2", 1)]
    assert trained(run("--keep-models")) == [("A", "m=1", 0), ("A", "m=1", 1), *others]
    assert len(list((tmp_path / "out/models").glob("*/model.safetensors"))) == 4
    assert trained(run()) == []
    results = [json.loads(line) for line in (tmp_path / "out/results.jsonl").open()]
    assert len(results) == 4
    for result in results:
        assert result["steps"] == 2
        assert set(result["sts"]) == {"STS-B"}
        assert [row["step"] for row in result["curves"]] == [0, 1, 2]
    assert [[f"{row['table']} {row['name']}" for row in result["rows"]] for result in results] == [
        ["B whitened", "A m=1"], ["B whitened", "A m=1"], ["A m=2"], ["A m=2"]
    ]  # fmt: skip
    shown = (tmp_path / "out/results.md").read_text()
    assert "## A" in shown
    assert "## B" in shown
    assert "| whitened | 2 |" in shown
    assert shown.count(" ± ") >= 6
    pictures = sorted(path.name for path in (tmp_path / "out/figures").iterdir())
    assert pictures == [
        f"{table}-{what}.png" for table in "ab" for what in ("alignment", "stsb-dev", "uniformity")
    ]
    assert all(f"(figures/{name})" in shown for name in pictures)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seeds = [", "is no sweep that can be read"),
        (SWEEP.replace("m={positives}", "m={m}"), "quotes what its grid does not have"),
        (SWEEP.replace("[1, 2]", "[]"), "a grid gives lists of values, and positives none"),
        (SWEEP.replace("seeds = [0, 1]", "seeds = 0"), "seeds is 0; give a list"),
        (SWEEP.replace("[1, 2] }", "[1, 2], seed = [1] }"), "give them as seeds ="),
        (SWEEP.replace("m={positives}", "m"), "several runs of A are called m"),
        (SWEEP.replace('name = "whitened"', ""), "has a table and a name"),
        (SWEEP.replace("[base]", '[base]\nwhiten = "no"'), "--whiten takes true or false"),
        (SWEEP.replace("groups = 8", "grups = 8"), "grups is unknown; did you mean groups?"),
        (SWEEP.replace('name = "whitened"', 'name = "w"\ngroups = 5'), "5 groups do not divide 32"),
    ],
)
def test_a_file_that_cannot_be_is_told(run: Any, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "sweep.toml").write_text(text)
    done = run()
    assert done.exit_code == 2
    assert message in events(done)[-1]["message"]
    # An error in the last row is reported before the first is trained.
    assert len(events(done)) == 1
