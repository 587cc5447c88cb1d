"""Packs: small or derived shards joined in one folder, each a stretch of its rows."""

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
from whiten_index.store.records import REMEDY
from whiten_index.whitening.moments import Moments

KIND, FORMAT_VERSION = "pack", 1
EMBEDDINGS = "embeddings.safetensors"
_NAME = re.compile(r"[0-9]{8,}-[0-9a-f]{12}")
_MomentsFile = Annotated[str, StringConstraints(pattern=r"^(moments-[0-9]{5,}\.safetensors)?$")]


@dataclass(frozen=True, slots=True)
class Member:
    """A shard in a pack.

    Attributes:
        pack: name of the pack.
        fingerprint: of the shard.
        start: its first row in the pack.
        rows: n.
        dtype: numpy name of the embeddings' type.
        truncated: texts that were longer than the encoder's limit.
        bytes: size of its embeddings.
        moments: name of the file of its moments, empty where its rows are so few that these are
            taken anew.
        held_as: what derived shards that pick from it know its rows by.
    """

    pack: str
    fingerprint: Digest
    start: Count
    rows: Positive
    dtype: EmbeddingsType
    truncated: Count
    bytes: Count
    moments: _MomentsFile
    held_as: str

    @property
    def keeps_moments(self) -> bool:
        """Whether its moments are in a file; else its rows are so few that they are taken anew."""
        return bool(self.moments)

    def facts(self) -> dict[str, Any]:
        """Return what is known of the shard itself."""
        names = ("fingerprint", "rows", "dtype", "truncated", "bytes")
        return {name: getattr(self, name) for name in names}


class PackManifest(Described):
    """Manifest of a pack."""

    members: tuple[Member, ...]


SCHEMA = Schema(KIND, FORMAT_VERSION, PackManifest)


def read_pack(folder: Path) -> PackManifest:
    """Read the manifest of a pack."""
    fields = manifest.read_manifest(folder, SCHEMA)
    start = 0
    for member in fields["members"]:
        if (member.pack, member.start) != (folder.name, start):
            raise ArtifactError(
                f"{folder / manifest.MANIFEST} is damaged: its shards do not follow one another; "
                f"{REMEDY}"
            )
        start += member.rows
    return fields


@dataclass(frozen=True, eq=False)
class ToPack:
    """A shard that goes into a pack.

    Attributes:
        fingerprint: of the shard.
        embeddings: (n, d) as kept.
        digests: (n, 16) of its texts.
        truncated: (n,) whether a text was cut.
        moments: of its rows, None where these are so few that they are taken anew when needed.
        held_as: what derived shards that pick from it know its rows by, empty where none can yet.
    """

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
        # Of a shard that was packed anew, the latest place last.
        self._members: dict[str, tuple[Member, ...]] = {}
        # None where nothing was looked at so far.
        self._read: frozenset[str] | None = None
        self._sound: dict[str, bool] = {}

    def names(self) -> list[str]:
        """Return the names of the packs, whole or damaged, the latest last; of nothing else."""
        found = self.mirror.names(self.folder)
        found |= {path.name for path in list_folder(self.folder) if is_folder(path)}
        return sorted(filter(_NAME.fullmatch, found))

    def next_name(self) -> str:
        """Return a name for a new pack, later than all that are there, that never was another's."""
        numbers = [int(name.partition("-")[0]) for name in self.names()]
        return f"{max(numbers, default=0) + 1:08d}-{uuid.uuid4().hex[:12]}"

    def find(self, fingerprint: str, *, verify: bool, held_as: str | None = None) -> Member | None:
        """Return where a shard is packed, the latest place; None where it is in no sound pack.

        Packs that came since are seen after ``look_again``.
        """
        if self._read is None:
            self.look_again()
        for member in reversed(self._members.get(fingerprint, ())):
            wanted = held_as in (None, member.held_as) and self.is_there(member)
            if wanted and (not verify or self._is_sound(member.pack)):
                return member
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
            rows = len(shard.embeddings)
            moments = "" if shard.moments is None else f"moments-{number:05d}.safetensors"
            dtype, truncated = type_of(shard.embeddings.dtype), int(shard.truncated.sum())
            size = shard.embeddings.nbytes
            held_as = shard.held_as or f"{name}:{start}"
            known = (shard.fingerprint, start, rows, dtype, truncated, size, moments, held_as)
            members.append(Member(name, *known))
            start += rows

        def fill(folder: Path) -> dict[str, Any]:
            tensors = {
                "embeddings": np.concatenate([shard.embeddings for shard in shards]),
                "digests": np.concatenate([shard.digests for shard in shards]),
                "truncated": np.concatenate([shard.truncated for shard in shards]).astype(np.uint8),
            }
            write_tensors(folder / EMBEDDINGS, tensors, kind=KIND, version=FORMAT_VERSION)
            for shard, member in zip(shards, members, strict=True):
                if shard.moments is not None:
                    shard.moments.save(folder / member.moments)
            listed = [asdict(member) for member in members]
            return {"kind": KIND, "format_version": FORMAT_VERSION, "members": listed}

        manifest.publish_folder(self.folder / name, fill)
        self.mirror.push(self.folder / name)
        self.look_again()
        return members

    def embeddings(self, member: Member) -> NDArray[np.floating]:
        """Return the embeddings (n, d) of a shard, of which only rows that are touched are read."""
        return self._map(member, "embeddings")

    def tensor(self, member: Member, name: str) -> NDArray[Any]:
        """Return the ``digests`` or the flags ``truncated`` of a shard's rows."""
        return np.array(self._map(member, name))

    def moments(self, member: Member) -> Moments:
        """Return the moments of a shard's embeddings as kept, of one that keeps them."""
        return Moments.load(self.folder / member.pack / member.moments)

    def _map(self, member: Member, name: str) -> NDArray[Any]:
        whole = map_tensor(self.folder / member.pack / EMBEDDINGS, name, remedy=REMEDY)
        return whole[member.start : member.start + member.rows]

    def is_there(self, member: Member) -> bool:
        """Tell whether the pack of a member is still there."""
        return exists(self.folder / member.pack)

    def damaged(self, fingerprint: str) -> Path | None:
        """Return the damaged file of a pack that a shard is in, or may be; None where none is."""
        unknown = None
        for name in reversed(self.names()):
            folder = self.folder / name
            fields = self._listed(folder)
            if fields is None:
                unknown = unknown or folder / manifest.MANIFEST
            elif any(each.fingerprint == fingerprint for each in fields["members"]):
                found = manifest.first_damaged(folder, SCHEMA)
                if found is not None:
                    return found
        return unknown

    def _listed(self, folder: Path) -> PackManifest | None:
        """Return the manifest of a pack, whose files may be damaged; None where it is itself."""
        try:
            return read_pack(folder)
        except FormatError:
            raise
        except ArtifactError:
            return None

    def look_again(self) -> None:
        """Take note of packs that came since; ``find`` knows of no others."""
        names, known = self.names(), self._read or frozenset()
        for name in names:
            if name in known:
                continue
            fields = self.fields(name, verify=False)
            for member in [] if fields is None else fields["members"]:
                self._members[member.fingerprint] = (
                    *self._members.get(member.fingerprint, ()),
                    member,
                )
        self._read = frozenset(names)

    def _is_sound(self, name: str) -> bool:
        if name not in self._sound:
            self._sound[name] = self.fields(name, verify=True) is not None
        return self._sound[name]
