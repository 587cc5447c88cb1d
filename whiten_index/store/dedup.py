"""Rows that other shards of a store hold already, and how a shard that has such is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.corpus.batches import EmbeddingBatch, TextBatch
from whiten_index.store.digest_index import DigestIndex, Lookup
from whiten_index.store.dtypes import StoreDtype, as_kept
from whiten_index.store.row_refs import SELF, Change, EmbeddingRows, RowRefs, Source
from whiten_index.whitening.moments import Moments

if TYPE_CHECKING:
    from whiten_index.store.embedding_store import EmbeddingStore

# A shard of which less is known is kept whole.
BY_REFERENCE = 0.5
# Three of the sixteen digits of float64.
_DIGITS_TO_LOSE = 1e3


@dataclass(frozen=True, eq=False)
class DerivedShardPlan:
    """A shard some of whose n rows others hold."""

    # The shard that most of them come from, and its moments.
    nearest: str
    before: Moments
    picks: RowRefs
    # (m, d) as kept, the rows that no other shard holds; and all rows (n, d).
    own: NDArray[np.floating]
    gathered: EmbeddingRows
    # (n, d) to be kept whole, None where the shard is derived.
    whole: NDArray[np.floating] | None


class RowFinder:
    """The rows of some shards of a store by digest, read when first needed."""

    def __init__(self, store: EmbeddingStore, shards: tuple[str, ...]) -> None:
        """Take the shards that may be picked from."""
        self._store, self._shards = store, shards
        self._known: dict[frozenset[str], DigestIndex] = {}

    def known(self, dtype: StoreDtype, batch: TextBatch | EmbeddingBatch) -> DigestIndex:
        """Return the rows that are kept as precisely as those of a batch are to be."""
        if dtype is StoreDtype.FLOAT16:
            dtypes = frozenset(("float16", "float32"))
        elif dtype is StoreDtype.OWN and isinstance(batch, EmbeddingBatch):
            dtypes = frozenset((str(batch.embeddings.dtype),))
        else:
            dtypes = frozenset(("float32",))
        if dtypes not in self._known:
            names = dict.fromkeys(self._shards)
            self._store.fetch_shards(names)
            shards = ((name, self._store.find(name)) for name in names)
            sound = [name for name, shard in shards if shard is not None and shard.dtype in dtypes]
            self._known[dtypes] = DigestIndex((name, self._store.digests(name)) for name in sound)
        return self._known[dtypes]

    def refer(
        self,
        dtype: StoreDtype,
        batch: TextBatch | EmbeddingBatch,
        found: Lookup,
        new: NDArray[np.floating],
    ) -> DerivedShardPlan:
        """Plan a shard some of whose rows others hold; ``new`` (m, d) has the other rows."""
        known = self.known(dtype, batch)
        picks = self._picks_of(known, found)
        numbers, times = np.unique(found.shard[found.known], return_counts=True)
        nearest = known.shards[numbers[np.argmax(times)]]
        before = self._store.moments(nearest)
        variances = np.diag(before.scatter) / max(before.count, 1)
        own = as_kept(new, dtype, variances=variances if before.count > 1 else None)
        gathered = self._store.picked(picks, own)
        whole = _whole(dtype, batch, gathered, known=float(found.known.mean()))
        return DerivedShardPlan(nearest, before, picks, own, gathered, whole)

    def _picks_of(self, known: DigestIndex, found: Lookup) -> RowRefs:
        """Return the places of rows (n,) that were looked up; unknown rows are the shard's own.

        Only sources that a row is picked from are named: each must stay for the shard.
        """
        sources: dict[Source, int] = {} if found.known.all() else {SELF: 0}
        source = np.zeros(len(found.shard), dtype=np.int32)
        row = np.zeros(len(found.shard), dtype=np.int32)
        row[~found.known] = np.arange(np.count_nonzero(~found.known))
        for number in np.unique(found.shard[found.known]):
            inside = found.shard == number
            there, wanted = self._store.row_refs(known.shards[number]), found.row[inside]
            used, which = np.unique(there.source[wanted], return_inverse=True)
            numbers = [sources.setdefault(there.sources[each], len(sources)) for each in used]
            source[inside] = np.array(numbers, dtype=np.int32)[which]
            row[inside] = there.row[wanted]
        return RowRefs(tuple(sources), source, row)

    def moments(self, refers: DerivedShardPlan) -> Moments:
        """Return the moments of picked rows, from those of the shard that most come from."""
        nearest, before, gathered = refers.nearest, refers.before, refers.gathered
        change = Change.between(self._store.row_refs(nearest), refers.picks)
        if len(change.left) + len(change.joined) >= len(gathered):
            return Moments.of(gathered[np.arange(len(gathered))])
        moments = before
        if len(change.left):
            moments -= Moments.of(self._store.mapped_embeddings(nearest)[change.left])
        if _mostly_removed(before, moments):
            return Moments.of(gathered[np.arange(len(gathered))])
        if len(change.joined):
            moments += Moments.of(gathered[change.joined])
        return moments

    def __reduce__(self) -> tuple[Any, ...]:
        return RowFinder, (self._store, self._shards)


def _whole(
    dtype: StoreDtype, batch: TextBatch | EmbeddingBatch, gathered: EmbeddingRows, *, known: float
) -> NDArray[np.floating] | None:
    """Return the embeddings (n, d) of a shard to be kept whole, None where it is derived.

    Given ones are kept whole where a new store would round them otherwise than the rows picked.
    """
    rows = np.arange(len(gathered))
    if isinstance(batch, TextBatch):
        return gathered[rows] if known < BY_REFERENCE else None
    given = batch.embeddings
    if known < BY_REFERENCE:
        return given
    rounds = dtype is StoreDtype.FLOAT16 and given.dtype != np.float16
    if not rounds:
        return None
    new, old = as_kept(given, dtype), gathered[rows]
    return None if new.dtype == old.dtype and np.array_equal(new, old) else given


def _mostly_removed(before: Moments, left: Moments) -> bool:
    """Return whether so much was taken away, as of outliers, that rounding shows in the rest."""
    sums = [(float(np.trace(before.scatter)), float(np.trace(left.scatter)))]
    if before.quartic is not None and left.quartic is not None:
        sums.append((before.quartic, left.quartic))
    return any(whole > _DIGITS_TO_LOSE * part for whole, part in sums)
