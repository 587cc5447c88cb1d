"""Packing of small and scattered shards: the plan, and the packs."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.atomic import require_space
from whiten_index.errors import ArtifactError
from whiten_index.store.dtypes import keeps_moments, moments_bytes, rows_bytes
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.live_set import Inventory, LiveSet, ShardFolder
from whiten_index.store.packs import Member, StoredShard, ToPack
from whiten_index.store.row_refs import Source

# A shard of fewer rows than this share of a pack is joined with others.
_SMALL = 1 / 4
# A small derived shard is joined only if its folder takes this share of the bytes to write, since
# every night makes such shards.
WORTH_WRITING = 1 / 4
# A pack filled less than this is joined with others of as many rows.
_FILLED = 1 / 2
# A shard that picks from more others is written whole: each is a file to map, and to keep.
_MOST_SOURCES = 8
_NONE = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class _Unit:
    """A shard that may be packed, and the folder or pack that it is in now."""

    name: str
    rows: int
    dtype: str
    place: str
    forced: bool


def write_packs(
    inventory: Inventory, shards: Sequence[str], others: Collection[str], pack_rows: int
) -> Counter[str]:
    """Write packs of about ``pack_rows`` rows from the shards of corpora, in their order.

    ``others`` are shards that versions of indexes need. Returns the numbers of shards ``packed``,
    of their ``rows`` and ``packs``, and of shards that are ``damaged`` or missing.
    """
    groups, damaged = _plan(inventory, shards, others, pack_rows)
    store, rows = inventory.store, 0
    packed = [store.require(name, verify=False) for group in groups for name in group]
    require_space({store.folder: sum(map(_bytes_in_pack, packed))}, "compaction")
    for group in groups:
        to_pack = [_to_pack(store, name) for name in group]
        members = store.packs.write(store.packs.next_name(), to_pack)
        rows += sum(member.shard.rows for member in members)
    return Counter(packed=len(packed), rows=rows, packs=len(groups), damaged=damaged)


def _bytes_in_pack(shard: StoredShard) -> int:
    itemsize = np.dtype(shard.dtype).itemsize
    dim = shard.bytes // (shard.rows * itemsize)
    return rows_bytes(shard.rows, dim, itemsize) + moments_bytes(shard.rows, dim)


def _plan(
    inventory: Inventory, shards: Sequence[str], others: Collection[str], pack_rows: int
) -> tuple[list[list[str]], int]:
    """Return the shards of each pack, and the number of shards that are damaged or missing."""
    packed, is_sound = inventory.packed(), functools.cache(inventory.store.find)
    needed = list(dict.fromkeys([*shards, *sorted(others)]))
    now = LiveSet(inventory)
    now.keep(needed)
    mine = [name for name in shards if name not in now.homes]
    folders = [inventory.folders[name] for name in mine if name in inventory.folders]
    groups, forced, damaged = list[list[_Unit]](), set[str](), set(mine) - set(inventory.folders)
    while True:
        to_pack = {unit.name for group in groups for unit in group}
        scattered = _scattered(inventory, frozenset(needed), {*packed, *to_pack})
        forced |= scattered & {folder.name for folder in folders}
        mostly_dead, half_empty = _pack_units(inventory, needed, to_pack, pack_rows)
        units = mostly_dead + [
            _Unit(each.name, each.rows, each.dtype, each.name, each.name in forced)
            for each in folders
            if each.name in forced or _is_small(each, pack_rows)
        ]
        names = {unit.name for each in (units, *half_empty) for unit in each}
        damaged |= {name for name in names if not is_sound(name)}
        sound = [unit for unit in units if unit.name not in damaged]
        found = _groups(sound, half_empty, pack_rows)
        if found == groups:
            return [[unit.name for unit in group] for group in groups], len(damaged)
        # Packed shards pick from nothing, so that others may now hold on to more alone.
        groups = found


def _is_small(folder: ShardFolder, pack_rows: int) -> bool:
    if folder.rows >= _SMALL * pack_rows:
        return False
    return not folder.sources or folder.to_free >= WORTH_WRITING * folder.to_write


def _pack_units(
    inventory: Inventory, needed: Sequence[str], to_pack: Collection[str], pack_rows: int
) -> tuple[list[_Unit], list[list[_Unit]]]:
    """Return the needed shards of packs that can be replaced.

    First those of packs at least half of which nothing needs; then, pack by pack from the
    smallest, those of packs that have room for as much again.
    """
    live = LiveSet(inventory, to_pack)
    live.keep(needed)
    members = defaultdict[str, list[Member]](list)
    for home in live.homes.values():
        members[home.pack].append(home)
    mostly_dead, half_empty = list[_Unit](), list[tuple[int, str, list[_Unit]]]()
    for pack, homes in members.items():
        if pack in live.pinned:
            continue
        rows = sum(home.shard.rows for home in homes)
        dead = sum(member.shard.rows for member in inventory.packs[pack]) - rows
        shards = [home.shard for home in homes]
        units = [_Unit(s.fingerprint, s.rows, s.dtype, pack, rows <= dead) for s in shards]
        if rows <= dead:
            mostly_dead += units
        elif rows < _FILLED * pack_rows:
            half_empty.append((rows, pack, units))
    return mostly_dead, [units for *_, units in sorted(half_empty, key=lambda each: each[:2])]


def _groups(
    units: Sequence[_Unit], half_empty: Sequence[Sequence[_Unit]], pack_rows: int
) -> list[list[_Unit]]:
    """Return the units of each new pack: of one type, and one large unit or so many rows.

    Each goes where there is room first. A group that is one folder or pack already is left out.
    """
    groups: list[list[_Unit]] = []
    room: list[int] = []
    for unit in _joined(units, half_empty):
        for number, group in enumerate(groups):
            if group[0].dtype == unit.dtype and room[number] >= unit.rows:
                group.append(unit)
                room[number] -= unit.rows
                break
        else:
            groups.append([unit])
            room.append(pack_rows - unit.rows)
    counts = Counter(unit.place for group in groups for unit in group)
    return [group for group in groups if not _is_there(group, counts)]


def _is_there(group: Sequence[_Unit], counts: Mapping[str, int]) -> bool:
    first = group[0].place
    same = all(unit.place == first and not unit.forced for unit in group)
    return same and len(group) == counts[first]


def _joined(units: Sequence[_Unit], half_empty: Sequence[Sequence[_Unit]]) -> list[_Unit]:
    """Return units, and before them those of packs that have no more rows than join them."""
    rows = Counter[str]()
    for unit in units:
        rows[unit.dtype] += unit.rows
    packs, smaller = list[_Unit](), defaultdict[str, list[_Unit]](list)
    for pack in half_empty:
        size, dtype = sum(unit.rows for unit in pack), pack[0].dtype
        smaller[dtype] += pack
        if size <= rows[dtype]:
            packs += smaller.pop(dtype)
        rows[dtype] += size
    return [*packs, *units]


def _scattered(inventory: Inventory, needed: frozenset[str], packed: Collection[str]) -> set[str]:
    """Return the needed derived shards that are better written whole, ``packed`` left out.

    They pick from too many others, or others hold for them as many unused rows as they have.
    """
    store = inventory.store
    folders = [inventory.folders[name] for name in needed & set(inventory.folders)]
    derived = [each for each in folders if each.sources and each.name not in packed]
    reach = {folder.name: _reach(inventory, folder.name, packed) for folder in derived}
    used = defaultdict[Source, list[NDArray[np.int32]]](list)
    for folder in derived:
        with contextlib.suppress(ArtifactError):
            picks = store.row_refs(folder.name)
            for number, source in enumerate(picks.sources):
                used[source].append(picks.row[picks.source == number])
    idle = Counter[Source]()
    for source in set[Source]().union(*reach.values()):
        if source[0] not in needed:
            with contextlib.suppress(ArtifactError):
                rows = np.unique(np.concatenate(used[source] or [_NONE]))
                idle[source] = len(store.held_by(source)) - len(rows)
    return {
        folder.name
        for folder in derived
        if len(folder.sources) > _MOST_SOURCES
        or sum(idle[source] for source in reach[folder.name]) >= folder.rows
    }


def _reach(inventory: Inventory, name: str, packed: Collection[str]) -> set[Source]:
    """Return the sources of a shard, and theirs unless they are packed."""
    found, names = set[Source](), [name]
    while names:
        folder = inventory.folders.get(names.pop())
        new = set(() if folder is None else folder.sources) - found
        found |= new
        names += [name for name, _ in new if name not in packed]
    return found


def _to_pack(store: EmbeddingStore, name: str) -> ToPack:
    place, embeddings = store.locate(name, verify=True), store.embeddings(name)
    # Others know only the rows in the folder of a derived shard: the folder stays for them.
    derived = place is None or place.picks() is not None
    return ToPack(
        name,
        embeddings,
        store.digests(name),
        store.truncated(name),
        store.moments(name) if keeps_moments(*embeddings.shape) else None,
        "" if place is None or derived else place.held_as,
    )


def remove_replaced(inventory: Inventory) -> int:
    """Remove folders of shards, and packs, all of which is in a later pack; return how many."""
    kept = LiveSet(inventory)
    kept.keep(inventory.shards)
    folders, packs = set(inventory.folders) - kept.folders, set(inventory.packs) - kept.packs
    inventory.remove(folders=folders, packs=packs)
    return len(folders) + len(packs)
