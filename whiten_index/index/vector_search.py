"""Search of a FAISS index over vectors: the quickest way of each kind, and hits by document."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.errors import ConfigError
from whiten_index.index.exact import (
    FEW_QUERIES,
    Rows,
    Scores,
    Vectors,
    exact_search,
    flat_vectors,
)
from whiten_index.index.filtered import (
    Search,
    Selection,
    list_parameters,
    over_fetch,
    search_selected,
)
from whiten_index.index.gpu import MOST_ON_GPU
from whiten_index.index.library import load_faiss

# Passages fetched to find one document, at first.
_FIRST_FETCH = 4


def nearest(
    inner: Any, queries: Vectors, top_k: int, selection: Selection | None = None
) -> tuple[Scores, Rows]:
    """Return scores and row numbers of the nearest rows, best first, −1 in unfilled places.

    Both are (n, top_k), or with a selection (n, m), m the lesser of top_k and the rows that pass.
    ``top_k`` is not above the rows of the index.
    """
    if selection is not None:
        return search_selected(
            inner, lambda some, most: nearest(inner, some, most), queries, top_k, selection
        )
    if len(queries) <= FEW_QUERIES and (vectors := flat_vectors(inner)) is not None:
        return exact_search(vectors, queries, top_k)
    scores, rows = inner.search(queries, top_k, params=_parameters(inner, top_k, thorough=False))
    short = np.flatnonzero((rows < 0).any(axis=1))
    parameters = _parameters(inner, top_k, thorough=True) if len(short) else None
    if parameters is not None:
        scores[short], rows[short] = _thorough(inner, queries[short], top_k, parameters)
    return scores, rows


def nearest_on_gpu(index: Any, inner: Any, queries: Vectors, top_k: int) -> tuple[Scores, Rows]:
    """Return the same as ``nearest``, by a copy of the index on a GPU.

    The CPU's index searches what the copy cannot, or finds too few rows of.
    """
    if top_k > MOST_ON_GPU or not len(queries):
        return nearest(inner, queries, top_k)
    scores, rows = index.search(queries, top_k)
    short = np.flatnonzero((rows < 0).any(axis=1))
    if len(short):
        scores[short], rows[short] = nearest(inner, queries[short], top_k)
    return scores, rows


def _thorough(inner: Any, queries: Vectors, top_k: int, parameters: Any) -> tuple[Scores, Rows]:
    """Return the hits of a search that looks everywhere."""
    try:
        scores, rows = inner.search(queries, top_k, params=parameters)
    except RuntimeError:
        if not hasattr(inner, "nprobe"):
            raise
        # Additive codes in fast scan take no parameters. A concurrent search looks into more
        # lists meanwhile, and finds no less.
        kept, inner.nprobe = inner.nprobe, inner.nlist
        try:
            scores, rows = inner.search(queries, top_k)
        finally:
            inner.nprobe = kept
    return scores, rows


def _parameters(inner: Any, top_k: int, *, thorough: bool) -> Any:
    """Return the parameters of a search for so many rows, None for the index's own.

    A thorough search looks into all lists.
    """
    faiss = load_faiss()
    if isinstance(inner, faiss.IndexHNSW):
        # HNSW stops after efSearch candidates, and gives no more rows than it has seen.
        return faiss.SearchParametersHNSW(efSearch=max(inner.hnsw.efSearch, top_k))
    if isinstance(inner, faiss.IndexIVF) and thorough:
        return list_parameters(inner, inner.nlist)
    if isinstance(inner, faiss.IndexRefine):
        candidates = math.ceil(top_k * inner.k_factor)
        base = _parameters(faiss.downcast_index(inner.base_index), candidates, thorough=thorough)
        if base is not None:
            return faiss.IndexRefineSearchParameters(
                k_factor=inner.k_factor, base_index_params=base
            )
    return None


def search_documents(
    search: Search,
    document_of: Callable[[Rows], Rows],
    queries: Vectors,
    *,
    top_k: int,
    rows: int,
) -> tuple[Scores, Rows]:
    """Return the best row of each of the nearest documents, scores and rows (n, top_k).

    If fewer documents are found, the end of a query's rows is −1. ``document_of`` returns the
    document of each row, as a number.
    """
    return over_fetch(
        search,
        lambda hits: first_of_each(hits, document_of),
        queries,
        wanted=top_k,
        first=_FIRST_FETCH * top_k,
        rows=rows,
    )


def first_of_each(hits: Rows, document_of: Callable[[Rows], Rows]) -> NDArray[np.int64]:
    """Return the positions in ``hits`` (n,) of the first row of each document; −1 is skipped."""
    positions = np.flatnonzero(hits >= 0)
    _, first = np.unique(document_of(hits[positions]), return_index=True)
    return positions[np.sort(first)]


def vectors_of(inner: Any, rows: range) -> NDArray[np.float32]:
    """Return the vectors of n rows as the index keeps them, (n, k)."""
    faiss = load_faiss()
    if isinstance(inner, faiss.IndexRefine):
        inner = faiss.downcast_index(inner.refine_index)
    lists = (faiss.IndexIVFFlat, faiss.IndexIVFScalarQuantizer, faiss.IndexIVFPQ)
    # Some of FAISS's fast-scan indexes crash on this.
    if not isinstance(inner, (faiss.IndexFlatCodes, faiss.IndexHNSW, *lists)):
        raise ConfigError(
            f"an index of kind {type(inner).__name__} gives no vectors back, so it has no "
            "neighbours of a document; search by text, add --rerank, which takes the document's "
            "embedding from the store, or build with another --factory"
        )
    if isinstance(inner, lists):
        inner.make_direct_map()
    return np.stack([inner.reconstruct(row) for row in rows])
