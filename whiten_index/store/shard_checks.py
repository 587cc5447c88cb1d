"""Checks of the folders of shards and of packs, one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from whiten_index.artifacts.manifest import check_files
from whiten_index.errors import ArtifactError, FormatError, StorageError
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.live_set import shard_names
from whiten_index.store.row_refs import other_sources
from whiten_index.store.shard_resolver import InFolder, InPack, Place, read_pack, read_shard


class ShardChecks:
    """The shards and packs of a store as far as they can be read, and checks of each.

    Attributes:
        pickers: shard -> shards that pick rows from it.
        packs: folder of a pack -> its shards, none if it is damaged.
        unread_pack: error of a pack that cannot be read, which may hold any shard.
    """

    def __init__(self, store: EmbeddingStore) -> None:
        self._store = store
        self.pickers: dict[str, set[str]] = {}
        self.packs: dict[Path, tuple[str, ...]] = {}
        self.unread_pack: StorageError | None = None
        for name in self.shards():
            # The error is reported where the shard is checked.
            with contextlib.suppress(ArtifactError, StorageError):
                fields = store.resolver.fields(name, verify=False)
                for source, _ in [] if fields is None else other_sources(fields):
                    self.pickers.setdefault(source, set()).add(name)
        for name in store.packs.names():
            pack = None
            try:
                pack = store.packs.fields(name, verify=False)
            except FormatError:
                pass
            except StorageError as error:
                self.unread_pack = error
            members = () if pack is None else pack["members"]
            self.packs[store.packs.folder / name] = tuple(
                each.shard.fingerprint for each in members
            )

    def shards(self) -> list[str]:
        """Return the names of the folders of shards, sound or damaged."""
        return shard_names(self._store)

    def check_shard(self, folder: Path) -> None:
        """Raise ``ArtifactError`` for a folder that is damaged, or whose sources are missing."""
        fields = read_shard(folder)
        check_files(folder, fields, content=True)
        place = InFolder(folder, fields)
        lengths, picks = {"digests": len(place.tensor("digests"))}, place.picks()
        if picks is None:
            lengths["embeddings"] = len(place.tensor("embeddings"))
        else:
            lengths |= {"source": len(picks.source), "row": len(picks.row)}
        _require_rows(folder, place, lengths)
        if self._store.packs.find(folder.name, verify=True):
            # It is read from there; the folder stays for the rows that it holds itself.
            return
        for source, held_as in other_sources(fields):
            if self._store.resolver.find(source, verify=False, held_as=held_as) is None:
                raise ArtifactError(
                    f"{folder} picks rows from shard {source}, which is missing or another"
                )

    def check_pack(self, folder: Path) -> None:
        """Raise ``ArtifactError`` for a pack that is damaged."""
        fields = read_pack(folder)
        check_files(folder, fields, content=True)
        for member in fields["members"]:
            place = InPack(folder, member)
            names = ("embeddings", "digests")
            _require_rows(folder, place, {name: len(place.tensor(name)) for name in names})


def _require_rows(folder: Path, place: Place, lengths: Mapping[str, int]) -> None:
    rows, moments = place.shard.rows, place.moments()
    if wrong := [f"{n} {name}" for name, n in lengths.items() if n != rows]:
        raise ArtifactError(f"{folder} is damaged: it has {', '.join(wrong)} for {rows} rows")
    if moments is not None and moments.count != rows:
        raise ArtifactError(f"{folder} is damaged: its moments are of other rows")
