"""Atomic replacement of files and folders, and removal of leftovers of killed writers.

A writer works in a temporary folder next to its target, flushes its files, and renames it: a
reader sees the old file or folder or the new one, whole. The writer holds a lock on the temporary
folder, which the system frees when the process dies, however it dies. The next writer of the same
target removes the temporary folders that nobody holds.
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import re
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from whiten_index.artifacts.files import (
    exists,
    fsync_path,
    is_file,
    is_folder,
    is_link,
    list_folder,
    mode_of,
    resolved,
    walk_files,
    writing,
)
from whiten_index.errors import ConfigError, StorageError
from whiten_index.paths import is_uri, require_no_secret

_TEMPORARY = ".tmp-"
_FORM = re.compile(re.escape(_TEMPORARY) + r"(.*)~([0-9a-f]{8})-[0-9a-f]{12}", re.DOTALL)
_MOVED_ASIDE = ".moved-aside"
_TRIES = 3
_DAY = 86_400.0
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def require_path(path: Path | str) -> Path:
    """Return a valid path, whether or not it exists."""
    require_no_secret(path, what="the path")
    if is_uri(path):
        raise ConfigError(f"this works in folders, not at {path}; copy what is there to a folder")
    mode_of(path)
    return Path(path)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path to write, and put it at ``path`` in one step when the block ends.

    Mode, owner and group of a file that is replaced stay, as far as this user may set them.
    """
    require_plain_target(path)
    old = path.stat() if exists(path) else None
    with temporary_folder(path) as folder:
        temporary = folder / path.name
        if old is not None:
            # Those who may not read the old content may not read the new one as it is written.
            _close(folder)
        yield temporary
        if old is not None:
            _keep_access(temporary, old)
        fsync_path(temporary)
        temporary.replace(path)
        fsync_path(path.parent)


def replace_file(path: Path, data: bytes) -> None:
    """Put ``data`` at ``path`` in one step: a reader sees the old bytes or the new ones."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


@contextlib.contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """Give a new folder next to ``path`` to prepare it in, and remove it when the block ends.

    Those of killed writers of the same ``path`` are removed first.
    """
    remove_killed(path.parent, path)
    with contextlib.ExitStack() as held:
        for tries_left in reversed(range(_TRIES)):
            temporary = path.with_name(_temporary_name(path.name))
            temporary.mkdir()
            try:
                held.enter_context(locked(temporary))
                break
            except (BlockingIOError, FileNotFoundError):
                # Another process locked it first, and removes it.
                if not tries_left:
                    raise
            except OSError:
                break  # a file system without locks
        try:
            yield temporary
        finally:
            # If that fails, the next writer does it.
            with contextlib.suppress(OSError, StorageError):
                _discard(temporary, path)


def remove_killed(folder: Path, target: Path | None = None) -> None:
    """Remove the temporary folders in ``folder`` of killed writers, or of those of one target.

    Those that cannot be locked stay.
    """
    for each in leftovers_in(folder):
        form = _FORM.fullmatch(each.name)
        if form is None or (target is not None and form[1] != _cut(target.name)):
            continue
        # Another user may have put one there that Python cannot remove, folder in folder.
        with contextlib.suppress(OSError, StorageError, RecursionError), locked(each):
            if form[2] == _this_host() or _is_old(each):
                _discard(each, target or folder / form[1])


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Give a folder in the system's folder for temporary files that only this user can read."""
    with temporary_folder(Path(tempfile.gettempdir()) / "whiten-index") as folder:
        folder.chmod(0o700)
        yield folder


def remove_leftovers(folder: Path) -> int:
    """Remove the temporary files and folders in ``folder``, and return their number.

    Those that a live process holds stay. On a file system without locks all go, so the caller
    must be the only writer of ``folder``.
    """
    removed = 0
    for path in leftovers_in(folder):
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(locked(path))
            except BlockingIOError:
                continue
            except OSError:
                pass
            remove_path(path)
            removed += 1
    return removed


def leftovers_in(folder: Path) -> list[Path]:
    """Return the temporary files and folders in ``folder``, those of live writers included."""
    return [path for path in list_folder(folder, f"{_TEMPORARY}*") if _FORM.fullmatch(path.name)]


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a folder that no other process holds or has removed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.stat()
        yield
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _discard(temporary: Path, path: Path) -> None:
    """Remove a temporary folder, after the folder that was moved from ``path`` is back there."""
    if exists(temporary / _MOVED_ASIDE) and not exists(path):
        (temporary / _MOVED_ASIDE).rename(path)
    remove_path(temporary)


def _is_old(folder: Path) -> bool:
    # Some shared file systems do not show locks to other hosts.
    newest = max(each.lstat().st_mtime for each in (folder, *walk_files(folder)))
    return time.time() - newest > _DAY


def _this_host() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def remove_path(path: Path) -> None:
    """Remove a file, a link or a folder with all below it, if it exists."""
    with writing(path, kept=""), contextlib.suppress(FileNotFoundError):
        if is_folder(path) and not is_link(path):
            shutil.rmtree(path)
        else:
            path.unlink()


def discard(path: Path) -> None:
    """Remove a file or a folder that nothing needs any more; if that fails, it does no harm."""
    with contextlib.suppress(StorageError):
        remove_path(path)


def make_folder(path: Path) -> None:
    """Make a folder and those above it, and flush their entries to the disk."""
    missing = [each for each in (path, *path.parents) if not exists(each)]
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        fsync_path(each.parent)


