"""Moments of a corpus from those of its shards: groups of shards first, then the groups."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from whiten_index.draw import mapped_part
from whiten_index.moments import Moments
from whiten_index.runners import Calls
from whiten_index.store import CorpusPart, CorpusRecord, EmbeddingStore, total_moments
from whiten_index.whitening import unit_rows

_LEAST_GROUP, _BLOCK_ROWS = 64, 8_192

Weighed = tuple[tuple[CorpusPart, ...], NDArray[np.float64] | None]


def sum_of_shards(
    store: EmbeddingStore,
    record: CorpusRecord,
    calls: Calls,
    advance: Callable[[int], None],
) -> Moments:
    """Return the sum of the moments that the shards of a corpus keep.

    Whoever adds up does it in the same order, so that the sum is the same to the bit.

    Args:
        store: holds the shards.
        record: the corpus.
        calls: who adds up groups of shards.
        advance: told the rows that are in.
    """
    parts = [part for part in record.parts if part.rows]
    groups = list(_groups(parts))
    # Told 0 by and by, so that whoever wants to stop is heard.
    sum_up = functools.partial(_sum_of_group, store)
    sums = calls.map(sum_up, groups, advance=lambda _: advance(0))
    return _total(store, groups, sums, advance)


def sum_of_rows(
    store: EmbeddingStore,
    record: CorpusRecord,
    calls: Calls,
    advance: Callable[[int], None],
    *,
    weights: NDArray[np.float64] | None,
    normalize: bool,
) -> Moments:
    """Return the moments of all rows of a corpus, weighed (n,) or at unit length.

    Args:
        store: holds the shards.
        record: the corpus.
        calls: who goes through groups of shards.
        advance: told the rows that are in.
        weights: (n,) of the rows, None for one each.
        normalize: take the rows at unit length.
    """
    parts = [part for part in record.parts if part.rows]
    groups = list(_groups(parts))
    items, start = list[Weighed](), 0
    for group in groups:
        stop = start + sum(part.rows for part in group)
        items.append((group, None if weights is None else weights[start:stop]))
        start = stop
    go_through = functools.partial(_moments_of_group, store, normalize)
    sums = calls.map(go_through, items, advance=lambda _: advance(0))
    return _total(store, groups, sums, advance)


def _groups(parts: Sequence[CorpusPart]) -> Iterator[tuple[CorpusPart, ...]]:
    size = max(_LEAST_GROUP, math.isqrt(len(parts)))
    for start in range(0, len(parts), size):
        yield tuple(parts[start : start + size])


def _total(
    store: EmbeddingStore,
    groups: Sequence[tuple[CorpusPart, ...]],
    sums: Iterator[Moments],
    advance: Callable[[int], None],
) -> Moments:
    def counted() -> Iterator[Moments]:
        for group, moments in zip(groups, sums, strict=True):
            advance(sum(part.rows for part in group))
            yield moments

    return Moments.total(chain([Moments.empty(int(store.encoder["dim"]))], counted()))


def _sum_of_group(store: EmbeddingStore, group: tuple[CorpusPart, ...]) -> Moments:
    return total_moments(store, [part.shard for part in group], int(store.encoder["dim"]))


def _moments_of_group(store: EmbeddingStore, normalize: bool, item: Weighed) -> Moments:
    group, weights = item
    moments, first = Moments.empty(int(store.encoder["dim"])), 0
    for part in group:
        shard = mapped_part(store, part)
        for start in range(0, len(shard), _BLOCK_ROWS):
            block = np.array(shard[start : start + _BLOCK_ROWS])
            rows = unit_rows(block.astype(np.float64)) if normalize else block
            own = None if weights is None else weights[first : first + len(rows)]
            moments = moments.update(rows, weights=own)
            first += len(rows)
    return moments
