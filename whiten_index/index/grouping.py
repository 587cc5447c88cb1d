"""Hits by document: of the rows found, the best one of each document."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float32]
Rows = NDArray[np.int64]

# Passages asked for to find one document, at first.
_FIRST_FETCH = 4
# Hits held at once by one search: 12 bytes each.
_MOST_HITS = 1 << 22


def search_documents(
    search: Callable[[NDArray[np.float32], int], tuple[Scores, Rows]],
    document_of: Callable[[Rows], Rows],
    queries: NDArray[np.float32],
    *,
    top_k: int,
    rows: int,
) -> tuple[Scores, Rows]:
    """Return the best row of each of the nearest documents, scores and rows (n, top_k).

    More rows are asked for, twice as many each time, until they belong to enough documents or
    there are no more. Where fewer documents are found, the end of a query's rows is −1.

    Args:
        search: (n, ·) queries and a number -> scores and rows, best first, −1 where none.
        document_of: rows -> the document of each, as a number.
        queries: (n, ·).
        top_k: documents a query, 1 or more.
        rows: in the index.
    """
    best = np.full((len(queries), top_k), -np.inf, dtype=np.float32)
    found = np.full((len(queries), top_k), -1, dtype=np.int64)
    pending = np.arange(len(queries))
    fetch = min(_FIRST_FETCH * top_k, rows)
    while len(pending):
        short = []
        step = max(_MOST_HITS // fetch, 1)
        for start in range(0, len(pending), step):
            some = pending[start : start + step]
            for query, scores, hits in zip(some, *search(queries[some], fetch), strict=True):
                first = first_of_each(hits, document_of)[:top_k]
                if len(first) < top_k and fetch < rows and (hits >= 0).all():
                    short.append(query)
                best[query, : len(first)] = scores[first]
                found[query, : len(first)] = hits[first]
        pending = np.array(short, dtype=np.int64)
        fetch = min(2 * fetch, rows)
    return best, found


def first_of_each(hits: Rows, document_of: Callable[[Rows], Rows]) -> NDArray[np.int64]:
    """Return the positions in ``hits`` (n,) where a document comes up first; −1 is passed over."""
    positions = np.flatnonzero(hits >= 0)
    _, first = np.unique(document_of(hits[positions]), return_index=True)
    return positions[np.sort(first)]
