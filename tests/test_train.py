"""A training from sentences to a folder: gone on with, compared, refused, used as any model."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from whiten_index.errors import (
    ArtifactError,
    ConfigError,
    CorpusError,
    EncoderError,
    OutputError,
    WhiteningError,
)
from whiten_index.train import TrainReport, train
from whiten_index.training.config import GroupMap, PositiveSum, Precision, TrainingConfig

WORDS = ("cat", "dog", "bird", "fish", "king", "queen", "man", "woman", "river", "house")
VERBS = ("sat", "ran", "flew", "swam", "walks", "sings", "reads", "writes")


def sentences(count: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    draw = rng.choice
    return [
        f"the {draw(WORDS)} {draw(VERBS)} on the {draw(('red', 'blue', 'small', 'old'))} "
        f"{draw(WORDS)} and the {draw(WORDS)} {draw(VERBS)}"
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path_factory.mktemp("sentences") / "s.parquet"
    pq.write_table(pa.table({"text": sentences(200)}), path, row_group_size=50)
    return path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """STS-B in small: pairs are the closer the more words they share."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(5)
    first, second = sentences(60, seed=1), sentences(60, seed=2)
    second = [a if rng.random() < 0.3 else b for a, b in zip(first, second, strict=True)]
    shared = [len(set(a.split()) & set(b.split())) for a, b in zip(first, second, strict=True)]
    path = tmp_path_factory.mktemp("pairs") / "sts.parquet"
    pq.write_table(
        pa.table(
            {
                "dataset": ["STS-B"] * 60,
                "subset": ["all"] * 60,
                "split": ["dev"] * 40 + ["test"] * 20,
                "sentence1": first,
                "sentence2": second,
                "score": [min(each, 8) * 5 / 8 for each in shared],
            }
        ),
        path,
    )
    return path


@pytest.fixture
def config(corpus: Path, tiny_model: Path, tmp_path: Path) -> Any:
    def make(**options: Any) -> TrainingConfig:
        options = {
            "corpus": (str(corpus),), "out": str(tmp_path / "model"), "model": str(tiny_model),
            "groups": 8, "batch_size": 16, "max_steps": 6, "eval_steps": 2, "save_steps": 2,
            "device": "cpu", "learning_rate": 1e-3, **options,
        }  # fmt: skip
        return TrainingConfig(**options)

    return make


def weights(report: TrainReport) -> dict[str, torch.Tensor]:
    return load_file(report.out / "model.safetensors")


def require_same(one: TrainReport, other: TrainReport) -> None:
    mine, its = weights(one), weights(other)
    assert mine.keys() == its.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, its[name]), name


class Stops:
    """Progress of a job that is stopped from outside after so many steps."""

    def __init__(self, after: int) -> None:
        self.left = after
        self.notes: list[str] = []

    def start(self, name: str, total: int) -> None:
        self.training = name == "train"

    def advance(self, rows: int) -> None:
        if self.training and rows:
            self.left -= rows
            if self.left <= 0:
                raise KeyboardInterrupt

    def finish(self, name: str, seconds: float) -> None:
        pass

    def note(self, message: str) -> None:
        self.notes.append(message)


class Dies(Stops):
    """Progress of a job that dies."""

    def advance(self, rows: int) -> None:
        try:
            super().advance(rows)
        except KeyboardInterrupt:
            raise RuntimeError("dies") from None


def test_the_loss_falls_and_curves_tell_it(config: Any, pairs: Path) -> None:
    report = train(config(max_steps=40, eval_steps=10, save_steps=20), pairs=pairs)
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
    report = train(config(max_steps=10), pairs=pairs)
    assert report.facts["best_step"] == 4
    found = weights(report)
    for name, tensor in seen[2].items():
        if name in found:
            assert torch.equal(found[name], tensor), name
    assert not all(torch.equal(found[name], seen[-1][name]) for name in found)


