"""What is in the folder of an encoder in a store, as its manifests say."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from whiten_index.artifacts.files import exists, is_folder, list_folder, size_of
from whiten_index.artifacts.manifest import MANIFEST
from whiten_index.errors import ArtifactError
from whiten_index.store.dtypes import keeps_moments, rows_bytes
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.packs import Member
from whiten_index.store.row_refs import Source, other_sources
from whiten_index.store.shard_resolver import MOMENTS, held_by_folder
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
        """Look at every manifest, and at the sizes of files.

        Raises:
            FormatError: a later release wrote something.
        """
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

    def places(self) -> dict[str, list[Member]]:
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
    fields = shards.places.fields(name, verify=False)
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
    """Open the stores of all the encoders below a root folder.

    Raises:
        ArtifactError: there is none, or one is damaged.
    """
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
