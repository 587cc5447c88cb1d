"""Hits by document: of the rows found, the best one of each document."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from whiten_index.index.fetching import Rows, Scores, Search, fetch_until

# Passages asked for to find one document, at first.
_FIRST_FETCH = 4


def search_documents(
    search: Search,
    document_of: Callable[[Rows], Rows],
    queries: NDArray[np.float32],
    *,
    top_k: int,
    rows: int,
) -> tuple[Scores, Rows]:
    """Return the best row of each of the nearest documents, scores and rows (n, top_k).

    Where fewer documents are found, the end of a query's rows is −1.

    Args:
        search: (n, ·) queries and a number -> scores and rows, best first, −1 where none.
        document_of: rows -> the document of each, as a number.
        queries: (n, ·).
        top_k: documents a query, 1 or more.
        rows: in the index.
    """
    return fetch_until(
        search,
        lambda hits: first_of_each(hits, document_of),
        queries,
        wanted=top_k,
        first=_FIRST_FETCH * top_k,
        rows=rows,
    )


def first_of_each(hits: Rows, document_of: Callable[[Rows], Rows]) -> NDArray[np.int64]:
    """Return the positions in ``hits`` (n,) where a document comes up first; −1 is passed over."""
    positions = np.flatnonzero(hits >= 0)
    _, first = np.unique(document_of(hits[positions]), return_index=True)
    return positions[np.sort(first)]
