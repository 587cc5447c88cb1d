"""Garbage collection: removes segments that no corpus and no version of an index needs."""

import contextlib
import itertools
import math
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.atomic import remove_killed, require_path
from whiten_index.artifacts.cached_storage import place_of, required_place
from whiten_index.artifacts.files import exists, is_link
from whiten_index.artifacts.storage import Place, settled
from whiten_index.errors import ArtifactError, ConfigError
from whiten_index.paths import is_uri, shown
from whiten_index.store.digest_index import HashTable, digest_keys
from whiten_index.store.embedding_store import (
    EmbeddingStore,
    bridged_folders,
    open_stores,
    remove_bridged,
)
from whiten_index.store.notes import CHOICES, SAMPLES, UNFINISHED, RegisteredIndex, owner_of
from whiten_index.versions.published import INDEX_ID, read_index_id, read_published
from whiten_index.versions.references import (
    Reference,
    index_around,
    indexes_of,
    is_at_its_place,
    is_being_filled,
    lacks_record,
    lock_indexes,
    lock_stores,
    needed_digests,
    parts_of,
    references_of,
    registered,
    registered_as,
    require_gone,
    stores_of,
)

# An encode that was interrupted is likely to be taken up within a week.
KEEP_DAYS = 7.0
_DAY = 86400.0


@dataclass(frozen=True)
class GcReport:
    """Result of a gc, or what it would do."""

    store: str  # the root folder
    dry_run: bool  # whether nothing was removed
    segments: int  # removed
    parts: int  # files of digests, of ids and kept columns, and of remembered results, removed
    bridged: int  # folders of the rows of bridged versions, removed
    leftovers: int  # unfinished files of writers that died, removed
    bytes: int  # freed, those of leftovers not counted
    kept: dict[str, int]  # kind -> how many of it stay; `recent` of them stay for their age alone
    indexes: tuple[str, ...]  # those built from the store
    left_alone: tuple[str, ...]  # folders of encoders of which no corpus is recorded
    references: int  # corpora and versions that need something


