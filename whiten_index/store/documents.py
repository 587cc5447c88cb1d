"""Ids and kept columns of shards, a file each, which is named by what is in it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pyarrow as pa

from whiten_index.artifacts.atomic import make_folder, replace_file
from whiten_index.artifacts.files import exists, list_folder, open_regular, reading, writing
from whiten_index.artifacts.storage import Here
from whiten_index.errors import ArtifactError
from whiten_index.store.shard_resolver import REMEDY

_SUFFIX = ".arrow.zst"


class DocumentFiles:
    """The files in a folder."""

    def __init__(self, folder: Path, mirror: Here) -> None:
        """Take the folder, and the bucket that counts, if there is one."""
        self.folder, self.mirror = folder, mirror

    def path(self, name: str) -> Path:
        """Return where the rows of that name are."""
        return self.folder / f"{name}{_SUFFIX}"

    def by_name(self) -> dict[str, Path]:
        """Return the files in the folder, by the digest that names them."""
        files = list_folder(self.folder, f"[!.]*{_SUFFIX}")
        return {file.name.removesuffix(_SUFFIX): file for file in files}

    def write(self, documents: pa.Table) -> str:
        """Keep rows; return the digest that names them.

        Equal rows get equal names, however the table is chunked or sliced.
        """
        data = rows_as_bytes(documents)
        # The name is of the rows: the bytes of the compressed file change with zstd's release.
        name = digest(data)
        path = self.path(name)
        if self._content(path) == data:
            self.mirror.keep(path)
            return name
        with writing(path):
            if not exists(path.parent):
                # On another machine than that which made the store in its bucket.
                make_folder(path.parent)
            replace_file(path, compressed(data))
        self.mirror.push(path)
        return name

    def read(self, name: str) -> pa.Table:
        """Return the rows of that name.

        Raises:
            ArtifactError: they are missing or damaged.
        """
        path = self.path(name)
        data = self._content(path)
        if data is None and self.mirror.look_again():
            data = self._content(path)
        if data is None:
            unreadable = content(path) is None
            how = "missing or unreadable" if unreadable else "damaged: it does not match its name"
            raise ArtifactError(f"{path} is {how}; {REMEDY}")
        return pa.ipc.open_stream(data).read_all()

    def is_sound(self, name: str) -> bool:
        """Tell whether the rows of that name are there, and undamaged."""
        return self._content(self.path(name)) is not None

    def name_of(self, documents: pa.Table) -> str:
        """Return the digest that would name rows."""
        return digest(rows_as_bytes(documents))

    def bytes_of(self, name: str, documents: pa.Table) -> int:
        """Return the bytes that rows of that name would take, 0 if they are there."""
        there = self.mirror.has(self.path(name))
        return 0 if there else len(compressed(rows_as_bytes(documents)))

    def _content(self, path: Path) -> bytes | None:
        """Return what a file of rows holds, None where it is missing or damaged."""
        self.mirror.fetch(path)
        data = content(path)
        if data is not None and f"{digest(data)}{_SUFFIX}" == path.name:
            return data
        return self._content(path) if self.mirror.fetch_again(path) else None


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
