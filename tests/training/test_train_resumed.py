"""A training that was interrupted is gone on with, from what is whole."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.helpers import Stops, evaluated, require_same
from whiten_index.artifacts.manifest import describe_file
from whiten_index.errors import ArtifactError, StorageError
from whiten_index.training.train import train_encoder


# An epoch has 12 steps: at its end the sentences are drawn anew.
@pytest.mark.parametrize("stop", [12, 26])
def test_an_interrupted_training_that_is_gone_on_with_is_the_uninterrupted_one(
    config: Any, pairs: Path, tmp_path: Path, stop: int
) -> None:
    options = {"max_steps": 26, "eval_steps": 4}
    whole = train_encoder(config(out=str(tmp_path / "whole"), **options), pairs=pairs)
    with pytest.raises(KeyboardInterrupt):
        train_encoder(config(**options), pairs=pairs, progress=Stops(stop))
    assert not (tmp_path / "model").exists()
    report = train_encoder(config(**options), pairs=pairs)
    assert report.facts["resumed_at"] == stop
    require_same(whole, report)
    assert report.facts["stsb_dev"] == whole.facts["stsb_dev"]
    assert evaluated(report) == evaluated(whole)
    assert not (tmp_path / "model.training").exists()


def test_a_checkpoint_that_was_being_written_is_passed_over(
    config: Any, pairs: Path, tmp_path: Path
) -> None:
    whole = train_encoder(config(out=str(tmp_path / "whole")), pairs=pairs)
    with pytest.raises(KeyboardInterrupt):
        train_encoder(config(), pairs=pairs, progress=Stops(4))
    checkpoints = tmp_path / "model.training" / "checkpoints"
    # It died while it wrote the next one, with weights of a later step for the best.
    half = shutil.copytree(checkpoints / "checkpoint-4", checkpoints / "checkpoint-5")
    (half / "whole.json").unlink()
    (half / "model.safetensors").write_bytes(b"half")
    (checkpoints / "best-6.safetensors").write_bytes(b"half")
    report = train_encoder(config(), pairs=pairs)
    assert report.facts["resumed_at"] == 4
    require_same(whole, report)


def test_what_a_training_left_that_died_at_its_very_end_is_removed(
    config: Any, pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import whiten_index.training.train as module

    real = module.replace_folder

    def die(*arguments: Any, **options: Any) -> None:
        real(*arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "replace_folder", die)
        with pytest.raises(KeyboardInterrupt):
            train_encoder(config(), pairs=pairs)
    assert (tmp_path / "model.training" / "checkpoints").exists()
    assert train_encoder(config(), pairs=pairs).again
    assert not (tmp_path / "model.training").exists()


@pytest.mark.parametrize("how", ["truncate", "remove"])
@pytest.mark.parametrize(
    "name",
    [
        "checkpoint-5/model.safetensors", "checkpoint-5/optimizer.pt",
        "checkpoint-5/trainer_state.json", "best-{}.safetensors",
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_is_told(
    config: Any, pairs: Path, tmp_path: Path, name: str, how: str
) -> None:
    with pytest.raises(KeyboardInterrupt):
        train_encoder(config(), pairs=pairs, progress=Stops(5))
    folder = tmp_path / "model.training" / "checkpoints"
    (best,) = folder.glob("best-*.safetensors")
    path = folder / name.format(best.stem.partition("-")[2])
    if how == "remove":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        ArtifactError, match="remove the folder of checkpoints to train from the start"
    ):
        train_encoder(config(), pairs=pairs)


@pytest.mark.parametrize(
    "name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "scaler.pt"]
)
def test_a_checkpoint_that_holds_something_else_is_told(
    config: Any, pairs: Path, tmp_path: Path, name: str
) -> None:
    """Its checksums are right; no code of it runs."""
    with pytest.raises(KeyboardInterrupt):
        train_encoder(config(), pairs=pairs, progress=Stops(5))
    folder = tmp_path / "model.training" / "checkpoints" / "checkpoint-5"
    torch.save({"state": Path("x")}, folder / name)
    whole = json.loads((folder / "whole.json").read_text())
    if name != "scaler.pt":  # which this training does not have
        whole["files"][f"{folder.name}/{name}"] = describe_file(folder / name)
    (folder / "whole.json").write_text(json.dumps(whole))
    wrong = "is no part of the checkpoint;" if name == "scaler.pt" else "cannot be loaded"
    with pytest.raises(ArtifactError, match=rf"checkpoint-5.* {wrong} .* train from the start"):
        train_encoder(config(), pairs=pairs)


@pytest.mark.parametrize("how", ["of another training", "a link"])
def test_a_checkpoint_from_elsewhere_is_refused(config: Any, tmp_path: Path, how: str) -> None:
    for name, seed in (("model", 0), ("other", 7)):
        with pytest.raises(KeyboardInterrupt):
            train_encoder(config(out=str(tmp_path / name), seed=seed), progress=Stops(4))
    parts = "model.training", "other.training"
    mine, other = (tmp_path / each / "checkpoints/checkpoint-4" for each in parts)
    if how == "a link":
        mine = mine.with_name("checkpoint-5")
        mine.symlink_to(other)
    else:
        shutil.rmtree(mine)
        shutil.move(other, mine)
    with pytest.raises(ArtifactError, match=rf"{mine} is .*{how}.* train from the start"):
        train_encoder(config(seed=0))


def test_a_disk_that_is_full_at_the_very_end_is_told(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import SafetensorError

    import whiten_index.training.contrastive_model as module

    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_model", full)
        with pytest.raises(StorageError, match="No space left on device"):
            train_encoder(config())
    assert train_encoder(config()).facts["resumed_at"] == 6
