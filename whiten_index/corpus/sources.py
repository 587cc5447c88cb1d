"""From what a user names (path, folder, glob, URI) to Parquet files on some file system."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.fs as pafs

from whiten_index.address import hide_secrets
from whiten_index.artifacts.files import exists, is_link, list_folder, reading, system_error
from whiten_index.errors import ConfigError, CorpusError
from whiten_index.paths import cut, require_no_secret, require_plain_environment

SUFFIXES = (".parquet", ".pq", ".parq")
_PLAIN = "".join(map(chr, range(33, 127)))
_GLOB = frozenset("*?[")
_HIDDEN = "._"
_Test = Callable[[Sequence[str]], bool]


def find_files(sources: Sequence[str | Path]) -> list[SourceFile]:
    """List the Parquet files of ``sources``, sorted by path within each source.

    Raises:
        CorpusError: a source does not exist, cannot be listed or holds no Parquet file.
    """
    if not sources:
        raise CorpusError("no corpus was given; name a Parquet file, folder, glob or URI")
    files = [file for source in sources for file in _files_of(os.fspath(source))]
    seen: set[str] = set()
    for file in files:
        if file.place in seen:
            raise CorpusError(f"{file.path} is named twice in the corpus; name each file once")
        seen.add(file.place)
    return _with_distinct_names(files)


def resolve(source: str) -> tuple[Any, str]:
    """Return the file system of ``source`` and its path there.

    pyarrow's own file systems come first (local, s3, gs, hdfs), then whatever fsspec knows.

    Raises:
        CorpusError: no installed file system reads the URI.
        ConfigError: the URI, or the endpoint in the environment, holds a secret.
    """
    require_no_secret(source, what="the corpus")
    require_plain_environment()
    if "://" not in source:
        return pafs.LocalFileSystem(), os.path.normpath(Path(source).expanduser().absolute())
    try:
        # Names with spaces and letters beyond ASCII are written as they are, or escaped.
        filesystem, path = pafs.FileSystem.from_uri(quote(source, safe=_PLAIN))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return _resolve_with_fsspec(source)
    except (OSError, pa.ArrowException) as error:
        raise CorpusError(f"{source} cannot be opened ({_line(error)}); check the URI") from error
    return filesystem, path


def require_reachable(source: str) -> None:
    """Ask for a URI, or for the folder that a pattern begins with, once.

    Raises:
        CorpusError: it cannot be reached, its keys are refused, or nothing is there.
    """
    pattern_at = _glob_position(source)
    base = source if pattern_at is None else source[:pattern_at]
    filesystem, path = resolve(base)
    shown = cut(source, most=200)
    try:
        found = _kind(filesystem, path)
    except (OSError, pa.ArrowException) as error:
        raise CorpusError(f"{shown} of the corpus cannot be reached ({_line(error)})") from error
    if found == pafs.FileType.NotFound:
        raise CorpusError(f"{shown} of the corpus is not there, or its keys are refused")


def canonical(source: str | Path) -> str:
    """Return ``source`` in the form that names it whatever the working directory."""
    text = os.fspath(source)
    return text if "://" in text else os.path.normpath(Path(text).expanduser().absolute())


def _resolve_with_fsspec(source: str) -> tuple[Any, str]:
    import fsspec

    try:
        filesystem, path = fsspec.core.url_to_fs(source)
    except (ValueError, ImportError, OSError) as error:
        raise CorpusError(
            f"{source} cannot be opened ({_line(error)}); use a URI that pyarrow or an installed "
            "fsspec package reads"
        ) from error
    return pafs.PyFileSystem(pafs.FSSpecHandler(filesystem)), path


def _files_of(source: str) -> list[SourceFile]:
    pattern_at = _glob_position(source)
    base = source if pattern_at is None else source[:pattern_at]
    filesystem, path = resolve(base or ".")
    try:
        with reading(path):
            if pattern_at is not None:
                found = _matching(filesystem, path, source[pattern_at:])
            else:
                found = _below(filesystem, path, source)
    except (OSError, pa.ArrowException) as error:
        raise CorpusError(
            f"{cut(source, most=200)} cannot be listed ({_line(error)}); check the path"
        ) from error
    return sorted(found, key=lambda file: file.path)


def _glob_position(source: str) -> int | None:
    """Return where the first path segment with a wildcard begins, or None without one."""
    # A question mark in a URI begins its options.
    wildcards = _GLOB - {"?"} if "://" in source else _GLOB
    first = next((i for i, character in enumerate(source) if character in wildcards), None)
    if first is None:
        return None
    # A pattern may be longer than the system takes names.
    with contextlib.suppress(ConfigError):
        if exists(source):
            return None
    return source.rfind("/", 0, first) + 1


def _matching(filesystem: Any, base: str, pattern: str) -> list[SourceFile]:
    patterns = pattern.split("/")

    def matches(names: Sequence[str]) -> bool:
        return _segments_match(names, patterns)

    def may_hold(names: Sequence[str]) -> bool:
        return _prefix_matches(names, patterns)

    files: list[SourceFile] = []
    if _kind(filesystem, base) == pafs.FileType.Directory:
        files, _ = _list(filesystem, base, may_hold=may_hold, wanted=matches)
    if not files:
        raise CorpusError(f"no file matches {pattern} in {base}; check the pattern")
    return files


def _segments_match(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Match folder by folder: ``*`` stays within one, ``**`` stands for any number of them.

    A writer's bookkeeping (``_SUCCESS``, ``.crc``) is matched only where its first letter is.
    """
    if not names or not patterns:
        return not names and not patterns
    hidden = names[0][0] in _HIDDEN and patterns[0][0] != names[0][0]
    if patterns[0] == "**":
        here = _segments_match(names, patterns[1:] or ["*"])
        return here or (not hidden and _segments_match(names[1:], patterns))
    matched = not hidden and fnmatch.fnmatchcase(names[0], patterns[0])
    return matched and _segments_match(names[1:], patterns[1:])


