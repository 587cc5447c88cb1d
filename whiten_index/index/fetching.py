"""Asking for more hits until enough of them count."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float32]
Rows = NDArray[np.int64]
Search = Callable[[NDArray[np.float32], int], tuple[Scores, Rows]]

# Hits held at once by one search: 12 bytes each.
_MOST_HITS = 1 << 22


def fetch_until(
    search: Search,
    counting: Callable[[Rows], NDArray[np.int64]],
    queries: NDArray[np.float32],
    *,
    wanted: int,
    first: int,
    rows: int,
) -> tuple[Scores, Rows]:
    """Return the best hits that count, scores and rows (n, wanted), −1 where there are no more.

    More are asked for, twice as many each time, until enough count or there are no more rows.

    Args:
        search: (n, ·) queries and a number -> scores and rows, best first, −1 where none.
        counting: rows (m,) of one query -> positions of those that count, best first.
        queries: (n, ·).
        wanted: hits a query, 1 or more.
        first: to ask for at first.
        rows: there are.
    """
    best = np.full((len(queries), wanted), -np.inf, dtype=np.float32)
    found = np.full((len(queries), wanted), -1, dtype=np.int64)
    pending = np.arange(len(queries))
    fetch = min(first, rows)
    while len(pending):
        short = []
        step = max(_MOST_HITS // fetch, 1)
        for start in range(0, len(pending), step):
            some = pending[start : start + step]
            for query, scores, hits in zip(some, *search(queries[some], fetch), strict=True):
                counted = counting(hits)[:wanted]
                if len(counted) < wanted and fetch < rows:
                    short.append(query)
                best[query, : len(counted)] = scores[counted]
                found[query, : len(counted)] = hits[counted]
        pending = np.array(short, dtype=np.int64)
        fetch = min(2 * fetch, rows)
    return best, found
