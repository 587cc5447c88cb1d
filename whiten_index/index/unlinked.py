"""Rows taken out of a graph for a while, so that it can be tuned with queries it does not hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.index.library import load_faiss

_LINKS = 1 << 22


@contextmanager
def unlinked(inner: Any, rows: NDArray[np.int64]) -> Iterator[None]:
    """Keep a search from coming to some rows while this is entered; other kinds stay as they are.

    A row of the graph is found by way of its own links and so are its neighbours, which makes it
    an easier query than any that comes from outside (20,000 rows, 32 links, efSearch 32: recall
    .981, and .958 of rows never added). Links to it are turned back to where they come from, which
    a search has seen already (.957). The row where every search begins stays.

    Args:
        inner: a filled index.
        rows: (q,) row numbers.
    """
    graph = _graph_of(inner)
    if graph is None or not len(rows):
        yield
        return
    faiss = load_faiss()
    links = faiss.rev_swig_ptr(graph.neighbors.data(), graph.neighbors.size())
    places = _links_to(links, rows[rows != graph.entry_point])
    before = links[places]
    starts = faiss.vector_to_array(graph.offsets)
    links[places] = np.searchsorted(starts, places, side="right") - 1
    try:
        yield
    finally:
        links[places] = before


def is_graph(inner: Any) -> bool:
    """Return whether an index is a graph, or one whose hits are refined."""
    return _graph_of(inner) is not None


def _graph_of(inner: Any) -> Any:
    faiss = load_faiss()
    index = faiss.downcast_index(inner)
    if isinstance(index, faiss.IndexPreTransform):
        return _graph_of(index.index)
    if isinstance(index, faiss.IndexRefine):
        return _graph_of(index.base_index)
    return index.hnsw if isinstance(index, faiss.IndexHNSW) else None


def _links_to(links: NDArray[np.int32], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the places in ``links`` (m,) that hold one of some rows, a block at a time."""
    found = [
        start + np.flatnonzero(np.isin(links[start : start + _LINKS], rows))
        for start in range(0, len(links), _LINKS)
    ]
    return np.concatenate(found) if found else np.empty(0, dtype=np.int64)
