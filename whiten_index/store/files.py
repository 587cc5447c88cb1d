"""The files of ids and kept columns, which are named by what is in them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pyarrow as pa

from whiten_index.artifacts.files import open_regular, reading
from whiten_index.errors import ArtifactError


def rows_as_bytes(documents: pa.Table) -> bytes:
    """Return rows as bytes, equal for equal rows however they are chunked or sliced."""
    everything = pa.array(range(documents.num_rows), pa.int64())
    table = documents.take(everything).combine_chunks()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def content(path: Path) -> bytes | None:
    """Return what a compressed file holds, None if it is missing or damaged.

    Raises:
        StorageError: the system does not let it be read.
    """
    try:
        with (
            reading(path),
            open_regular(path) as file,
            pa.input_stream(file, compression="zstd") as stream,
        ):
            data: bytes = stream.read()
    except (ArtifactError, OSError, pa.ArrowException):
        return None
    return data


def compressed(data: bytes) -> bytes:
    """Return bytes as ``content`` reads them back."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    packed: bytes = sink.getvalue().to_pybytes()
    return packed


def digest(data: bytes) -> str:
    """Return 32 hex digits that tell bytes from others."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()
