"""Which rows a store knows by their digests, and where they lie."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Found:
    """Where rows (n,) lie.

    Attributes:
        shard: (n,) int32, number of the shard, −1 where a row is not known.
        row: (n,) int32, its row in that shard.
    """

    shard: NDArray[np.int32]
    row: NDArray[np.int32]

    @property
    def known(self) -> NDArray[np.bool_]:
        """(n,) whether a row is known."""
        return self.shard >= 0


class KnownRows:
    """Looks rows up by digest; it takes 24 bytes a row.

    Attributes:
        shards: fingerprints of the shards whose rows are known.
    """

    def __init__(self, shards: Iterable[tuple[str, NDArray[np.uint8]]]) -> None:
        """Take the shards, and the digests (m, 16) of the rows of each."""
        names, halves, numbers, rows = [], [], [], []
        for number, (name, digests) in enumerate(shards):
            names.append(name)
            halves.append(_halves(digests))
            numbers.append(np.full(len(digests), number, dtype=np.int32))
            rows.append(np.arange(len(digests), dtype=np.int32))
        self.shards = tuple(names)
        both = np.concatenate(halves or [np.empty((0, 2), dtype=np.uint64)])
        order = np.lexsort((both[:, 1], both[:, 0]))
        self._first, self._second = both[order, 0], both[order, 1]
        self._shard = np.concatenate(numbers or [np.empty(0, dtype=np.int32)])[order]
        self._row = np.concatenate(rows or [np.empty(0, dtype=np.int32)])[order]

    def __len__(self) -> int:
        return len(self._first)

    def find(self, digests: NDArray[np.uint8]) -> Found:
        """Return where rows with these digests (n, 16) lie, the first of several places."""
        shard = np.full(len(digests), -1, dtype=np.int32)
        row = np.zeros(len(digests), dtype=np.int32)
        if not len(self) or not len(digests):
            return Found(shard, row)
        wanted = _halves(digests)
        place = np.searchsorted(self._first, wanted[:, 0])
        end = np.searchsorted(self._first, wanted[:, 0], side="right")
        # Digests that agree in their first half alone are as good as never met.
        while (left := place < end).any():
            hit = left.copy()
            hit[left] = self._second[place[left]] == wanted[left, 1]
            shard[hit], row[hit] = self._shard[place[hit]], self._row[place[hit]]
            place = np.where(hit, end, place + 1)
        return Found(shard, row)


def _halves(digests: NDArray[np.uint8]) -> NDArray[np.uint64]:
    return np.ascontiguousarray(digests).view(np.uint64).reshape(-1, 2)
