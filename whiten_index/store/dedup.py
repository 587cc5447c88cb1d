"""Rows that other shards of a store hold already, and how a shard that has such is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.corpus.batches import EmbeddingBatch, TextBatch
from whiten_index.store.digest_index import DigestIndex, Lookup
from whiten_index.store.dtypes import StoreDtype, as_kept
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.row_refs import EmbeddingRows, RowRefs
from whiten_index.whitening.moments import Moments

# A shard of which less is known is kept whole.
BY_REFERENCE = 0.5
# Three of the sixteen digits of float64.
_DIGITS_TO_LOSE = 1e3


@dataclass(frozen=True, eq=False)
class DerivedShardPlan:
    """A shard some of whose rows others hold.

    Attributes:
        nearest: the shard that most of them come from.
        before: its moments.
        picks: where the n rows lie.
        own: (m, d) as kept, those held by none other.
        gathered: all of them.
        whole: (n, d) to be kept whole, None where it is derived.
    """

    nearest: str
    before: Moments
    picks: RowRefs
    own: NDArray[np.floating]
    gathered: EmbeddingRows
    whole: NDArray[np.floating] | None


class RowFinder:
    """Knows the rows of shards of a store, read on first need; pickled, it has read nothing yet."""

    def __init__(self, store: EmbeddingStore, shards: tuple[str, ...]) -> None:
        """Take the shards that may be picked from."""
        self._store, self._shards = store, shards
        self._known: dict[frozenset[str], DigestIndex] = {}

    def known(self, dtype: StoreDtype, batch: TextBatch | EmbeddingBatch) -> DigestIndex:
        """Return the rows that are kept as precisely as these are to be."""
        if dtype is StoreDtype.FLOAT16:
            dtypes = frozenset(("float16", "float32"))
        elif dtype is StoreDtype.OWN and isinstance(batch, EmbeddingBatch):
            dtypes = frozenset((str(batch.embeddings.dtype),))
        else:
            dtypes = frozenset(("float32",))
        if dtypes not in self._known:
            self._known[dtypes] = self._store.shards.known_rows(self._shards, dtypes=dtypes)
        return self._known[dtypes]

    def refer(
        self,
        dtype: StoreDtype,
        batch: TextBatch | EmbeddingBatch,
        found: Lookup,
        new: NDArray[np.floating],
    ) -> DerivedShardPlan:
        """Settle how a shard is kept some of whose rows others hold, ``new`` (m, d) being not."""
        known = self.known(dtype, batch)
        picks = self._store.shards.picks_of(known, found)
        numbers, times = np.unique(found.shard[found.known], return_counts=True)
        nearest = known.shards[numbers[np.argmax(times)]]
        before = self._store.moments(nearest)
        variances = np.diag(before.scatter) / max(before.count, 1)
        own = as_kept(new, dtype, variances=variances if before.count > 1 else None)
        gathered = self._store.shards.picked(picks, own)
        whole = _whole(dtype, batch, gathered, known=float(found.known.mean()))
        return DerivedShardPlan(nearest, before, picks, own, gathered, whole)

    def moments(self, refers: DerivedShardPlan) -> Moments:
        """Return the moments of picked rows, from those of the shard that most come from."""
        nearest, before, gathered = refers.nearest, refers.before, refers.gathered
        change = self._store.shards.change(nearest, refers.picks)
        if len(change.left) + len(change.joined) >= len(gathered):
            return Moments.of(gathered[np.arange(len(gathered))])
        moments = before
        if len(change.left):
            moments -= Moments.of(self._store.mapped_embeddings(nearest)[change.left])
        if _little_is_left(before, moments):
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

    Given ones are kept whole too where the rows picked are rounded otherwise than a new store
    would: as float16 or not is settled shard by shard.
    """
    rows = np.arange(len(gathered))
    if isinstance(batch, TextBatch):
        return gathered[rows] if known < BY_REFERENCE else None
    given = batch.embeddings
    if known < BY_REFERENCE:
        return given
    rounds = dtype is StoreDtype.FLOAT16 and given.dtype != np.float16
    same = not rounds or _equal(as_kept(given, dtype), gathered[rows])
    return None if same else given


def _equal(some: NDArray[np.floating], others: NDArray[np.floating]) -> bool:
    return some.dtype == others.dtype and np.array_equal(some, others)


def _little_is_left(before: Moments, left: Moments) -> bool:
    """Tell whether so much was taken away that rounding shows in what is left, as of outliers."""
    sums = [(float(np.trace(before.scatter)), float(np.trace(left.scatter)))]
    if before.quartic is not None and left.quartic is not None:
        sums.append((before.quartic, left.quartic))
    return any(whole > _DIGITS_TO_LOSE * part for whole, part in sums)
