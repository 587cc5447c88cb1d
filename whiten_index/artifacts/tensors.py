"""Arrays in safetensors files with a kind and a format version."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from whiten_index.artifacts.files import open_regular, reading
from whiten_index.artifacts.limits import load_json
from whiten_index.errors import ArtifactError

_HEADER, _CONTENT = "__metadata__", "content"
_REMEDY = "restore it from a copy, or build again"
# The limit of the library too.
_HEADER_BYTES = 100_000_000
_TYPES = {
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "I32": np.int32,
    "U8": np.uint8,
}


def write_tensors(
    path: Path | str,
    tensors: Mapping[str, NDArray[Any]],
    *,
    kind: str,
    version: int,
    facts: Mapping[str, str] | None = None,
) -> None:
    """Write arrays and short facts to one safetensors file; equal ones make equal files."""
    metadata = {"kind": kind, "format_version": str(version), **(facts or {})}
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    data = save(arrays, metadata)
    start = 8 + int.from_bytes(data[:8], "little")
    # The library writes facts in an order that changes.
    header = json.loads(data[8:start])
    header[_HEADER] = dict(sorted(header[_HEADER].items()))
    with Path(path).open("wb") as file:
        file.write(_framed(header))
        file.write(memoryview(data)[start:])


def content_digest(tensors: Mapping[str, NDArray[Any]], facts: Mapping[str, str]) -> str:
    """Return the identity of arrays and facts, for a file that no manifest lists."""
    sha = hashlib.sha256(repr(sorted(facts.items())).encode())
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        sha.update(repr((name, array.dtype.str, array.shape)).encode())
        sha.update(array.tobytes())
    return sha.hexdigest()


def write_sealed(
    path: Path | str,
    tensors: Mapping[str, NDArray[Any]],
    *,
    kind: str,
    version: int,
    facts: Mapping[str, str] | None = None,
) -> None:
    """Write arrays and facts with a digest; see ``write_tensors``."""
    all_facts = {"kind": kind, "format_version": str(version), **(facts or {})}
    sealed = {**(facts or {}), _CONTENT: content_digest(tensors, all_facts)}
    write_tensors(path, tensors, kind=kind, version=version, facts=sealed)


def read_sealed(
    path: Path | str,
    *,
    kind: str,
    version: int,
    shapes: Mapping[str, str],
    remedy: str = _REMEDY,
) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Read what ``write_sealed`` wrote; see ``read_tensors``."""
    tensors, facts = read_tensors(path, kind=kind, version=version, shapes=shapes, remedy=remedy)
    others = {name: value for name, value in facts.items() if name != _CONTENT}
    if facts.get(_CONTENT) != content_digest(tensors, others):
        raise ArtifactError(f"{path} is damaged: its content does not match its digest; {remedy}")
    return tensors, facts


def create_tensor(
    path: Path | str, name: str, shape: Sequence[int], *, kind: str, version: int
) -> NDArray[np.float32]:
    """Create a file of one float32 array of zeros, and map it for writing.

    Flush the array when it is filled.
    """
    count = 4 * int(np.prod(shape, dtype=np.int64))
    metadata = {"kind": kind, "format_version": str(version)}
    entry = {"dtype": "F32", "shape": list(shape), "data_offsets": [0, count]}
    header = _framed({_HEADER: metadata, name: entry})
    with Path(path).open("wb") as file:
        file.write(header)
        # Writing to a mapped file on a full disk would kill the process.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, len(header) + count)
        else:
            file.truncate(len(header) + count)
    return np.memmap(path, np.float32, mode="r+", offset=len(header), shape=tuple(shape))


def _framed(header: Mapping[str, Any]) -> bytes:
    """Return the length of a header and the header, as safetensors files begin, aligned to 8."""
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_tensors(
    path: Path | str,
    *,
    kind: str,
    version: int,
    shapes: Mapping[str, str],
    optional: Mapping[str, str] | None = None,
    remedy: str = _REMEDY,
) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Read the arrays and facts that ``write_tensors`` wrote.

    Args:
        path: the file.
        kind: its required kind.
        version: the latest format known here.
        shapes: name -> shape in letters, such as ``{"mean": "d", "basis": "dk", "count": "1"}``;
            a letter stands for the same length everywhere, and every entry must be finite.
        optional: shapes of arrays that may be absent.
        remedy: advice for a damaged file.

    Raises:
        ArtifactError: missing, damaged, of another kind, or written by a later release.
        StorageError: the system does not let it be read.
    """
    try:
        with reading(path), open_regular(path) as file:
            data = file.read()
        tensors, length = load(data), int.from_bytes(data[:8], "little")
        facts: dict[str, str] = load_json(data[8 : 8 + length]).get(_HEADER) or {}
        if facts.get("kind") != kind or int(facts["format_version"]) > version:
            raise ArtifactError(
                f"{path} holds {facts.get('kind')} of format {facts.get('format_version')}, and "
                f"{kind} up to format {version} is needed; check the path, or upgrade whiten-index"
            )
        present = {name: shape for name, shape in (optional or {}).items() if name in tensors}
        _check_shapes(tensors, {**shapes, **present})
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ArtifactError(f"{path} cannot be read as {kind} ({error}); {remedy}") from error
    return tensors, facts


def map_tensor(path: Path | str, name: str, *, remedy: str) -> NDArray[Any]:
    """Map one array of a file of ``write_tensors``; only the file's length is checked."""
    try:
        with reading(path), open_regular(path) as file:
            length = int.from_bytes(file.read(8), "little")
            size = os.fstat(file.fileno()).st_size
            header = load_json(file.read(min(length, _HEADER_BYTES)))
        ends = [each["data_offsets"][1] for key, each in header.items() if key != _HEADER]
        if size != 8 + length + max(ends):
            raise ValueError(f"it has {size} bytes")  # noqa: TRY301
        entry = header[name]
        first, _ = entry["data_offsets"]
        dtype = np.dtype(_TYPES[entry["dtype"]])
        shape = tuple(entry["shape"])
        if 0 in shape:
            return np.empty(shape, dtype)  # nothing can be mapped
        with reading(path):
            return np.memmap(path, dtype, mode="r", offset=8 + length + first, shape=shape)
    except (OSError, AttributeError, KeyError, ValueError, TypeError, OverflowError) as error:
        raise ArtifactError(f"{path} cannot be read ({error}); {remedy}") from error


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
