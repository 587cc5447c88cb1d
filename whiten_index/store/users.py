"""The indexes that are built from a store: what they need is not to be dropped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whiten_index.artifacts import manifest
from whiten_index.artifacts.atomic import make_folder
from whiten_index.artifacts.files import writing
from whiten_index.artifacts.schema import Schema, Sealed
from whiten_index.errors import ArtifactError
from whiten_index.given import is_uri
from whiten_index.objects import Here, Place, settled

_KIND, _VERSION = "store_user", 1


class _User(Sealed):
    """Fields of the file of an index."""

    index: str


_SCHEMA = Schema(_KIND, _VERSION, _User)


class Users:
    """The indexes of a store, a file each."""

    def __init__(self, folder: Path, mirror: Here) -> None:
        """Take the folder of their files, and the bucket that counts, if there is one."""
        self.folder, self.mirror = folder, mirror

    def register(self, index: Place) -> None:
        """Remember that an index is built from here, so that nothing it needs is dropped.

        Raises:
            StorageError: the disk is full or cannot be written.
        """
        place = owner_of(index)
        path = self.folder / f"{manifest.fingerprint({'index': place})}.json"
        fields = {"kind": _KIND, "format_version": _VERSION, "index": place}
        self.mirror.fetch(path)
        with writing(path):
            if not self._holds(path, fields):
                make_folder(path.parent)
                manifest.write_manifest(path, fields)
                self.mirror.push(path)
        self.mirror.keep(path)

    def _holds(self, path: Path, fields: Mapping[str, Any]) -> bool:
        try:
            found = manifest.read_json(path, what="a file that names an index", exact=True)
        except ArtifactError:
            return False
        return found.items() >= fields.items()

    def indexes(self) -> dict[Path, Path]:
        """Return the places of the indexes that were built from here, by the file that tells.

        Raises:
            ArtifactError: such a file is damaged.
        """
        return {path: Path(place) for path, place in self._by_file().items()}

    def in_buckets(self) -> dict[Path, str]:
        """Return the URIs of those of them that are in a bucket, by the file that tells.

        Raises:
            ArtifactError: such a file is damaged.
        """
        return {path: place for path, place in self._by_file().items() if is_uri(place)}

    def files(self) -> list[Path]:
        """Return the files, one an index."""
        return manifest.records_in(self.folder)

    def index_of(self, path: Path) -> str:
        """Return the folder or URI of the index that a file is of.

        Raises:
            ArtifactError: it is damaged.
        """
        place = manifest.read_manifest(self.folder, _SCHEMA, name=path.name)["index"]
        if f"{manifest.fingerprint({'index': place})}.json" != path.name:
            raise ArtifactError(f"{path} is damaged: it is the file of {place}; {manifest.REMEDY}")
        return place

    def _by_file(self) -> dict[Path, str]:
        return {path: self.index_of(path) for path in self.files()}


def owner_of(index: Place | None) -> str:
    """Return how an index is called in what is kept, empty for none."""
    return "" if index is None else str(settled(index))
