"""Joins the small shards of a store into packs, and those that pick from too many others.

A night's changes leave shards of few rows, and shards of many whose rows lie here and there. What
the corpora of the store are made of is written together again; nothing about it changes but where
it lies.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.corpus import SHARD_ROWS
from whiten_index.errors import ArtifactError, ConfigError
from whiten_index.lock import Held, only_writer
from whiten_index.space import require_space
from whiten_index.store import (
    OWN,
    CorpusRecord,
    EmbeddingStore,
    InFolder,
    Member,
    Source,
    ToPack,
)
from whiten_index.upkeep.claims import record_paths
from whiten_index.upkeep.inventory import Inventory, open_stores
from whiten_index.upkeep.keeping import Keeping, remove

# A shard of fewer rows than this share of a pack is joined with others.
_SMALL = 1 / 4
# So is what is in a pack of which less than this is filled.
_FILLED = 1 / 2
# One that picks from more others is written as a whole: each is a file to map, and to keep.
_MOST_SOURCES = 8
_NONE = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Room:
    """What a store takes up: folders of shards and of packs, and bytes, those of rows included."""

    shards: int
    packs: int
    bytes: int


@dataclass(frozen=True)
class CompactReport:
    """What a compaction did.

    Attributes:
        store: the root folder.
        packed: shards written into packs.
        rows: of these.
        packs: written.
        removed: folders of shards and packs that these replace.
        damaged: shards of corpora that are missing or damaged, and were left alone.
        before: what the store took up.
        after: what it takes up now.
    """

    store: str
    packed: int
    rows: int
    packs: int
    removed: int
    damaged: int
    before: Room
    after: Room

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return asdict(self)


def compact_store(root: Path | str, *, pack_rows: int = SHARD_ROWS) -> CompactReport:
    """Pack what lies scattered of the corpora that a store remembers, for every encoder in it.

    Into packs of about ``pack_rows`` rows go shards of less than a quarter of that, derived shards
    that pick from more than 8 others, or whose others hold as many rows that no corpus needs as
    the shard has, and what is still needed of packs that are half empty or mostly not needed.
    Every shard stays what it was, to the bit; what picks rows from one still finds them.

    Whoever reads meanwhile is not disturbed. Done again it does nothing.

    Args:
        root: of the store.
        pack_rows: rows of a full pack.

    Raises:
        ArtifactError: there is no store, or the record of a corpus is damaged.
        BusyError: another process is writing the store.
        OutputError: the disk is full or cannot be written.
    """
    if pack_rows < 1:
        raise ConfigError(f"packs have 1 row or more; pack_rows {pack_rows} was given")
    place = Path(root)
    done = [_compact(store, pack_rows) for store in open_stores(place)]
    return CompactReport(
        store=str(place),
        packed=sum(each.packed for each in done),
        rows=sum(each.rows for each in done),
        packs=sum(each.packs for each in done),
        removed=sum(each.removed for each in done),
        damaged=sum(each.damaged for each in done),
        before=_sum(each.before for each in done),
        after=_sum(each.after for each in done),
    )


def _sum(rooms: Iterable[Room]) -> Room:
    found = list(rooms)
    return Room(*(sum(getattr(each, name) for each in found) for name in Room.__slots__))


def _compact(store: EmbeddingStore, pack_rows: int) -> CompactReport:
    with only_writer(store.folder, what="store") as held:
        store.tidy()
        inventory = Inventory.take(store)
        records = [CorpusRecord.load(path) for path in record_paths(store)]
        shards = list(dict.fromkeys(name for record in records for name in record.shards))
        before, plan = _room(inventory), _Plan.make(inventory, shards, pack_rows)
        _require_space(store, plan)
        packed = rows = 0
        for group in plan.groups:
            members = _write(store, group)
            packed += len(members)
            rows += sum(member.rows for member in members)
        if plan.groups:
            inventory = Inventory.take(store)
        removed = _remove_replaced(inventory, held)
        after = _room(Inventory.take(store)) if removed or plan.groups else before
    return CompactReport(
        str(store.root), packed, rows, len(plan.groups), removed, plan.damaged, before, after
    )


def _room(inventory: Inventory) -> Room:
    folders = len(inventory.folders) + len(inventory.damaged_folders)
    packs = len(inventory.packs) + len(inventory.damaged_packs)
    return Room(folders, packs, inventory.bytes)


@dataclass(frozen=True, slots=True)
class _Unit:
    """A shard that may be packed.

    Attributes:
        name: fingerprint.
        rows: n.
        dtype: numpy name.
        place: the pack or folder it is in.
        forced: whether it is to be written even alone.
    """

    name: str
    rows: int
    dtype: str
    place: str
    forced: bool


@dataclass
class _Plan:
    """Which shards go into which pack, and how many were found damaged."""

    groups: list[list[str]] = field(default_factory=list)
    damaged: int = 0

    @classmethod
    def make(cls, inventory: Inventory, shards: Sequence[str], pack_rows: int) -> _Plan:
        """Plan for the shards of the corpora, in order."""
        packed = inventory.places()
        homes = {name: home for name in shards if (home := _home(inventory, packed, name))}
        folders = [inventory.folders[name] for name in shards if _is_alone(inventory, homes, name)]
        missing = len(shards) - len(homes) - len(folders)
        candidates = _packed_units(inventory, homes, pack_rows)
        scattered = _Scattered(inventory, shards)
        groups: list[list[_Unit]] = []
        sound, unsound, forced = set[str](), set[str](), set[str]()
        while True:
            to_pack = {unit.name for group in groups for unit in group}
            forced |= scattered.too_much({*homes, *to_pack})
            units = candidates + [
                _Unit(folder.name, folder.rows, folder.dtype, folder.name, folder.name in forced)
                for folder in folders
                if folder.name in forced or folder.rows < _SMALL * pack_rows
            ]
            new = {unit.name for unit in units} - sound - unsound
            sound |= {name for name in new if _is_whole(inventory.store, name)}
            unsound |= new - sound
            found = _groups([unit for unit in units if unit.name in sound], pack_rows)
            if found == groups:
                names = [[unit.name for unit in group] for group in groups]
                return cls(names, missing + len(unsound))
            # What is packed picks from nothing any more, so that others hold on to more alone.
            groups = found


def _is_alone(inventory: Inventory, homes: Container[str], name: str) -> bool:
    """Tell whether a shard is in a folder of its own and in no pack."""
    return name not in homes and name in inventory.folders


def _home(inventory: Inventory, packed: Mapping[str, Sequence[Member]], name: str) -> Member | None:
    """Return where a shard is packed.

    Where it is in another pack or a folder too, one may have been written as another is damaged.
    """
    several = len(packed.get(name, ())) + (name in inventory.folders) > 1
    return inventory.store.shards.packs.find(name, verify=several)


def _is_whole(store: EmbeddingStore, name: str) -> bool:
    """Tell whether all is sound that goes into a pack of a shard."""
    # Of some shards of an earlier release it is not known which texts were cut.
    return store.find(name) is not None and store.shards.truncated(name) is not None


def _packed_units(inventory: Inventory, packed: dict[str, Member], pack_rows: int) -> list[_Unit]:
    """Return the shards in packs that are half empty, or mostly of what is not needed."""
    live: dict[str, int] = defaultdict(int)
    for member in packed.values():
        live[member.pack] += member.rows
    whole = {name: sum(each.rows for each in members) for name, members in inventory.packs.items()}
    units = []
    for name, member in packed.items():
        forced = live[member.pack] < whole[member.pack] / 2
        if forced or live[member.pack] < _FILLED * pack_rows:
            units.append(_Unit(name, member.rows, member.dtype, member.pack, forced))
    return units


def _groups(units: Sequence[_Unit], pack_rows: int) -> list[list[_Unit]]:
    """Return what is to be written together: units of one type, of one larger or so many rows.

    Each goes where there is room first, so that at most one group of a type is half empty. What
    would be written as it lies already is left out.
    """
    groups: list[list[_Unit]] = []
    room: list[int] = []
    for unit in units:
        for number, group in enumerate(groups):
            if group[0].dtype == unit.dtype and room[number] >= unit.rows:
                group.append(unit)
                room[number] -= unit.rows
                break
        else:
            groups.append([unit])
            room.append(pack_rows - unit.rows)
    there = Counter(unit.place for unit in units)
    return [group for group in groups if not _lies_so(group, there)]


def _lies_so(group: Sequence[_Unit], there: Mapping[str, int]) -> bool:
    """Tell whether a group is one folder or pack as it is; ``there`` counts the units of each."""
    places = {unit.place for unit in group}
    return (
        not any(unit.forced for unit in group)
        and len(places) == 1
        and len(group) == there[group[0].place]
    )


class _Scattered:
    """Tells which derived shards lie in too many places, or hold on to too much."""

    def __init__(self, inventory: Inventory, shards: Sequence[str]) -> None:
        """Take the shards of the corpora."""
        self._inventory, self._shards = inventory, shards
        self._needed = frozenset(shards)
        self._packed = frozenset(inventory.places())

    def too_much(self, packed: Collection[str]) -> set[str]:
        """Return the derived shards that are better written as a whole, ``packed`` those that are.

        Each picks from too many others, or others hold for it as many rows as it has that no shard
        of a corpus needs.
        """
        folders = (self._inventory.folders.get(name) for name in self._shards)
        derived = [f for f in folders if f is not None and f.sources and f.name not in packed]
        reach = {folder.name: self._reach(folder.name, packed) for folder in derived}
        idle = self._idle(reach)
        return {
            folder.name
            for folder in derived
            if len(folder.sources) > _MOST_SOURCES
            or sum(idle.get(source, 0) for source in reach[folder.name]) >= folder.rows
        }

    def _reach(self, name: str, packed: Collection[str]) -> set[Source]:
        """Return what must stay for a shard to be found."""
        found, left = set[Source](), [name]
        while left:
            folder = self._inventory.folders.get(left.pop())
            for source in () if folder is None else folder.sources:
                if source not in found:
                    found.add(source)
                    # What is packed is found without its own sources.
                    if source[0] not in packed and source[0] not in self._packed:
                        left.append(source[0])
        return found

    def _idle(self, reach: Mapping[str, set[Source]]) -> dict[Source, int]:
        """Return for each source the rows that no shard of a corpus picks from it."""
        used = defaultdict[Source, list[NDArray[np.int32]]](list)
        for name in reach:
            for source, rows in self._picked(name):
                used[source].append(rows)
        return {
            source: self._rows_of(source) - len(np.unique(np.concatenate(used[source] or [_NONE])))
            for source in set[Source]().union(*reach.values())
            if source[0] not in self._needed
        }

    def _picked(self, name: str) -> Iterator[tuple[Source, NDArray[np.int32]]]:
        """Yield what a derived shard picks from others; nothing where it is damaged."""
        try:
            picks = self._inventory.store.shards.picks(name)
        except ArtifactError:
            return
        for number, source in enumerate(() if picks is None else picks.sources):
            if picks is not None and source != OWN:
                yield source, picks.row[picks.source == number]

    def _rows_of(self, source: Source) -> int:
        try:
            return len(self._inventory.store.shards.places.held_by(source))
        except ArtifactError:
            return 0


def _require_space(store: EmbeddingStore, plan: _Plan) -> None:
    total = 0
    for name in (name for group in plan.groups for name in group):
        found = store.require(name, verify=False)
        rows = store.mapped_embeddings(name)
        dim = int(rows.shape[1])
        moments = 8 * dim * (dim + 2) if found.rows >= dim else 0
        total += found.bytes + 17 * found.rows + moments
    require_space({store.folder: total}, "compaction")


def _write(store: EmbeddingStore, names: Sequence[str]) -> list[Member]:
    packs = store.shards.packs
    return packs.write(packs.next_name(), [_to_pack(store, name) for name in names])


def _to_pack(store: EmbeddingStore, name: str) -> ToPack:
    shards = store.shards
    embeddings, truncated = shards.embeddings(name), shards.truncated(name)
    assert truncated is not None
    # Of few rows they are quicker taken again than read.
    many = len(embeddings) >= embeddings.shape[1]
    return ToPack(
        name,
        embeddings,
        shards.digests(name),
        truncated,
        shards.moments(name) if many else None,
        _known_as(store, name),
    )


def _known_as(store: EmbeddingStore, name: str) -> str:
    """Return what those that pick from a shard know its rows by, empty where none can."""
    place = store.shards.places.find(name, verify=True)
    # Of a derived shard they know only the rows that it holds itself: its folder stays for them.
    return "" if place is None or (isinstance(place, InFolder) and place.sources) else place.held_as


def _remove_replaced(inventory: Inventory, held: Held) -> int:
    """Remove folders of shards, and packs, all of which is in a later pack; return how many."""
    kept = Keeping(inventory).keep(inventory.shards)
    folders, packs = set(inventory.folders) - kept.folders, set(inventory.packs) - kept.packs
    remove(inventory, folders=folders, packs=packs, documents=set(), check=held.require)
    return len(folders) + len(packs)