def gc_store(
    root: Path | str,
    *,
    dry_run: bool = False,
    forget: Collection[Path | str] = (),
    indexes: Collection[Path | str] = (),
    keep_days: float = KEEP_DAYS,
) -> GcReport:
    """Remove the segments of which nothing needs a row, of every encoder in a store.

    A row is needed by a corpus of the store, or by a version or candidate of an index that was
    built from it. Segments younger than ``keep_days`` stay too: they may be of an encode that was
    interrupted. From a bucket, only digests are read, and files of which copies here differ.

    The rows of a bridged version stay until that version is pruned, and no migration of this
    store's indexes is under way.

    Args:
        root: of the store, or its URI.
        dry_run: only say what would be removed; nothing is locked or written.
        forget: places, as registered, of indexes that are gone; their needs no longer count.
        indexes: indexes that were built from it and moved since; they are registered at their new
            places, before any is forgotten.
        keep_days: age in days.

    Raises:
        ArtifactError: there is no store; an index that was built from it, its published version or
            a needed row is missing; or a version is damaged so that its rows are not known.
        BusyError: another process is writing the store or an index built from it.
        ConfigError: an index to forget is not known or is there, a named one was not built from
            this store, or ``keep_days`` is no number of days.
        StorageError: the disk cannot be read or written.
    """
    if not 0 <= keep_days < 1e9:
        raise ConfigError(
            f"--keep-days takes a number of days, 0 or more (0 keeps nothing for its age alone); "
            f"{shown(keep_days)} was given"
        )
    place = required_place(root)
    named = [settled(required_place(index)) for index in indexes]
    gone = [each if is_uri(each) else require_path(each) for each in forget]
    every = open_stores(place)
    # Before an index is registered, which makes folders that are not mounted.
    known = registered(every)
    forgotten = registered_as(place, known, gone)
    moved = _new_places(place, known, forgotten, named)
    ended = {old for old, places in moved.items() if not places}
    stores = [each for each in every if not is_being_filled(each, ended)]
    removed, kept = Counter[str](leftovers=0, segments=0, parts=0), Counter[str]()
    with contextlib.ExitStack() as locks:
        if not dry_run:
            lock_stores(place, stores, locks)
            # A migration may have begun meanwhile.
            stores = [each for each in stores if not is_being_filled(each, ended)]
        # Rows that a migration under way has bridged are not in a version yet.
        bridged = bridged_folders(place) if len(stores) == len(every) else []
        # Others are collected if one has no record, as after a first encode that was interrupted.
        unrecorded = [each for each in stores if lacks_record(each)]
        cleaned = [each for each in stores if each not in unrecorded] or stores
        users = [(index, stores_of(index, place, every)) for index in named]
        kept_ids = set[tuple[str, str | None]]()
        for index, its in users:
            index_id = read_index_id(index) if isinstance(index, Path) else None
            kept_ids.add((owner_of(index), index_id))
            # What it needs stays, even if this ends because another index is missing.
            for store in () if dry_run else its:
                store.indexes.register(index, index_id)
        files = {each.file for each in forgotten if (each.place, each.id) not in kept_ids}
        used_by = list(dict.fromkeys([*indexes_of(place, every, but=files), *named]))
        require_gone(forgotten, used_by)
        if not dry_run:
            lock_indexes(used_by, place, locks)
        names = {each.name for each in bridged}
        references = references_of(place, cleaned, used_by, bridged=names)
        names -= {each.encoder for each in references}
        since = time.time() - keep_days * _DAY if keep_days else math.inf
        # All is looked at before anything is removed.
        garbage = [_garbage(store, references, since) for store in cleaned]
        for _, one, counts in garbage:
            removed.update(one)
            kept.update(counts)
        root_folder, mirror = place_of(place)
        size = mirror.size(*(root_folder / name for name in names))
        removed.update(bridged=len(names), bytes=size)
        if not dry_run:
            for store in every:
                _move_migrations(store, moved)
            if isinstance(place, Path):
                remove_killed(place)
            for store, (paths, _, _) in zip(cleaned, garbage, strict=True):
                removed["leftovers"] += _remove(store, paths, references)
            for name in sorted(names):
                remove_bridged(place, name)
            # Last, so that the same command can be run again if it dies before.
            for store, file in itertools.product(every, files):
                store.indexes.forget(file)
    return GcReport(
        store=str(place),
        dry_run=dry_run,
        **removed,
        kept=dict(kept),
        indexes=tuple(map(str, used_by)),
        left_alone=tuple(str(each.folder) for each in unrecorded),
        references=len(references),
    )


def _new_places(
    root: Place,
    known: Sequence[RegisteredIndex],
    gone: Collection[RegisteredIndex],
    named: Sequence[Place],
) -> dict[str, list[Place]]:
    """Return where each index to forget is now: named, registered, or around the store."""
    around = index_around(root)
    near = named if around is None else [*named, around]
    others = (each for each in known if each not in gone and is_at_its_place(each))
    ids = {index: _id_of(index) for index in (*near, *(settled(each.place) for each in others))}
    found, olds = dict[str, list[Place]](), {each.id for each in gone} - {None}
    for old in gone:
        # Notes of a place may also be of an index with another id that is there now.
        place = settled(old.place)
        same = [each for each in ids if each == place or ids[each] == old.id is not None]
        # One without an id, as in a bucket, may be any; one that is named may have a new id.
        unsure = (each for each in near if ids[each] not in olds)
        maybe = (each for each in unsure if each in named or None in (ids[each], old.id))
        found[old.place] = list(dict.fromkeys([*found.get(old.place, []), *(same or maybe)]))
    return found


def _id_of(index: Place) -> str | None:
    if isinstance(index, Path) and exists(index / INDEX_ID):
        return read_index_id(index)
    return None


