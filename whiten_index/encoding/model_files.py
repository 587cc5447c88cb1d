"""Files of a model's folder: JSON read with suspicion, weights found and digested."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

from whiten_index.artifacts.files import exists, list_folder, reading, sha256_file
from whiten_index.artifacts.limits import load_json, read_bounded
from whiten_index.errors import EncoderError


def read_json(path: Path) -> Any:
    """Return the value in a JSON file.

    Raises:
        EncoderError: the file cannot be read or is not JSON.
    """
    try:
        with reading(path):
            return load_json(read_bounded(path).decode())
    except (OSError, ValueError) as error:
        raise EncoderError(f"{path} cannot be read ({error}); restore the model folder") from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty where there is no file or no object in it."""
    value = read_json(path) if exists(path) else {}
    return value if isinstance(value, dict) else {}


def weight_files(folder: Path) -> list[Path]:
    """Return the files of weights that a loader takes, as transformers chooses; empty for none."""
    tensors = list_folder(folder, "*.safetensors")
    if any(exists(folder / f"model.safetensors{end}") for end in ("", ".index.json")):
        return tensors
    return list_folder(folder, "pytorch_model*.bin") or tensors


def files_sha256(files: list[Path], *, name: str, folder: Path, what: str) -> str:
    """Return one digest of files, in their order.

    Args:
        files: may be empty, which is an error.
        name: of the model, for the message.
        folder: where the files were looked for, for the message.
        what: they are, for the message.

    Raises:
        EncoderError: there are no files, or they cannot be read.
    """
    if not files:
        raise EncoderError(f"{folder} holds no {what} for model {name}; complete the folder")
    try:
        with reading(folder):
            facts = [(file, file.stat()) for file in files]
            digests = [_file_sha256(file, stat.st_size, stat.st_mtime_ns) for file, stat in facts]
    except OSError as error:
        raise EncoderError(
            f"{what} of model {name} in {folder} cannot be read ({error.strerror}); change their "
            "permissions"
        ) from error
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


@functools.lru_cache(maxsize=64)
def _file_sha256(path: Path, size: int, changed: int) -> str:  # noqa: ARG001 (part of the key)
    """Return a file's digest, computed once for as long as size and time of change stay."""
    return sha256_file(path)
