"""Storage of stores and indexes: local files, and the interface that a bucket has too."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from whiten_index.artifacts.atomic import leftovers_in, remove_folder, remove_path, replace_file
from whiten_index.artifacts.files import (
    MANIFEST,
    exists,
    fsync_path,
    is_folder,
    list_folder,
    reading,
    resolved,
    size_of,
    writing,
)
from whiten_index.artifacts.object_store import Tag, plain_uri
from whiten_index.paths import is_uri

# A folder, or the URI of a bucket's prefix.
Place = Path | str
# Of some files of an artifact, None for all.
Names = Iterable[str] | None


class Storage:
    """Storage in local folders; ``BucketStorage`` is in a bucket with a local cache."""

    uri = ""  # of the prefix in a bucket

    def fetch(self, path: Path, *, names: Names = None) -> None:
        """Copy an artifact or a file from the bucket, unless there is a copy.

        Of an artifact the manifest is copied and the files ``names``.
        """

    def fetch_all(self, paths: Iterable[Path]) -> None:
        """Fetch several at a time."""

    def fetch_again(self, path: Path) -> bool:
        """Replace a damaged copy from the bucket; return whether the new one is sound."""
        return False

    def latest(self, path: Path) -> Tag | None:
        """Update or remove the copy of a file as the bucket has it now; return its tag."""
        return None

    def settle(self, path: Path) -> None:
        """Update what is here of an artifact from the bucket, if it is sound there."""

    def is_as_copied(self, path: Path) -> bool:
        """Return whether the bucket lists a file as it did when it was copied."""
        return True

    def keep(self, path: Path) -> None:
        """Put a sound artifact or file into the bucket, if it is missing or damaged there."""

    def push(self, path: Path) -> None:
        """Put an artifact or file into the bucket; an artifact that is there already stays."""

    def replace(self, path: Path, data: bytes, tag: Tag | None) -> Tag | None:
        """Put a file and return its tag, or raise ``BusyError`` if another is there by now."""
        replace_file(path, data)
        return None

    def drop(self, path: Path) -> None:
        """Remove a damaged artifact, so that it is written again everywhere."""
        remove_path(path)

    def remove(self, *paths: Path, own: bool = False) -> None:
        """Remove artifacts and files, also from the bucket; ``own`` ones even without a mark."""
        for path in paths:
            with writing(path, kept=""):
                if is_folder(path):
                    remove_folder(path)
                else:
                    path.unlink(missing_ok=True)
        for folder in filter(exists, {path.parent for path in paths}):
            fsync_path(folder)

    def remove_unnamed(self, folder: Path) -> int:
        """Remove files that no manifest names from the artifacts in a folder of the bucket."""
        return 0

    def holds(self, path: Path) -> bool:
        """Return whether an artifact or file is in the bucket, or in a folder without a bucket."""
        return exists(path)

    def fault(self, path: Path, data: bytes | None = None, *, content: bool = False) -> str:
        """Return which objects of an artifact in the bucket are damaged; empty if none is.

        ``data`` are the bytes of its manifest; None to read it. Sizes are compared, or with
        ``content`` the objects are read and hashed.
        """
        return ""

    def names(self, folder: Path, pattern: str = "[!.]*") -> list[str]:
        """Return the sorted names of the artifacts and files in a folder, as the bucket has it."""
        found = list_folder(folder, pattern)
        return sorted({path.name for path in found} - {path.name for path in leftovers_in(folder)})

    def folders(self, root: Path) -> list[Path]:
        """Return the folders right below the prefix, or in a folder, but for hidden ones."""
        return list(filter(is_folder, list_folder(root, "[!.]*"))) if is_folder(root) else []

    def size(self, *paths: Path) -> int:
        """Return the bytes of artifacts and files, as the bucket has them."""
        return sum(map(size_of, paths))

    def modified(self, path: Path) -> float:
        """Return the time at which an artifact or file was finished, 0 if it is gone."""
        marker = path / MANIFEST if is_folder(path) else path
        try:
            with reading(marker):
                return marker.stat().st_mtime
        except FileNotFoundError:
            return 0.0

    @contextlib.contextmanager
    def opened(self, path: Path, names: Names = None) -> Iterator[Path]:
        """Give an artifact or file to read as the bucket has it, in a folder that is then removed.

        Of an artifact, its manifest is read, and all its files or those named.
        """
        yield path

    def look_again(self) -> bool:
        """Forget the listing of the bucket, which others may change; return False without one."""
        return False


LOCAL = Storage()


def settled(place: Place) -> Place:
    """Return a place in the form that names it in any working directory."""
    if isinstance(place, str) and is_uri(place):
        return plain_uri(place)
    return resolved(place)
