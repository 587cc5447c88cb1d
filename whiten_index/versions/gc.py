"""Drops from a store what no corpus, and no version of an index, needs any longer."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from whiten_index.artifacts.files import is_folder, reading, require_path, writing
from whiten_index.artifacts.lock import only_writer
from whiten_index.artifacts.manifest import MANIFEST
from whiten_index.errors import ArtifactError, ConfigError
from whiten_index.paths import shown
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.versions.live_set import Inventory, LiveSet, Removed, open_stores, remove
from whiten_index.versions.published import read_index_id
from whiten_index.versions.references import (
    Reference,
    corpus_references,
    files_naming,
    index_references,
    indexes_of,
    real_place,
    stores_of,
)

# An encode that was interrupted is likely to be taken up within a week.
KEEP_DAYS = 7.0
_DAY = 86400.0


@dataclass(frozen=True)
class GcReport:
    """What a gc did, or would do.

    Attributes:
        store: the root folder.
        dry_run: whether nothing was removed.
        shards: folders of shards removed.
        packs: folders of packs removed.
        rows: files of ids and kept columns removed.
        leftovers: what writers that died had left, removed.
        bytes: freed, those of leftovers not counted.
        kept: kind -> how many of it stay; ``recent`` of them stay for their age alone.
        indexes: that were asked what they need.
        references: corpora and versions that need something.
        forgotten: indexes that are not asked any more.
        registered: indexes that were named, which are asked from now on.
    """

    store: str
    dry_run: bool
    shards: int
    packs: int
    rows: int
    leftovers: int
    bytes: int
    kept: dict[str, int]
    indexes: tuple[str, ...]
    references: int
    forgotten: tuple[str, ...]
    registered: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return asdict(self)


def gc_store(
    root: Path | str,
    *,
    dry_run: bool = False,
    forget: Collection[Path | str] = (),
    indexes: Collection[Path | str] = (),
    keep_days: float = KEEP_DAYS,
) -> GcReport:
    """Remove the shards, packs and rows that nothing needs, of every encoder in a store.

    Needed is what the corpora are made of that the store remembers, and what the versions and
    candidates are made of of every index that was built from it. What nothing needs and is younger
    than ``keep_days`` stays too: it may be of an encode that was interrupted.

    Args:
        root: of the store.
        dry_run: only say what would be removed; nothing is locked or written.
        forget: indexes that are gone, not to be asked again, as they are registered.
        indexes: that were built from it and moved since; they are registered where they are now,
            before any is forgotten.
        keep_days: age in days by the clock of the file system.

    Raises:
        ArtifactError: there is no store; an index that was built from it, its published version or
            a shard that is needed is not there; or of something it cannot be told what it needs.
        BusyError: another process is writing the store or an index built from it.
        ConfigError: an index built from it is in a bucket, an index to forget is not known or is
            there, one named is none of this store, or ``keep_days`` is no number of days.
        StorageError: the disk cannot be read or written.
    """
    _require_days(keep_days)
    place = require_path(root)
    stores = open_stores(place)
    named = [real_place(require_path(index)) for index in indexes]
    users = {index: stores_of(index, place, stores) for index in named}
    files = files_naming(place, stores, list(map(require_path, forget)), named)
    with contextlib.ExitStack() as locks:
        if dry_run:
            asked = _asked(place, stores, files, named)
        else:
            asked = _hold_all(locks, place, stores, files, users)
        references = list(_references(place, stores, asked))
        leftovers = 0 if dry_run else sum(store.tidy() for store in stores)
        done = [_collect(store, references, dry_run, keep_days) for store in stores]
    removed, kept = Removed(), Counter[str]()
    for each, counts in done:
        removed += each
        kept.update(counts)
    return GcReport(
        store=str(place),
        dry_run=dry_run,
        **asdict(removed),
        leftovers=leftovers,
        kept=dict(kept),
        indexes=tuple(map(str, asked)),
        references=len(references),
        forgotten=tuple(map(str, forget)),
        registered=tuple(map(str, named)),
    )


def _require_days(days: float) -> None:
    number = isinstance(days, int | float) and not isinstance(days, bool)
    if not number or not 0 <= days < 1e9:
        raise ConfigError(
            f"--keep-days takes a number of days, 0 or more (0 keeps nothing for its age alone); "
            f"{shown(days)} was given"
        )


def _asked(
    root: Path,
    stores: Sequence[EmbeddingStore],
    forget: Collection[Path],
    named: Iterable[Path] = (),
) -> list[Path]:
    """Return the indexes to be asked, those named among them, without those that files name."""
    return list(dict.fromkeys([*indexes_of(root, stores, but=forget), *named]))


def _hold_all(
    locks: contextlib.ExitStack,
    root: Path,
    stores: Sequence[EmbeddingStore],
    forget: Sequence[Path],
    named: Mapping[Path, Sequence[EmbeddingStore]],
) -> list[Path]:
    """Become the one writer of the store and of all indexes built from it; return these.

    Those named are registered with the stores given for each, and then files of others removed.
    """
    indexes = list[Path]()

    def hold(found: Iterable[Path]) -> None:
        for index in found:
            locks.enter_context(only_writer(index, what="index"))
            indexes.append(index)

    # In the order that a build takes them.
    hold(_asked(root, stores, forget, named))
    for store in stores:
        locks.enter_context(only_writer(store.folder, what="store"))
    for index, users in named.items():
        for store in users:
            store.indexes.register(index, read_index_id(index))
    for file in forget:
        with writing(file):
            file.unlink(missing_ok=True)
    # Another may have been built from it before the store was ours.
    hold(index for index in _asked(root, stores, forget) if index not in indexes)
    return indexes


def _references(
    root: Path, stores: Sequence[EmbeddingStore], indexes: Sequence[Path]
) -> Iterable[Reference]:
    for store in stores:
        yield from corpus_references(store)
    for index in indexes:
        yield from index_references(index, root, stores)


def _collect(
    store: EmbeddingStore,
    references: Sequence[Reference],
    dry_run: bool,
    keep_days: float,
) -> tuple[Removed, dict[str, int]]:
    inventory = Inventory.take(store)
    records = [reference.record for reference in references if reference.is_of(store)]
    kept = LiveSet(inventory)
    kept.keep(dict.fromkeys(shard for record in records for shard in record.shards))
    _require_known(store, kept)
    folders, packs = set(kept.folders), set(kept.packs)
    documents = {part.documents for record in records for part in record.parts if part.rows}
    is_recent = _Recent(store, keep_days, dry_run=dry_run)
    recent = {name for name in inventory.folders if is_recent(inventory.shard_path(name))}
    recent |= {
        member.fingerprint
        for name, members in inventory.packs.items()
        if is_recent(inventory.pack_path(name))
        for member in members
    }
    kept.keep(recent)
    documents |= {name for name, path in inventory.documents.items() if is_recent(path)}

    there = set(inventory.folders) | inventory.damaged_folders
    all_packs = set(inventory.packs) | inventory.damaged_packs
    removed = remove(
        inventory,
        folders=there - kept.folders,
        packs=all_packs - kept.packs,
        documents=set(inventory.documents) - documents,
        dry_run=dry_run,
    )
    return removed, {
        "shards": len(there & kept.folders),
        "packs": len(all_packs & kept.packs),
        "rows": len(set(inventory.documents) & documents),
        "recent": len(kept.folders - folders) + len(kept.packs - packs),
    }


def _require_known(store: EmbeddingStore, kept: LiveSet) -> None:
    """Refuse where it is not known what a needed shard picks its rows from."""
    unknown = kept.damaged | kept.missing
    if unknown:
        raise ArtifactError(
            f"{store.shards.folder / min(unknown)} is damaged or missing, so that it is not known "
            f"which others it needs ({len(unknown)} such); mount its disk, or see how to mend it "
            f"with whiten-index verify {store.root}"
        )


class _Recent:
    """Tells whether a file or folder is younger than some days, by the clock of its file system."""

    def __init__(self, store: EmbeddingStore, days: float, *, dry_run: bool) -> None:
        self._limit = days * _DAY
        self._now = time.time()
        if not dry_run:
            with (
                writing(store.folder),
                tempfile.NamedTemporaryFile(dir=store.folder, prefix=".tmp-clock-") as probe,
            ):
                self._now = Path(probe.name).stat().st_mtime

    def __call__(self, path: Path) -> bool:
        """Tell whether it is; so is what was written later than now, by a clock put right since."""
        marker = path / MANIFEST if is_folder(path) else path
        try:
            with reading(marker):
                written = marker.stat().st_mtime
        except FileNotFoundError:
            return False
        return self._limit > 0 and self._now - written < self._limit