def remove_folder(path: Path) -> None:
    """Remove a published folder, or a link to one; readers see it whole or not at all."""
    with writing(path, kept=""):
        aside = path.with_name(_temporary_name(path.name))
        path.rename(aside)
        fsync_path(path.parent)
        remove_path(aside)


def rename_unless_taken(temporary: Path, final: Path) -> None:
    """Rename a finished folder; that of a faster writer, which is as good, stays."""
    try:
        temporary.rename(final)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise


def _temporary_name(name: str) -> str:
    # It does not end as ``name`` does, as other programs look for files by their endings.
    return f"{_TEMPORARY}{_cut(name)}~{_this_host()}-{uuid.uuid4().hex[:12]}"


def _cut(name: str) -> str:
    # Disks count bytes, and a name that fills them all leaves no room for more.
    data = os.fsencode(name)
    if len(data) <= 160:
        return data.decode("utf-8", "ignore")
    # Another target may begin alike.
    return f"{data[:140].decode('utf-8', 'ignore')}~{hashlib.sha256(data).hexdigest()[:16]}"


def _close(folder: Path) -> None:
    """Let nobody else read a folder, on file systems with permissions."""
    with contextlib.suppress(PermissionError):
        folder.chmod(0o700)


def _keep_access(path: Path, old: os.stat_result) -> None:
    """Give a new file or folder the mode, the owner and the group of the one that it replaces."""
    path.chmod(old.st_mode & 0o777)
    new = path.stat()
    with contextlib.suppress(PermissionError):
        if new.st_gid != old.st_gid:
            os.chown(path, -1, old.st_gid)
        if new.st_uid != old.st_uid:
            os.chown(path, old.st_uid, -1)


def require_plain_target(path: Path) -> None:
    """Refuse to replace a pipe, a socket or a device by a file."""
    if exists(path) and not is_file(path) and not is_folder(path):
        raise ConfigError(
            f"{path} is a pipe, a socket or a device, and is left as it is; name another file"
        )


def require_replaceable(
    path: Path, is_ours: Callable[[Path], bool], what: str, *, remedy: str = "name another file"
) -> None:
    """Refuse to replace what is not ours; so are folders, pipes and links to nothing."""
    with writing(path, kept=""):
        # To open a pipe would wait for ever.
        require_plain_target(path)
        ours = is_file(path) and is_ours(path)
        if not ours and (exists(path) or is_link(path)):
            raise ConfigError(
                f"{path} holds something else than {what}, and is left as it is; {remedy}"
            )


def require_free(
    path: Path | str, *, files: Callable[[Path], Collection[str] | None], what: str
) -> Path:
    """Return the resolved path of a folder to write, if ``replace_folder`` would write it."""
    final = resolved(require_path(path))
    if not exists(final):
        return final
    known = files(final) if is_folder(final) else None
    if known is None and (not is_folder(final) or list_folder(final)):
        raise ConfigError(
            f"{final} holds something else than {what}, or a damaged one, and is left as it is; "
            "name a folder that is new, empty, or was made by the same command"
        )
    for each in _leaves(final):
        if (name := each.relative_to(final).as_posix()) not in (known or ()):
            raise ConfigError(
                f"{final} holds {name} beside {what}, which would be lost; move it away, or name a "
                "new folder"
            )
    return final


def replace_folder(
    path: Path | str,
    make: Callable[[Path], object],
    *,
    files: Callable[[Path], Collection[str] | None],
    what: str,
) -> Path:
    """Make a folder under another name, and put it at ``path`` when it is complete.

    What is at ``path`` must be nothing, an empty folder, or a ``what`` made before: one that has
    only the ``files`` of its kind. If the system cannot swap two folders in one step, a process
    that is killed between two renames leaves none there; the next writer puts the old one back.
    """
    final = require_free(path, files=files, what=what)
    with writing(final, kept=""):
        make_folder(final.parent)
        with temporary_folder(final) as temporary:
            new = temporary / "new"
            old = final.stat() if exists(final) else None
            if old is not None:
                _close(temporary)
            make(new)
            for folder in (new, *filter(is_folder, list_folder(new))):
                remove_leftovers(folder)
            # Something else may have come meanwhile.
            require_free(path, files=files, what=what)
            if old is not None:
                _keep_access(new, old)
            _put_in_place(new, final, aside=temporary / _MOVED_ASIDE)
            fsync_path(final.parent)
    return final


def _put_in_place(new: Path, final: Path, *, aside: Path) -> None:
    if _exchanged(new, final):
        return
    if exists(final):
        final.rename(aside)
    try:
        new.rename(final)
    except OSError:
        # Another writer may have put its folder there.
        if not _exchanged(new, final):
            if exists(aside) or not exists(final):
                raise
            final.rename(aside)
            new.rename(final)


def _exchanged(new: Path, final: Path) -> bool:
    """Swap two folders in one step, and return whether the system can do that."""
    swap = getattr(ctypes.CDLL(None), "renameat2", None)
    names = (_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(final))
    return swap is not None and swap(*names, _RENAME_EXCHANGE) == 0


def _leaves(folder: Path) -> Iterator[Path]:
    """Yield the paths below a folder that have nothing below them, empty folders included."""
    for path in list_folder(folder):
        if is_folder(path) and not is_link(path) and list_folder(path):
            yield from _leaves(path)
        else:
            yield path
