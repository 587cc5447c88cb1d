"""Storage of stores and indexes: local files, and the interface that a bucket has too."""

from collections.abc import Iterable
from pathlib import Path

from whiten_index.artifacts.atomic import remove_folder, remove_path, replace_file
from whiten_index.artifacts.files import exists, list_folder, resolved
from whiten_index.artifacts.object_store import Tag, plain_uri
from whiten_index.paths import is_uri

# A folder, or the URI of a bucket's prefix.
Place = Path | str


class Storage:
    """Storage in local folders; ``BucketStorage`` is in a bucket with a local cache."""

    uri = ""  # of the prefix in a bucket

    def fetch(self, path: Path, *, compare: bool = False) -> None:
        """Copy an artifact or a file from the bucket, unless there is a copy.

        With ``compare``, a copy of an artifact is replaced if the bucket has another one by now.
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
        """Update the copy of an artifact from the bucket, if it is sound there."""

    def keep(self, path: Path) -> None:
        """Put a sound artifact or file into the bucket, if it is missing or damaged there."""

    def push(self, path: Path) -> None:
        """Put an artifact or file into the bucket; an artifact that is there already stays."""

    def replace(self, path: Path, data: bytes, tag: Tag | None) -> None:
        """Put a file if it is still as ``latest`` saw it."""
        replace_file(path, data)

    def drop(self, path: Path) -> None:
        """Remove a damaged artifact, so that it is written again everywhere."""
        remove_path(path)

    def remove_folder(self, path: Path) -> None:
        """Remove an artifact, also from the bucket."""
        remove_folder(path)

    def remove(self, path: Path) -> None:
        """Remove a file, also from the bucket."""
        path.unlink(missing_ok=True)

    def holds(self, path: Path) -> bool:
        """Return whether an artifact or file is in the bucket, or in a folder without a bucket."""
        return exists(path)

    def names(self, folder: Path) -> set[str]:
        """Return the names of the artifacts and files in a folder of the bucket."""
        return set()

    def folders_with(self, root: Path, name: str, *, only: str | None = None) -> list[Path]:
        """Return the folders in ``root``, or the ``only`` one, that have a file of that name.

        Copies of that file are updated.
        """
        folders = list_folder(root) if only is None else [root / only]
        return [folder for folder in folders if exists(folder / name)]

    def look_again(self) -> bool:
        """Forget the listing of the bucket, which others may change; return False without one."""
        return False


LOCAL = Storage()


def settled(place: Place) -> Place:
    """Return a place in the form that names it in any working directory."""
    if isinstance(place, str) and is_uri(place):
        return plain_uri(place)
    return resolved(place)
