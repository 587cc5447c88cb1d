"""Files of a corpus, and what tells without reading one whether its content changed."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from whiten_index.artifacts.files import reading
from whiten_index.errors import CorpusError

# Names under which object stores and fsspec give the version of an object.
_TAGS = ("etag", "generation", "versionid", "version_id", "md5hash", "created")


@dataclass(frozen=True, slots=True)
class Identity:
    """What differs once the content of a file does.

    Attributes:
        size: bytes.
        modified: nanoseconds since 1970 at which the file was last written, None with a tag or
            where the file system does not say. Programs that copy files set it.
        tag: ETag, generation or version that an object store gives, else empty.
        local: inode and ctime of a local file. No program can set the ctime. Another host may see
            another inode, so that another process does without.
    """

    size: int
    modified: int | None
    tag: str = ""
    local: tuple[int, int] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Identity, (self.size, self.modified, self.tag)

    def matches(self, other: Identity) -> bool:
        """Return whether both may be of the same content."""
        both = self.local is not None and other.local is not None
        return self == other if both else replace(self, local=None) == replace(other, local=None)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One Parquet file.

    Attributes:
        name: its path below the source that the user named; part of a row's identity.
        path: its path on ``filesystem``.
        filesystem: the pyarrow file system that opens it.
        identity: taken before anything is read of it; None until then.
        footer: digest of its footer; empty until that is read.
    """

    name: str
    path: str
    filesystem: Any
    identity: Identity | None = None
    footer: str = ""

    @property
    def place(self) -> str:
        """Path and kind of file system, which tell files apart."""
        return f"{self.filesystem.type_name}:{self.path}"

    def identified(self) -> SourceFile:
        """Return the file with its present identity.

        Raises:
            CorpusError: the file is gone.
            StorageError: the system does not let it be looked at.
        """
        try:
            with reading(self.path):
                return replace(self, identity=_identify(self.filesystem, self.path))
        except FileNotFoundError as error:
            raise CorpusError(
                f"{self.path} vanished while the corpus was read; restore it or take it out of "
                "the corpus, then run the same command again"
            ) from error
        except (OSError, pa.ArrowException) as error:
            raise CorpusError(
                f"{self.path} cannot be looked at ({str(error).splitlines()[0][:200]}); "
                "run the same command again"
            ) from error

    def require_unchanged(self) -> None:
        """Make sure that the file is still the one whose identity was taken.

        Raises:
            CorpusError: it changed, or is gone.
        """
        now = self.identified().identity
        if self.identity is None or now is None or not self.identity.matches(now):
            raise self.changed()

    def changed(self) -> CorpusError:
        """Return the error to raise for a file that changed."""
        return CorpusError(
            f"{self.path} changed while it was read; run the same command again when nothing "
            "writes to it"
        )


def _identify(filesystem: Any, path: str) -> Identity:
    if isinstance(filesystem, pafs.LocalFileSystem):
        # A network file system asks its server when a file is opened, and else may remember.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            found = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        local = (found.st_ino, found.st_ctime_ns)
        return Identity(found.st_size, found.st_mtime_ns, local=local)
    if isinstance(handler := getattr(filesystem, "handler", None), pafs.FSSpecHandler):
        # Some of fsspec's file systems remember listings.
        handler.fs.invalidate_cache()
        given = handler.fs.info(path)
        size = given["size"]
    else:
        with filesystem.open_input_file(path) as file:
            given, size = file.metadata() or {}, file.size()
    if tags := [str(given[key]) for key in sorted(given) if str(key).lower() in _TAGS]:
        return Identity(size, None, " ".join(tags))
    info = filesystem.get_file_info(path)
    if info.type != pafs.FileType.File:
        raise FileNotFoundError(path)
    return Identity(info.size, info.mtime_ns)
