"""Choices, samples and runtimes that a store keeps with its rows."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from whiten_index.artifacts import manifest
from whiten_index.artifacts.atomic import make_folder, replacing
from whiten_index.artifacts.files import exists, writing
from whiten_index.artifacts.storage import Storage
from whiten_index.artifacts.tensors import read_tensors, write_tensors
from whiten_index.errors import ArtifactError, StorageError

_SAMPLE, _VERSION, _RUNTIMES = "sample", 1, "runtimes"


class ResultCache:
    """Results in the folder of an encoder; a damaged one counts as never made."""

    def __init__(self, folder: Path, mirror: Storage) -> None:
        self.folder, self.mirror = folder, mirror

    def save_choice(self, key: Mapping[str, Any], value: Mapping[str, Any]) -> None:
        """Keep the choice of a transform, by everything that it depends on."""
        self._save_note("choices", key, value)

    def choice(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the choice kept for ``key``, None if none was kept or it is damaged."""
        return self._read(self._path("choices", key))

    def save_runtime(self, value: Mapping[str, str]) -> None:
        """Keep the versions of the libraries that computed some embeddings of the store."""
        if not exists(self._path(_RUNTIMES, value)):
            self._save_note(_RUNTIMES, value, value)

    def runtimes(self) -> list[dict[str, str]]:
        """Return the values that ``save_runtime`` kept, without damaged ones."""
        folder = self.folder / _RUNTIMES
        notes = [self._read(folder / name) for name in self.mirror.names(folder, "[!.]*.json")]
        return [note for note in notes if note is not None]

    def save_sample(self, key: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> None:
        """Keep the arrays of a sample, whole or not at all; a full disk is no error."""
        path = self._path("samples", key, ".safetensors")
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
        self, key: Mapping[str, Any], shapes: Mapping[str, str]
    ) -> dict[str, NDArray[Any]] | None:
        """Return the sample kept for ``key``, None if none was kept or it is damaged."""
        path = self._path("samples", key, ".safetensors")
        self.mirror.fetch(path)
        try:
            return _read_sample(path, shapes)
        except ArtifactError:
            return None

    def forget_sample(self, key: Mapping[str, Any]) -> None:
        """Remove what ``save_sample`` kept."""
        self.mirror.remove(self._path("samples", key, ".safetensors"))

    def check(self, path: Path) -> None:
        """Raise ``ArtifactError`` for a sample, choice or runtime that is damaged."""
        with self.mirror.opened(path) as file:
            if path.parent.name == "samples":
                _read_sample(file, {})
            else:
                _read_note(file)

    def _save_note(self, kind: str, key: Mapping[str, Any], value: Mapping[str, Any]) -> None:
        path = self._path(kind, key)
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

    def _path(self, kind: str, key: Mapping[str, Any], suffix: str = ".json") -> Path:
        return self.folder / kind / f"{manifest.fingerprint(dict(key))}{suffix}"


def _read_note(path: Path) -> dict[str, Any]:
    found = manifest.read_json(path, what="a note of a store", exact=True)
    note = found.get("note")
    if found.get("of") != path.name or not isinstance(note, dict):
        raise ArtifactError(f"{path} is damaged: it is not the note that its name says")
    return note


def _read_sample(path: Path, shapes: Mapping[str, str]) -> dict[str, NDArray[Any]]:
    found, facts = read_tensors(path, kind=_SAMPLE, version=_VERSION, shapes=shapes, sealed=True)
    if facts.get("of") != path.name:
        raise ArtifactError(f"{path} is damaged: it is not the sample that its name says")
    return found
