"""References to rows that a shard picks from others, and comparison of two such shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

# A shard, and the SHA-256 of its embeddings: written again, it may hold its rows in another order.
Source = tuple[str, str]
# The source that is the shard itself.
SELF: Source = ("", "")
Numbers = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class RowRefs:
    """Places of the rows (n,) of a derived shard.

    Attributes:
        sources: shards that hold them, ``SELF`` being the shard itself.
        source: (n,) int32, number of the source of each row.
        row: (n,) int32, the row in that source.
    """

    sources: tuple[Source, ...]
    source: Numbers
    row: Numbers


@dataclass(frozen=True, eq=False)
class Change:
    """Difference between the rows of a shard and those of the next; repeated rows count as often.

    Attributes:
        left: (m,) positions of rows of the first that are not in the second.
        joined: (l,) positions of rows of the second that were not in the first.
    """

    left: NDArray[np.int64]
    joined: NDArray[np.int64]

    @classmethod
    def between(cls, before: RowRefs, after: RowRefs) -> Change:
        """Compare two shards, no source of the first being ``SELF``: own rows now are new."""
        # Own rows get −1.
        numbers = {place: number for number, place in enumerate(before.sources)}
        for place in after.sources:
            numbers.setdefault(place, len(numbers) if place != SELF else -1)
        was, now = _places(before, numbers), _places(after, numbers)
        return cls(_beyond(was, now), _beyond(now, was))


def other_sources(fields: Mapping[str, Any]) -> list[Source]:
    """Return the sources of a shard without itself; none where it is whole."""
    return [each for each in fields["sources"] if each != SELF]


def _places(picks: RowRefs, numbers: Mapping[Source, int]) -> NDArray[np.int64]:
    renamed = np.array([numbers[place] for place in picks.sources], dtype=np.int64)
    return (renamed[picks.source] << 32) + picks.row


def _beyond(some: NDArray[np.int64], others: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the positions in ``some`` that are more than ``others`` has of the same number."""
    order = np.argsort(some, kind="stable")
    numbers, starts, counts = np.unique(some[order], return_index=True, return_counts=True)
    there, times = np.unique(others, return_counts=True)
    place = np.minimum(np.searchsorted(there, numbers), max(len(there) - 1, 0))
    met = there[place] == numbers if len(there) else np.zeros(len(numbers), dtype=bool)
    taken = np.where(met, times[place] if len(there) else 0, 0)
    rank = np.arange(len(some)) - np.repeat(starts, counts)
    return np.sort(order[rank >= np.repeat(taken, counts)])


class EmbeddingRows(Protocol):
    """Embeddings (n, d), read row by row: an array, or an object like one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(n, d)."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type they are kept in."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any, /) -> NDArray[np.floating]: ...


class RowView:
    """Rows (n, d) picked from several arrays, in any order."""

    def __init__(
        self,
        holders: Sequence[NDArray[np.floating]],
        sources: NDArray[np.int32],
        rows: NDArray[np.int32],
    ) -> None:
        """Take the arrays (m_i, d), the number of the array of each row (n,), and its row (n,)."""
        self._holders, self._sources, self._rows = holders, sources, rows
        self.shape = (len(rows), int(holders[0].shape[1]))
        self.dtype: np.dtype[Any] = np.result_type(*(holder.dtype for holder in holders))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, wanted: slice | NDArray[np.integer]) -> NDArray[np.floating]:
        """Return rows (m, d) by a slice or by their numbers."""
        sources, rows = self._sources[wanted], self._rows[wanted]
        found = np.empty((len(rows), self.shape[1]), dtype=self.dtype)
        for source in np.unique(sources):
            inside = sources == source
            found[inside] = self._holders[source][rows[inside]]
        return found