def evaluated(report: TrainReport) -> list[tuple[str, ...]]:
    with (report.out / "curves.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["stsb_dev"]]
    return [
        tuple(row[name] for name in ("step", "stsb_dev", "alignment", "uniformity")) for row in rows
    ]


# An epoch has 12 steps: at its end the sentences are drawn anew.
@pytest.mark.parametrize("stop", [1, 3, 4, 11, 12, 13, 24, 26])
def test_an_interrupted_training_that_is_gone_on_with_is_the_uninterrupted_one(
    config: Any, pairs: Path, tmp_path: Path, stop: int
) -> None:
    # The head too, with its running moments.
    options = {"max_steps": 26, "eval_steps": 4, "keep_head": True}
    whole = train(config(out=str(tmp_path / "whole"), **options), pairs=pairs)
    with pytest.raises(KeyboardInterrupt):
        train(config(**options), pairs=pairs, progress=Stops(stop))
    assert not (tmp_path / "model").exists()
    report = train(config(**options), pairs=pairs)
    assert report.facts["resumed_at"] == stop
    require_same(whole, report)
    assert report.facts["stsb_dev"] == whole.facts["stsb_dev"]
    assert evaluated(report) == evaluated(whole)
    heads = [load_file(each.out / "2_Dense/model.safetensors") for each in (whole, report)]
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])
    assert not (tmp_path / "model.training").exists()


def test_a_checkpoint_that_was_being_written_is_passed_over(
    config: Any, pairs: Path, tmp_path: Path
) -> None:
    whole = train(config(out=str(tmp_path / "whole")), pairs=pairs)
    with pytest.raises(KeyboardInterrupt):
        train(config(), pairs=pairs, progress=Stops(4))
    checkpoints = tmp_path / "model.training" / "checkpoints"
    # It died while it wrote the next one, with weights of a later step for the best.
    half = shutil.copytree(checkpoints / "checkpoint-4", checkpoints / "checkpoint-5")
    (half / "whole.json").unlink()
    (half / "model.safetensors").write_bytes(b"half")
    (checkpoints / "best-6.safetensors").write_bytes(b"half")
    report = train(config(), pairs=pairs)
    assert report.facts["resumed_at"] == 4
    require_same(whole, report)


