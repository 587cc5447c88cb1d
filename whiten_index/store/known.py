"""Which rows a store knows by their digests, and where they lie."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whiten_index.store.hash_table import Keys, KeyTable, digest_keys


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
        names, keys, sizes = list[str](), list[Keys](), [0]
        for name, digests in shards:
            names.append(name)
            keys.append(digest_keys(digests))
            sizes.append(len(digests))
        self.shards = tuple(names)
        self._starts = np.cumsum(sizes)
        self._table = KeyTable(keys)

    def __len__(self) -> int:
        return len(self._table)

    def find(self, digests: NDArray[np.uint8]) -> Found:
        """Return where rows with these digests (n, 16) lie, the first of several places."""
        place = self._table.find(digest_keys(digests))
        known = place >= 0
        # Shards without rows start where the next does: the last to start there has the row.
        shard = np.where(known, np.searchsorted(self._starts, place, side="right") - 1, -1)
        row = np.where(known, place - self._starts[shard], 0)
        return Found(shard.astype(np.int32), row.astype(np.int32))
