"""The nearest rows of a FAISS index over vectors: the quickest way that a kind of index has."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from whiten_index.index.exact import (
    FEW_QUERIES,
    Rows,
    Scores,
    Vectors,
    exact_search,
    flat_vectors,
)
from whiten_index.index.filtering import Selection, list_parameters, search_selected
from whiten_index.index.gpu import MOST_ON_GPU
from whiten_index.index.library import load_faiss


def nearest(
    inner: Any, queries: Vectors, top_k: int, selection: Selection | None = None
) -> tuple[Scores, Rows]:
    """Return scores and row numbers of the nearest rows, best first, −1 where none.

    Both are (n, top_k), or with a selection (n, m), m the lesser of top_k and the rows that pass.

    Args:
        inner: FAISS's index over vectors, behind the transforms.
        queries: (n, k) unit vectors.
        top_k: rows a query, 1 or more and not above the rows of the index.
        selection: the rows to search among, all of them where it is left out.
    """

    def search(some: Vectors, most: int) -> tuple[Scores, Rows]:
        return _all(inner, some, most)

    if selection is None:
        return search(queries, top_k)
    return search_selected(inner, search, queries, top_k, selection)


def nearest_on_gpu(index: Any, inner: Any, queries: Vectors, top_k: int) -> tuple[Scores, Rows]:
    """Return what ``nearest`` does of all rows, by a copy of the index on a GPU where it can.

    Args:
        index: the copy.
        inner: the CPU's own, which searches what the copy finds too few rows of.
        queries: (n, k) unit vectors.
        top_k: rows a query, 1 or more and not above the rows of the index.
    """
    if top_k > MOST_ON_GPU or not len(queries):
        return _all(inner, queries, top_k)
    scores, rows = index.search(queries, top_k)
    short = np.flatnonzero((rows < 0).any(axis=1))
    if len(short):
        scores[short], rows[short] = _all(inner, queries[short], top_k)
    return scores, rows


def _all(inner: Any, queries: Vectors, top_k: int) -> tuple[Scores, Rows]:
    if len(queries) <= FEW_QUERIES and (vectors := flat_vectors(inner)) is not None:
        return exact_search(vectors, queries, top_k)
    scores, rows = inner.search(queries, top_k, params=_parameters(inner, top_k, thorough=False))
    short = np.flatnonzero((rows < 0).any(axis=1))
    parameters = _parameters(inner, top_k, thorough=True) if len(short) else None
    if parameters is not None:
        scores[short], rows[short] = _thorough(inner, queries[short], top_k, parameters)
    return scores, rows


def _thorough(inner: Any, queries: Vectors, top_k: int, parameters: Any) -> tuple[Scores, Rows]:
    """Return what is found by parameters that look everywhere."""
    try:
        scores, rows = inner.search(queries, top_k, params=parameters)
    except RuntimeError:
        if not hasattr(inner, "nprobe"):
            raise
        # Additive codes in fast scan take no parameters. A search beside this one looks into more
        # lists meanwhile, and finds no less.
        kept, inner.nprobe = inner.nprobe, inner.nlist
        try:
            scores, rows = inner.search(queries, top_k)
        finally:
            inner.nprobe = kept
    return scores, rows


def _parameters(inner: Any, top_k: int, *, thorough: bool) -> Any:
    """Return how an index is to be searched for so many rows, None for as it is set.

    Args:
        inner: FAISS's index over vectors.
        top_k: rows a query.
        thorough: look into all lists, where the ones it is set to hold too few rows.
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
