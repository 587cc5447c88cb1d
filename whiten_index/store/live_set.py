"""Everything in the folder of an encoder, and the part of it that some shards need."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import numpy as np

from whiten_index.artifacts.atomic import remove_folder
from whiten_index.artifacts.files import (
    exists,
    fsync_path,
    is_folder,
    list_folder,
    size_of,
    writing,
)
from whiten_index.artifacts.manifest import MANIFEST
from whiten_index.errors import ArtifactError
from whiten_index.store.dtypes import keeps_moments, rows_bytes
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.packs import MOMENTS, Member, ShardPlace
from whiten_index.store.row_refs import Source, other_sources

_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
# Most file systems allocate files in blocks of this size.
_BLOCK = 4096


@dataclass(frozen=True)
class ShardFolder:
    """The folder of a shard, with files of the right sizes."""

    name: str
    held_as: str
    # Other places that it picks rows from.
    sources: tuple[Source, ...]
    rows: int
    dtype: str
    # Bytes that its rows would take in a pack, and bytes on the disk that its folder takes, in
    # whole blocks. In both, moments that a pack would hold too are left out.
    to_write: int
    to_free: int


@dataclass(frozen=True)
class Inventory:
    """Everything that takes room in the folder of an encoder, by name; the latest pack last."""

    store: EmbeddingStore
    folders: Mapping[str, ShardFolder]
    packs: Mapping[str, tuple[Member, ...]]
    damaged_folders: frozenset[str]
    damaged_packs: frozenset[str]
    # Digest -> file of ids and kept columns.
    documents: Mapping[str, Path]

    @classmethod
    def take(cls, store: EmbeddingStore) -> Inventory:
        """Look at every manifest, and at the sizes of files."""
        folders = {name: _shard_folder(store, name) for name in shard_names(store)}
        packs = {name: store.packs.fields(name, verify=False) for name in store.packs.names()}
        return cls(
            store=store,
            folders={name: folder for name, folder in folders.items() if folder is not None},
            packs={name: fields["members"] for name, fields in packs.items() if fields},
            damaged_folders=frozenset(name for name, folder in folders.items() if folder is None),
            damaged_packs=frozenset(name for name, fields in packs.items() if not fields),
            documents=store.documents_paths(),
        )

    @property
    def all_folders(self) -> set[str]:
        """Names of the folders of shards, sound or damaged."""
        return {*self.folders, *self.damaged_folders}

    @property
    def all_packs(self) -> set[str]:
        """Names of the packs, sound or damaged."""
        return {*self.packs, *self.damaged_packs}

    @property
    def shards(self) -> set[str]:
        """Fingerprints of the shards in folders and packs."""
        members = {each.shard.fingerprint for members in self.packs.values() for each in members}
        return members | set(self.folders)

    def packed(self) -> dict[str, list[Member]]:
        """Return fingerprint -> places of the shard in packs, the latest first."""
        found: dict[str, list[Member]] = {}
        for members in self.packs.values():
            for member in members:
                found.setdefault(member.shard.fingerprint, []).insert(0, member)
        return found

    def shard_path(self, name: str) -> Path:
        """Return the folder of a shard."""
        return self.store.shards_folder / name

    def pack_path(self, name: str) -> Path:
        """Return the folder of a pack."""
        return self.store.packs.folder / name

    def sizes(self) -> Counter[str]:
        """Return the numbers of folders of shards and of packs, and the bytes of all files."""
        paths = [
            *map(self.shard_path, self.all_folders),
            *map(self.pack_path, self.all_packs),
            *self.documents.values(),
        ]
        size = sum(map(size_of, paths))
        return Counter(shards=len(self.all_folders), packs=len(self.all_packs), bytes=size)

    def remove(
        self,
        *,
        folders: Collection[str],
        packs: Collection[str],
        documents: Collection[str] = (),
        dry_run: bool = False,
    ) -> Counter[str]:
        """Remove folders of shards, packs and files of rows; return how many, and their bytes.

        A shard goes before its sources, so that after a crash every remaining shard can be read.
        """
        paths = [self.shard_path(name) for name in self._pickers_first(folders)]
        paths += [self.pack_path(name) for name in sorted(packs)]
        files = [self.documents[digest] for digest in sorted(documents)]
        size = sum(map(size_of, (*paths, *files)))
        if not dry_run:
            for path in paths:
                remove_folder(path)
            if files:
                with writing(files[0].parent, kept=""):
                    for path in files:
                        path.unlink(missing_ok=True)
                    fsync_path(files[0].parent)
        return Counter(shards=len(folders), packs=len(packs), rows=len(documents), bytes=size)

    def _pickers_first(self, names: Collection[str]) -> list[str]:
        graph = TopologicalSorter[str](dict.fromkeys(sorted(names), ()))
        for name in sorted(set(names) & set(self.folders)):
            for source, _ in self.folders[name].sources:
                if source in names:
                    graph.add(source, name)
        try:
            return list(graph.static_order())
        except CycleError:
            # Only where one was damaged, so that no order keeps all readable.
            return sorted(names)


def _shard_folder(store: EmbeddingStore, name: str) -> ShardFolder | None:
    fields = store.folder_manifest(name, verify=False)
    if fields is None:
        return None
    shard, sources = fields["shard"], tuple(dict.fromkeys(other_sources(fields)))
    rows, itemsize = shard.rows, np.dtype(shard.dtype).itemsize
    dim = shard.bytes // (rows * itemsize)
    sizes = {file: described["bytes"] for file, described in fields["files"].items()}
    if keeps_moments(rows, dim):
        sizes.pop(MOMENTS, None)
    # The manifest and the folder take a block each.
    to_free = _BLOCK * (2 + sum(-(-size // _BLOCK) for size in sizes.values()))
    held_as = ShardPlace.in_folder(store.shards_folder / name, fields).held_as
    to_write = rows_bytes(rows, dim, itemsize)
    return ShardFolder(name, held_as, sources, rows, shard.dtype, to_write, to_free)


def shard_names(store: EmbeddingStore) -> list[str]:
    """Return the names of the folders of shards, sound or damaged."""
    return [name for name in _folder_names(store.shards_folder) if _FINGERPRINT.fullmatch(name)]


def _folder_names(folder: Path) -> list[str]:
    found = list_folder(folder, "[!.]*") if is_folder(folder) else []
    return [path.name for path in found if is_folder(path)]


def encoder_folders(root: Path) -> Iterator[Path]:
    """Yield the folders of encoders below a root folder, damaged ones among them."""
    for name in _folder_names(root):
        folder = root / name
        if exists(folder / MANIFEST) or is_folder(folder / "shards"):
            yield folder


def require_encoder_folders(root: Path) -> list[Path]:
    """Return the folders of encoders below a root folder, or raise ``ArtifactError``."""
    if found := list(encoder_folders(root)):
        return found
    raise ArtifactError(
        f"{root} holds no store of embeddings; check the path: it is the folder that was named "
        "to --store, or the folder store of an index"
    )


def open_stores(root: Path) -> list[EmbeddingStore]:
    """Open the stores of all the encoders below a root folder."""
    folders = require_encoder_folders(root)
    return [EmbeddingStore.open(root, fingerprint=folder.name) for folder in folders]


class LiveSet:
    """Everything that must stay for shards to be found, of several places of one the soundest.

    The latest pack goes first, then earlier packs, then a folder; a place that does not match its
    checksums goes last. The sources of a shard in a folder stay too.
    """

    def __init__(self, inventory: Inventory, to_pack: Collection[str] = ()) -> None:
        """Take all there is; folders of the shards ``to_pack`` are not counted as needed."""
        # Names of shards whose folder stays, of packs, and of shards that cannot be read.
        self.folders, self.packs, self.missing = set[str](), set[str](), set[str]()
        # Shard -> its place in a pack; and packs with rows that shards pick from another place.
        self.homes, self.pinned = dict[str, Member](), set[str]()
        self._inventory, self._store, self._to_pack = inventory, inventory.store, to_pack
        self._packed = inventory.packed()
        # Shard and the name that others know its rows by, empty for the shard itself.
        self._met = dict[Source, Member | None]()

    def keep(self, shards: Iterable[str]) -> None:
        """Add everything that these shards need."""
        needed = [(shard, "") for shard in shards]
        while needed:
            each = needed.pop()
            if each not in self._met:
                needed += self._keep(*each)
        self.homes = {name: home for (name, as_), home in self._met.items() if home and not as_}
        held = (each for (name, _), each in self._met.items() if each != self.homes.get(name))
        self.pinned = {member.pack for member in held if member is not None}

    def _keep(self, shard: str, held_as: str) -> Iterable[Source]:
        """Keep the best place of a shard, or of rows that others pick; return what that needs."""
        self._met[shard, held_as] = None
        # A job that meets the shard again needs all of it, or it would encode it again.
        whole = [(shard, "")] if held_as else []
        folder = self._inventory.folders.get(shard)
        packed = self._packed.get(shard, [])
        if held_as:
            folder = folder if folder is not None and folder.held_as == held_as else None
            packed = [member for member in packed if member.held_as == held_as]
        if folder is None and not packed:
            self.missing.add(shard)
            self.folders |= {shard} & self._inventory.damaged_folders
            return whole
        alone = len(packed) + (folder is not None) == 1
        for member in packed:
            if alone or self._store.packs.is_sound(member.pack):
                self.packs.add(member.pack)
                self._met[shard, held_as] = member
                return whole
        if folder is None or not (alone or self._is_sound(shard, held_as)):
            # None is sound: the user decides which one to restore from a copy.
            self.packs |= {member.pack for member in packed}
        if folder is None or (shard in self._to_pack and not held_as):
            return whole
        self.folders.add(shard)
        return whole or folder.sources

    def _is_sound(self, shard: str, held_as: str) -> bool:
        found = self._store.in_folder(shard, verify=True, held_as=held_as or None)
        return found is not None
