"""Exact search over float32 vectors in memory or in a mapped file: products and a top-k.

For a few queries a matrix-vector product each takes about a third of the time of FAISS, which
goes row by row. From some tens of queries on, FAISS multiplies blocks of rows itself.
"""

import ctypes
import mmap
import threading
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from whiten_index.index.library import load_faiss

Scores = NDArray[np.float32]
Rows = NDArray[np.int64]
Vectors = NDArray[np.float32]
Number = TypeVar("Number", np.float32, np.int64, np.uint8)

FEW_QUERIES = 3
# Numbers held at once: 64 MB of scores, or of rows copied together.
_HELD = 1 << 24
_GROUPS = 1024
_TIED = 1e-5
_TRUTH_BLOCK_QUERIES = 1_024
# Smaller arrays fit the caches, or are read quickly anyway.
_LARGE_BYTES = 16 << 20
# Linux 6.1: gather the pages now, in this call; older kernels refuse it and nothing changes.
_MADV_COLLAPSE = 25


def flat_vectors(inner: Any) -> Vectors | None:
    """Return the vectors (n, k) of a plain exact index, not copied; None for every other kind.

    The array is valid as long as the index is.
    """
    faiss = load_faiss()
    plain = type(inner) in (faiss.IndexFlat, faiss.IndexFlatIP)
    if not plain or inner.metric_type != faiss.METRIC_INNER_PRODUCT:
        return None
    return view_of(inner.get_xb(), int(inner.ntotal), int(inner.d), np.float32)


def view_of(pointer: Any, rows: int, width: int, dtype: type[Number]) -> NDArray[Number]:
    """Return numbers (rows, width) behind a pointer of FAISS, not copied."""
    if not rows:
        return np.empty((0, width), dtype)
    view: NDArray[Number] = load_faiss().rev_swig_ptr(pointer, rows * width).reshape(rows, width)
    return view


def use_large_pages(vectors: Vectors) -> threading.Thread | None:
    """Ask the system to keep an array in large pages, in the background; None if it is small.

    numpy's own arrays have them, FAISS's do not, which costs a single query a quarter of its speed
    (100,000 × 384: 7.0 ms, numpy 5.1, with large pages 5.3). A system without this advice changes
    nothing.
    """
    if vectors.nbytes < _LARGE_BYTES or not vectors.flags.c_contiguous:
        return None
    page = mmap.PAGESIZE
    start = -(-vectors.ctypes.data // page) * page
    length = (vectors.ctypes.data + vectors.nbytes - start) // page * page

    def advise() -> None:
        madvise = getattr(ctypes.CDLL(None), "madvise", None)
        if madvise is not None:
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_COLLAPSE)

    thread = threading.Thread(target=advise, daemon=True)
    thread.start()
    return thread