def _move_migrations(store: EmbeddingStore, moved: Mapping[str, Sequence[Place]]) -> None:
    """Give the notes of indexes to the same ones at their new places, or mark them as given up."""
    notes = store.results.migrations()
    for old, places in moved.items():
        if note := notes.get(old):
            for index in places:
                # Other notes at its new place are of an earlier migration.
                encoder = read_published(index).fields["encoder_fingerprint"]
                finished = encoder == store.fingerprint
                owner = owner_of(index)
                store.results.save_migration(owner, not finished and (notes.get(owner) or note))
            if old not in map(owner_of, places):
                store.results.save_migration(old, None)


def _remove(store: EmbeddingStore, paths: Sequence[Path], references: Sequence[Reference]) -> int:
    """Remove paths from a store, and what killed writers left; return how many these were."""
    store.keep_part_files(parts_of(store, references))
    leftovers = store.tidy()
    store.mirror.remove(*paths)
    return leftovers + store.mirror.remove_unnamed(store.segments_folder)


def _garbage(
    store: EmbeddingStore, references: Sequence[Reference], since: float
) -> tuple[list[Path], Counter[str], Counter[str]]:
    """Return the paths that these do not need; count what they are, and what stays."""
    names, mirror = store.segment_names(), store.mirror
    needed = _needed_segments(store, names, references)
    files = {path for part in parts_of(store, references) for path in store.part_files(part)}
    paths = [store.segments_folder / name for name in names]
    # A time in the future counts too.
    recent = {path for path in paths if mirror.modified(path) > since}
    kept = {path for path in paths if path.name in needed} | recent
    # Results are made again when they are next needed.
    results = (
        path for kind in (CHOICES, SAMPLES, UNFINISHED) for path in store.results.files(kind)
    )
    # What is behind a link of somebody else may be anything.
    there = [path for path in (*store.all_part_files(), *results) if not is_link(path.parent)]
    kept_files = {path for path in there if path in files or mirror.modified(path) > since}
    gone, gone_files = set(paths) - kept, set(there) - kept_files
    size = mirror.size(*gone, *gone_files)
    removed = Counter(segments=len(gone), parts=len(gone_files), bytes=size)
    ages = len(kept) - len(needed)
    kept_counts = Counter(segments=len(kept), parts=len(kept_files), recent=ages)
    return [*sorted(gone), *sorted(gone_files)], removed, kept_counts


def _needed_segments(
    store: EmbeddingStore, names: Sequence[str], references: Sequence[Reference]
) -> set[str]:
    """Return the segments that have a row that these need; refuse a row that none has."""
    try:
        wanted = needed_digests(store, references)
    except ArtifactError as error:
        raise ArtifactError(
            f"a file of needed digests is damaged or missing: mount its disk ({error})"
        ) from error
    keys = digest_keys(wanted)
    table = HashTable([keys])
    times, rows_of = np.zeros(len(wanted), dtype=np.int64), dict[str, NDArray[np.int64]]()
    found, unread = store.digests_of_segments(names), set(names)
    for name, digests in found:
        unread.discard(name)
        rows = np.unique(table.find(digest_keys(digests)))
        if len(rows := rows[rows >= 0]):
            rows_of[name] = rows
            times[rows] += 1
    if lacking := len(wanted) - int(np.count_nonzero(times[table.find(keys)])):
        raise ArtifactError(
            f"{store.damaged()} is damaged or missing: {lacking:,} of {len(wanted):,} needed rows "
            "are in no segment, so that nothing is removed; mount its disk, or see how to mend it "
            f"with whiten-index verify {store.place}"
        )
    for name, rows in list(rows_of.items()):
        # Of a row that is there twice, a damaged one goes.
        if (times[rows] > 1).all():
            try:
                store.check_kept(name)
            except ArtifactError:
                times[rows] -= 1
                del rows_of[name]
    for name in unread:
        # One answer of a server may have been wrong: what is sound stays until the next gc.
        with contextlib.suppress(ArtifactError):
            store.check_kept(name)
            rows_of[name] = np.empty(0, np.int64)
    return set(rows_of)
