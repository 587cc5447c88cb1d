"""Compaction of a store: small and scattered shards are joined in packs."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from whiten_index.artifacts.atomic import require_path
from whiten_index.artifacts.lock import only_writer
from whiten_index.corpus.sharding import SHARD_ROWS
from whiten_index.errors import ConfigError
from whiten_index.store.live_set import Inventory, open_stores
from whiten_index.store.shard_packing import remove_replaced, write_packs
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
    """

    store: str
    packed: int
    rows: int
    packs: int
    removed: int
    damaged: int
    before: StoreSize
    after: StoreSize

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
            counts.update(_pack_needed(inventory, pack_rows))
            if counts["packs"]:
                inventory = Inventory.take(store)
            removed = remove_replaced(inventory)
            counts["removed"] += removed
            after.update(Inventory.take(store).sizes() if removed else inventory.sizes())
    return CompactReport(
        store=str(place), before=StoreSize(**before), after=StoreSize(**after), **counts
    )


def _pack_needed(inventory: Inventory, pack_rows: int) -> Counter[str]:
    store = inventory.store
    shards = [name for each in corpus_references(store) for name in each.record.shards]
    others = frozenset(
        shard
        for index in indexes_of(store.root, [store])
        for reference in index_references(index, store.root, [store])
        for shard in reference.record.shards
    )
    return write_packs(inventory, list(dict.fromkeys(shards)), others, pack_rows)
