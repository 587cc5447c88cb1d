"""Search of a FAISS index over vectors: the quickest way of each kind, filters, hits by document.

A filtered search gives as many hits as there are rows to give. If few rows pass, all of them are
compared, so that nothing is lost to lists that are not looked into or links not followed. If many
pass, an approximate index looks at twice as many of them as it would without a filter.
"""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.prefetch import blocks
from whiten_index.errors import ConfigError
from whiten_index.index.exact import (
    FEW_QUERIES,
    Rows,
    Scores,
    Vectors,
    exact_search,
    flat_vectors,
    merged,
)
from whiten_index.index.gpu import DeviceIndex, most_on_gpu
from whiten_index.index.library import load_faiss, threads_for

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
# Passages fetched to find one document, at first.
_FIRST_FETCH = 4
# Held by who changes an index that several threads search.
_CHANGING = threading.Lock()


def nearest(
    inner: Any, queries: Vectors, top_k: int, selection: "Selection | None" = None
) -> tuple[Scores, Rows]:
    """Return scores and row numbers of the nearest rows, best first, −1 in unfilled places.

    Both are (n, top_k), or with a selection (n, m), m the lesser of top_k and the rows that pass.
    ``top_k`` is not above the rows of the index.
    """
    with threads_for(len(queries)):
        if selection is not None:
            return _nearest_selected(inner, queries, top_k, selection)
        if len(queries) <= FEW_QUERIES and (vectors := flat_vectors(inner)) is not None:
            return exact_search(vectors, queries, top_k)
        found = inner.search(queries, top_k, params=_parameters(inner, top_k, thorough=False))
        return _filled(found, queries, lambda some: _thorough(inner, some, top_k))


def nearest_on_gpu(
    placed: DeviceIndex, inner: Any, queries: Vectors, top_k: int
) -> tuple[Scores, Rows]:
    """Return the same as ``nearest``, by a copy of the index on a GPU.

    The CPU's index searches what the copy cannot, or finds too few rows of.
    """
    if top_k > most_on_gpu(inner) or not len(queries):
        return nearest(inner, queries, top_k)
    # FAISS's indexes on a GPU take one search at a time.
    with placed.lock, placed.working() as index:
        found = index.search(queries, top_k)
    return _filled(found, queries, lambda some: nearest(inner, some, top_k))


def _filled(
    found: tuple[Scores, Rows], queries: Vectors, search: Callable[[Vectors], tuple[Scores, Rows]]
) -> tuple[Scores, Rows]:
    """Return hits; queries that lack some are searched for once more, in another way."""
    scores, rows = found
    short = np.flatnonzero((rows < 0).any(axis=1))
    if len(short):
        scores[short], rows[short] = search(queries[short])
    return scores, rows


def _thorough(inner: Any, queries: Vectors, top_k: int) -> tuple[Scores, Rows]:
    """Return the hits of a search that looks everywhere."""
    parameters = _parameters(inner, top_k, thorough=True)
    try:
        scores, rows = inner.search(queries, top_k, params=parameters)
    except RuntimeError:
        if not hasattr(inner, "nprobe"):
            raise
        # Additive codes in fast scan take no parameters. A concurrent search looks into more
        # lists meanwhile, and finds no less.
        with _CHANGING:
            kept, inner.nprobe = inner.nprobe, inner.nlist
            try:
                scores, rows = inner.search(queries, top_k)
            finally:
                inner.nprobe = kept
    return scores, rows


def _parameters(inner: Any, top_k: int, *, thorough: bool) -> Any:
    """Return parameters, if ``thorough`` those of all lists; None for the index's own."""
    faiss = load_faiss()
    if isinstance(inner, faiss.IndexHNSW):
        # HNSW stops after efSearch candidates, and gives no more rows than it has seen.
        return faiss.SearchParametersHNSW(efSearch=max(inner.hnsw.efSearch, top_k))
    if isinstance(inner, faiss.IndexIVF) and thorough:
        return list_parameters(inner, inner.nlist)
    return None


