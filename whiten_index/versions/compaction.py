"""Compaction of a store: small and partly unused segments are joined."""

import contextlib
import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.cached_storage import required_place
from whiten_index.artifacts.storage import Place
from whiten_index.corpus.sharding import SHARD_ROWS
from whiten_index.errors import ArtifactError, ConfigError
from whiten_index.store.dtypes import StoreDtype
from whiten_index.store.embedding_store import EmbeddingStore, open_stores
from whiten_index.store.segments import Segment
from whiten_index.versions.references import (
    indexes_of,
    is_being_filled,
    lacks_record,
    lock_indexes,
    lock_stores,
    needed_digests,
    parts_of,
    references_of,
)

# A segment of fewer rows than this share of a full one is joined with others.
_SMALL = 1 / 4
# One that needs less than this share of its rows is written again: what nothing needs takes a
# quarter as much as what is needed, at most.
_USED = 4 / 5


@dataclass(frozen=True)
class CompactReport:
    """Result of a compaction."""

    store: str  # the root folder
    rows: int  # written into new segments
    written: int  # new segments
    removed: int  # segments that these replace, and those whose rows are all in others
    damaged: int  # segments that were left alone
    # `segments` of the store before, and `bytes` of these and of the rows of corpora.
    before: Mapping[str, int]
    after: Mapping[str, int]  # the same now

    def require_sound(self) -> None:
        """Raise ``ArtifactError`` if damaged segments were left alone."""
        if self.damaged:
            raise ArtifactError(
                f"{self.damaged:,} segments of {self.store} are damaged and were left alone; to "
                f"see what mends them: whiten-index verify {self.store}"
            )


def compact_store(root: Place, *, segment_rows: int = SHARD_ROWS) -> CompactReport:
    """Join the small and partly unused segments of a store, for every encoder in it.

    Into segments of up to ``segment_rows`` rows go the needed rows of segments that need less than
    four fifths of theirs, and those of segments with less than a quarter of that many, of as many
    rows as are joined with them: a row is written once for each doubling. Rows stay the same to the
    bit.

    A row is needed by a corpus, or by a version of an index built from the store. Readers are not
    disturbed. A second run does nothing.

    Args:
        root: of the store, or its URI.
        segment_rows: rows of a full segment.

    Raises:
        ArtifactError: there is no store, the record of a corpus is damaged, or an index built from
            it, its published version or the record of a version is missing or damaged.
        BusyError: another process is writing the store or an index built from it.
        StorageError: the disk is full or cannot be written.
    """
    if segment_rows < 1:
        raise ConfigError(f"segments have 1 row or more; segment_rows {segment_rows} was given")
    place = required_place(root)
    counts = Counter[str](rows=0, written=0, removed=0, damaged=0)
    before, after = Counter[str](segments=0, bytes=0), Counter[str](segments=0, bytes=0)
    stores = open_stores(place)
    free = list(itertools.filterfalse(is_being_filled, stores))
    for store in list(itertools.filterfalse(lacks_record, free)) or free:
        with contextlib.ExitStack() as locks:
            lock_stores(place, [store], locks)
            if is_being_filled(store):
                # A migration has begun meanwhile.
                continue
            indexes = indexes_of(place, stores)
            lock_indexes(indexes, place, locks)
            references = references_of(place, [store], indexes)
            wanted = needed_digests(store, references)
            store.keep_part_files(parts_of(store, references))
            store.tidy()
            before.update(_size(store))
            # What was removed may leave others partly unused.
            while (done := _compact(store, wanted, segment_rows))["removed"]:
                counts.update(done)
            sound = store.index(verify=True).names
            counts.update(damaged=len(set(store.segment_names()) - set(sound)), **done)
            after.update(_size(store))
    return CompactReport(store=str(place), before=dict(before), after=dict(after), **counts)


def _size(store: EmbeddingStore) -> Counter[str]:
    paths = [store.segments_folder / name for name in store.segment_names()]
    size = store.mirror.size(*paths, *store.all_part_files())
    return Counter(segments=len(paths), bytes=size)


def _compact(store: EmbeddingStore, wanted: NDArray[np.uint8], segment_rows: int) -> Counter[str]:
    # No copy of a row goes that another may have to stand in for.
    store.mirror.fetch_all(store.segments_folder / name for name in store.segment_names())
    index = store.index(verify=True)
    found = [store.require_segment(name) for name in index.names]
    places = index.find(wanted)
    pairs = (places.segment.astype(np.int64) << 32) + places.row
    _, first = np.unique(pairs[places.known], return_index=True)
    first.sort()
    numbers, rows = (each[places.known][first] for each in (places.segment, places.row))
    used = np.bincount(numbers, minlength=len(found))
    joined = _to_join(found, used, segment_rows)
    moving = np.isin(numbers, joined)
    numbers, rows = numbers[moving], rows[moving]
    dtypes = {int(number): found[number].dtype for number in joined}
    counts, kept = Counter[str](rows=0, written=0, removed=0), set[str]()
    for dtype in sorted(set(dtypes.values())):
        mine = np.isin(numbers, [number for number, own in dtypes.items() if own == dtype])
        places_of = np.stack([numbers[mine], rows[mine]])
        for start in range(0, places_of.shape[1], segment_rows):
            block = places_of[:, start : start + segment_rows]
            name = _write_joined(store, index.names, block)
            # A segment that is alone in its type comes out as it was.
            if name not in index.names:
                counts.update(rows=block.shape[1], written=1)
            kept.add(name)
    for number in np.flatnonzero(used == 0):
        places = index.find(store.tensor(index.names[number], "digests"))
        # Other segments have all of its rows.
        if not (places.segment == number).any():
            joined = np.append(joined, number)
    gone = [name for number in joined if (name := found[number].name) not in kept]
    store.mirror.remove(*(store.segments_folder / name for name in gone))
    counts["removed"] += len(gone)
    store.look_again()
    return counts


def _to_join(found: list[Segment], used: NDArray[np.int64], segment_rows: int) -> NDArray[np.int64]:
    """Return the numbers of segments to join, ``used`` being their needed rows."""
    sizes = np.array([each.rows for each in found], dtype=np.int64)
    partly_unused = np.flatnonzero((used > 0) & (used < _USED * sizes))
    small = np.flatnonzero((used > 0) & (sizes < _SMALL * segment_rows))
    small = np.setdiff1d(small, partly_unused)
    small = small[np.argsort(sizes[small], kind="stable")]
    # The smaller ones together, and what is joined anyway, have as many rows as the next.
    before = int(used[partly_unused].sum()) + np.cumsum(sizes[small]) - sizes[small]
    fits = np.flatnonzero((before >= sizes[small]) & (before > 0))
    joined = small[: fits[-1] + 1] if len(fits) else small[:0]
    return np.concatenate([partly_unused, joined])


def _write_joined(store: EmbeddingStore, names: tuple[str, ...], places: NDArray[np.int32]) -> str:
    tensors = dict[str, NDArray[Any]]()
    for what in ("embeddings", "digests", "truncated"):
        for number in np.unique(places[0]):
            inside = places[0] == number
            own = store.tensor(names[number], what)[places[1, inside]]
            if what not in tensors:
                tensors[what] = np.empty((places.shape[1], *own.shape[1:]), dtype=own.dtype)
            tensors[what][inside] = own
    written = store.write(
        tensors["digests"],
        tensors["embeddings"],
        dtype=StoreDtype.OWN,
        truncated=tensors["truncated"].astype(np.bool_),
    )
    return written.name
