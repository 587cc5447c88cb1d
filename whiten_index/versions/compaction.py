"""Compaction of a store: small and scattered shards are joined in packs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from whiten_index.artifacts.disk_space import require_space
from whiten_index.artifacts.files import require_path
from whiten_index.artifacts.lock import only_writer
from whiten_index.corpus.sharding import SHARD_ROWS
from whiten_index.errors import ConfigError
from whiten_index.store.compaction_plan import plan_compaction
from whiten_index.store.dtypes import keeps_moments, moments_bytes, rows_bytes
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.live_set import Inventory, LiveSet, open_stores
from whiten_index.store.packs import ToPack
from whiten_index.versions.references import (
    corpus_references,
    index_references,
    indexes_of,
)


@dataclass(frozen=True, slots=True)
class StoreSize:
    """Size of a store: folders of shards and of packs, and bytes, those of rows included."""

    shards: int
    packs: int
    bytes: int


@dataclass(frozen=True)
class CompactReport:
    """Result of a compaction.

    Attributes:
        store: the root folder.
        packed: shards written into packs.
        rows: of these.
        packs: written.
        removed: folders of shards and packs that these replace.
        damaged: shards of corpora that are missing or damaged, and were left alone.
        before: size of the store before.
        after: size of the store now.
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
    derived: int
    alone: int

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return asdict(self)


def compact_store(root: Path | str, *, pack_rows: int = SHARD_ROWS) -> CompactReport:
    """Pack the small and scattered shards of the corpora of a store, for every encoder in it.

    Into packs of about ``pack_rows`` rows go

    - whole shards of less than a quarter of that;
    - derived ones of as few rows whose folder takes a quarter of what these would, or more;
    - derived shards that pick from more than 8 others, or whose others hold as many rows that
      nothing needs as the shard has;
    - the needed rows of packs at least half of which nothing needs, and of packs less than half
      full that as many rows join.

    A shard is needed by a corpus, or by a version of an index built from the store. Every shard
    stays the same to the bit, and shards that pick rows from it still find them.

    Readers are not disturbed. A second run does nothing.

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
    counts, before, after = Counter[str](), Counter[str](), Counter[str]()
    for store in open_stores(place):
        with only_writer(store.folder, what="store"):
            store.tidy()
            inventory = Inventory.take(store)
            before.update(inventory.sizes())
            counts.update(_write_packs(inventory, pack_rows))
            if counts["packs"]:
                inventory = Inventory.take(store)
            removed = _remove_replaced(inventory)
            counts["removed"] += removed
            after.update(Inventory.take(store).sizes() if removed else inventory.sizes())
    return CompactReport(
        store=str(place), before=StoreSize(**before), after=StoreSize(**after), **counts
    )


def _write_packs(inventory: Inventory, pack_rows: int) -> Counter[str]:
    store = inventory.store
    shards = [name for each in corpus_references(store) for name in each.record.shards]
    others = frozenset(
        shard
        for index in indexes_of(store.root, [store])
        for reference in index_references(index, store.root, [store])
        for shard in reference.record.shards
    )
    plan = plan_compaction(inventory, list(dict.fromkeys(shards)), others, pack_rows)
    names = [name for group in plan.groups for name in group]
    _require_space(store, names)
    rows = 0
    for group in plan.groups:
        packed = store.packs.write(
            store.packs.next_name(), [_to_pack(inventory, name) for name in group]
        )
        rows += sum(member.rows for member in packed)
    return Counter(
        packed=len(names),
        rows=rows,
        packs=len(plan.groups),
        damaged=plan.damaged,
        derived=plan.derived,
        alone=plan.alone,
    )


def _require_space(store: EmbeddingStore, names: Collection[str]) -> None:
    total = 0
    for name in names:
        found = store.require(name, verify=False)
        dim = int(store.mapped_embeddings(name).shape[1])
        itemsize = np.dtype(found.dtype).itemsize
        total += rows_bytes(found.rows, dim, itemsize) + moments_bytes(found.rows, dim)
    require_space({store.folder: total}, "compaction")


def _to_pack(inventory: Inventory, name: str) -> ToPack:
    store = inventory.store
    place, embeddings = store.resolver.find(name, verify=True), store.embeddings(name)
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


def _remove_replaced(inventory: Inventory) -> int:
    """Remove folders of shards, and packs, all of which is in a later pack; return how many."""
    kept = LiveSet(inventory)
    kept.keep(inventory.shards)
    folders, packs = set(inventory.folders) - kept.folders, set(inventory.packs) - kept.packs
    inventory.remove(folders=folders, packs=packs)
    return len(folders) + len(packs)
