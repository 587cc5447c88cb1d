"""Files and folders as the system shows them, where a failure is never taken for an absence.

``Path.exists``, ``is_dir`` and ``glob`` answer "no" or "nothing" to some errors of the system, and
to more of them with each release of Python. An unreadable folder would then look empty, and a
program that deletes unreferenced files would delete too much. The functions here answer "no" only
if the path does not exist, and raise ``StorageError`` for every other error.
"""

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError

from whiten_index.artifacts.limits import read_up_to
from whiten_index.errors import ArtifactError, ConfigError, StorageError

MANIFEST = "manifest.json"  # in each folder that is an artifact
_BLOCK = 1 << 20
# Of a file of this size, one byte in a hundred must have been written.
_LARGE, _LEAST_WRITTEN = 64 << 20, 100
_MOST_SHOWN = 80
# A job file or a model's configuration that is read whole has some kilobytes.
_FILE_BYTES = 16 << 20
_KEPT = "what was published and the shards already finished are kept"
_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission is denied",
    errno.EPERM: "permission is denied",
    errno.ENOTDIR: "a file stands where a folder is needed",
    errno.EEXIST: "a file stands where a folder is needed",
    errno.EISDIR: "a folder stands where a file is needed",
    errno.ENOENT: "the folder it belongs in is not there",
    errno.EIO: "the disk reports an input/output error",
    errno.EFBIG: "the file would be larger than the file system or the limit allows",
    errno.EMFILE: "this process has too many files open",
    errno.ENFILE: "the system has too many files open",
    errno.ENOMEM: "out of memory",
    errno.EAGAIN: "the system starts no more threads or processes",
    errno.ELOOP: "it is a link that leads back to itself",
    errno.ESTALE: "the file server no longer knows it",
}
# Libraries in C++ and Rust report the system's errors by these words, without the number.
_WORDS = {os.strerror(number): number for number in _REASONS if number != errno.ENOENT}
_WORDS["can't start new thread"] = errno.EAGAIN
# Arrow and Python do not say why; every file that is read here is a regular one.
_WORDS |= dict.fromkeys(("error stat()ing file", "File or stream is not seekable"), errno.EIO)
# Allocators of torch, for a GPU too, of ONNX Runtime and of C++.
_MEMORY = (
    "out of memory|DefaultCPUAllocator|Failed to allocate memory|bad_alloc|bad allocation|"
    "CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
)
_WORDS |= dict.fromkeys(_MEMORY.split("|"), errno.ENOMEM)
# A missing path; ENOTDIR is the answer below a file, ELOOP of a link to itself.
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def system_error(
    path: Path | str, error: BaseException, *, action: str = "read"
) -> StorageError | ConfigError:
    """Return the error to raise for a system that fails or refuses, which is no sign of damage.

    A name that is longer than the system allows is a ``ConfigError``.
    """
    number = _number_of(error) or 0
    if number == errno.ENAMETOOLONG:
        return ConfigError(f"{str(path)[:_MOST_SHOWN]}... is longer than a path can be; check it")
    reason = _REASONS.get(number) or (os.strerror(number) if number else str(error))
    return StorageError(
        f"cannot {action} {path}: {reason}; fix that and run the same command again"
    )


def unforeseen(error: BaseException, *, step: str) -> StorageError | ConfigError | None:
    """Return the error to show for one of the system that no reader or writer expected.

    It names the file or, without one, the stage of the work or ``step``. ``None`` for an error of
    another kind.
    """
    if not isinstance(error, OSError | MemoryError) and _number_of(error) is None:
        return None
    if named := getattr(error, "filename", None):
        return system_error(named, error)
    stages = getattr(error, "__notes__", ())
    return system_error(f"the step {stages[0]!r}" if stages else step, error, action="finish")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the system, or a device, has no memory left."""
    return _number_of(error) == errno.ENOMEM


def _number_of(error: BaseException) -> int | None:
    """Return the number of the system's error, None for an error of the content."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    # Arrow and tokenizers raise their plain exceptions for what they have no kind for, and ONNX
    # Runtime its own kinds.
    kind, known = type(error), isinstance(error, OSError | RuntimeError | SafetensorError)
    plain = kind.__name__ in ("Exception", "ArrowException")
    if not (known or plain or kind.__module__.startswith("onnxruntime.")):
        return None
    return next((_WORDS[words] for words in _WORDS if words in str(error)), None)


