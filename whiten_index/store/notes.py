"""Small files of a store next to its rows: remembered results, and the indexes built from it."""

import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from whiten_index.artifacts import manifest
from whiten_index.artifacts.atomic import make_folder, replacing
from whiten_index.artifacts.files import exists, writing
from whiten_index.artifacts.manifest import Digest, Schema, Sealed
from whiten_index.artifacts.storage import Place, Storage, settled
from whiten_index.artifacts.tensors import read_tensors, write_tensors
from whiten_index.errors import ArtifactError, StorageError

_SAMPLE, _VERSION = "sample", 1
_NAME = re.compile(r"[0-9a-f]{32}\.(json|safetensors)")
_NOTES = CHOICES, RUNTIMES, MIGRATIONS = ("choices", "runtimes", "migrations")
SAMPLES, UNFINISHED = "samples", "unfinished"
RESULTS = (*_NOTES, SAMPLES, UNFINISHED)
INDEXES, _COPIES = "indexes", "registered"


class ResultCache:
    """Results in the folder of an encoder; a damaged one counts as never made."""

    def __init__(self, folder: Path, mirror: Storage) -> None:
        self.folder, self.mirror = folder, mirror

    def save_choice(self, key: Mapping[str, Any], value: Mapping[str, Any]) -> None:
        """Keep the choice of a transform, by everything that it depends on."""
        self._save_note(self._path(CHOICES, key), value)

    def choice(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the choice kept for ``key``, None if none was kept or it is damaged."""
        return self._read(self._path(CHOICES, key))

    def save_migration(self, index: str, note: Mapping[str, Any] | bool | None) -> None:
        """Keep the note of the migration of an index; see ``migrations``."""
        path = self._path(MIGRATIONS, {"index": index})
        self._save_note(path, {"index": index, "migration": note})

    def migrations(self) -> dict[str, Any]:
        """Return the notes of migrations by their indexes.

        A note is false for a migration that is finished, None for one that was given up. A damaged
        one is refused, since without it gc would remove what was encoded.
        """
        folder, found = self.folder / MIGRATIONS, dict[str, Any]()
        for path in (folder / name for name in self.mirror.names(folder, "[!.]*.json")):
            self.mirror.latest(path)
            try:
                index, found[index] = _read_migration(path)
            except ArtifactError as error:
                raise ArtifactError(f"{path} is damaged; {remedy_of(path)}") from error
        return found

    def save_runtime(self, value: Mapping[str, str]) -> None:
        """Keep the versions of the libraries that computed some embeddings of the store."""
        if not exists(path := self._path(RUNTIMES, value)):
            self._save_note(path, value)

    def runtimes(self) -> list[dict[str, str]]:
        """Return the values that ``save_runtime`` kept, without damaged ones."""
        folder = self.folder / RUNTIMES
        notes = [self._read(folder / name) for name in self.mirror.names(folder, "[!.]*.json")]
        return [note for note in notes if note is not None]

    def save_sample(
        self, key: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]], kind: str = SAMPLES
    ) -> None:
        """Keep the arrays of a sample, whole or not at all; a full disk is no error."""
        path = self._path(kind, key)
        # A store that cannot be written still serves: the sample is made again next time.
        with suppress(StorageError):
            with writing(path):
                make_folder(path.parent)
                with replacing(path) as temporary:
                    facts = {"of": path.name}
                    write_tensors(
                        temporary, tensors, kind=_SAMPLE, version=_VERSION, facts=facts, seal=True
                    )
            self.mirror.push(path)

    def sample(
        self, key: Mapping[str, Any], shapes: Mapping[str, str], kind: str = SAMPLES
    ) -> dict[str, NDArray[Any]] | None:
        """Return the sample kept for ``key``, None if none was kept or it is damaged."""
        path = self._path(kind, key)
        self.mirror.fetch(path)
        try:
            return _read_sample(path, shapes)
        except ArtifactError:
            return None

    def forget_unfinished(self, key: Mapping[str, Any]) -> None:
        """Remove what an interrupted run kept."""
        self.mirror.remove(self._path(UNFINISHED, key))

    def files(self, kind: str) -> list[Path]:
        """Return the files of a kind of results."""
        found = filter(_NAME.fullmatch, self.mirror.names(self.folder / kind))
        return [self.folder / kind / name for name in found]

    def check(self, path: Path) -> None:
        """Raise ``ArtifactError`` for a result that is damaged."""
        with self.mirror.opened(path) as file:
            if path.suffix == ".json":
                _read_note(file)
            else:
                _read_sample(file, {})

    def _save_note(self, path: Path, value: Mapping[str, Any]) -> None:
        with writing(path):
            make_folder(path.parent)
            manifest.write_manifest(path, {"of": path.name, "note": dict(value)})
        self.mirror.push(path)

    def _read(self, path: Path) -> dict[str, Any] | None:
        self.mirror.latest(path)
        try:
            return _read_note(path)
        except ArtifactError:
            return None

    def _path(self, kind: str, key: Mapping[str, Any]) -> Path:
        ending = ".json" if kind in _NOTES else ".safetensors"
        return self.folder / kind / f"{manifest.fingerprint(dict(key))}{ending}"


def remedy_of(path: Path) -> str:
    """Return the advice for a damaged result."""
    if path.parent.name == MIGRATIONS:
        return "remove it, and run again, before any gc, the migrations that fill this store"
    return f"remove {path}: it is made again when it is next needed"


def _read_note(path: Path) -> dict[str, Any]:
    found = manifest.read_json(path, what="a note of a store", exact=True)
    note = found.get("note")
    if found.get("of") != path.name or not isinstance(note, dict):
        raise ArtifactError(f"{path} is damaged: it is not the note that its name says")
    return note


def _read_migration(path: Path) -> tuple[str, dict[str, Any] | bool | None]:
    """Return the index of a migration and its note."""
    fields = _read_note(path)
    index, note = str(fields.get("index")), fields.get("migration")
    known = note in (None, False) or isinstance(note, dict)
    if not known or path.stem != manifest.fingerprint({"index": index}):
        raise ArtifactError(f"{path} is damaged: it is not the note that its name says")
    return index, note


def _read_sample(path: Path, shapes: Mapping[str, str]) -> dict[str, NDArray[Any]]:
    found, facts = read_tensors(path, kind=_SAMPLE, version=_VERSION, shapes=shapes, sealed=True)
    if facts.get("of") != path.name:
        raise ArtifactError(f"{path} is damaged: it is not the sample that its name says")
    return found


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
    """The indexes built from the store in a folder: garbage collection keeps what they need.

    Each has a file in ``indexes/`` and a copy of it in ``registered/``, so that it is not forgotten
    where one of the folders was emptied, or its disk is not mounted.
    """

    def __init__(self, store: Path, mirror: Storage) -> None:
        self.folder, self.copies, self.mirror = store / INDEXES, store / _COPIES, mirror

    def register(self, index: Place, index_id: str | None) -> None:
        """Note that an index is built from here, so that its shards stay."""
        self._require_there()
        place = owner_of(index)
        fields = _SCHEMA.headed(index=place, id=index_id)
        for path in (folder / _file_name(place, index_id) for folder in (self.folder, self.copies)):
            try:
                self.read(path)
            except ArtifactError:
                with writing(path):
                    make_folder(path.parent)
                    manifest.write_manifest(path, fields)
            self.mirror.keep(path)

    def registered(self) -> list[RegisteredIndex]:
        """Return the indexes that were built from here."""
        self._require_there()
        found = {path.name: self.read(path) for path in self.files()}
        return [found[name] for name in sorted(found)]

    def _require_there(self) -> None:
        if not self.mirror.uri and not exists(self.folder):
            raise ArtifactError(
                f"{self.folder} is missing, so that it is not known which indexes need the shards "
                "of this store; mount its disk or restore the folder from a copy. If it is gone "
                f"for good, make it with mkdir {shlex.quote(str(self.folder))}, then build or "
                "update each index once"
            )

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
