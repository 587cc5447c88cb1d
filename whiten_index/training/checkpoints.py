"""Checkpoints of a training, and its best weights so far.

The Trainer writes ``checkpoint-STEP`` folders in place. A file inside, written last, marks one as
whole and has the checksums. ``best-STEP.safetensors`` has the best weights.
"""

import pickle
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from typing_extensions import TypedDict

from whiten_index.artifacts.atomic import leftovers_in, make_folder, replacing
from whiten_index.artifacts.files import exists, fsync_path, is_link, list_folder, reading
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
from whiten_index.errors import ArtifactError, StorageError

_WHOLE = "whole.json"
_CHECKPOINT, _BEST = r"checkpoint-\d+", r"best-\d+\.safetensors"
_REMEDY = "remove the folder of checkpoints to train from the start"


class _Whole(TypedDict):
    training: str
    files: Files


_SCHEMA = Schema("checkpoint", 1, _Whole)


@contextmanager
def written(folder: Path) -> Iterator[None]:
    """Turn every writer's error of a full disk into a ``StorageError``."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (OSError, RuntimeError, SafetensorError) as error:
        raise StorageError(
            f"cannot write {folder} ({str(error).splitlines()[0]}); make room, and run the same "
            "command again (checkpoints are kept)"
        ) from error


@contextmanager
def loaded(checkpoint: Path | str) -> Iterator[None]:
    """Turn the errors of a checkpoint that torch or the Trainer refuses into ``ArtifactError``."""
    try:
        with reading(checkpoint):
            yield
    except torch.OutOfMemoryError:
        raise
    except (
        pickle.UnpicklingError, SafetensorError, OSError, RuntimeError, ValueError, LookupError,
        TypeError, AttributeError, EOFError,
    ) as error:  # fmt: skip
        why = (str(error) or type(error).__name__).splitlines()[0][:160]
        raise ArtifactError(f"{checkpoint} cannot be loaded ({why}); {_REMEDY}") from error


def step_of(path: Path) -> int:
    """Return the step of a checkpoint or of a file of weights."""
    return int(path.stem.partition("-")[2])


def best_weights(folder: Path, step: int) -> Path:
    """Return the path of the best weights, made at a step."""
    return folder / f"best-{step}.safetensors"


def any_whole(folder: Path) -> bool:
    """Return whether there is a checkpoint to resume from."""
    return any(exists(path / _WHOLE) for path in _named(folder, _CHECKPOINT))


def last_whole(folder: Path, training: str) -> Path | None:
    """Return a training's last whole checkpoint, or None; remove what was written after it."""
    whole = None
    for path in _named(folder, _CHECKPOINT):
        if exists(path / _WHOLE):
            whole = path
        else:
            shutil.rmtree(path)
    for path in _named(folder, _BEST):
        if whole is None or step_of(path) > step_of(whole):
            path.unlink()
    if whole is not None:
        found = read_json(whole / _WHOLE, what="a checkpoint", remedy=_REMEDY)
        fields = checked(found, _SCHEMA, whole / _WHOLE, remedy=_REMEDY)
        if fields["training"] != training:
            raise ArtifactError(f"{whole} is a checkpoint of another training; {_REMEDY}")
        check_files(folder, fields, content=True, remedy=_REMEDY)
        # The Trainer reads whatever has one of its names.
        for file in {*list_folder(whole)} - {whole / _WHOLE, *leftovers_in(whole)}:
            if f"{whole.name}/{file.name}" not in fields["files"]:
                raise ArtifactError(f"{file} is no part of the checkpoint; {_REMEDY}")
    return whole


def keep(folder: Path, checkpoint: Path, best: int | None, training: str) -> None:
    """Mark a written checkpoint of a training as whole, then remove the earlier ones."""
    for file in list_folder(checkpoint):
        fsync_path(file)
    fsync_path(folder)
    files = {f"{checkpoint.name}/{name}": each for name, each in describe_files(checkpoint).items()}
    if best is not None:
        weights = best_weights(folder, best)
        files[weights.name] = describe_file(weights)
    write_json(checkpoint / _WHOLE, {"training": training, "files": files})
    for path in _named(folder, _CHECKPOINT):
        if path != checkpoint:
            # If this process dies now, the rest of the checkpoint does not count as whole.
            (path / _WHOLE).unlink(missing_ok=True)
            shutil.rmtree(path)
    for path in _named(folder, _BEST):
        if step_of(path) != best:
            path.unlink()


def save_best(folder: Path, step: int, model: nn.Module) -> None:
    """Save a model's weights as the best so far."""
    make_folder(folder)
    tensors = {name: each.contiguous() for name, each in model.state_dict().items()}
    with written(folder), replacing(best_weights(folder, step)) as temporary:
        save_file(tensors, temporary)


def load_weights(path: Path, model: nn.Module) -> None:
    """Load weights from a file into a model."""
    with loaded(path):
        model.load_state_dict(load_file(path))


def _named(folder: Path, pattern: str) -> list[Path]:
    """Return the entries of a folder whose whole names match, by their steps."""
    found = sorted((p for p in list_folder(folder) if re.fullmatch(pattern, p.name)), key=step_of)
    if links := [path for path in found if is_link(path)]:
        raise ArtifactError(f"{links[0]} is a link, which no training makes; {_REMEDY}")
    return found
