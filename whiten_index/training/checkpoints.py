"""What a training leaves on the way: its best weights, and checkpoints that it is gone on from."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from typing_extensions import TypedDict

from whiten_index.artifacts.atomic import make_folder, replacing
from whiten_index.artifacts.files import exists, fsync_path, list_folder, reading
from whiten_index.artifacts.manifest import (
    Files,
    Schema,
    check_files,
    checked,
    describe_file,
    describe_files,
    read_json,
    write_json,
)
from whiten_index.errors import StorageError
from whiten_index.training.contrastive_model import ContrastiveModel

_WEIGHTS, _WHOLE = "model.safetensors", "whole.json"
_REMEDY = "remove the folder of checkpoints to train anew"


class _Whole(TypedDict):
    """Fields of the record of a whole checkpoint."""

    files: Files


_SCHEMA = Schema("checkpoint", 1, _Whole)


@contextmanager
def written(folder: Path) -> Iterator[None]:
    """Tell of a full disk as such, whatever each writer calls it.

    Raises:
        StorageError: the block could not write.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (OSError, RuntimeError, SafetensorError) as error:
        raise StorageError(
            f"cannot write {folder} ({str(error).splitlines()[0]}); make room, and run the same "
            "command again (checkpoints are kept)"
        ) from error


def step_of(path: Path) -> int:
    """Return the step that a checkpoint, or a file of weights, was made at."""
    return int(path.stem.partition("-")[2])


def any_whole(folder: Path) -> bool:
    """Tell whether there is a checkpoint to go on from."""
    return any(exists(path / _WHOLE) for path in _checkpoints(folder))


def last_whole(folder: Path) -> Path | None:
    """Return the last checkpoint that is whole, None where there is none.

    Others are removed, which look like any other: the Trainer writes them in place. So are best
    weights of later steps, which will be made anew.

    Raises:
        ArtifactError: it is damaged, or the best weights until then are.
    """
    whole = None
    for path in _checkpoints(folder):
        if exists(path / _WHOLE):
            whole = path
        else:
            shutil.rmtree(path)
    for path in _bests(folder):
        if whole is None or step_of(path) > step_of(whole):
            path.unlink()
    if whole is not None:
        found = read_json(whole / _WHOLE, what="a checkpoint", remedy=_REMEDY)
        fields = checked(found, _SCHEMA, whole / _WHOLE, remedy=_REMEDY)
        check_files(folder, fields, content=True, remedy=_REMEDY)
    return whole


def keep(folder: Path, checkpoint: Path, best: int | None) -> None:
    """Mark a checkpoint that was written as whole; then remove what it makes needless."""
    for file in list_folder(checkpoint):
        fsync_path(file)
    fsync_path(folder)
    inside = describe_files(checkpoint)
    files = {f"{checkpoint.name}/{name}": facts for name, facts in inside.items()}
    if best is not None:
        weights = _best(folder, best)
        files[weights.name] = describe_file(weights)
    write_json(checkpoint / _WHOLE, {"files": files})
    for path in _checkpoints(folder):
        if path != checkpoint:
            # What is left of it, if this dies now, is not whole.
            (path / _WHOLE).unlink(missing_ok=True)
            shutil.rmtree(path)
    for path in _bests(folder):
        if step_of(path) != best:
            path.unlink()


def save_best(folder: Path, step: int, model: ContrastiveModel) -> None:
    """Keep a model's weights as the best so far."""
    make_folder(folder)
    tensors = {name: each.contiguous() for name, each in model.state_dict().items()}
    with replacing(_best(folder, step)) as temporary:
        save_file(tensors, temporary)


def load_best(folder: Path, step: int, model: ContrastiveModel) -> None:
    """Give a model the best weights."""
    _load(_best(folder, step), model)


def load(checkpoint: Path, model: ContrastiveModel) -> None:
    """Give a model the weights of a checkpoint."""
    _load(checkpoint / _WEIGHTS, model)


def _load(path: Path, model: ContrastiveModel) -> None:
    with reading(path):
        tensors = load_file(path)
    model.load_state_dict(tensors)


def _best(folder: Path, step: int) -> Path:
    return folder / f"best-{step}.safetensors"


def _bests(folder: Path) -> list[Path]:
    return _named(folder, r"best-\d+\.safetensors")


def _checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, whole or not, the last one last."""
    return _named(folder, r"checkpoint-\d+")


def _named(folder: Path, pattern: str) -> list[Path]:
    return sorted((p for p in list_folder(folder) if re.fullmatch(pattern, p.name)), key=step_of)
