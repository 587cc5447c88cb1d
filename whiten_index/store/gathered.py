"""Rows that lie in several arrays, read as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class EmbeddingRows(Protocol):
    """Embeddings (n, d) of which only rows that are asked for are read: an array, or like one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(n, d)."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type they are kept in."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any, /) -> NDArray[np.floating]: ...


class GatheredRows:
    """Rows (n, d) picked from several arrays, in any order.

    Attributes:
        shape: (n, d).
        dtype: the widest of the arrays'.
    """

    def __init__(
        self,
        holders: Sequence[NDArray[np.floating]],
        sources: NDArray[np.int32],
        rows: NDArray[np.int32],
    ) -> None:
        """Take the arrays (m_i, d), which of them each row is in (n,), and where there (n,)."""
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
