"""The place that a shard, or rows that others pick, are verified in and read from.

A shard may be in several packs and in a folder at once: a process died between writing one and
removing another, others pick rows from the folder, or one is damaged and another replaces it.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import StringConstraints

from whiten_index.artifacts import manifest
from whiten_index.artifacts.files import exists, is_folder, list_folder
from whiten_index.artifacts.manifest import Count, Described, Digest, Positive, Schema
from whiten_index.artifacts.storage import LOCAL, Storage
from whiten_index.artifacts.tensors import map_tensor, write_tensors
from whiten_index.errors import ArtifactError, FormatError
from whiten_index.store.dtypes import EmbeddingsType, type_of
from whiten_index.store.row_refs import SELF, RowRefs, Source, other_sources
from whiten_index.whitening.moments import Moments

KIND, FORMAT_VERSION = "shard", 1
EMBEDDINGS, MOMENTS = "embeddings.safetensors", "moments.safetensors"
REMEDY = "run the same encode or build with the corpus again, which makes just what is missing"
PACK, PACK_FORMAT = "pack", 1
_NAME = re.compile(r"[0-9]{8,}-[0-9a-f]{12}")
_MomentsFile = Annotated[str, StringConstraints(pattern=r"^(moments-[0-9]{5,}\.safetensors)?$")]


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A finished shard.

    Attributes:
        fingerprint: of its texts and of how they are kept.
        rows: n.
        dtype: numpy name of the embeddings' type.
        truncated: texts that were longer than the encoder's limit.
        bytes: size of the embeddings.
    """

    fingerprint: Digest
    rows: Positive
    dtype: EmbeddingsType
    truncated: Count
    bytes: Count


@dataclass(frozen=True, slots=True)
class Member:
    """A shard in a pack, as the manifest of the pack lists it.

    Attributes:
        pack: name of the pack.
        shard: facts of the shard.
        start: first row of the shard in the pack.
        moments: file of its moments, empty where it keeps none; see ``keeps_moments``.
        held_as: the name by which derived shards that pick from it know its rows.
    """

    pack: str
    shard: StoredShard
    start: Count
    moments: _MomentsFile
    held_as: str


@dataclass(frozen=True)
class InPack:
    """A shard in the folder of a pack."""

    path: Path
    member: Member

    @property
    def shard(self) -> StoredShard:
        """Facts of the shard."""
        return self.member.shard

    @property
    def held_as(self) -> str:
        """Name by which others know its rows."""
        return self.member.held_as

    def tensor(self, name: str) -> NDArray[Any]:
        """Return an array of the shard, mapped."""
        whole = map_tensor(self.path / EMBEDDINGS, name, remedy=REMEDY)
        return whole[self.member.start : self.member.start + self.shard.rows]

    def moments(self) -> Moments | None:
        """Return the moments of the shard, None where it keeps none."""
        return Moments.load(self.path / self.member.moments) if self.member.moments else None

    def picks(self) -> None:
        """Return None: a pack holds all the rows of its shards."""


class PackManifest(Described):
    """Manifest of a pack."""

    members: tuple[Member, ...]


_PACK_SCHEMA = Schema(PACK, PACK_FORMAT, PackManifest)


def read_pack(folder: Path) -> PackManifest:
    """Read the manifest of a pack."""
    fields = manifest.read_manifest(folder, _PACK_SCHEMA)
    start = 0
    for member in fields["members"]:
        if (member.pack, member.start) != (folder.name, start):
            raise ArtifactError(
                f"{folder / manifest.MANIFEST} is damaged: its shards do not follow one another; "
                f"{REMEDY}"
            )
        start += member.shard.rows
    return fields


@dataclass(frozen=True, eq=False)
class ToPack:
    """A shard of n rows that goes into a pack; ``held_as`` is empty where nothing picks from it."""

    fingerprint: str
    embeddings: NDArray[np.floating]
    digests: NDArray[np.uint8]
    truncated: NDArray[np.bool_]
    moments: Moments | None
    held_as: str = ""


