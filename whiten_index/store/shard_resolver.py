"""The place that a shard, or rows that others pick, are verified in and read from.

A shard may be in several packs and in a folder at once: a process died between writing one and
removing another, others pick rows from the folder, or one is damaged and another replaces it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts import manifest
from whiten_index.artifacts.files import exists
from whiten_index.artifacts.manifest import Described, Schema
from whiten_index.artifacts.storage import LOCAL, Storage
from whiten_index.artifacts.tensors import map_tensor
from whiten_index.errors import ArtifactError, FormatError
from whiten_index.store.packs import InPack, Packs, StoredShard
from whiten_index.store.records import REMEDY
from whiten_index.store.row_refs import SELF, RowRefs, Source, other_sources
from whiten_index.whitening.moments import Moments

KIND, FORMAT_VERSION = "shard", 1
EMBEDDINGS, MOMENTS = "embeddings.safetensors", "moments.safetensors"
T = TypeVar("T")
_MOVES = 2


class _NowhereError(ArtifactError):
    """Rows are missing, or were moved a moment ago."""


class ShardManifest(Described):
    """Manifest of the folder of a shard."""

    shard: StoredShard
    sources: tuple[Source, ...]


SCHEMA = Schema(KIND, FORMAT_VERSION, ShardManifest)


def read_shard(folder: Path) -> ShardManifest:
    """Read the manifest of the folder of a shard."""
    fields = manifest.read_manifest(folder, SCHEMA)
    if fields["shard"].fingerprint != folder.name or EMBEDDINGS not in fields["files"]:
        raise ArtifactError(
            f"{folder / manifest.MANIFEST} is damaged: it is of another shard; {REMEDY}"
        )
    return fields


@dataclass(frozen=True, eq=False)
class InFolder:
    """A shard in a folder, or the rows that the folder itself holds."""

    path: Path
    fields: ShardManifest

    @property
    def shard(self) -> StoredShard:
        """Facts of the shard."""
        return self.fields["shard"]

    @property
    def held_as(self) -> str:
        """Name by which others know the rows in the folder."""
        return self.fields["files"][EMBEDDINGS]["sha256"]

    @property
    def sources(self) -> tuple[Source, ...]:
        """Sources of the rows, the shard itself among them; none where it is whole."""
        return self.fields["sources"]

    def tensor(self, name: str) -> NDArray[Any]:
        """Return an array of the folder, mapped."""
        return map_tensor(self.path / EMBEDDINGS, name, remedy=REMEDY)

    def moments(self) -> Moments | None:
        """Return the moments of the shard, None where it keeps none."""
        return Moments.load(self.path / MOMENTS) if MOMENTS in self.fields["files"] else None

    def picks(self) -> RowRefs | None:
        """Return the places of the rows of a derived shard, None for a whole one."""
        if not self.sources:
            return None
        source, row = (np.array(self.tensor(name), dtype=np.int32) for name in ("source", "row"))
        return RowRefs(self.sources, source, row)


Place = InPack | InFolder


class ShardResolver:
    """Chooses where shards are read from: the latest sound pack, else a folder.

    Content is hashed once, before anything of it is read. The place chosen then serves until it
    is gone.
    """

    def __init__(
        self, folder: Path, packs: Packs, mirror: Storage = LOCAL, *, verify: bool = True
    ) -> None:
        self.folder, self.packs, self.mirror, self.verify = folder, packs, mirror, verify
        # Manifests of folders whose files were hashed, and places found sound.
        self._hashed: dict[str, ShardManifest] = {}
        # By shard, so that one thread forgets a shard while another finds others.
        self._chosen: dict[str, dict[str | None, Place]] = {}

    def find(self, name: str, *, verify: bool, held_as: str | None = None) -> Place | None:
        """Return the place that a shard is read from, None where it is missing or damaged."""
        chosen = self._chosen.get(name, {}).get(held_as)
        if chosen is not None and self._stands(chosen, held_as):
            return chosen
        # Rows that were verified once stay so when something is moved.
        verify = verify or chosen is not None
        found = self._first(name, verify=verify, held_as=held_as)
        if verify and found is not None:
            places = self._chosen.setdefault(name, {})
            places[held_as] = found
            places.setdefault(found.held_as, found)
        return found

    def forget(self, name: str) -> None:
        """Look at a shard again as if for the first time."""
        self._hashed.pop(name, None)
        self._chosen.pop(name, None)
        self.packs.look_again()

    def read(self, name: str, read: Callable[[Place], T]) -> T:
        """Return the result of ``read`` on the place of a shard."""
        for left in reversed(range(_MOVES + 1)):
            # It may be moved into a pack between the look and the reading.
            try:
                return read(self._require(name))
            except _NowhereError:
                continue
            except ArtifactError:
                if not left:
                    raise
        raise ArtifactError(
            f"shard {name} cannot be read: {self.culprit(name)} is missing or damaged; {REMEDY}"
        )

    def held_by(self, source: Source) -> NDArray[np.floating]:
        """Return the embeddings (m, d) of a source, mapped."""
        name, held_as = source
        place = self.find(name, verify=self.verify, held_as=held_as)
        if place is None:
            raise _NowhereError(
                f"shard {name} in {self.folder}, which others pick rows from, is missing or "
                f"damaged; {REMEDY}"
            )
        return place.tensor("embeddings")

    def in_folder(self, name: str, *, verify: bool, held_as: str | None = None) -> InFolder | None:
        """Return the folder of a shard whose sources are there too, or of rows; see ``find``."""
        fields = self.fields(name, verify=verify)
        found = None if fields is None else InFolder(self.folder / name, fields)
        if found is None or held_as not in (None, found.held_as):
            return None
        return found if held_as is not None or self._has_sources(found, verify=verify) else None

    def fields(self, name: str, *, verify: bool) -> ShardManifest | None:
        """Return the manifest of a shard's folder, None where the folder is missing or damaged."""
        folder = self.folder / name
        self.mirror.fetch(folder)
        try:
            found = read_shard(folder)
            hash_it = verify and self._hashed.get(name) != found
            manifest.check_files(folder, found, content=hash_it)
        except FormatError:
            raise
        except ArtifactError:
            again = self.mirror.fetch_again(folder)
            return self.fields(name, verify=verify) if again else None
        if hash_it:
            self._hashed[name] = found
            # An upload may have been cut off.
            self.mirror.keep(folder)
        return found

    def is_there(self, name: str) -> bool:
        """Return whether a shard is there, sound or damaged."""
        return self.mirror.has(self.folder / name) or bool(self.packs.find(name, verify=False))

    def culprit(self, name: str) -> Path:
        """Return the file or folder, of a shard or its sources, that is damaged or missing."""
        fields = self.fields(name, verify=True)
        for source, held_as in [] if fields is None else other_sources(fields):
            if self.find(source, verify=True, held_as=held_as) is None:
                return self._damaged_at(source)
        return self._damaged_at(name)

    def _damaged_at(self, name: str) -> Path:
        folder = self.folder / name
        own = manifest.first_damaged(folder, SCHEMA)
        return own or self.packs.damaged(name) or folder

    def _first(self, name: str, *, verify: bool, held_as: str | None) -> Place | None:
        if member := self.packs.find(name, verify=verify, held_as=held_as):
            return member
        if found := self.in_folder(name, verify=verify, held_as=held_as):
            return found
        # It may have been packed since the packs were looked at.
        self.packs.look_again()
        return self.packs.find(name, verify=verify, held_as=held_as)

    def _stands(self, place: Place, held_as: str | None) -> bool:
        """Return whether a place is still as it was found, by its sizes."""
        if isinstance(place, InPack):
            return exists(place.path)
        if self.fields(place.path.name, verify=False) != place.fields:
            return False
        return held_as is not None or self._has_sources(place, verify=False)

    def _has_sources(self, place: InFolder, *, verify: bool) -> bool:
        return all(
            self.find(name, verify=verify, held_as=held_as) is not None
            for name, held_as in place.sources
            if (name, held_as) != SELF
        )

    def _require(self, name: str) -> Place:
        if found := self.find(name, verify=self.verify):
            return found
        # Another machine may have put it into the bucket since that was listed.
        if self.mirror.look_again() and (found := self.find(name, verify=self.verify)):
            return found
        folder = self.folder / name
        if not exists(folder):
            raise _NowhereError(f"shard {name} is in no place in {self.folder}; {REMEDY}")
        # Reading it again names the damage.
        fields = read_shard(folder)
        manifest.check_files(folder, fields, content=self.verify, remedy=REMEDY)
        return InFolder(folder, fields)
