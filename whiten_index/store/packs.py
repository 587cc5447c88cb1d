"""Places of shards: folders of their own, and packs, which join small shards."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

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
from whiten_index.store.row_refs import RowRefs, Source
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
    """A shard in a pack, as the manifest of the pack lists it."""

    pack: str
    shard: StoredShard
    # Its first row in the pack.
    start: Count
    # Empty where it keeps none; see ``keeps_moments``.
    moments: _MomentsFile
    # The name by which derived shards that pick from it know its rows.
    held_as: str


@dataclass(frozen=True, eq=False)
class ShardPlace:
    """A shard in its folder or in a pack, or the rows that a folder itself holds."""

    path: Path
    shard: StoredShard
    # The name by which derived shards know the rows.
    held_as: str
    # Empty where it keeps none.
    moments_file: str
    # Sources of the rows, the shard itself among them; none where it is whole.
    sources: tuple[Source, ...] = ()
    # Its first row in a pack.
    start: int | None = None

    @classmethod
    def in_folder(cls, path: Path, fields: ShardManifest) -> ShardPlace:
        """Return the place of a shard by the manifest of its folder."""
        files, moments = fields["files"], MOMENTS if MOMENTS in fields["files"] else ""
        held_as = files[EMBEDDINGS]["sha256"]
        return cls(path, fields["shard"], held_as, moments, fields["sources"])

    @classmethod
    def in_pack(cls, path: Path, member: Member) -> ShardPlace:
        """Return the place of a shard by the manifest of a pack."""
        return cls(path, member.shard, member.held_as, member.moments, start=member.start)

    def tensor(self, name: str) -> NDArray[Any]:
        """Return an array of the shard, mapped."""
        whole = map_tensor(self.path / EMBEDDINGS, name, remedy=REMEDY)
        return whole if self.start is None else whole[self.start : self.start + self.shard.rows]

    def moments(self) -> Moments | None:
        """Return the moments of the shard, None where it keeps none."""
        return Moments.load(self.path / self.moments_file) if self.moments_file else None

    def picks(self) -> RowRefs | None:
        """Return the places of the rows of a derived shard, None for a whole one."""
        if not self.sources:
            return None
        source, row = (np.array(self.tensor(name), dtype=np.int32) for name in ("source", "row"))
        return RowRefs(self.sources, source, row)


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
        self._places: dict[str, list[ShardPlace]] = {}
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

    def find(
        self, fingerprint: str, *, verify: bool, held_as: str | None = None
    ) -> ShardPlace | None:
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
                place = ShardPlace.in_pack(self.folder / name, member)
                # Another thread may read the list of before.
                before = self._places.get(place.shard.fingerprint, [])
                self._places[place.shard.fingerprint] = [*before, place]
        self._read = frozenset(names)

    def is_sound(self, name: str) -> bool:
        """Return whether a pack matches its checksums, which are compared once."""
        if name not in self._sound:
            self._sound[name] = self.fields(name, verify=True) is not None
        return self._sound[name]


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
