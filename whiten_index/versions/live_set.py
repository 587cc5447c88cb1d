"""What must stay in a store so that some shards can be read, and removing the rest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from whiten_index.artifacts.atomic import remove_folder
from whiten_index.artifacts.files import fsync_path, size_of, writing
from whiten_index.store.packs import Member
from whiten_index.store.row_refs import Source
from whiten_index.versions.store_scan import Inventory, ShardFolder


@dataclass
class Kept:
    """What must stay.

    Attributes:
        folders: names of shards whose own folder stays.
        packs: names of packs.
        missing: shards that are nowhere.
        damaged: shards that are nowhere but in a damaged folder.
    """

    folders: set[str] = field(default_factory=set)
    packs: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    damaged: set[str] = field(default_factory=set)


class Keeping:
    """Finds what must stay for shards to be found, of several places of one the soundest.

    A pack goes before a folder, the latest pack first, and nothing that a checksum speaks against
    where there is another. The sources of a shard that stays by its own folder stay too; those of
    one that stays in a pack need not.
    """

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._packed = inventory.places()
        self.kept = Kept()
        self._met: set[str] = set()
        self._held: set[Source] = set()
        self._sound: dict[str, bool] = {}

    def keep(self, shards: Iterable[str]) -> Kept:
        """Add what these shards need, and return all that must stay."""
        shards_left, sources_left = list(shards), list[Source]()
        while shards_left or sources_left:
            if sources_left:
                shards_left += self._hold(sources_left.pop())
            else:
                sources_left += self._keep(shards_left.pop())
        return self.kept

    def _keep(self, shard: str) -> tuple[Source, ...]:
        """Keep the best place of a shard; return what that picks from."""
        if shard in self._met:
            return ()
        self._met.add(shard)
        folder, packed = self._inventory.folders.get(shard), self._packed.get(shard, [])
        if folder is None and not packed:
            damaged = shard in self._inventory.damaged_folders
            (self.kept.damaged if damaged else self.kept.missing).add(shard)
            if damaged:
                self.kept.folders.add(shard)
            return ()
        alone = len(packed) + (folder is not None) == 1
        for member in packed:
            if alone or self._is_sound(member):
                self.kept.packs.add(member.pack)
                return ()
        if folder is None or not self._folder_is_sound(folder, alone=alone):
            # Nothing is sound: what is worth restoring from a copy is not for a program to say.
            self.kept.packs |= {member.pack for member in packed}
        if folder is None:
            return ()
        self.kept.folders.add(shard)
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
        best = next((each for each in packed if alone or self._is_sound(each)), None)
        if best is not None:
            self.kept.packs.add(best.pack)
        elif in_folder:
            self.kept.folders.add(name)
        elif not packed:
            self.kept.missing.add(name)
        if best is None and not (in_folder and self._rows_are_sound(source, alone=alone)):
            self.kept.packs |= {each.pack for each in packed}
        # Whoever meets the shard again would make it anew if not all of it were there.
        return (name,)

    def _is_sound(self, member: Member) -> bool:
        name = member.pack
        if name not in self._sound:
            packs = self._inventory.store.shards.packs
            self._sound[name] = packs.fields(name, verify=True) is not None
        return self._sound[name]

    def _folder_is_sound(self, folder: ShardFolder, *, alone: bool) -> bool:
        places = self._inventory.store.shards.places
        return alone or places.in_folder(folder.name, verify=True) is not None

    def _rows_are_sound(self, source: Source, *, alone: bool) -> bool:
        (name, held_as), places = source, self._inventory.store.shards.places
        return alone or places.in_folder(name, verify=True, held_as=held_as) is not None


@dataclass
class Removed:
    """What was removed, or would be.

    Attributes:
        shards: folders of shards.
        packs: folders of packs.
        rows: files of ids and kept columns.
        bytes: of all of them.
    """

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

    Args:
        inventory: of the store.
        folders: names of shards whose own folder goes.
        packs: names.
        documents: digests.
        dry_run: only say what would be removed.

    Raises:
        StorageError: the disk does not let it go.
    """
    found = Removed(len(folders), len(packs), len(documents))
    paths = [inventory.shard_path(name) for name in _pickers_first(inventory, folders)]
    paths += [inventory.pack_path(name) for name in sorted(packs)]
    files = [inventory.documents[digest] for digest in sorted(documents)]
    found.bytes = sum(map(size_of, (*paths, *files)))
    if dry_run:
        return found
    for path in paths:
        remove_folder(path)
    if files:
        _unlink(files)
    return found


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


def _unlink(files: list[Path]) -> None:
    folder = files[0].parent
    with writing(folder, kept=""):
        for path in files:
            path.unlink(missing_ok=True)
        fsync_path(folder)
