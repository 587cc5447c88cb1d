"""Arrays in safetensors files with a kind and a format version."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load

from whiten_index.artifacts.files import open_regular, reading
from whiten_index.artifacts.limits import load_json
from whiten_index.errors import ArtifactError, FormatError

# By values of a header that are of no foreseen kind.
_WRONG = (AttributeError, LookupError, ValueError, TypeError, OverflowError)
_HEADER, _PLACE, _CONTENT = "__metadata__", "data_offsets", "content"
_REMEDY = "restore it from a copy, or build again"
# Of a handful of arrays and short facts. A hundred times as much, which the library takes, would
# need minutes and gigabytes.
_HEADER_BYTES = 1 << 20
_TYPES = {
    "F16": np.float16, "F32": np.float32, "F64": np.float64, "I32": np.int32, "I64": np.int64,
    "U8": np.uint8,
}  # fmt: skip
_NAMES = {np.dtype(dtype): name for name, dtype in _TYPES.items()}


def write_tensors(
    path: Path | str,
    tensors: Mapping[str, NDArray[Any]],
    *,
    kind: str,
    version: int,
    facts: Mapping[str, str] | None = None,
    seal: bool = False,
) -> None:
    """Write arrays and short facts to one safetensors file; equal ones make equal files.

    With ``seal`` a digest of both is among the facts, for a file that no manifest lists.
    """
    metadata = {"kind": kind, "format_version": str(version), **(facts or {})}
    arrays = {
        name: np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        for name, array in tensors.items()
    }
    if seal:
        metadata[_CONTENT] = content_digest(arrays, metadata)
    # The library's own writer copies all arrays, and writes facts in an order that changes.
    order = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
    header, start = {_HEADER: dict[str, Any](sorted(metadata.items()))}, 0
    for name in order:
        array, end = arrays[name], start + arrays[name].nbytes
        header[name] = {"dtype": _NAMES[array.dtype], "shape": array.shape, _PLACE: [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with Path(path).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(arrays[name].data)


def content_digest(tensors: Mapping[str, NDArray[Any]], facts: Mapping[str, str]) -> str:
    """Return the identity of arrays and facts."""
    sha = hashlib.sha256(repr(sorted(facts.items())).encode())
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        sha.update(repr((name, array.dtype.str, array.shape)).encode())
        sha.update(array.tobytes())
    return sha.hexdigest()


def read_tensors(
    path: Path | str,
    *,
    kind: str,
    version: int,
    shapes: Mapping[str, str],
    optional: Mapping[str, str] | None = None,
    sealed: bool = False,
) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Read the arrays and facts that ``write_tensors`` wrote; ``sealed`` ones have a digest.

    ``shapes`` has names and shapes in letters, such as ``{"mean": "d", "basis": "dk", "count":
    "1"}``: a letter stands for the same length everywhere. Every entry must be finite. Arrays in
    ``optional`` may be absent.

    Raises:
        ArtifactError: missing, damaged, of another kind, or written by a later release.
        FormatError: sealed and sound, and written by a later release.
        StorageError: the system does not let it be read.
    """
    try:
        with reading(path), open_regular(path) as file:
            header, start = _read_header(file)
            file.seek(0)
            tensors = load(file.read(start + _size(header)))
        facts: dict[str, str] = header.get(_HEADER) or {}
        others = {name: value for name, value in facts.items() if name != _CONTENT}
        sound = sealed and facts.get(_CONTENT) == content_digest(tensors, others)
        if facts.get("kind") != kind or int(facts["format_version"]) > version:
            raise (FormatError if sound and facts.get("kind") == kind else ArtifactError)(
                f"{path} holds {facts.get('kind')} of format {facts.get('format_version')}, and "
                f"{kind} up to format {version} is needed; check the path, or upgrade whiten-index"
            )
        present = {name: shape for name, shape in (optional or {}).items() if name in tensors}
        _check_shapes(tensors, {**shapes, **present})
    except (OSError, SafetensorError, *_WRONG) as error:
        raise ArtifactError(f"{path} cannot be read as {kind} ({error}); {_REMEDY}") from error
    if sealed and not sound:
        raise ArtifactError(f"{path} is damaged: its content does not match its digest; {_REMEDY}")
    return tensors, facts


def map_tensor(path: Path | str, name: str, *, remedy: str) -> NDArray[Any]:
    """Map one array of a file of ``write_tensors``; only the file's length is checked."""
    try:
        with reading(path), open_regular(path) as file:
            header, start = _read_header(file)
        entry = header[name]
        first, _ = entry[_PLACE]
        dtype = np.dtype(_TYPES[entry["dtype"]])
        shape = tuple(entry["shape"])
        if 0 in shape:
            return np.empty(shape, dtype)  # nothing can be mapped
        with reading(path):
            return np.memmap(path, dtype, mode="r", offset=start + first, shape=shape)
    except (OSError, *_WRONG) as error:
        raise ArtifactError(f"{path} cannot be read ({error}); {remedy}") from error


def _read_header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """Return the header and where the arrays begin, of a file that is as long as they say."""
    length, size = int.from_bytes(file.read(8), "little"), os.fstat(file.fileno()).st_size
    if length > _HEADER_BYTES:
        raise ValueError(f"its header has {length:,} bytes")
    header = load_json(file.read(length))
    if size != 8 + length + _size(header):
        raise ValueError(f"it has {size:,} bytes")
    return header, 8 + length


def _size(header: Mapping[str, Any]) -> int:
    """Return the bytes of all arrays."""
    ends = (int(each[_PLACE][1]) for name, each in header.items() if name != _HEADER)
    return max(ends, default=0)


def _check_shapes(tensors: Mapping[str, NDArray[Any]], shapes: Mapping[str, str]) -> None:
    lengths: dict[str, int] = {"1": 1}
    for name, letters in shapes.items():
        shape = tensors[name].shape
        if len(shape) != len(letters) or tensors[name].dtype not in _NAMES:
            raise ValueError(f"{name} is {tensors[name].dtype} of shape {shape}")
        for letter, length in zip(letters, shape, strict=True):
            if lengths.setdefault(letter, length) != length:
                raise ValueError(f"{name} has shape {shape}")
        if not np.isfinite(tensors[name]).all():
            raise ValueError(f"{name} holds NaN or infinity")
