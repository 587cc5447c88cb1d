"""Checkpoints of a training: the last whole one and the best are kept, whatever it dies at."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file

from whiten_index.manifest import fsync_path, replace_file
from whiten_index.training.model import ContrastiveModel

_WEIGHTS, _WHOLE = "model.safetensors", "whole"


def step_of(checkpoint: Path) -> int:
    """Return the step that a checkpoint was made at."""
    return int(checkpoint.name.rsplit("-", 1)[1])


def all_of(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, whole or not, the last one last."""
    return sorted(folder.glob("checkpoint-*"), key=step_of) if folder.is_dir() else []


def last_whole(folder: Path) -> Path | None:
    """Return the last checkpoint that is whole, None where there is none; others are removed.

    The Trainer writes them in place: one that it died at looks like any other.
    """
    whole = None
    for path in all_of(folder):
        if (path / _WHOLE).exists():
            whole = path
        else:
            shutil.rmtree(path)
    return whole


def keep(folder: Path, checkpoint: Path, best: Path | None) -> None:
    """Mark a checkpoint that was written as whole; then remove all but it and the best."""
    for file in checkpoint.iterdir():
        fsync_path(file)
    replace_file(checkpoint / _WHOLE, b"")
    kept = {checkpoint.name, best.name if best else None}
    for path in all_of(folder):
        if path.name not in kept:
            # What is left of it, if this dies now, is not whole.
            (path / _WHOLE).unlink(missing_ok=True)
            shutil.rmtree(path)


def load(model: ContrastiveModel, checkpoint: Path) -> None:
    """Give a model the weights of a checkpoint."""
    model.load_state_dict(load_file(checkpoint / _WEIGHTS))
