"""What is in the folder of an encoder in a store, as its manifests say."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
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
from whiten_index.store.packs import Member
from whiten_index.store.row_refs import Source, other_sources
from whiten_index.store.shard_resolver import MOMENTS, ShardResolver, held_by_folder
from whiten_index.store.shards import Shards

_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
# What file systems give a file in, most of them.
_BLOCK = 4096


@dataclass(frozen=True)
class ShardFolder:
    """The folder of a shard, its files there and of the right size.

    Attributes:
        name: fingerprint of the shard.
        held_as: what the rows that it holds itself are known by.
        sources: what it picks rows from, nothing where it is whole.
        rows: n of the shard, however many of them it holds itself.
        dtype: numpy name of their type.
        to_write: bytes that its rows would take in a pack.
        to_free: bytes on the disk that its folder takes, files in whole blocks; in either, moments
            that a pack would hold too are left out.
    """

    name: str
    held_as: str
    sources: tuple[Source, ...]
    rows: int
    dtype: str
    to_write: int
    to_free: int


@dataclass(frozen=True)
class Inventory:
    """Everything that takes room in the folder of an encoder.

    Attributes:
        store: of the encoder.
        folders: name -> folder of a shard.
        packs: name -> members of a pack, the latest pack last.
        damaged_folders: names of shards whose folder is damaged.
        damaged_packs: names of packs likewise.
        documents: digest -> file of ids and kept columns.
    """

    store: EmbeddingStore
    folders: Mapping[str, ShardFolder]
    packs: Mapping[str, tuple[Member, ...]]
    damaged_folders: frozenset[str]
    damaged_packs: frozenset[str]
    documents: Mapping[str, Path]

    @classmethod
    def take(cls, store: EmbeddingStore) -> Inventory:
        """Look at every manifest, and at the sizes of files."""
        shards = store.shards
        folders = {name: _shard_folder(shards, name) for name in shard_names(shards.folder)}
        packs = {name: shards.packs.fields(name, verify=False) for name in shards.packs.names()}
        return cls(
            store=store,
            folders={name: folder for name, folder in folders.items() if folder is not None},
            packs={name: fields["members"] for name, fields in packs.items() if fields},
            damaged_folders=frozenset(name for name, folder in folders.items() if folder is None),
            damaged_packs=frozenset(name for name, fields in packs.items() if not fields),
            documents=store.document_files.by_name(),
        )

    @property
    def shards(self) -> set[str]:
        """Fingerprints of the shards that are there in one way or another."""
        members = {each.fingerprint for members in self.packs.values() for each in members}
        return members | set(self.folders)

    def packed(self) -> dict[str, list[Member]]:
        """Return fingerprint -> where the shard is packed, the latest place first."""
        found: dict[str, list[Member]] = {}
        for members in self.packs.values():
            for member in members:
                found.setdefault(member.fingerprint, []).insert(0, member)
        return found

    def shard_path(self, name: str) -> Path:
        """Return the folder of a shard."""
        return self.store.shards.folder / name

    def pack_path(self, name: str) -> Path:
        """Return the folder of a pack."""
        return self.store.shards.packs.folder / name

    @property
    def bytes(self) -> int:
        """Size of all the files of shards, packs and rows."""
        paths = [self.shard_path(name) for name in (*self.folders, *self.damaged_folders)]
        paths += [self.pack_path(name) for name in (*self.packs, *self.damaged_packs)]
        return sum(map(size_of, (*paths, *self.documents.values())))


def _shard_folder(shards: Shards, name: str) -> ShardFolder | None:
    fields = shards.resolver.fields(name, verify=False)
    if fields is None:
        return None
    sources = tuple(dict.fromkeys(other_sources(fields)))
    shard = fields["shard"]
    rows, itemsize = shard.rows, np.dtype(shard.dtype).itemsize
    dim = shard.bytes // (rows * itemsize)
    sizes = {name: file["bytes"] for name, file in fields["files"].items()}
    if keeps_moments(rows, dim):
        sizes.pop(MOMENTS, None)
    to_write, to_free = rows_bytes(rows, dim, itemsize), _on_disk(sizes.values())
    return ShardFolder(name, held_by_folder(fields), sources, rows, shard.dtype, to_write, to_free)


def _on_disk(files: Iterable[int]) -> int:
    """Return what a folder of files of so many bytes takes up."""
    # The manifest and the folder itself take a block each.
    return _BLOCK * (2 + sum(-(-size // _BLOCK) for size in files))


def shard_names(folder: Path) -> list[str]:
    """Return the names of the folders of shards, sound or not, and of nothing else in a folder."""
    return [name for name in folder_names(folder) if _FINGERPRINT.fullmatch(name)]


def folder_names(folder: Path) -> list[str]:
    """Return the names of the folders in a folder but those of unfinished work."""
    found = list_folder(folder, "[!.]*") if is_folder(folder) else []
    return [path.name for path in found if is_folder(path)]


def open_stores(root: Path) -> list[EmbeddingStore]:
    """Open the stores of all the encoders below a root folder."""
    found = [EmbeddingStore.open(root, fingerprint=folder.name) for folder in encoder_folders(root)]
    if not found:
        raise ArtifactError(
            f"{root} holds no store of embeddings; check the path: it is the folder that was named "
            "to --store, or the folder store of an index"
        )
    return found


def encoder_folders(root: Path) -> Iterator[Path]:
    """Yield the folders of encoders below a root folder, damaged ones among them."""
    for name in folder_names(root):
        folder = root / name
        if exists(folder / MANIFEST) or is_folder(folder / "shards"):
            yield folder


class LiveSet:
    """What must stay for shards to be found, of several places of one the soundest.

    A pack goes before a folder, the latest pack first, and nothing that a checksum speaks against
    where there is another. The sources of a shard that stays by its own folder stay too; those of
    one that stays in a pack need not.

    Attributes:
        folders: names of shards whose own folder stays.
        packs: names of packs.
        missing: shards that are nowhere.
        damaged: shards that are nowhere but in a damaged folder.
    """

    def __init__(self, inventory: Inventory) -> None:
        self.folders, self.packs = set[str](), set[str]()
        self.missing, self.damaged = set[str](), set[str]()
        self._inventory = inventory
        self._packed = inventory.packed()
        self._met: set[str] = set()
        self._held: set[Source] = set()
        self._sound: dict[str, bool] = {}

    def keep(self, shards: Iterable[str]) -> None:
        """Add what these shards need."""
        shards_left, sources_left = list(shards), list[Source]()
        while shards_left or sources_left:
            if sources_left:
                shards_left += self._hold(sources_left.pop())
            else:
                sources_left += self._keep(shards_left.pop())

    def _keep(self, shard: str) -> tuple[Source, ...]:
        """Keep the best place of a shard; return what that picks from."""
        if shard in self._met:
            return ()
        self._met.add(shard)
        folder, packed = self._inventory.folders.get(shard), self._packed.get(shard, [])
        if folder is None and not packed:
            if shard in self._inventory.damaged_folders:
                self.damaged.add(shard)
                self.folders.add(shard)
            else:
                self.missing.add(shard)
            return ()
        alone = len(packed) + (folder is not None) == 1
        for member in packed:
            if alone or self._is_sound(member.pack):
                self.packs.add(member.pack)
                return ()
        if folder is None or not (alone or self._resolver.in_folder(shard, verify=True)):
            # Nothing is sound: what is worth restoring from a copy is not for a program to say.
            self.packs |= {member.pack for member in packed}
        if folder is None:
            return ()
        self.folders.add(shard)
        return folder.sources

    def _hold(self, source: Source) -> tuple[str, ...]:
        """Keep the best place of rows that others pick; return the shard that has to stay whole."""
        if source in self._held:
            return ()
        self._held.add(source)
        name, held_as = source
        folder = self._inventory.folders.get(name)
        in_folder = folder is not None and folder.held_as == held_as
        packed = [each for each in self._packed.get(name, []) if each.held_as == held_as]
        alone = len(packed) + in_folder == 1
        best = next((each for each in packed if alone or self._is_sound(each.pack)), None)
        if best is not None:
            self.packs.add(best.pack)
        elif in_folder:
            self.folders.add(name)
            if not (alone or self._resolver.in_folder(name, verify=True, held_as=held_as)):
                self.packs |= {each.pack for each in packed}
        elif packed:
            self.packs |= {each.pack for each in packed}
        else:
            self.missing.add(name)
        # Another job that meets the shard would encode it again if not all of it were there.
        return (name,)

    @property
    def _resolver(self) -> ShardResolver:
        return self._inventory.store.shards.resolver

    def _is_sound(self, pack: str) -> bool:
        if pack not in self._sound:
            packs = self._inventory.store.shards.packs
            self._sound[pack] = packs.fields(pack, verify=True) is not None
        return self._sound[pack]


@dataclass
class Removed:
    """Number of folders of shards, of packs and of files of rows removed, and their bytes."""

    shards: int = 0
    packs: int = 0
    rows: int = 0
    bytes: int = 0

    def __add__(self, other: Removed) -> Removed:
        mine, others = vars(self), vars(other)
        return Removed(**{name: mine[name] + others[name] for name in mine})


def remove(
    inventory: Inventory,
    *,
    folders: set[str],
    packs: set[str],
    documents: set[str],
    dry_run: bool = False,
) -> Removed:
    """Remove folders of shards, packs and rows; each is there whole or not at all to who looks.

    What picks rows goes before what it picks them from, so that whenever this process dies every
    shard that is left can be read.
    """
    paths = [inventory.shard_path(name) for name in _pickers_first(inventory, folders)]
    paths += [inventory.pack_path(name) for name in sorted(packs)]
    files = [inventory.documents[digest] for digest in sorted(documents)]
    size = sum(map(size_of, (*paths, *files)))
    if not dry_run:
        for path in paths:
            remove_folder(path)
        if files:
            with writing(files[0].parent, kept=""):
                for path in files:
                    path.unlink(missing_ok=True)
                fsync_path(files[0].parent)
    return Removed(len(folders), len(packs), len(documents), size)


def _pickers_first(inventory: Inventory, names: set[str]) -> list[str]:
    graph = TopologicalSorter[str](dict.fromkeys(sorted(names), ()))
    for name in sorted(names & set(inventory.folders)):
        for source, _ in inventory.folders[name].sources:
            if source in names:
                graph.add(source, name)
    try:
        return list(graph.static_order())
    except CycleError:
        # Only where one was damaged, so that there is no order in which all can be read.
        return sorted(names)