def _prefix_matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Return whether what is named may be a folder that holds matches, or is one itself."""
    if not names or not patterns:
        return not names
    hidden = names[0][0] in _HIDDEN and patterns[0][0] != names[0][0]
    if patterns[0] == "**":
        here = _prefix_matches(names, patterns[1:])
        return here or (not hidden and _prefix_matches(names[1:], patterns))
    matched = not hidden and fnmatch.fnmatchcase(names[0], patterns[0])
    return matched and _prefix_matches(names[1:], patterns[1:])


def _below(filesystem: Any, path: str, source: str) -> list[SourceFile]:
    info = filesystem.get_file_info(path)
    if info.type == pafs.FileType.NotFound:
        raise CorpusError(f"{source} does not exist; check the path")
    if info.type == pafs.FileType.File:
        return [SourceFile(PurePosixPath(path).name, info.path, filesystem)]
    files, listed = _list(filesystem, path, may_hold=_is_shown, wanted=_is_parquet)
    if not files:
        raise CorpusError(
            f"{source} holds no Parquet file ({listed} files, none ending with "
            f"{', '.join(SUFFIXES)}); name the files with a glob, or another folder"
        )
    return files


def _list(
    filesystem: Any, path: str, *, may_hold: _Test, wanted: _Test
) -> tuple[list[SourceFile], int]:
    """Return the files below a folder that are wanted by their names, and how many were seen."""
    if isinstance(filesystem, pafs.LocalFileSystem):
        # pyarrow leaves links that lead nowhere out, and follows one to a folder above for ever.
        paths = list(walk(path, may_hold=may_hold, wanted=wanted))
    else:
        infos = filesystem.get_file_info(pafs.FileSelector(path, recursive=True))
        paths = [info.path for info in infos if info.type == pafs.FileType.File]
    files = []
    for each in paths:
        names = _names(each, path)
        if wanted(names):
            _require_utf8(each)
            files.append(SourceFile("/".join(names), each, filesystem))
    return files, len(paths)


def _require_utf8(path: str) -> None:
    try:
        path.encode()
    except UnicodeEncodeError as error:
        shown = os.fsencode(path).decode("utf-8", "backslashreplace")
        raise CorpusError(f"the name of {shown} is not UTF-8; rename the file") from error


def _names(path: str, root: str) -> tuple[str, ...]:
    return PurePosixPath(path).relative_to(root).parts


def _kind(filesystem: Any, path: str) -> Any:
    return filesystem.get_file_info(path).type


def _is_shown(names: Sequence[str]) -> bool:
    """Return whether it is no writer's bookkeeping: ``_temporary``, ``.crc`` and the like."""
    return all(name[0] not in _HIDDEN for name in names)


