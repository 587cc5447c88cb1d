"""Search among some rows only, by FAISS's selectors if a kind of index has them.

A filtered search gives as many hits as there are rows to give. If few rows pass, all of them are
compared, so that nothing is lost to lists that are not looked into or links not followed. If many
pass, an approximate index looks at twice as many of them as it would without a filter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.index.exact import (
    Rows,
    Scores,
    Vectors,
    exact_search,
    flat_vectors,
    largest,
    merged,
)
from whiten_index.index.library import load_faiss

Search = Callable[[Vectors, int], tuple[Scores, Rows]]

# Above one row in so many, asking an index without selectors for more hits costs less than
# comparing the rows that pass one by one.
_FEW = 16
# Rows that pass are near each other more often than by chance, and then not near the query.
_MARGIN = 2
# Numbers of decoded rows held at once.
_HELD = 1 << 24
# Hits held at once by one search: 12 bytes each.
_MOST_HITS = 1 << 22


@dataclass(frozen=True, eq=False)
class Selection:
    """The rows of an index that pass a filter."""

    bits: NDArray[np.uint8]  # a bit a row, the lowest of each byte first
    total: int  # rows in the index
    count: int  # rows that pass

    @classmethod
    def of(cls, mask: NDArray[np.bool_]) -> Selection:
        """Return the rows (n,) for which ``mask`` is true."""
        return cls(np.packbits(mask, bitorder="little"), len(mask), int(np.count_nonzero(mask)))

    @cached_property
    def rows(self) -> Rows:
        """Numbers of the rows that pass, rising."""
        mask = np.unpackbits(self.bits, count=self.total, bitorder="little")
        return np.flatnonzero(mask).astype(np.int64, copy=False)

    def holds(self, rows: Rows) -> NDArray[np.bool_]:
        """Return a mask of the row numbers that pass; −1 does not."""
        bits = (self.bits[rows >> 3] >> (rows & 7).astype(np.uint8)) & 1
        passing: NDArray[np.bool_] = (bits == 1) & (rows >= 0)
        return passing


def over_fetch(
    search: Search,
    counted: Callable[[Rows], NDArray[np.int64]],
    queries: Vectors,
    *,
    wanted: int,
    first: int,
    rows: int,
) -> tuple[Scores, Rows]:
    """Return the best hits that count, scores and rows (n, wanted), −1 in unfilled places.

    ``counted`` returns the positions of the hits that count, best first, of rows (m,) of a query.
    The first search asks for ``first`` hits, each further one for twice as many as the one before,
    until enough count or all ``rows`` were seen.
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
                counting = counted(hits)[:wanted]
                if len(counting) < wanted and fetch < rows:
                    short.append(query)
                best[query, : len(counting)] = scores[counting]
                found[query, : len(counting)] = hits[counting]
        pending = np.array(short, dtype=np.int64)
        fetch = min(2 * fetch, rows)
    return best, found


def search_selected(
    inner: Any, search: Search, queries: Vectors, top_k: int, selection: Selection
) -> tuple[Scores, Rows]:
    """Return scores and rows of the nearest that pass, (n, m), m the lesser of top_k and those.

    ``search`` searches the index without a filter.
    """
    wanted = min(top_k, selection.count)
    if not wanted or not len(queries):
        empty = np.empty((len(queries), wanted))
        return empty.astype(np.float32), empty.astype(np.int64)
    if (vectors := flat_vectors(inner)) is not None:
        return exact_search(vectors, queries, wanted, among=selection.rows)
    parameters = _sparing(inner, wanted, selection)
    found = None
    if parameters is not None:
        found = _with_selector(inner, queries, wanted, parameters, selection)
    if found is None:
        return _thorough(inner, search, queries, wanted, selection)
    short = np.flatnonzero((found[1] < 0).any(axis=1))
    if len(short):
        found[0][short], found[1][short] = _thorough(
            inner, search, queries[short], wanted, selection
        )
    return found


def _with_selector(
    inner: Any, queries: Vectors, wanted: int, parameters: Any, selection: Selection
) -> tuple[Scores, Rows] | None:
    """Return the hits of FAISS by its selector, None if this kind of index has none."""
    try:
        scores, rows = inner.search(queries, wanted, params=parameters)
    except RuntimeError:
        # Each kind refuses in other words. Any other fault shows in the plain search.
        return None
    # Some kinds take the parameters and ignore the selector.
    return (scores, rows) if (selection.holds(rows) | (rows < 0)).all() else None


