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
from whiten_index.store.row_refs import Source, other_sources
from whiten_index.store.shard_resolver import MOMENTS, InFolder, Member

_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
# Most file systems allocate files in blocks of this size.
_BLOCK = 4096


@dataclass(frozen=True)
class ShardFolder:
    """The folder of a shard, with files of the right sizes.

    Attributes:
        name: fingerprint of the shard.
        held_as: name by which others know the rows in the folder.
        sources: other places that it picks rows from.
        rows: n of the shard.
        dtype: numpy name of their type.
        to_write: bytes that its rows would take in a pack.
        to_free: bytes on the disk that its folder takes, in whole blocks. In both, moments that a
            pack would hold too are left out.
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
    fields = store.resolver.fields(name, verify=False)
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
    held_as = InFolder(store.shards_folder / name, fields).held_as
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

    Attributes:
        folders: names of shards whose folder stays.
        packs: names of packs.
        homes: shard -> its place in a pack.
        pinned: packs with rows that others pick, and that are not the place of their shard.
        missing: shards that are nowhere.
        damaged: shards that are nowhere but in a damaged folder.
    """

    def __init__(self, inventory: Inventory, to_pack: Collection[str] = ()) -> None:
        """Take all there is; folders of the shards ``to_pack`` are not counted as needed."""
        self.folders, self.packs, self.pinned = set[str](), set[str](), set[str]()
        self.missing, self.damaged = set[str](), set[str]()
        self.homes = dict[str, Member]()
        self._inventory, self._store, self._to_pack = inventory, inventory.store, to_pack
        self._packed = inventory.packed()
        self._met: set[str] = set()
        self._held = dict[Source, Member | None]()

    def keep(self, shards: Iterable[str]) -> None:
        """Add everything that these shards need."""
        shards_left, sources_left = list(shards)[::-1], list[Source]()
        while shards_left or sources_left:
            if sources_left:
                # A job that meets the shard again needs all of it, or it would encode it again.
                shards_left.append(sources_left[-1][0])
                self._hold(sources_left.pop())
            else:
                sources_left += self._keep(shards_left.pop())
        self.pinned |= {
            member.pack
            for (name, _), member in self._held.items()
            if member is not None and member != self.homes.get(name)
        }

    def _keep(self, shard: str) -> tuple[Source, ...]:
        """Keep the best place of a shard; return the sources of that."""
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
            if alone or self._store.packs.is_sound(member.pack):
                self.packs.add(member.pack)
                self.homes[shard] = member
                return ()
        if folder is None or not (alone or self._is_sound(shard)):
            # None is sound: the user decides which one to restore from a copy.
            self.packs |= {member.pack for member in packed}
        if folder is None or shard in self._to_pack:
            return ()
        self.folders.add(shard)
        return folder.sources

    def _hold(self, source: Source) -> None:
        """Keep the best place of rows that others pick."""
        if source in self._held:
            return
        name, held_as = source
        folder = self._inventory.folders.get(name)
        in_folder = folder is not None and folder.held_as == held_as
        packed = [each for each in self._packed.get(name, []) if each.held_as == held_as]
        alone = len(packed) + in_folder == 1
        sound = (each for each in packed if alone or self._store.packs.is_sound(each.pack))
        best = self._held[source] = next(sound, None)
        if best is not None:
            self.packs.add(best.pack)
            return
        if in_folder:
            self.folders.add(name)
        if not in_folder or not (alone or self._is_sound(name, held_as=held_as)):
            self.packs |= {each.pack for each in packed}
        if not in_folder and not packed:
            self.missing.add(name)

    def _is_sound(self, shard: str, *, held_as: str | None = None) -> bool:
        return self._store.resolver.in_folder(shard, verify=True, held_as=held_as) is not None