def exact_search(
    vectors: Vectors, queries: Vectors, top_k: int, *, among: Rows | None = None
) -> tuple[Scores, Rows]:
    """Return inner products and row numbers of the nearest rows, best first, both (n, m).

    m is the lesser of top_k and the number of rows. Of rows with equal scores the earlier comes
    first. ``among`` has the row numbers, rising, to search among, all by default.
    """
    total = len(vectors) if among is None else len(among)
    best = np.empty((len(queries), 0), dtype=np.float32)
    found = np.empty((len(queries), 0), dtype=np.int64)
    width = 1 if among is None else vectors.shape[1]
    step = max(_HELD // max(len(queries), width), 1)
    for start in range(0, total if len(queries) else 0, step):
        stop = min(start + step, total)
        if among is None:
            scores = _multiplied(vectors[start:stop], queries)
        else:
            scores = _products(vectors, queries, among[start:stop])
        first = np.stack([largest(each, top_k) for each in scores])
        rows = first + start if among is None else among[start:stop][first]
        best, found = merged(best, found, np.take_along_axis(scores, first, axis=1), rows, top_k)
    return best, found


def largest(scores: NDArray[np.floating], count: int) -> NDArray[np.int64]:
    """Return the positions of the greatest scores (n,), the greatest first, of equals the earlier.

    The ``count``-th greatest of the maxima of any groups is a floor below which none of the
    ``count`` greatest can be; few others are above it, and only those are sorted.
    """
    rows = len(scores)
    if count >= rows:
        return np.argsort(-scores, kind="stable")
    groups = max(_GROUPS, 4 * count)
    heights = scores
    if rows >= 2 * groups:
        heights = scores[: rows // groups * groups].reshape(-1, groups).max(axis=0)
    floor = np.partition(heights, len(heights) - count)[len(heights) - count]
    above = np.flatnonzero(scores >= floor)
    return above[np.argsort(-scores[above], kind="stable")[:count]]


def _products(vectors: Vectors, queries: Vectors, rows: Rows) -> Scores:
    """Return the products (n, m) of the queries with m rows of rising numbers."""
    first, span = int(rows[0]), int(rows[-1] - rows[0]) + 1
    if span > 2 * len(rows):
        return _multiplied(vectors[rows], queries)
    scores = _multiplied(vectors[first : first + span], queries)
    return scores if span == len(rows) else scores[:, rows - first]


def _multiplied(some: Vectors, queries: Vectors) -> Scores:
    if len(queries) <= FEW_QUERIES:
        return np.stack([some @ query for query in queries])
    return queries @ some.T


def merged(
    best: Scores, found: Rows, scores: Scores, rows: Rows, top_k: int
) -> tuple[Scores, Rows]:
    """Return the best of two lists a query; the rows of the first come before the second's."""
    if not best.shape[1]:
        return scores, rows
    scores, rows = np.hstack([best, scores]), np.hstack([found, rows])
    order = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(rows, order, axis=1)


def exact_neighbours(
    blocks: Iterable[Vectors], queries: Vectors, top_k: int
) -> tuple[Scores, Rows]:
    """Return scores and row numbers of the nearest rows by inner product, both (q, top_k).

    Rows are numbered as the blocks (m, k) come; −1 and −inf fill up if there are fewer. Memory is
    that of one block and the result.
    """
    faiss = load_faiss()
    scores = np.full((len(queries), top_k), -np.inf, dtype=np.float32)
    rows = np.full((len(queries), top_k), -1, dtype=np.int64)
    start = 0
    for block in blocks:
        most = min(top_k, len(block))
        for first in range(0, len(queries), _TRUTH_BLOCK_QUERIES):
            part = slice(first, first + _TRUTH_BLOCK_QUERIES)
            near, places = faiss.knn(queries[part], block, most, faiss.METRIC_INNER_PRODUCT)
            # Of equal scores those of the block that came first stay first.
            scores[part], rows[part] = merged(scores[part], rows[part], near, places + start, top_k)
        start += len(block)
    return scores, rows


def rounding(scores: Scores, share: float = _TIED) -> Scores:
    """Return by how much equal scores (q, n) of each query may differ, (q, 1).

    float32 adds up k products, so it is a share of the greatest of the query, or of most queries.
    """
    tops = np.abs(np.where(np.isfinite(scores), scores, 0)).max(axis=1, initial=0, keepdims=True)
    tolerances: Scores = share * np.maximum(tops, np.median(tops) if len(tops) else 0)
    return tolerances


def recall(best: Scores, found: Scores) -> float | None:
    """Return the share of the nearest rows that are found, None if there are none.

    ``best`` (q, n) are the scores of the nearest, and ``found`` (q, m) those of the rows found;
    either is −∞ where there is no row.
    """
    there = np.isfinite(best)
    wanted = there.sum(axis=1)
    if not wanted.any():
        return None
    least = np.where(there, best, np.inf).min(axis=1, initial=np.inf)
    right = np.isfinite(found) & (found >= least[:, None] - rounding(best))
    return float(np.minimum(right.sum(axis=1), wanted).sum() / wanted.sum())