def _is_parquet(names: Sequence[str]) -> bool:
    return _is_shown(names) and names[-1].lower().endswith(SUFFIXES)


def _with_distinct_names(files: list[SourceFile]) -> list[SourceFile]:
    """Name files by their whole path where two sources hold the same name."""
    names = [file.name for file in files]
    if len(set(names)) == len(names):
        return files
    paths = [file.path for file in files]
    names = paths if len(set(paths)) == len(paths) else [file.place for file in files]
    return [replace(file, name=name) for file, name in zip(files, names, strict=True)]


def _line(error: Exception) -> str:
    lines = hide_secrets(str(error)).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


# Names under which object stores and fsspec give the version of an object.
_TAGS = ("etag", "generation", "versionid", "version_id", "md5hash", "created")


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity that changes with the content of a file.

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
        """Path and kind of file system, which identify a file."""
        return f"{self.filesystem.type_name}:{self.path}"

    def open(self) -> pa.NativeFile:
        """Return the file, opened to be read at any place."""
        return self.filesystem.open_input_file(self.path)

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


Test = Callable[[Sequence[str]], bool]
_Place = tuple[int, int]


def walk(root: str, *, may_hold: Test, wanted: Test) -> Iterator[str]:
    """Yield the paths of the files below ``root``; links are followed.

    A listing that leaves out what cannot be looked at would make its rows look deleted.

    Args:
        root: a folder.
        may_hold: tells by the names from ``root`` on whether something may be, or hold, a file of
            the corpus; folders of which it says no are not looked into.
        wanted: likewise whether it is such a file.

    Raises:
        CorpusError: a link leads nowhere or to a folder above itself, or what has a file's name is
            none.
        StorageError: the system does not list a folder, or does not let a file be looked at.
    """
    top = Path(root)
    found = top.stat()
    yield from _below_listing(top, (), {(found.st_dev, found.st_ino)}, may_hold, wanted)


def _below_listing(
    folder: Path, names: tuple[str, ...], above: set[_Place], may_hold: Test, wanted: Test
) -> Iterator[str]:
    for path in _entries(folder):
        inside = (*names, path.name)
        if not may_hold(inside):
            continue
        found = _look(path)
        if stat.S_ISREG(found.st_mode):
            yield str(path)
        elif stat.S_ISDIR(found.st_mode):
            place = (found.st_dev, found.st_ino)
            if place in above:
                raise CorpusError(
                    f"the link {path} leads to a folder above it, so that the corpus has no end; "
                    "remove the link"
                )
            yield from _below_listing(path, inside, above | {place}, may_hold, wanted)
        elif wanted(inside):
            raise CorpusError(
                f"{path} is neither a file nor a folder; remove it, or name the corpus's files"
            )


def _entries(folder: Path) -> list[Path]:
    entries = list_folder(folder)
    if not entries and not exists(folder):
        raise CorpusError(
            f"{folder} was removed while the corpus was listed; run the same command again"
        )
    return entries


def _look(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP) and is_link(path):
            raise CorpusError(
                f"the link {path} leads nowhere ({error.strerror}), and what it named would be "
                "missing from the corpus; restore that, or remove the link"
            ) from error
        raise system_error(path, error) from error
