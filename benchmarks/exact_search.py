"""Exact search of the index against numpy's bare products, run in turns: ratios of each round.

Run ``python -m benchmarks.exact_search [THREADS]`` on a calm machine. numpy's own threads are set
by ``OPENBLAS_NUM_THREADS`` before it starts; give both the same number.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.results_file import write
from whiten_index.index.exact import flat_vectors, use_large_pages
from whiten_index.index.factory import inner_index
from whiten_index.index.library import set_threads
from whiten_index.index.vector_search import nearest

_ROWS, _BATCH, _TOP_K, _ROUNDS = 100_000, 1_000, 10, 9
_DIMS = (128, 384, 768)
Vectors = NDArray[np.float32]


def measure(threads: int) -> Iterator[dict[str, Any]]:
    """Yield numpy's seconds over ours, for one query, three, and a batch, at each width."""
    set_threads(threads)
    random = np.random.default_rng(0)
    for dim in _DIMS:
        rows = _unit(random, _ROWS, dim)
        inner = inner_index("Flat", dim)
        inner.add(rows)
        # As an opened index has it.
        if (vectors := flat_vectors(inner)) is not None and (asking := use_large_pages(vectors)):
            asking.join()
        for queries in (1, 3, _BATCH):
            asked = _unit(random, queries, dim)
            rounds = list(_rounds(rows, inner, asked))
            ratios = [bare / ours for bare, ours in rounds]
            yield {
                "benchmark": "exact_search",
                "dim": dim,
                "rows": _ROWS,
                "queries": queries,
                "top_k": _TOP_K,
                "threads": threads,
                "blas_threads": os.environ.get("OPENBLAS_NUM_THREADS"),
                "ratio": statistics.median(ratios),
                "least": min(ratios),
                "greatest": max(ratios),
                "seconds_numpy": statistics.median(bare for bare, _ in rounds),
                "seconds_index": statistics.median(ours for _, ours in rounds),
            }


def _rounds(rows: Vectors, inner: Any, asked: Vectors) -> Iterator[tuple[float, float]]:
    """Yield seconds of the bare product and of the search, of the same round."""
    repeats = 20 if len(asked) < _BATCH else 1
    for turn in range(_ROUNDS + 1):
        bare = _seconds(lambda: _product(rows, asked), repeats)
        ours = _seconds(lambda: nearest(inner, asked, _TOP_K), repeats)
        if turn:  # the first warms both up
            yield bare, ours


def _product(rows: Vectors, asked: Vectors) -> Vectors:
    found: Vectors = rows @ asked[0] if len(asked) == 1 else asked @ rows.T
    return found


def _seconds(work: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - start) / repeats


def _unit(random: np.random.Generator, rows: int, dim: int) -> Vectors:
    made = random.standard_normal((rows, dim), dtype=np.float32)
    made /= np.linalg.norm(made, axis=1, keepdims=True)
    return made


if __name__ == "__main__":
    print(write("exact_search", measure(int(sys.argv[1]) if len(sys.argv) > 1 else 1)))
