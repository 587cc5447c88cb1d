"""A training from sentences to a folder: what it comes to, and how that is used."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.train.helpers import require_same, sentences, weights
from whiten_index.train import train_encoder
from whiten_index.training.config import GroupMap, PositiveSum, Precision


def test_the_loss_falls_and_curves_tell_it(config: Any, pairs: Path) -> None:
    report = train_encoder(config(max_steps=40, eval_steps=10, save_steps=20), pairs=pairs)
    with (report.out / "curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [0, 1, 10, 20, 30, 40]
    losses = [float(row["loss"]) for row in rows[1:]]
    assert losses[-1] < 0.9 * losses[0]
    rows = [row for row in rows if row["step"] != "1"]
    for row in rows:
        assert -100 <= float(row["stsb_dev"]) <= 100
        assert float(row["alignment"]) >= 0
        assert float(row["uniformity"]) <= 0
    scores = {int(row["step"]): float(row["stsb_dev"]) for row in rows}
    best = report.facts["best_step"]
    assert scores[best] == max(scores[step] for step in (10, 20, 30, 40))
    assert report.facts["stsb_dev"] == pytest.approx(scores[best])
    assert report.facts["stsb_dev_before"] == pytest.approx(scores[0])


def test_the_best_checkpoint_is_what_is_written(
    config: Any, pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import whiten_index.train as module

    seen = list[Any]()

    def falling(*_: Any) -> Any:
        def score(model: Any) -> dict[str, float]:
            seen.append({k: v.clone() for k, v in model.encoder.state_dict().items()})
            return {"stsb_dev": 50.0 - abs(len(seen) - 3), "alignment": 0.0, "uniformity": 0.0}

        return score

    monkeypatch.setattr(module, "_scorer", falling)
    report = train_encoder(config(max_steps=10), pairs=pairs)
    assert report.facts["best_step"] == 4
    found = weights(report)
    for name, tensor in seen[2].items():
        if name in found:
            assert torch.equal(found[name], tensor), name
    assert not all(torch.equal(found[name], seen[-1][name]) for name in found)


def test_seeds_draw_what_they_drew_and_others_draw_otherwise(config: Any, tmp_path: Path) -> None:
    one, same, other = (
        train_encoder(config(out=str(tmp_path / f"m{number}"), seed=seed))
        for number, seed in enumerate((0, 0, 1))
    )
    require_same(one, same)
    name = "encoder.layer.0.output.dense.weight"
    assert not torch.equal(weights(one)[name], weights(other)[name])
    assert one.facts["best_step"] == 6


@pytest.mark.parametrize(
    "options",
    [
        {"whiten": False, "groups": None, "positives": 1},
        {"whiten": False, "groups": None, "positives": 3},
        {"positives": 1},
        {"passes": 2},
        {"passes": 1},
        {"positive_sum": PositiveSum.INSIDE},
        {"groups": None, "group_size": 4},
        {"shuffle": False},
        {"groups": 1, "shrinkage": 0.3},
        {"precision": Precision.BF16},
        {"pooling": "mean"},
        {"max_steps": None, "epochs": 0.5, "eval_steps": 5},
    ],
    ids=lambda options: "-".join(f"{key}={value}" for key, value in options.items()),
)
def test_variants_train(config: Any, pairs: Path, options: dict[str, Any]) -> None:
    report = train_encoder(config(**options), pairs=pairs)
    assert report.facts["steps"] == 6
    assert all(each.isfinite().all() for each in weights(report).values())


@pytest.mark.parametrize("keep_head", [False, True])
def test_the_folder_is_read_by_sentence_transformers_and_here_alike(
    config: Any, pairs: Path, keep_head: bool
) -> None:
    from sentence_transformers import SentenceTransformer

    from whiten_index.encoding import Encoder

    report = train_encoder(config(keep_head=keep_head), pairs=pairs)
    texts = sentences(20, seed=7)
    theirs = SentenceTransformer(str(report.out), device="cpu").encode(texts)
    ours = Encoder.load(str(report.out), device="cpu").encode(texts)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert ours.std() > 0


def test_the_head_that_is_kept_is_what_was_scored(
    config: Any, pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import whiten_index.train as module
    from whiten_index.encoding import Encoder
    from whiten_index.training import embed as embedding

    texts, seen = sentences(20, seed=7), list[Any]()
    real = module._scorer

    def scorer(asked: Any, collator: Any, dev: Any) -> Any:
        inner = real(asked, collator, dev)

        def score(model: Any) -> dict[str, float]:
            seen.append(embedding.embed(model, texts, collator, with_head=True))
            return {**inner(model), "stsb_dev": float(len(seen))}

        return score

    monkeypatch.setattr(module, "_scorer", scorer)
    report = train_encoder(config(keep_head=True), pairs=pairs)
    found = Encoder.load(str(report.out), device="cpu").encode(texts)
    np.testing.assert_allclose(found, seen[-1], atol=2e-5)


def test_the_trained_folder_goes_through_build_eval_and_search(
    config: Any, pairs: Path, corpus: Path, tmp_path: Path
) -> None:
    from click.testing import CliRunner

    from whiten_index.cli import cli

    folder = train_encoder(config(), pairs=pairs).out

    def run(*arguments: str) -> Any:
        done = CliRunner().invoke(cli, [*arguments, "--json"], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    built = run(
        "build", str(corpus), "--text-column", "text", "--model", str(folder), "--k", "8",
        "--out", str(tmp_path / "index"), "--device", "cpu",
    )  # fmt: skip
    assert built["counts"]["encoded"] == 200
    scored = run("eval", "sts", str(pairs), "--model", str(folder), "--device", "cpu")
    assert scored["datasets"]
    hits = run("search", str(tmp_path / "index"), sentences(1)[0], "--top-k", "3")
    assert hits


def test_a_link_and_its_folder_are_one_out(config: Any, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert train_encoder(config(out=str(tmp_path / "link"))).out == tmp_path / "real"
    assert train_encoder(config(out=str(tmp_path / "real"))).again


def test_other_users_may_read_what_was_trained(config: Any) -> None:
    out = train_encoder(config()).out
    modes = {path.stat().st_mode & 0o777 for path in out.rglob("*") if path.is_file()}
    assert len(modes) == 1


def test_longer_texts_than_those_trained_on_are_not_cut(config: Any, pairs: Path) -> None:
    from whiten_index.encoding import EncoderConfig, resolve_encoder

    report = train_encoder(config(max_length=8), pairs=pairs)
    spec, _ = resolve_encoder(EncoderConfig(model=str(report.out)))
    assert spec.max_length == 32


def test_the_command_trains_and_goes_on(
    corpus: Path, pairs: Path, tiny_model: Path, tmp_path: Path
) -> None:
    from click.testing import CliRunner

    from whiten_index.cli import cli

    command = [
        "train", str(corpus), "--out", str(tmp_path / "model"), "--model", str(tiny_model),
        "--dev", str(pairs), "--groups", "8", "--batch-size", "16", "--max-steps", "4",
        "--eval-steps", "2", "--device", "cpu",
    ]  # fmt: skip
    told = CliRunner().invoke(cli, command)
    assert told.exit_code == 0, told.output
    assert "4 steps over 200 sentences; checkpoint" in told.stdout
    again = CliRunner().invoke(cli, [*command, "--json"])
    assert json.loads(again.stdout)["already_there"]
    refused = CliRunner().invoke(cli, [*command, "--group-size", "4"])
    assert refused.exit_code == 2
    assert "either the number of groups or the channels of a group" in refused.stderr


def test_paths_and_choices_are_taken_as_they_come(config: Any, corpus: Path) -> None:
    one, other = config(group_map=GroupMap.NEWTON), config(corpus=corpus, group_map="newton")
    other = dataclasses.replace(other, out=Path(one.out), text_columns="text")
    assert one == other
