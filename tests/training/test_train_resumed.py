"""A training that was interrupted is gone on with, from what is whole."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import transformers
from safetensors import SafetensorError

from tests.helpers.flipped import flip
from tests.helpers.tiny_models import load, packed
from tests.training.helpers import Stops, evaluated, require_same
from whiten_index.artifacts.atomic import temporary_folder
from whiten_index.artifacts.manifest import describe_file, write_manifest
from whiten_index.errors import ArtifactError, ConfigError, EncoderError, StorageError
from whiten_index.training.train import TrainReport, train_encoder

LONGER = {"max_steps": 26, "eval_steps": 4}


@pytest.fixture(scope="module")
def whole(config_once: Any, pairs: Path) -> TrainReport:
    """A training that was not interrupted."""
    return train_encoder(config_once(**LONGER), pairs=pairs)


@pytest.fixture(scope="module")
def stopped(config_once: Any, pairs: Path) -> Path:
    """The checkpoints of a training that was stopped at step 5. Do not write to them."""
    given = config_once()
    stopped = replace(given, out=f"{given.out}-stopped")
    with pytest.raises(KeyboardInterrupt):
        train_encoder(stopped, pairs=pairs, progress=Stops(5))
    return Path(f"{stopped.out}.training")


@pytest.fixture
def checkpoint(stopped: Path, tmp_path: Path) -> Path:
    """The checkpoint of step 5, of the training that ``config`` gives."""
    return Path(shutil.copytree(stopped, tmp_path / "model.training")) / "checkpoint-5"


# An epoch has 12 steps: at its end the sentences are drawn anew.
@pytest.mark.parametrize("stop", [12, 26])
def test_an_interrupted_training_that_is_gone_on_with_is_the_uninterrupted_one(
    config: Any, pairs: Path, whole: TrainReport, tmp_path: Path, stop: int
) -> None:
    with pytest.raises(KeyboardInterrupt):
        train_encoder(config(**LONGER), pairs=pairs, progress=Stops(stop))
    assert not (tmp_path / "model").exists()
    report = train_encoder(config(**LONGER), pairs=pairs)
    assert report.facts["resumed_at"] == stop
    require_same(whole, report)
    assert report.facts["stsb_dev"] == whole.facts["stsb_dev"]
    assert evaluated(report) == evaluated(whole)
    assert not (tmp_path / "model.training").exists()


def test_ctrl_c_in_the_middle_of_a_step_keeps_the_steps_before(config: Any, tmp_path: Path) -> None:
    from whiten_index.training.contrastive_model import ContrastiveModel

    whole = train_encoder(config(out=str(tmp_path / "whole"), save_steps=100))
    real, left = ContrastiveModel.forward, iter((True, True, True, False))

    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        if not next(left):
            raise KeyboardInterrupt
        return real(self, *arguments, **options)

    with patch.object(ContrastiveModel, "forward", forward), pytest.raises(KeyboardInterrupt):
        train_encoder(config(save_steps=100))
    report = train_encoder(config(save_steps=100))
    assert report.facts["resumed_at"] == 3
    require_same(whole, report)


def test_what_a_training_left_that_died_at_its_very_end_is_removed(
    config: Any, pairs: Path, tmp_path: Path
) -> None:
    import whiten_index.training.train as module

    real = module.replace_folder

    def die(*arguments: Any, **options: Any) -> None:
        real(*arguments, **options)
        raise KeyboardInterrupt

    with patch.object(module, "replace_folder", die), pytest.raises(KeyboardInterrupt):
        train_encoder(config(), pairs=pairs)
    assert (tmp_path / "model.training" / "checkpoint-6").exists()
    with temporary_folder(tmp_path / "model") as left:
        pass
    left.mkdir()  # as one has that was killed right after its rename
    assert train_encoder(config(), pairs=pairs).again
    assert not (tmp_path / "model.training").exists()
    assert not left.exists()


@pytest.mark.parametrize("how", ["truncate", "remove"])
@pytest.mark.parametrize(
    "name", ["model.safetensors", "best.safetensors", "state.pt", "manifest.json"]
)
def test_a_damaged_checkpoint_is_told(
    config: Any, pairs: Path, checkpoint: Path, name: str, how: str
) -> None:
    path = checkpoint / name
    if how == "remove":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(
        ArtifactError, match="remove the folder of checkpoints to train from the start"
    ):
        train_encoder(config(), pairs=pairs)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("losses", None), ("losses", torch.zeros(3)), ("curves", None), ("curves", "text"),
        ("curves", torch.zeros(3)), ("curves", [{"loss": 1.0}]),
    ],
)  # fmt: skip
def test_an_odd_state_of_a_checkpoint_is_told(
    config: Any, pairs: Path, checkpoint: Path, field: str, value: Any
) -> None:
    path = checkpoint / "state.pt"
    torch.save({**torch.load(path, weights_only=True), field: value}, path)
    fields = json.loads(path.with_name("manifest.json").read_text())
    fields["files"]["state.pt"] = describe_file(path)
    write_manifest(path.with_name("manifest.json"), fields)
    with pytest.raises(ArtifactError, match=r"checkpoint-5 cannot be loaded .* from the start"):
        train_encoder(config(), pairs=pairs)


def test_a_checkpoint_beyond_the_last_step_is_told(
    config: Any, pairs: Path, checkpoint: Path
) -> None:
    path = checkpoint.rename(checkpoint.with_name("checkpoint-500"))
    fields = json.loads((path / "manifest.json").read_text())
    write_manifest(path / "manifest.json", {**fields, "step": 500})
    with pytest.raises(ArtifactError, match="has a checkpoint of step 500 of 6; remove"):
        train_encoder(config(), pairs=pairs)


@pytest.mark.parametrize("name", ["state.pt", "model.safetensors", "packed"])
def test_a_checkpoint_that_holds_something_else_is_told(
    config: Any, pairs: Path, checkpoint: Path, name: str
) -> None:
    """Its checksums are right; no code of it runs."""
    if name == "packed":
        name = packed(checkpoint / "state.pt").name
    else:
        torch.save({"state": Path("x")}, checkpoint / name)
    fields = json.loads((checkpoint / "manifest.json").read_text())
    fields["files"][name] = describe_file(checkpoint / name)
    write_manifest(checkpoint / "manifest.json", fields)
    with pytest.raises(
        ArtifactError, match=r"checkpoint-5 cannot be loaded .* train from the start"
    ):
        train_encoder(config(), pairs=pairs)


def test_an_error_of_the_system_is_none_of_a_checkpoint(
    config: Any, pairs: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> Any:
        raise SafetensorError(f"I/O error: Input/output error (os error 5): {path}")

    monkeypatch.setattr("whiten_index.training.trainer.load_file", fail)
    with pytest.raises(StorageError, match=r"cannot read .*checkpoint-5: .*input/output"):
        train_encoder(config(), pairs=pairs)


@pytest.mark.parametrize("when", ["loaded", "written"])
def test_a_model_that_changes_is_not_trained(
    config: Any, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    folder = tmp_path / "first"
    shutil.copytree(tiny_model, folder)
    place = {"loaded": "AutoModel", "written": "BertModel"}[when]
    name = {"loaded": "from_pretrained", "written": "forward"}[when]
    real = getattr(getattr(transformers, place), name)

    def touched(*arguments: Any, **options: Any) -> Any:
        (folder / "tokenizer.json").touch()
        return real(*arguments, **options)

    monkeypatch.setattr(f"transformers.{place}.{name}", touched)
    with pytest.raises(EncoderError, match="changed while it was used"):
        train_encoder(config(model=str(folder)))
    assert not (tmp_path / "model").exists()


def test_a_checkpoint_under_the_name_of_another_step_is_told(
    config: Any, pairs: Path, checkpoint: Path
) -> None:
    shutil.copytree(checkpoint, checkpoint.with_name("checkpoint-999"))
    with pytest.raises(ArtifactError, match=r"checkpoint-999 is the checkpoint of step 5; remove"):
        train_encoder(config(), pairs=pairs)


@pytest.mark.usefixtures("checkpoint")
def test_checkpoints_of_another_training_are_refused(config: Any, pairs: Path) -> None:
    with pytest.raises(ConfigError, match="checkpoints of a training with another seed"):
        train_encoder(config(seed=7), pairs=pairs)


def test_a_disk_that_is_full_at_the_very_end_is_told(config: Any) -> None:
    from safetensors import SafetensorError

    import whiten_index.training.contrastive_model as module

    full = Mock(side_effect=SafetensorError("I/O error: No space left on device (os error 28)"))
    refused = pytest.raises(StorageError, match="No space left on device")
    with patch.object(module, "write_model", full), refused:
        train_encoder(config())
    # Errors of a device are none of the disk.
    broken = Mock(side_effect=RuntimeError("CUDA error: an illegal memory access"))
    with patch.object(module, "write_model", broken), pytest.raises(RuntimeError, match="CUDA"):
        train_encoder(config())
    assert train_encoder(config()).facts["resumed_at"] == 6


def test_a_trained_model_is_checked_before_it_is_used(config: Any) -> None:
    out = Path(train_encoder(config()).out)
    (out / "README.md").write_text("A description may be added.")
    load(out)
    flip(out / "model.safetensors", -1)
    with pytest.raises(ArtifactError, match=r"model\.safetensors is damaged: its content"):
        load(out)
    (out / "manifest.json").unlink()
    load(out)