def _sparing(inner: Any, wanted: int, selection: Selection) -> Any:
    """Return parameters by which an approximate index looks at a part of the rows that pass.

    It looks at twice as many as without a filter: into more lists, or along more links, in
    proportion to how few pass. None if that comes to all of them, or the kind is exhaustive.
    """
    faiss = load_faiss()
    wider = _MARGIN * selection.total / selection.count
    if isinstance(inner, faiss.IndexIVF):
        lists = math.ceil(inner.nprobe * wider)
        return None if lists >= inner.nlist else list_parameters(inner, lists, selection)
    if isinstance(inner, faiss.IndexHNSW):
        steps = math.ceil(max(inner.hnsw.efSearch, wanted) * wider)
        if selection.count <= steps * inner.hnsw.nb_neighbors(0):
            return None
        return faiss.SearchParametersHNSW(sel=_selector(selection), efSearch=steps)
    if isinstance(inner, faiss.IndexRefine):
        base = faiss.downcast_index(inner.base_index)
        parameters = _sparing(base, math.ceil(wanted * inner.k_factor), selection)
        if parameters is None:
            return None
        return faiss.IndexRefineSearchParameters(
            k_factor=inner.k_factor, base_index_params=parameters
        )
    return None


def _thorough(
    inner: Any, search: Search, queries: Vectors, wanted: int, selection: Selection
) -> tuple[Scores, Rows]:
    """Return the best of all rows that pass, as far as the kind of index can compare them."""
    faiss = load_faiss()
    few = selection.count * _FEW <= selection.total
    if isinstance(inner, faiss.IndexRefine) and few:
        return _storage(inner.refine_index, queries, wanted, selection)
    if isinstance(inner, faiss.IndexHNSW) or (isinstance(inner, faiss.IndexNSG) and few):
        return _storage(inner.storage, queries, wanted, selection)
    parameters = None
    if isinstance(inner, faiss.IndexIVF):
        parameters = list_parameters(inner, inner.nlist, selection)
    elif isinstance(inner, faiss.IndexPQ | faiss.IndexAdditiveQuantizer) and few:
        # Without selectors. FAISS's fast-scan kinds, which crash on this, are not among them.
        return _decoded(inner, queries, wanted, selection)
    elif not isinstance(inner, (faiss.IndexRefine, faiss.IndexNSG)):
        parameters = faiss.SearchParameters(sel=_selector(selection))
    if parameters is not None:
        found = _with_selector(inner, queries, wanted, parameters, selection)
        if found is not None:
            return found
    found = over_fetch(
        search,
        lambda hits: np.flatnonzero(selection.holds(hits)),
        queries,
        wanted=wanted,
        first=2 * math.ceil(wanted * selection.total / selection.count),
        rows=selection.total,
    )
    beneath = getattr(inner, "refine_index", getattr(inner, "storage", None))
    short = np.flatnonzero((found[1] < 0).any(axis=1)) if beneath is not None else ()
    if len(short):
        found[0][short], found[1][short] = _storage(beneath, queries[short], wanted, selection)
    return found


def _storage(
    beneath: Any, queries: Vectors, wanted: int, selection: Selection
) -> tuple[Scores, Rows]:
    """Return the best of the rows that pass, by the vectors under a graph or a refinement."""
    inner = load_faiss().downcast_index(beneath)
    return search_selected(inner, inner.search, queries, wanted, selection)


def _selector(selection: Selection) -> Any:
    return load_faiss().IDSelectorBitmap(selection.bits)


def list_parameters(inner: Any, lists: int, selection: Selection | None = None) -> Any:
    """Return parameters to search so many lists, among the rows that pass.

    An index over the centroids gives no more of them than it looks at, so it looks at more.
    """
    faiss = load_faiss()
    options: dict[str, Any] = {} if selection is None else {"sel": _selector(selection)}
    quantizer = faiss.downcast_index(inner.quantizer)
    if isinstance(quantizer, faiss.IndexHNSW):
        options["quantizer_params"] = faiss.SearchParametersHNSW(efSearch=2 * lists)
    elif isinstance(quantizer, faiss.IndexIVF) and lists >= inner.nlist:
        options["quantizer_params"] = faiss.SearchParametersIVF(nprobe=quantizer.nlist)
    return faiss.SearchParametersIVF(nprobe=lists, max_codes=inner.max_codes, **options)


def _decoded(
    inner: Any, queries: Vectors, wanted: int, selection: Selection
) -> tuple[Scores, Rows]:
    """Return the best of the rows that pass, by their decoded vectors."""
    best = np.empty((len(queries), 0), dtype=np.float32)
    found = np.empty((len(queries), 0), dtype=np.int64)
    step = max(_HELD // max(int(inner.d), len(queries)), 1)
    for start in range(0, selection.count, step):
        rows = selection.rows[start : start + step]
        scores = queries @ inner.reconstruct_batch(rows).T
        first = np.stack([largest(each, wanted) for each in scores])
        some = np.take_along_axis(scores, first, axis=1)
        best, found = merged(best, found, some, rows[first], wanted)
    return best, found
