"""Files of the parts of corpora in a store: digests of texts, and ids with kept columns."""

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from whiten_index.artifacts.atomic import make_folder, replace_file
from whiten_index.artifacts.files import exists, open_regular, reading, require_target, writing
from whiten_index.artifacts.limits import LimitError, check_expanded, read_unpacked
from whiten_index.artifacts.storage import Storage
from whiten_index.corpus.arrow_types import read_documents
from whiten_index.corpus.batches import DIGEST_BYTES
from whiten_index.errors import ArtifactError, CorpusError
from whiten_index.store.records import REMEDY, CorpusPart

# Folders of the files of parts, and the ending of these.
DIGESTS, ROWS, _END = "digests", "rows", ".zst"
_PART_FILE = re.compile(rf"[0-9a-f]{{32}}{_END}")


class PartFiles:
    """The files of parts in the folder of an encoder, each named by its content."""

    folder: Path
    mirror: Storage

    def write_digests(self, digests: NDArray[np.uint8]) -> str:
        """Keep the digests (n, 16) of the texts of a part; return the name of the file."""
        return self._keep(DIGESTS, digests.tobytes())

    def digests(self, part: CorpusPart) -> NDArray[np.uint8]:
        """Return the digests (n, 16) of the texts of a part.

        Raises:
            ArtifactError: they are missing or damaged.
        """
        path = self.part_files(part)[0]
        data = self._required_bytes(path)
        if len(data) != DIGEST_BYTES * part.rows:
            raise _not_of_part(path, part)
        return np.frombuffer(data, dtype=np.uint8).reshape(-1, DIGEST_BYTES)

    def write_documents(self, documents: pa.Table) -> str:
        """Keep the ids and kept columns of a part; return the name of the file.

        Equal rows get equal names, however the table is chunked or sliced.
        """
        return self._keep(ROWS, _as_bytes(documents))

    def name_documents(self, documents: pa.Table) -> str:
        """Return the name that ``write_documents`` would return."""
        return _digest(_as_bytes(documents))

    def documents(self, part: CorpusPart) -> pa.Table:
        """Return the ids and kept columns of a part, n rows.

        Raises:
            ArtifactError: they are missing or damaged.
        """
        path = self.part_files(part)[1]
        found = read_documents(path, self._required_bytes(path))
        if found.num_rows != part.rows:
            raise _not_of_part(path, part)
        return found

    def part_files(self, part: CorpusPart) -> tuple[Path, Path]:
        """Return the files of a part's digests, and of its ids and kept columns."""
        return self._part_file(DIGESTS, part.digests), self._part_file(ROWS, part.documents)

    def all_part_files(self) -> list[Path]:
        """Return the files of digests, and of ids and kept columns, of all parts."""
        folders = (self.folder / DIGESTS, self.folder / ROWS)
        found = ((each, name) for each in folders for name in self.mirror.names(each))
        return [folder / name for folder, name in found if _PART_FILE.fullmatch(name)]

    def keep_part_files(self, parts: Iterable[CorpusPart]) -> None:
        """Put files of parts that a bucket lost, or has otherwise, there again from sound copies.

        Kept columns may be gigabytes, so that only copies of such files are read.
        """
        for path in {each for part in parts for each in self.part_files(part)}:
            differs = exists(path) and not self.mirror.is_as_copied(path)
            if differs and self._checked_bytes(path) is not None:
                self.mirror.keep(path)

    def check_part_file(self, path: Path, part: CorpusPart | None) -> None:
        """Check a file of ``all_part_files``, and its length if the part that it is of is known.

        Raises:
            ArtifactError: it is missing or damaged.
        """
        require_target(path.parent)
        with self.mirror.opened(path) as file:
            data = _content(file)
        if data is None or _digest(data) != path.stem:
            raise ArtifactError(f"{path} is missing or damaged; {REMEDY}")
        rows = len(data) / DIGEST_BYTES
        if path.parent.name == ROWS:
            rows = read_documents(path, data).num_rows
        if part is not None and part.rows != rows:
            raise _not_of_part(path, part)

    def _part_file(self, kind: str, name: str) -> Path:
        return self.folder / kind / f"{name}{_END}"

    def _keep(self, kind: str, data: bytes) -> str:
        """Keep a file of a part, named by its content: packed, it changes with zstd's release."""
        path = self._part_file(kind, _digest(data))
        if self._checked_bytes(path) is None:
            packed = pa.compress(data, "zstd", asbytes=True)
            try:
                check_expanded(len(data), len(packed))
            except LimitError as error:
                raise CorpusError(
                    "the ids and kept columns of one part are beyond the limit of such a file "
                    f"({error}); use a smaller --shard-rows, or --keep fewer columns"
                ) from error
            with writing(path):
                # On another machine than that which made the store in its bucket, it is missing.
                make_folder(path.parent)
                replace_file(path, packed)
            self.mirror.push(path)
        self.mirror.keep(path)
        return path.stem

    def _required_bytes(self, path: Path) -> bytes:
        data = self._checked_bytes(path)
        if data is None and self.mirror.look_again():
            data = self._checked_bytes(path)
        if data is None:
            raise ArtifactError(f"{path} is missing or damaged; {REMEDY}")
        return data

    def _checked_bytes(self, path: Path) -> bytes | None:
        """Return the content that a file is named by, None where it is missing or damaged."""
        self.mirror.fetch(path)
        # A disk that is not mounted is no absence.
        require_target(path.parent)
        data = _content(path)
        if data is not None and _digest(data) == path.stem:
            return data
        return self._checked_bytes(path) if self.mirror.fetch_again(path) else None


def _not_of_part(path: Path, part: CorpusPart) -> ArtifactError:
    return ArtifactError(
        f"{path} is damaged, or the record of its corpus is: it does not have {part.rows:,} rows; "
        f"{REMEDY}"
    )


def _as_bytes(documents: pa.Table) -> bytes:
    everything = pa.array(range(documents.num_rows), pa.int64())
    table = documents.take(everything).combine_chunks()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _content(path: Path) -> bytes | None:
    """Return the content of a compressed file, None if it is missing or damaged."""
    try:
        with (
            reading(path),
            open_regular(path) as file,
            pa.input_stream(file, compression="zstd") as stream,
        ):
            return read_unpacked(stream, os.fstat(file.fileno()).st_size)
    except (ArtifactError, OSError, ValueError, pa.ArrowException):
        return None


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
