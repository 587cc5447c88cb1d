"""Registry of the indexes built from a store: garbage collection keeps the shards they need.

Each index has a file in ``indexes/`` and a copy of it in ``registered/``, so that an index is not
forgotten where one of the folders was emptied, or its disk is not mounted.
"""

from dataclasses import dataclass
from pathlib import Path

from whiten_index.artifacts import manifest
from whiten_index.artifacts.atomic import make_folder
from whiten_index.artifacts.files import exists, writing
from whiten_index.artifacts.manifest import Digest, Schema, Sealed
from whiten_index.artifacts.storage import Place, Storage, settled
from whiten_index.errors import ArtifactError

FOLDER, _COPIES = "indexes", "registered"


class _Fields(Sealed):
    index: str
    id: Digest | None


_SCHEMA = Schema("registered_index", 1, _Fields)


@dataclass(frozen=True, slots=True)
class RegisteredIndex:
    """An index that was built from a store, and the file that registers it, or its copy."""

    file: Path
    # Its folder or URI when it was built, and its id, to recognise it there; none for a URI.
    place: str
    id: str | None


class IndexRegistry:
    """The indexes of the store in a folder, a file and its copy each."""

    def __init__(self, store: Path, mirror: Storage) -> None:
        self.folder, self.copies, self.mirror = store / FOLDER, store / _COPIES, mirror

    def register(self, index: Place, index_id: str | None) -> None:
        """Note that an index is built from here, so that its shards stay."""
        place = owner_of(index)
        path = self.folder / _file_name(place, index_id)
        fields = _SCHEMA.headed(index=place, id=index_id)
        for each in (path, self.copies / path.name):
            with writing(each):
                if not self._is_sound(each):
                    make_folder(each.parent)
                    manifest.write_manifest(each, fields)
            self.mirror.keep(each)

    def _is_sound(self, path: Path) -> bool:
        try:
            self.read(path)
        except ArtifactError:
            return False
        return True

    def registered(self) -> list[RegisteredIndex]:
        """Return the indexes that were built from here."""
        if not self.mirror.uri and not exists(self.folder):
            raise ArtifactError(
                f"{self.folder} is missing, so that it is not known which indexes need the shards "
                "of this store; mount its disk or restore the folder from a copy. If it is gone "
                f"for good, make it with mkdir {self.folder}, then build or update each index once"
            )
        found = {path.name: self.read(path) for path in self.files()}
        return [found[name] for name in sorted(found)]

    def files(self) -> list[Path]:
        """Return the files of all indexes, copies first."""
        folders, names = (self.copies, self.folder), self.mirror.names
        return [folder / name for folder in folders for name in names(folder, "*.json*")]

    def forget(self, file: Path) -> None:
        """Remove the file of an index and its copy."""
        self.mirror.remove(*(folder / file.name for folder in (self.folder, self.copies)))

    def read(self, path: Path) -> RegisteredIndex:
        """Return the index that a file registers."""
        self.mirror.latest(path)
        found = manifest.read_manifest(path.parent, _SCHEMA, name=path.name)
        if _file_name(found["index"], found["id"]) != path.name:
            raise ArtifactError(
                f"{path} is damaged: it is the file of {found['index']}; {manifest.REMEDY}"
            )
        return RegisteredIndex(path, found["index"], found["id"])


def _file_name(index: str, index_id: str | None) -> str:
    return f"{manifest.fingerprint({'index': index, 'id': index_id})}.json"


def owner_of(index: Place | None) -> str:
    """Return the name of an index in the files of a store, empty for none."""
    return "" if index is None else str(settled(index))
