"""Which shards of a store are written together into which pack."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.disk_space import require_space
from whiten_index.artifacts.files import require_path
from whiten_index.artifacts.lock import only_writer
from whiten_index.corpus.sharding import SHARD_ROWS
from whiten_index.errors import ArtifactError, ConfigError
from whiten_index.store.dtypes import keeps_moments, moments_bytes, rows_bytes
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.packs import Member, ToPack
from whiten_index.store.row_refs import SELF, Source
from whiten_index.store.shard_resolver import InFolder
from whiten_index.versions.live_set import Inventory, LiveSet, ShardFolder, open_stores, remove
from whiten_index.versions.references import index_references, indexes_of, record_paths

# A shard of fewer rows than this share of a pack is joined with others.
_SMALL = 1 / 4
# A derived one is only if its folder takes this share of what its rows would take in a pack, or
# more. Else much would be written for little: that would be so every night.
WORTH_WRITING = 1 / 4
# A pack of which less than this is filled is joined with others of as many rows.
_FILLED = 1 / 2
# One that picks from more others is written as a whole: each is a file to map, and to keep.
_MOST_SOURCES = 8
_NONE = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class _Unit:
    """A shard that may be packed."""

    name: str
    rows: int
    dtype: str
    place: str
    forced: bool


@dataclass
class Plan:
    """Which shards go into which pack, and what becomes of no pack."""

    groups: list[list[str]] = field(default_factory=list)
    damaged: int = 0
    derived: int = 0
    alone: int = 0

    @classmethod
    def make(
        cls,
        inventory: Inventory,
        shards: Sequence[str],
        others: frozenset[str],
        pack_rows: int,
    ) -> Plan:
        """Plan for the shards of the corpora, in order."""
        packed = inventory.packed()
        homes = {name: home for name in shards if (home := _home(inventory, packed, name))}
        folders = [inventory.folders[name] for name in shards if _is_alone(inventory, homes, name)]
        missing = len(shards) - len(homes) - len(folders)
        needed = list(dict.fromkeys([*shards, *sorted(others)]))
        scattered = _Scattered(inventory, shards, needed)
        groups: list[list[_Unit]] = []
        sound, unsound, forced = set[str](), set[str](), set[str]()
        while True:
            to_pack = {unit.name for group in groups for unit in group}
            forced |= scattered.too_much({*homes, *to_pack})
            packs = _PackUnits(inventory, needed, to_pack)
            half_empty = packs.half_empty(pack_rows)
            units = packs.mostly_dead() + [
                _Unit(folder.name, folder.rows, folder.dtype, folder.name, folder.name in forced)
                for folder in folders
                if folder.name in forced or _is_small(folder, pack_rows)
            ]
            new = {unit.name for units in (units, *half_empty) for unit in units} - sound - unsound
            sound |= {name for name in new if inventory.store.find(name)}
            unsound |= new - sound
            found = _groups([unit for unit in units if unit.name in sound], half_empty, pack_rows)
            if found == groups:
                names = [[unit.name for unit in group] for group in groups]
                few = [each for each in folders if each.rows < _SMALL * pack_rows]
                left = [each for each in few if each.name not in to_pack | unsound]
                alone = sum(_is_small(each, pack_rows) for each in left)
                return cls(names, missing + len(unsound), len(left) - alone, alone)
            # What is packed picks from nothing any more, so that others hold on to more alone.
            groups = found


def _is_small(folder: ShardFolder, pack_rows: int) -> bool:
    """Tell whether a shard is to be joined with others for its size alone."""
    if folder.rows >= _SMALL * pack_rows:
        return False
    return not folder.sources or folder.to_free >= WORTH_WRITING * folder.to_write


def _is_alone(inventory: Inventory, homes: Container[str], name: str) -> bool:
    """Tell whether a shard is in a folder of its own and in no pack."""
    return name not in homes and name in inventory.folders


def _home(inventory: Inventory, packed: Mapping[str, Sequence[Member]], name: str) -> Member | None:
    """Return where a shard is packed.

    Where it is in another pack or a folder too, one may have been written as another is damaged.
    """
    several = len(packed.get(name, ())) + (name in inventory.folders) > 1
    return inventory.store.shards.packs.find(name, verify=several)


class _PackUnits:
    """What must stay of each pack, as units that can be written elsewhere."""

    def __init__(
        self, inventory: Inventory, needed: Iterable[str], to_pack: Container[str]
    ) -> None:
        """Take the shards that something is made of; what these pick from is needed too."""
        self._inventory = inventory
        self._packed = inventory.packed()
        self._live: dict[str, list[Member]] = defaultdict(list)
        # Packs of which something must stay that would not be found in another.
        self._pinned = set[str]()
        homes, sources = self._homes(needed, to_pack)
        for home in homes.values():
            self._live[home.pack].append(home)
        for name, held_as in sources:
            for member in self._packed.get(name, ()):
                if member.held_as == held_as and member != homes.get(name):
                    self._pinned.add(member.pack)

    def mostly_dead(self) -> list[_Unit]:
        """Return the units of packs as much of which is needed by nothing as has to stay."""
        found = []
        for pack, (live, whole) in self._sizes().items():
            if 0 < live <= whole - live:
                found += self._units(pack, forced=True)
        return found

    def half_empty(self, pack_rows: int) -> list[list[_Unit]]:
        """Return the units of each other pack that has room for as much again, smallest first."""
        found = [
            (live, pack)
            for pack, (live, whole) in self._sizes().items()
            if whole - live < live < _FILLED * pack_rows
        ]
        return [self._units(pack, forced=False) for _, pack in sorted(found)]

    def _sizes(self) -> dict[str, tuple[int, int]]:
        """Return pack -> rows that must stay and rows in it, of packs that may go."""
        return {
            pack: (
                sum(member.rows for member in members),
                sum(member.rows for member in self._inventory.packs[pack]),
            )
            for pack, members in self._live.items()
            if pack not in self._pinned
        }

    def _units(self, pack: str, *, forced: bool) -> list[_Unit]:
        return [
            _Unit(member.fingerprint, member.rows, member.dtype, pack, forced)
            for member in self._live[pack]
        ]

    def _homes(
        self, needed: Iterable[str], to_pack: Container[str]
    ) -> tuple[dict[str, Member], set[Source]]:
        """Return where each shard is packed that must stay, and what others pick from."""
        homes, sources = dict[str, Member](), set[Source]()
        met, left = set[str](), list(needed)[::-1]
        while left:
            name = left.pop()
            if name in met:
                continue
            met.add(name)
            if home := _home(self._inventory, self._packed, name):
                homes[name] = home
            elif (folder := self._inventory.folders.get(name)) and name not in to_pack:
                sources |= set(folder.sources)
                left += [source for source, _ in folder.sources]
        return homes, sources


def _groups(
    units: Sequence[_Unit], half_empty: Sequence[Sequence[_Unit]], pack_rows: int
) -> list[list[_Unit]]:
    """Return what is to be written together: units of one type, of one larger or so many rows.

    Each goes where there is room first. What would be written as it lies already is left out.
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
    there = Counter(unit.place for group in groups for unit in group)
    return [group for group in groups if not _lies_so(group, there)]