def search_documents(
    search: Search, document_of: Callable[[Rows], Rows], queries: Vectors, *, top_k: int, rows: int
) -> tuple[Scores, Rows]:
    """Return the best row of each of the nearest documents, scores and rows (n, top_k).

    If fewer documents are found, the end of a query's rows is −1. ``document_of`` returns the
    document of each row, as a number.
    """
    counted = partial(first_of_each, document_of=document_of)
    first = _FIRST_FETCH * top_k
    return over_fetch(search, counted, queries, wanted=top_k, first=first, rows=rows)


def first_of_each(hits: Rows, document_of: Callable[[Rows], Rows]) -> NDArray[np.int64]:
    """Return the positions in ``hits`` (n,) of the first row of each document; −1 is skipped."""
    positions = np.flatnonzero(hits >= 0)
    _, first = np.unique(document_of(hits[positions]), return_index=True)
    return positions[np.sort(first)]


def vectors_of(inner: Any, rows: range) -> NDArray[np.float32]:
    """Return the vectors of n rows as the index keeps them, (n, k)."""
    faiss = load_faiss()
    lists = (faiss.IndexIVFFlat, faiss.IndexIVFScalarQuantizer, faiss.IndexIVFPQ)
    # Some of FAISS's fast-scan indexes crash on this.
    if not isinstance(inner, (faiss.IndexFlatCodes, faiss.IndexHNSW, *lists)):
        raise ConfigError(
            f"an index of kind {type(inner).__name__} gives no vectors back, so it has no "
            "neighbours of a document; search by text, add --rerank, which takes the document's "
            "embedding from the store, or build with another --factory"
        )
    if isinstance(inner, lists):
        with _CHANGING:
            inner.make_direct_map()
    return np.stack([inner.reconstruct(row) for row in rows])


@dataclass(frozen=True, eq=False)
class Selection:
    """The rows of an index that pass a filter."""

    bits: NDArray[np.uint8]  # a bit a row, the lowest of each byte first
    total: int  # rows in the index
    count: int  # rows that pass

    @classmethod
    def of(cls, mask: NDArray[np.bool_]) -> "Selection":
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
        for some in blocks(pending, step):
            for query, scores, hits in zip(some, *search(queries[some], fetch), strict=True):
                counting = counted(hits)[:wanted]
                if len(counting) < wanted and fetch < rows:
                    short.append(query)
                best[query, : len(counting)] = scores[counting]
                found[query, : len(counting)] = hits[counting]
        pending = np.array(short, dtype=np.int64)
        fetch = min(2 * fetch, rows)
    return best, found


def _nearest_selected(
    inner: Any, queries: Vectors, top_k: int, selection: Selection
) -> tuple[Scores, Rows]:
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
        return _thorough_selected(inner, queries, wanted, selection)
    return _filled(found, queries, lambda some: _thorough_selected(inner, some, wanted, selection))


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
    return None


def _thorough_selected(
    inner: Any, queries: Vectors, wanted: int, selection: Selection
) -> tuple[Scores, Rows]:
    """Return the best of all rows that pass, as far as the kind of index can compare them."""
    faiss = load_faiss()
    few = selection.count * _FEW <= selection.total
    if isinstance(inner, faiss.IndexHNSW):
        return nearest(faiss.downcast_index(inner.storage), queries, wanted, selection)
    if isinstance(inner, faiss.IndexPQ | faiss.IndexAdditiveQuantizer) and few:
        # Without selectors. FAISS's fast-scan kinds, which crash on this, are not among them.
        return _decoded(inner, queries, wanted, selection)
    if isinstance(inner, faiss.IndexIVF):
        parameters = list_parameters(inner, inner.nlist, selection)
    else:
        parameters = faiss.SearchParameters(sel=_selector(selection))
    found = _with_selector(inner, queries, wanted, parameters, selection)
    return found or over_fetch(
        lambda some, most: nearest(inner, some, most),
        lambda hits: np.flatnonzero(selection.holds(hits)),
        queries,
        wanted=wanted,
        first=2 * math.ceil(wanted * selection.total / selection.count),
        rows=selection.total,
    )


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
    for rows in blocks(selection.rows, step):
        scores, first = exact_search(inner.reconstruct_batch(rows), queries, wanted)
        best, found = merged(best, found, scores, rows[first], wanted)
    return best, found