@contextlib.contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Turn the system's errors into a ``StorageError`` that names ``path``.

    Arrow, FAISS and safetensors report the system's errors too. Other errors are of the content,
    and may count as damage. ``FileNotFoundError``, ``NotADirectoryError`` and
    ``IsADirectoryError`` pass: the caller knows whether the file may be missing.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise
    except Exception as error:
        if _number_of(error) is None:
            raise
        raise system_error(path, error) from error


@contextlib.contextmanager
def writing(path: Path, *, kept: str = _KEPT) -> Iterator[None]:
    """Turn the system's errors into a ``StorageError`` that names ``path``.

    The message names the work ``kept``, which the same command will not repeat.
    """
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
        remedy = "free space, change its permissions"
        if error.errno == errno.ENOENT:
            remedy = "make the folder"
        raise StorageError(
            f"cannot write {path}: {reason}; {remedy} or choose another folder, then run the same "
            f"command again{kept and f' ({kept})'}"
        ) from error


def require_target(path: Path) -> None:
    """Raise ``StorageError`` for a link whose target is missing: its disk may not be mounted."""
    if is_link(path) and not exists(path):
        raise StorageError(
            f"{path} is a link to {path.readlink()}, which is not there; mount its disk, or remove "
            "the link, then run the same command again"
        )


def mode_of(path: Path | str, *, follow: bool = True) -> int:
    """Return the ``st_mode`` of a path, 0 if it does not exist, or is a link to nothing.

    Without ``follow``, a link is looked at itself.
    """
    try:
        return Path(path).stat(follow_symlinks=follow).st_mode
    except OSError as error:
        if error.errno in _ABSENT:
            return 0
        raise system_error(path, error) from error
    except ValueError as error:
        raise ConfigError(f"{str(path)[:80]!r} is no path ({error}); check it") from error


def exists(path: Path | str) -> bool:
    """Return whether a path exists; raise ``StorageError`` if the system does not say."""
    return mode_of(path) != 0


def is_file(path: Path | str) -> bool:
    """Return whether a path is a regular file, or a link to one; see ``exists``."""
    return stat.S_ISREG(mode_of(path))


def is_folder(path: Path | str) -> bool:
    """Return whether a path is a folder, or a link to one; see ``exists``."""
    return stat.S_ISDIR(mode_of(path))


def is_link(path: Path | str) -> bool:
    """Return whether a path is a symbolic link; see ``exists``."""
    return stat.S_ISLNK(mode_of(path, follow=False))


def list_folder(folder: Path | str, pattern: str = "*") -> list[Path]:
    """Return the sorted paths in a folder with names like ``pattern``; none without a folder.

    A link to nothing is an error: its disk may not be mounted.
    """
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if fnmatchcase(entry.name, pattern))
    except FileNotFoundError:
        require_target(Path(folder))
        return []
    except OSError as error:
        raise system_error(folder, error, action="list") from error
    return [Path(folder) / name for name in names]


def walk_files(folder: Path, *, leave_out: Sequence[str] = ()) -> Iterator[Path]:
    """Yield every path below a folder that is no folder, sorted; links are not followed.

    Files and folders whose names match a pattern of ``leave_out`` are not looked at.
    """
    # Others may have put more folders in each other than Python has levels.
    waiting = list_folder(folder)[::-1]
    while waiting:
        path = waiting.pop()
        if any(fnmatchcase(path.name, each) for each in leave_out):
            continue
        if stat.S_ISDIR(mode_of(path, follow=False)):
            waiting += list_folder(path)[::-1]
        else:
            yield path


class NotAFileError(OSError):
    """A pipe, a socket or a device in the place of a file."""


