"""Arrays on disk: safetensors files with a kind and a format version, read with suspicion."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from whiten_index.errors import ArtifactError

_HEADER = "__metadata__"


def write_tensors(
    path: Path | str,
    tensors: Mapping[str, NDArray[Any]],
    *,
    kind: str,
    version: int,
    facts: Mapping[str, str] | None = None,
) -> None:
    """Write arrays and short facts to one safetensors file.

    Raises:
        OSError: the disk is full or cannot be written (the library's own writer hides which).
    """
    metadata = {"kind": kind, "format_version": str(version), **(facts or {})}
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    Path(path).write_bytes(save(arrays, metadata))


def read_tensors(
    path: Path | str,
    *,
    kind: str,
    version: int,
    shapes: Mapping[str, str],
    remedy: str = "restore it from a copy, or build again",
) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Read what ``write_tensors`` wrote.

    Args:
        path: the file.
        kind: what it must hold.
        version: the latest format known here.
        shapes: name -> shape in letters, such as ``{"mean": "d", "basis": "dk", "count": "1"}``;
            a letter stands for the same length everywhere, and every entry must be finite.
        remedy: what the user can do about a damaged file.

    Returns:
        The arrays and the facts.

    Raises:
        ArtifactError: missing, damaged, of another kind, or written by a later release.
    """
    try:
        data = Path(path).read_bytes()
        tensors, facts = load(data), _facts(data)
        if facts.get("kind") != kind or int(facts["format_version"]) > version:
            raise ArtifactError(
                f"{path} holds {facts.get('kind')} of format {facts.get('format_version')}, and "
                f"{kind} up to format {version} is needed; check the path, or upgrade whiten-index"
            )
        _check_shapes({name: tensors[name] for name in shapes}, shapes)
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ArtifactError(f"{path} cannot be read as {kind} ({error}); {remedy}") from error
    return tensors, facts


def _facts(data: bytes) -> dict[str, str]:
    length = int.from_bytes(data[:8], "little")
    facts: dict[str, str] = json.loads(data[8 : 8 + length]).get(_HEADER) or {}
    return facts


def _check_shapes(tensors: Mapping[str, NDArray[Any]], shapes: Mapping[str, str]) -> None:
    lengths: dict[str, int] = {"1": 1}
    for name, letters in shapes.items():
        shape = tensors[name].shape
        if len(shape) != len(letters):
            raise ValueError(f"{name} has shape {shape}")
        for letter, length in zip(letters, shape, strict=True):
            if lengths.setdefault(letter, length) != length:
                raise ValueError(f"{name} has shape {shape}")
        if not np.isfinite(tensors[name]).all():
            raise ValueError(f"{name} holds NaN or infinity")