class Packs:
    """The packs of one encoder in a store."""

    def __init__(self, folder: Path, mirror: Storage = LOCAL) -> None:
        self.folder, self.mirror = folder, mirror
        # The latest place of a shard last.
        self._places: dict[str, list[InPack]] = {}
        # None before the first look.
        self._read: frozenset[str] | None = None
        self._sound: dict[str, bool] = {}

    def names(self) -> list[str]:
        """Return the names of the packs, sound or damaged, the latest last."""
        found = self.mirror.names(self.folder)
        found |= {path.name for path in list_folder(self.folder) if is_folder(path)}
        return sorted(filter(_NAME.fullmatch, found))

    def next_name(self) -> str:
        """Return an unused name that sorts after those of all packs."""
        numbers = [int(name.partition("-")[0]) for name in self.names()]
        return f"{max(numbers, default=0) + 1:08d}-{uuid.uuid4().hex[:12]}"

    def find(self, fingerprint: str, *, verify: bool, held_as: str | None = None) -> InPack | None:
        """Return the latest sound place of a shard; later packs are seen after ``look_again``."""
        if self._read is None:
            self.look_again()
        for place in reversed(self._places.get(fingerprint, [])):
            wanted = held_as in (None, place.held_as) and exists(place.path)
            if wanted and (not verify or self.is_sound(place.path.name)):
                return place
        return None

    def fields(self, name: str, *, verify: bool) -> PackManifest | None:
        """Return the manifest of a pack, None where it is damaged."""
        folder = self.folder / name
        self.mirror.fetch(folder)
        try:
            fields = read_pack(folder)
            manifest.check_files(folder, fields, content=verify)
        except FormatError:
            raise
        except ArtifactError:
            again = self.mirror.fetch_again(folder)
            return self.fields(name, verify=verify) if again else None
        return fields

    def write(self, name: str, shards: Sequence[ToPack]) -> list[Member]:
        """Join shards of one type in a pack, whole or not at all."""
        members: list[Member] = []
        start = 0
        for number, shard in enumerate(shards):
            rows, cut = shard.embeddings, int(shard.truncated.sum())
            facts = StoredShard(shard.fingerprint, len(rows), type_of(rows.dtype), cut, rows.nbytes)
            moments = "" if shard.moments is None else f"moments-{number:05d}.safetensors"
            held_as = shard.held_as or f"{name}:{start}"
            members.append(Member(name, facts, start, moments, held_as))
            start += len(rows)
        tensors = {
            "embeddings": np.concatenate([shard.embeddings for shard in shards]),
            "digests": np.concatenate([shard.digests for shard in shards]),
            "truncated": np.concatenate([shard.truncated for shard in shards]).astype(np.uint8),
        }
        with manifest.new_artifact(self.folder / name) as (folder, fields):
            write_tensors(folder / EMBEDDINGS, tensors, kind=PACK, version=PACK_FORMAT)
            for shard, member in zip(shards, members, strict=True):
                if shard.moments is not None:
                    shard.moments.save(folder / member.moments)
            listed = [asdict(member) for member in members]
            fields |= {"kind": PACK, "format_version": PACK_FORMAT, "members": listed}
        self.mirror.push(self.folder / name)
        self.look_again()
        return members

    def damaged(self, fingerprint: str) -> Path | None:
        """Return the damaged file of a pack that a shard is in, or may be; None where none is."""
        unknown = None
        for name in reversed(self.names()):
            folder = self.folder / name
            try:
                members = read_pack(folder)["members"]
            except FormatError:
                raise
            except ArtifactError:
                unknown = unknown or folder / manifest.MANIFEST
                continue
            if fingerprint in {each.shard.fingerprint for each in members} and (
                found := manifest.first_damaged(folder, _PACK_SCHEMA)
            ):
                return found
        return unknown

    def look_again(self) -> None:
        """Take note of packs that were written since."""
        names, known = self.names(), self._read or frozenset()
        for name in sorted(set(names) - known):
            fields = self.fields(name, verify=False)
            for member in [] if fields is None else fields["members"]:
                place = InPack(self.folder / name, member)
                # Another thread may read the list of before.
                before = self._places.get(place.shard.fingerprint, [])
                self._places[place.shard.fingerprint] = [*before, place]
        self._read = frozenset(names)

    def is_sound(self, name: str) -> bool:
        """Return whether a pack matches its checksums, which are compared once."""
        if name not in self._sound:
            self._sound[name] = self.fields(name, verify=True) is not None
        return self._sound[name]


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
        folder = self.folder / name
        known = exists(folder) or self.mirror.holds(folder)
        return known or bool(self.packs.find(name, verify=False))

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