def test_only_the_last_checkpoint_and_the_best_weights_are_kept(
    config: Any, pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import whiten_index.train as module

    values = iter([0.0, 5.0, 9.0, 7.0, 8.0])
    monkeypatch.setattr(
        module, "_scorer", lambda *_: lambda _: {"stsb_dev": next(values), "uniformity": 0.0}
    )
    with pytest.raises(KeyboardInterrupt):
        train(config(max_steps=20, eval_steps=3, save_steps=5), pairs=pairs, progress=Stops(13))
    kept = tmp_path / "model.training" / "checkpoints"
    assert {path.name for path in kept.iterdir()} == {"checkpoint-13", "best-6.safetensors"}


def test_losses_between_checkpoints_are_told_whenever_it_is_stopped(
    config: Any, pairs: Path, tmp_path: Path
) -> None:
    def losses(**options: Any) -> dict[int, float]:
        report = train(config(max_steps=12, eval_steps=12, save_steps=12, **options), pairs=pairs)
        with (report.out / "curves.csv").open() as file:
            return {
                int(row["step"]): float(row["loss"]) for row in csv.DictReader(file) if row["loss"]
            }

    whole = losses(out=str(tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        train(config(max_steps=12, eval_steps=12, save_steps=12), pairs=pairs, progress=Stops(5))
    parts = losses()
    assert list(whole) == [1, 12]
    assert list(parts) == [1, 5, 12]
    # Each is the mean since the row before.
    assert 4 * parts[5] + 7 * parts[12] == pytest.approx(11 * whole[12], rel=1e-5)


def test_what_is_refused_leaves_nothing_behind(config: Any, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError):
        train(config())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_training_that_is_done_is_not_done_again(config: Any, pairs: Path) -> None:
    first = train(config(), pairs=pairs)
    before = (first.out / "model.safetensors").stat().st_mtime_ns
    again = train(config(), pairs=pairs)
    assert again.again
    assert again.facts == first.facts
    assert (first.out / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(ConfigError, match="a model trained with another learning_rate, seed"):
        train(config(seed=1, learning_rate=1e-4), pairs=pairs)


def test_checkpoints_of_another_model_are_not_gone_on_with(
    config: Any, pairs: Path, tmp_path: Path, tiny_model: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(config(), pairs=pairs, progress=Stops(2))
    other = shutil.copytree(tiny_model, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    from safetensors.torch import save_file

    save_file({name: each + 0.01 for name, each in tensors.items()}, other / "model.safetensors")
    with pytest.raises(ConfigError, match="checkpoints of a training with another model; name"):
        train(config(model=str(other)), pairs=pairs)
    with pytest.raises(ConfigError, match="with another max_steps"):
        train(config(max_steps=7), pairs=pairs)
    assert train(config(), pairs=pairs).facts["resumed_at"] == 2


def test_seeds_draw_what_they_drew_and_others_draw_otherwise(config: Any, tmp_path: Path) -> None:
    one, same, other = (
        train(config(out=str(tmp_path / f"m{number}"), seed=seed))
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
    report = train(config(**options), pairs=pairs)
    assert report.facts["steps"] == 6
    assert all(each.isfinite().all() for each in weights(report).values())


@pytest.mark.parametrize("keep_head", [False, True])
def test_the_folder_is_read_by_sentence_transformers_and_here_alike(
    config: Any, pairs: Path, keep_head: bool
) -> None:
    from sentence_transformers import SentenceTransformer

    from whiten_index.encoding import Encoder

    report = train(config(keep_head=keep_head), pairs=pairs)
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
    report = train(config(keep_head=True), pairs=pairs)
    found = Encoder.load(str(report.out), device="cpu").encode(texts)
    np.testing.assert_allclose(found, seen[-1], atol=2e-5)


def test_the_trained_folder_goes_through_build_eval_and_search(
    config: Any, pairs: Path, corpus: Path, tmp_path: Path
) -> None:
    from click.testing import CliRunner

    from whiten_index.cli import cli

    folder = train(config(), pairs=pairs).out

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


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_size": 1}, ConfigError, "batch_size is 1; give 2 or more: sentences are told"),
        ({"positives": 0}, ConfigError, "positives is 0; give 1 or more"),
        ({"groups": 5}, ConfigError, "5 groups do not divide 32 channels; give one of 1, 2, 4, 8"),
        ({"groups": 2, "group_size": 16}, ConfigError, "either the number of groups or"),
        ({"whiten": False}, ConfigError, "groups are of a head that whitens"),
        ({"groups": 1}, WhiteningError, "a batch of 16 cannot whiten groups of 32 channels"),
        ({"batch_size": 512}, CorpusError, "200 sentences, fewer than a batch of 512"),
        ({"passes": 5}, ConfigError, "passes is 5; a sentence has 4 views, so give 1 to 4"),
        ({"passes": 1, "shuffle": False}, ConfigError, "1 passes give 4 views of which some are"),
        ({"passes": 2, "shuffle": False}, ConfigError, "2 passes give 4 views of which some are"),
        ({"temperature": 0.0}, ConfigError, "temperature is 0.0; give a number above 0"),
        ({"learning_rate": float("nan")}, ConfigError, "learning_rate is nan"),
        ({"seed": -1}, ConfigError, "seed is -1; give 0 or more"),
        ({"positives": "3"}, ConfigError, "positives is '3'; give a whole number"),
        ({"whiten": "no"}, ConfigError, "whiten is 'no'; give true or false"),
        ({"group_map": "zca"}, ConfigError, "group_map is 'zca'; give one of zca"),
        ({"text_columns": (3,)}, ConfigError, "give text, or a list of it"),
        ({"seed": 2**32}, ConfigError, "give 4294967295 or less"),
        ({"epochs": 1e308}, ConfigError, "epochs is 1e\\+308; give a number from 0 to 1e\\+06"),
        ({"batch_size": 2.5}, ConfigError, "batch_size is 2.5; give a whole number"),
        ({"learning_rate": "fast"}, ConfigError, "learning_rate is 'fast'; give a number"),
        ({"passes": 1, "groups": 32}, ConfigError, "groups of several, but not all"),
        ({"learning_rate": 1e30}, WhiteningError, "are not finite; take a smaller learning rate"),
        (
            {"learning_rate": 1e30, "whiten": False, "groups": None},
            EncoderError,
            "the training diverged: its numbers are not finite",
        ),
        ({"warmup": 1.5}, ConfigError, "warmup is 1.5; give a number from 0 to 1"),
        ({"epsilon": -1.0}, ConfigError, "epsilon is -1.0; give 0 or more"),
        ({"pooling": "max"}, ConfigError, "pooling is max; give one of cls, mean"),
        ({"max_length": 2}, ConfigError, "max_length is 2"),
        ({"corpus": ()}, ConfigError, "no sentences are named"),
        ({"device": "tpu"}, ConfigError, "device is tpu; give one of auto, cpu, cuda"),
        ({"precision": Precision.FP16}, ConfigError, "fp16 is for GPUs"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_what_cannot_be_trained_is_told(
    config: Any, tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        train(config(**options))
    assert not (tmp_path / "model").exists()
    assert not (tmp_path / "model.training").exists()


def test_an_encoder_without_dropout_has_no_views_to_tell_apart_unless_channels_are_shuffled(
    config: Any, tiny_model: Path, tmp_path: Path
) -> None:
    plain = shutil.copytree(tiny_model, tmp_path / "plain")
    settings = json.loads((plain / "config.json").read_text())
    settings |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (plain / "config.json").write_text(json.dumps(settings))
    for options in ({"whiten": False, "groups": None}, {"shuffle": False}, {"groups": 32}):
        with pytest.raises(EncoderError, match="has no dropout, so that all views of a sentence"):
            train(config(model=str(plain), **options))
    assert train(config(model=str(plain))).facts["steps"] == 6


def test_a_head_that_is_kept_is_another_training(config: Any, pairs: Path) -> None:
    train(config(), pairs=pairs)
    with pytest.raises(ConfigError, match="a model trained with another keep_head"):
        train(config(keep_head=True), pairs=pairs)


def test_what_a_training_left_that_died_at_its_very_end_is_removed(
    config: Any, pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import whiten_index.train as module

    real = module.replace_folder

    def die(*arguments: Any, **options: Any) -> None:
        real(*arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "replace_folder", die)
        with pytest.raises(KeyboardInterrupt):
            train(config(), pairs=pairs)
    assert (tmp_path / "model.training" / "checkpoints").exists()
    assert train(config(), pairs=pairs).again
    assert not (tmp_path / "model.training").exists()


@pytest.mark.parametrize("name", ["thesis.txt", "training.json", ".env", "checkpoints/notes.txt"])
def test_a_users_own_folder_beside_is_left_alone(config: Any, tmp_path: Path, name: str) -> None:
    own = tmp_path / "model.training" / name
    own.parent.mkdir(parents=True)
    own.write_text('{"years": "of work"}')
    for options in ({}, {"groups": 5}):
        with pytest.raises(ConfigError):
            train(config(**options))
    assert own.read_text() == '{"years": "of work"}'
    assert [p.name for p in (tmp_path / "model.training").rglob("*") if p.is_file()] == [own.name]


def test_a_model_that_was_trained_is_no_folder_of_checkpoints(config: Any, tmp_path: Path) -> None:
    first = train(config(out=str(tmp_path / "model.training")))
    with pytest.raises(ConfigError, match="where checkpoints go, holds something else"):
        train(config())
    assert train(config(out=str(tmp_path / "model.training"))).facts == first.facts


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "curves.csv"])
def test_a_model_that_was_damaged_since_is_told(config: Any, name: str) -> None:
    out = train(config()).out
    (out / name).write_bytes(b"x")
    with pytest.raises(ArtifactError, match="remove it to train anew"):
        train(config())
    (out / name).unlink()
    with pytest.raises(ArtifactError, match="is missing"):
        train(config())


@pytest.mark.parametrize("how", ["truncate", "remove"])
@pytest.mark.parametrize(
    "name",
    [
        "checkpoint-5/model.safetensors", "checkpoint-5/optimizer.pt", "checkpoint-5/scheduler.pt",
        "checkpoint-5/rng_state.pth", "checkpoint-5/trainer_state.json", "best-{}.safetensors",
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_is_told(
    config: Any, pairs: Path, tmp_path: Path, name: str, how: str
) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(config(), pairs=pairs, progress=Stops(5))
    folder = tmp_path / "model.training" / "checkpoints"
    (best,) = folder.glob("best-*.safetensors")
    path = folder / name.format(best.stem.partition("-")[2])
    if how == "remove":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match="remove the folder of checkpoints to train anew"):
        train(config(), pairs=pairs)


def test_names_of_others_among_checkpoints_are_passed_over(
    config: Any, pairs: Path, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(config(), pairs=pairs, progress=Stops(3))
    folder = tmp_path / "model.training" / "checkpoints"
    (folder / "checkpoint-old").mkdir()
    (folder / "best-mine.safetensors").write_bytes(b"x")
    assert train(config(), pairs=pairs).facts["resumed_at"] == 3


def test_a_link_and_its_folder_are_one_out(config: Any, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert train(config(out=str(tmp_path / "link"))).out == tmp_path / "real"
    assert train(config(out=str(tmp_path / "real"))).again


def test_embeddings_that_all_became_the_same_are_a_divergence(
    config: Any, pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import whiten_index.train as module

    def scorer(*_: Any) -> Any:
        calls = iter([{"stsb_dev": 1.0, "uniformity": 0.0}])

        def score(_: Any) -> dict[str, float]:
            try:
                return next(calls)
            except StopIteration:
                raise ConfigError("all predicted similarities are 0") from None

        return score

    monkeypatch.setattr(module, "_scorer", scorer)
    with pytest.raises(EncoderError, match="or all embeddings are the same"):
        train(config(), pairs=pairs)


def test_a_disk_that_is_full_at_the_very_end_is_told(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import SafetensorError

    import whiten_index.training.folder as module

    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_model", full)
        with pytest.raises(OutputError, match="No space left on device"):
            train(config())
    assert train(config()).facts["resumed_at"] == 6


def test_other_users_may_read_what_was_trained(config: Any) -> None:
    out = train(config()).out
    modes = {path.stat().st_mode & 0o777 for path in out.rglob("*") if path.is_file()}
    assert len(modes) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("WORLD_SIZE", "2"), ("LOCAL_RANK", "3"), ("ACCELERATE_MIXED_PRECISION", "bf16")],
)
def test_what_others_set_for_their_own_trainings_is_refused(
    config: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"unset .*{name}|{name} is set"):
        train(config())


def test_checkpoints_are_as_often_as_is_asked_for_now(config: Any, tmp_path: Path) -> None:
    long = {"max_steps": 12, "eval_steps": 12}
    with pytest.raises(KeyboardInterrupt):
        train(config(save_steps=12, **long), progress=Stops(2))
    with pytest.raises(RuntimeError, match="dies"):
        train(config(save_steps=3, **long), progress=Dies(8))
    assert (tmp_path / "model.training/checkpoints/checkpoint-6/whole.json").exists()


def test_longer_texts_than_those_trained_on_are_not_cut(config: Any, pairs: Path) -> None:
    from whiten_index.encoding import EncoderConfig, resolve_encoder

    report = train(config(max_length=8), pairs=pairs)
    spec, _ = resolve_encoder(EncoderConfig(model=str(report.out)))
    assert spec.max_length == 32


def test_a_gradient_of_pca_is_that_of_its_zca_turned() -> None:
    from whiten_index.training.group_whitening import group_map

    torch.manual_seed(0)
    rows = torch.randn(20, 4, dtype=torch.float64, requires_grad=True)

    def turned(kind: GroupMap) -> torch.Tensor:
        centred = rows - rows.mean(0)
        covariance = centred.mT @ centred / 19
        out = centred @ group_map(kind, covariance).mT
        if kind is GroupMap.ZCA:
            with torch.no_grad():
                vectors = torch.linalg.eigh(covariance)[1].flip(-1)
            out = out @ vectors
        return out

    weights = torch.randn(20, 4, dtype=torch.float64)
    gradients = [
        torch.autograd.grad((turned(kind) * weights).sum(), rows)[0]
        for kind in (GroupMap.PCA, GroupMap.ZCA)
    ]
    torch.testing.assert_close(*gradients)


def test_a_folder_of_something_else_is_left_alone(config: Any, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match=r"holds something else than a trained model"):
        train(config())
    assert (tmp_path / "model" / "thesis.txt").read_text() == "years of work"


def test_without_accelerate_it_says_what_to_install(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: None if name == "accelerate" else real(name, *a),
    )
    with pytest.raises(ConfigError, match=r"pip install 'whiten-index\[train\]'"):
        train(config())


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