def _joined(units: Sequence[_Unit], half_empty: Sequence[Sequence[_Unit]]) -> list[_Unit]:
    """Return units, and before them those of packs that have no more rows than what joins them."""
    rows = Counter[str]()
    for unit in units:
        rows[unit.dtype] += unit.rows
    packs, smaller = list[_Unit](), defaultdict[str, list[_Unit]](list)
    for pack in half_empty:
        size, dtype = sum(unit.rows for unit in pack), pack[0].dtype
        smaller[dtype] += pack
        if size <= rows[dtype]:
            # The smaller ones are joined by this, if not by others yet.
            packs += smaller.pop(dtype)
        rows[dtype] += size
    return [*packs, *units]


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

    def __init__(self, inventory: Inventory, shards: Sequence[str], needed: Iterable[str]) -> None:
        """Take the shards of the corpora, and all that are needed."""
        self._inventory, self._shards, self._needed = inventory, shards, frozenset(needed)
        self._packed = frozenset(inventory.packed())

    def too_much(self, packed: Collection[str]) -> set[str]:
        """Return the derived shards that are better written as a whole, ``packed`` those that are.

        Each picks from too many others, or others hold for it as many rows as it has that nothing
        needs.
        """
        folders = (self._inventory.folders.get(name) for name in self._needed)
        derived = [f for f in folders if f is not None and f.sources and f.name not in packed]
        reach = {folder.name: self._reach(folder.name, packed) for folder in derived}
        idle = self._idle(reach)
        mine = frozenset(self._shards)
        return {
            folder.name
            for folder in derived
            if folder.name in mine
            and (
                len(folder.sources) > _MOST_SOURCES
                or sum(idle.get(source, 0) for source in reach[folder.name]) >= folder.rows
            )
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
        """Return for each source the rows that nothing needed picks from it."""
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
            if picks is not None and source != SELF:
                yield source, picks.row[picks.source == number]

    def _rows_of(self, source: Source) -> int:
        try:
            return len(self._inventory.store.shards.resolver.held_by(source))
        except ArtifactError:
            return 0


@dataclass(frozen=True, slots=True)
class StoreSize:
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
        derived: small shards left alone since they pick most of their rows from others.
        alone: small shards left alone since there is nothing to join with yet.
    """

    store: str
    packed: int
    rows: int
    packs: int
    removed: int
    damaged: int
    before: StoreSize
    after: StoreSize
    derived: int = 0
    alone: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return asdict(self)


def compact_store(root: Path | str, *, pack_rows: int = SHARD_ROWS) -> CompactReport:
    """Pack what lies scattered of the corpora that a store remembers, for every encoder in it.

    Into packs of about ``pack_rows`` rows go

    - whole shards of less than a quarter of that;
    - derived ones of as few rows whose folder takes a quarter of what these would, or more;
    - derived shards that pick from more than 8 others, or whose others hold as many rows that
      nothing needs as the shard has;
    - what is needed of packs at least half of which is not, and packs less than half full, where as
      many rows join them.

    Needed is what a corpus is made of or a version of an index built from the store. Every shard
    stays what it was, to the bit; what picks rows from one still finds them.

    Whoever reads meanwhile is not disturbed. Done again it does nothing.

    Args:
        root: of the store.
        pack_rows: rows of a full pack.

    Raises:
        ArtifactError: there is no store, the record of a corpus is damaged, or an index built from
            it, its published version or the record of a version is missing or damaged.
        BusyError: another process is writing the store.
        StorageError: the disk is full or cannot be written.
    """
    if pack_rows < 1:
        raise ConfigError(f"packs have 1 row or more; pack_rows {pack_rows} was given")
    place = require_path(root)
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
        derived=sum(each.derived for each in done),
        alone=sum(each.alone for each in done),
    )


def _sum(rooms: Iterable[StoreSize]) -> StoreSize:
    found = list(rooms)
    return StoreSize(*(sum(getattr(each, name) for each in found) for name in StoreSize.__slots__))


def _compact(store: EmbeddingStore, pack_rows: int) -> CompactReport:
    with only_writer(store.folder, what="store"):
        store.tidy()
        inventory = Inventory.take(store)
        records = [store.record(path.name) for path in record_paths(store)]
        shards = list(dict.fromkeys(name for record in records for name in record.shards))
        before, plan = (
            _room(inventory),
            Plan.make(inventory, shards, _needed_by_indexes(store), pack_rows),
        )
        _require_space(store, plan)
        packed = rows = 0
        for group in plan.groups:
            members = _write(store, group)
            packed += len(members)
            rows += sum(member.rows for member in members)
        if plan.groups:
            inventory = Inventory.take(store)
        removed = _remove_replaced(inventory)
        after = _room(Inventory.take(store)) if removed or plan.groups else before
    return CompactReport(
        store=str(store.root),
        packed=packed,
        rows=rows,
        packs=len(plan.groups),
        removed=removed,
        damaged=plan.damaged,
        before=before,
        after=after,
        derived=plan.derived,
        alone=plan.alone,
    )


def _room(inventory: Inventory) -> StoreSize:
    folders = len(inventory.folders) + len(inventory.damaged_folders)
    packs = len(inventory.packs) + len(inventory.damaged_packs)
    return StoreSize(folders, packs, inventory.bytes)


def _needed_by_indexes(store: EmbeddingStore) -> frozenset[str]:
    """Return the shards that versions of indexes need."""
    return frozenset(
        shard
        for index in indexes_of(store.root, [store])
        for reference in index_references(index, store.root, [store])
        for shard in reference.record.shards
    )


def _require_space(store: EmbeddingStore, plan: Plan) -> None:
    total = 0
    for name in (name for group in plan.groups for name in group):
        found = store.require(name, verify=False)
        rows = store.mapped_embeddings(name)
        dim, itemsize = int(rows.shape[1]), np.dtype(found.dtype).itemsize
        total += rows_bytes(found.rows, dim, itemsize) + moments_bytes(found.rows, dim)
    require_space({store.folder: total}, "compaction")


def _write(store: EmbeddingStore, names: Sequence[str]) -> list[Member]:
    packs = store.shards.packs
    return packs.write(packs.next_name(), [_to_pack(store, name) for name in names])


def _to_pack(store: EmbeddingStore, name: str) -> ToPack:
    shards = store.shards
    embeddings = shards.embeddings(name)
    return ToPack(
        name,
        embeddings,
        shards.digests(name),
        shards.truncated(name),
        shards.moments(name) if keeps_moments(*embeddings.shape) else None,
        _known_as(store, name),
    )


def _known_as(store: EmbeddingStore, name: str) -> str:
    """Return what those that pick from a shard know its rows by, empty where none can."""
    place = store.shards.resolver.find(name, verify=True)
    # Of a derived shard they know only the rows that it holds itself: its folder stays for them.
    return "" if place is None or (isinstance(place, InFolder) and place.sources) else place.held_as


def _remove_replaced(inventory: Inventory) -> int:
    """Remove folders of shards, and packs, all of which is in a later pack; return how many."""
    kept = LiveSet(inventory)
    kept.keep(inventory.shards)
    folders, packs = set(inventory.folders) - kept.folders, set(inventory.packs) - kept.packs
    remove(inventory, folders=folders, packs=packs, documents=set())
    return len(folders) + len(packs)
