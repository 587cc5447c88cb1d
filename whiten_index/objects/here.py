"""What stores and indexes ask of a bucket, and the answers where there is none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from whiten_index.artifacts.atomic import remove_path, replace_file
from whiten_index.artifacts.files import exists, list_folder
from whiten_index.objects.bucket import Tag

# A folder, or the URI of a bucket's prefix.
Place = Path | str


class Here:
    """No bucket: what a folder is to hold is in it. A ``Mirror`` is one whose bucket counts.

    Attributes:
        uri: of the prefix, empty for none.
        mended: what was damaged in the bucket, and was put there again from a sound copy.
    """

    uri = ""
    mended: Sequence[str] = ()

    def fetch(self, path: Path, *, compare: bool = False) -> None:
        """Get an artifact or a file that is in the bucket and not here.

        Args:
            path: where it belongs.
            compare: replace a copy of an artifact if the bucket has another one by now.

        Raises:
            ArtifactError: what the bucket has instead of the copy is damaged.
        """

    def fetch_all(self, paths: Iterable[Path]) -> None:
        """Fetch several at a time."""

    def fetch_again(self, path: Path) -> bool:
        """Replace a damaged copy by what the bucket has; return whether that is sound."""
        return False

    def latest(self, path: Path) -> Tag | None:
        """Make a file what the bucket has now, removing it where that has none; return its tag.

        One that was never in the bucket is left alone where the bucket was listed.
        """
        return None

    def settle(self, path: Path) -> None:
        """Make a copy of an artifact what the bucket has of it, if that is sound."""

    def keep(self, path: Path) -> None:
        """Put a sound artifact or file into the bucket, if it is missing or damaged there."""

    def push(self, path: Path) -> None:
        """Put an artifact or file into the bucket; the artifact that is there already counts."""

    def replace(self, path: Path, data: bytes, tag: Tag | None) -> None:
        """Put a file where it is still what ``latest`` saw.

        Raises:
            ChangedError: it is not.
        """
        replace_file(path, data)

    def drop(self, path: Path) -> None:
        """Remove a damaged artifact here, which is then to be written anew everywhere."""
        remove_path(path)

    def remove(self, path: Path) -> None:
        """Remove a file, here and in the bucket."""
        path.unlink(missing_ok=True)

    def holds(self, path: Path) -> bool:
        """Tell whether an artifact or file is in the bucket, or here if there is no bucket."""
        return exists(path)

    def has(self, path: Path) -> bool:
        """Tell whether an artifact or file is here or in the bucket, sound or not."""
        return exists(path)

    def names(self, folder: Path) -> set[str]:
        """Return the names of the artifacts and files in a folder of the bucket."""
        return set()

    def folders_with(self, root: Path, name: str, *, only: str | None = None) -> list[Path]:
        """Return the folders right below ``root`` that have a file of that name, made the latest.

        Args:
            root: the folder, or that of the copies.
            name: of the file.
            only: the one folder to look at, None for all.
        """
        folders = list_folder(root) if only is None else [root / only]
        return [folder for folder in folders if exists(folder / name)]

    def look_again(self) -> bool:
        """Take note of what others put into the bucket since; tell whether there is one."""
        return False


HERE = Here()
