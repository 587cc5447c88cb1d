"""Joins the small shards of a store into packs, and those that pick from too many others.

A night's changes leave shards of few rows, and shards of many whose rows lie here and there. What
the corpora of the store are made of is written together again; nothing about it changes but where
it lies.

What is written stays in proportion to what changed. A shard that picks from few others stays as it
is: written as a whole it would cost its rows for the few that are new. Only where its folder takes
a quarter of what all its rows would, or more, is a small one joined with others as if it were
whole: of twenty rows that is what the files of one that changed take on a disk. A pack is written
again where at least half of it is needed by nothing, versions of indexes included, so that this
frees as much as it writes; or with others of as many rows together, so that each row is written
again once for every doubling of the pack it is in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from whiten_index.artifacts.disk_space import require_space
from whiten_index.artifacts.files import require_path
from whiten_index.artifacts.lock import only_writer
from whiten_index.corpus.sharding import SHARD_ROWS
from whiten_index.errors import ConfigError
from whiten_index.store.dtypes import keeps_moments, moments_bytes, rows_bytes
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.packs import Member, ToPack
from whiten_index.store.shard_resolver import InFolder
from whiten_index.versions.compaction_plan import Plan
from whiten_index.versions.live_set import Keeping, remove
from whiten_index.versions.references import index_claims, indexes_of, record_paths
from whiten_index.versions.store_scan import Inventory, open_stores


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
        derived: small shards left alone since they pick most of their rows from others.
        alone: small shards left alone since there is nothing to join with yet.
    """

    store: str
    packed: int
    rows: int
    packs: int
    removed: int
    damaged: int
    before: Room
    after: Room
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


def _sum(rooms: Iterable[Room]) -> Room:
    found = list(rooms)
    return Room(*(sum(getattr(each, name) for each in found) for name in Room.__slots__))


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


def _room(inventory: Inventory) -> Room:
    folders = len(inventory.folders) + len(inventory.damaged_folders)
    packs = len(inventory.packs) + len(inventory.damaged_packs)
    return Room(folders, packs, inventory.bytes)


def _needed_by_indexes(store: EmbeddingStore) -> frozenset[str]:
    """Return the shards that versions of indexes need."""
    return frozenset(
        shard
        for index in indexes_of(store.root, [store])
        for claim in index_claims(index, store.root, [store])
        for shard in claim.record.shards
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
    embeddings, truncated = shards.embeddings(name), shards.truncated(name)
    assert truncated is not None
    return ToPack(
        name,
        embeddings,
        shards.digests(name),
        truncated,
        shards.moments(name) if keeps_moments(*embeddings.shape) else None,
        _known_as(store, name),
    )


def _known_as(store: EmbeddingStore, name: str) -> str:
    """Return what those that pick from a shard know its rows by, empty where none can."""
    place = store.shards.places.find(name, verify=True)
    # Of a derived shard they know only the rows that it holds itself: its folder stays for them.
    return "" if place is None or (isinstance(place, InFolder) and place.sources) else place.held_as


def _remove_replaced(inventory: Inventory) -> int:
    """Remove folders of shards, and packs, all of which is in a later pack; return how many."""
    kept = Keeping(inventory).keep(inventory.shards)
    folders, packs = set(inventory.folders) - kept.folders, set(inventory.packs) - kept.packs
    remove(inventory, folders=folders, packs=packs, documents=set())
    return len(folders) + len(packs)