def open_file(path: Path | str) -> BinaryIO:
    """Open a regular file, or a link to one, for reading.

    Every file that a user names or that an artifact has is opened here, or is looked at by
    ``require_regular`` first: to open a pipe waits for a writer that may never come, and a device
    may never end.

    Raises:
        NotAFileError: it is a pipe, a socket or a device.
        OSError: it cannot be opened.
    """
    _regular_size(path, Path(path).stat())
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _regular_size(path, os.fstat(descriptor))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def open_regular(path: Path | str) -> BinaryIO:
    """Open a file of an artifact; see ``open_file``.

    Raises:
        ArtifactError: it is a pipe, a socket or a device, or hardly anything of it was written.
        OSError: it cannot be opened.
    """
    with _of_artifact(path):
        file = open_file(path)
    try:
        _require_written(path, file.fileno())
    except BaseException:
        file.close()
        raise
    return file


def require_regular(path: Path | str) -> int:
    """Return the size of a file of an artifact that another library will open by its path."""
    with _of_artifact(path):
        return _regular_size(path, Path(path).stat())


@contextlib.contextmanager
def _of_artifact(path: Path | str) -> Iterator[None]:
    try:
        yield
    except NotAFileError as error:
        raise ArtifactError(
            f"{path} {error} where a file is needed; remove it, then restore the file from a copy, "
            "or run the build again"
        ) from error


def _regular_size(path: Path | str, found: os.stat_result) -> int:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        raise NotAFileError("is a pipe, a socket or a device")
    return found.st_size


def read_bounded(path: Path, *, limit: int = _FILE_BYTES) -> bytes:
    """Return the content of a configuration file; raise ``ValueError`` if it is too long."""
    with open_file(path) as file:
        return read_up_to(file, limit)


def read_bytes(path: Path | str, *, limit: int) -> bytes:
    """Return the content of a regular file; raise ``ValueError`` if it has more than ``limit``."""
    with open_regular(path) as file:
        return read_up_to(file, limit)


def resolved(path: Path | str) -> Path:
    """Return an absolute path without links, whether or not it exists."""
    found = None
    # Python reports a loop of links as a RuntimeError, and from 3.13 on not at all.
    with contextlib.suppress(RuntimeError), reading(path):
        found = Path(path).resolve()
    if found is None or is_link(found):
        raise system_error(path, OSError(errno.ELOOP, os.strerror(errno.ELOOP)))
    return found


def state_of(path: Path) -> tuple[int, ...]:
    """Return what differs once a file was replaced or written to; nothing of one that is gone."""
    try:
        with reading(path):
            found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def size_of(path: Path) -> int:
    """Return the bytes of a file or of a folder's files; 0 for a link or what does not exist."""
    try:
        with reading(path):
            found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return 0
    if stat.S_ISDIR(found.st_mode):
        return sum(map(size_of, list_folder(path)))
    return 0 if stat.S_ISLNK(found.st_mode) else found.st_size


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a regular file, as 64 hex digits."""
    sha = hashlib.sha256()
    with reading(path), open_regular(path) as file:
        while block := file.read(_BLOCK):
            sha.update(block)
    return sha.hexdigest()


def _require_written(path: Path | str, file: int) -> None:
    """Refuse a large file of which hardly anything is on the disk: it may claim any size."""
    size, written, at = os.fstat(file).st_size, 0, 0
    try:
        while at < size and written * _LEAST_WRITTEN < size:
            start = os.lseek(file, at, os.SEEK_DATA)
            at = os.lseek(file, start, os.SEEK_HOLE)
            written += at - start
    except OSError as error:
        # There is no more; other errors are of a file system that does not know.
        if error.errno != errno.ENXIO:
            written = size
    if size > _LARGE and written * _LEAST_WRITTEN < size:
        raise ArtifactError(
            f"{path} has {size:,} bytes, of which {written:,} were written, as of a file that was "
            "not copied to its end; restore it"
        )
    os.lseek(file, 0, os.SEEK_SET)


def fsync_path(path: Path) -> None:
    """Flush a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
