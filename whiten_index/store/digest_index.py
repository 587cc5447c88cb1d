"""Index of the rows of a store by digest, and the hash table under it."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Lookup:
    """Places of rows (n,)."""

    names: tuple[str, ...]  # of the segments
    segment: NDArray[np.int32]  # (n,) number of the segment, −1 where a row is not known
    row: NDArray[np.int32]  # (n,) its row in that segment

    @property
    def known(self) -> NDArray[np.bool_]:
        """(n,) whether a row is known."""
        return self.segment >= 0


class DigestIndex:
    """Looks rows up by digest; it takes 24 bytes a row."""

    def __init__(self, segments: Iterable[tuple[str, NDArray[np.uint8]]]) -> None:
        """Take the names of segments, and the digests (m, 16) of the rows of each."""
        names, keys, sizes = list[str](), list[Keys](), [0]
        for name, digests in segments:
            names.append(name)
            keys.append(digest_keys(digests))
            sizes.append(len(digests))
        self.names = tuple(names)
        self._starts = np.cumsum(sizes)
        self._table = HashTable(keys)

    def __len__(self) -> int:
        return len(self._table)

    def find(self, digests: NDArray[np.uint8]) -> Lookup:
        """Return the places of rows with these digests (n, 16), the first of several."""
        place = self._table.find(digest_keys(digests))
        known = place >= 0
        # Segments without rows start where the next does: the last to start there has the row.
        segment = np.where(known, np.searchsorted(self._starts, place, side="right") - 1, -1)
        row = np.where(known, place - self._starts[segment], 0)
        return Lookup(self.names, segment.astype(np.int32), row.astype(np.int32))


# (2, n) uint64: two halves of n keys.
Keys = NDArray[np.uint64]


def digest_keys(digests: NDArray[np.uint8]) -> Keys:
    """Return the keys (2, n) that digests (n, 16) are."""
    return np.ascontiguousarray(np.ascontiguousarray(digests).view(np.uint64).reshape(-1, 2).T)


class HashTable:
    """Finds rows by key; it takes 24 bytes a row, and 32 while it is made."""

    def __init__(self, keys: list[Keys]) -> None:
        """Take the keys (2, n) of blocks of rows, numbered consecutively; the list is emptied."""
        both = np.concatenate([np.empty((2, 0), dtype=np.uint64), *keys], axis=1)
        keys.clear()
        self._row = np.argsort(both[0])
        for half in both:
            half[:] = half[self._row]
        self._first, self._second = both
        self._sort_ties()

    def _sort_ties(self) -> None:
        """Sort rows with the same first half by the second half, then by row."""
        same = np.append(self._first[1:] == self._first[:-1], False)
        ties = np.flatnonzero(same | np.roll(same, 1))
        row, second = self._row[ties], self._second[ties]
        order = np.lexsort((row, second, self._first[ties]))
        self._row[ties], self._second[ties] = row[order], second[order]

    def __len__(self) -> int:
        return len(self._row)

    def find(self, keys: Keys) -> NDArray[np.int64]:
        """Return the row (n,) of each key (2, n), the first of several, −1 for an unknown key."""
        found = np.full(keys.shape[1], -1, dtype=np.int64)
        place = np.empty_like(found)
        # In order of the keys, neighbours in time are neighbours in memory.
        left = np.argsort(keys[0])
        place[left] = np.searchsorted(self._first, keys[0, left])
        # Few keys agree in one half alone, and the first of several of a key needs one step.
        while len(left):
            left = left[place[left] < len(self)]
            left = left[self._first[place[left]] == keys[0, left]]
            hit = self._second[place[left]] == keys[1, left]
            found[left[hit]] = self._row[place[left[hit]]]
            left = left[~hit]
            place[left] += 1
        return found
