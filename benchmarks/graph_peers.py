"""HNSW and IVF beside hnswlib and usearch: latency of single queries at recalls of 0.95 and 0.99.

Run ``python -m benchmarks.graph_peers STORE_FOLDER`` on a store of raw embeddings, after
``pip install hnswlib usearch``. All search the same vectors, PCA to 128 of the whole store but for
1,000 rows held out as queries: half to find the least effort that reaches the recall, half to
measure. One thread, by turns query by query, so that no one has a quieter machine. The peers are
given the finished vector; ours is measured that way too, and from the raw embedding, as users
search, with the transform.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.results_file import write
from whiten_index.index.factory import inner_index
from whiten_index.index.library import set_threads
from whiten_index.index.transforms import wrap
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.sampling import CorpusEmbeddings
from whiten_index.whitening.spectrum import unit_rows
from whiten_index.whitening.transform import Whitening
from whiten_index.whitening.whitening_config import WhiteningConfig

K, TOP_K, TARGETS = 128, 10, (0.95, 0.99)
LINKS, EF_CONSTRUCTION = 16, 100
# The graph that auto chooses; the peers have the links of the other.
OF_AUTO = "HNSW32"
_HELD_OUT, _ROUNDS, _SEED = 1000, 3, 0
_MOST_EFFORT = 4096

Rows = NDArray[np.int64]
Vectors = NDArray[np.float32]
Search = Callable[[Vectors, int], Rows]


@dataclass
class Contender:
    """One way to search.

    Attributes:
        name: of it.
        build_seconds: for all rows, two threads.
        effort_is: what is turned to reach the recall.
        search: (q, ·) queries and an effort -> (q, top_k) rows.
        raw: whether its queries are raw embeddings.
        effort: the least that reaches the recall.
        recall: of the queries measured.
        milliseconds: of each query.
    """

    name: str
    build_seconds: float
    effort_is: str
    search: Search
    raw: bool = False
    effort: int = 0
    recall: float = 0.0
    milliseconds: list[float] = field(default_factory=list)


def ours(factory: str, vectors: Vectors, whitening: Whitening) -> Iterator[Contender]:
    """Yield a FAISS index twice: searched by the vector, and by the raw embedding."""
    started = time.perf_counter()
    index = inner_index(factory, vectors.shape[1])
    lists = factory.startswith("IVF")
    if lists:
        sample = np.random.default_rng(_SEED).permutation(len(vectors))[: 50 * index.nlist]
        index.train(vectors[np.sort(sample)])
    else:
        index.hnsw.efConstruction = EF_CONSTRUCTION
    index.add(vectors)
    seconds = time.perf_counter() - started
    whole = wrap(index, whitening)

    def search(searched: Any, queries: NDArray[np.floating], effort: int) -> Rows:
        if lists:
            index.nprobe = effort
        else:
            index.hnsw.efSearch = effort
        found: Rows = searched.search(np.ascontiguousarray(queries, np.float32), TOP_K)[1]
        return found

    effort_is = "nprobe" if lists else "efSearch"
    yield Contender(f"ours, {factory}", seconds, effort_is, partial(search, index))
    yield Contender(
        f"ours, {factory}, from the raw embedding", seconds, effort_is,
        partial(search, whole), raw=True,
    )  # fmt: skip


def hnswlib_index(vectors: Vectors) -> Contender:
    """Return hnswlib's HNSW."""
    library: Any = import_module("hnswlib")
    index = library.Index(space="ip", dim=vectors.shape[1])
    started = time.perf_counter()
    index.init_index(max_elements=len(vectors), M=LINKS, ef_construction=EF_CONSTRUCTION)
    index.add_items(vectors, num_threads=2)
    seconds = time.perf_counter() - started

    def search(queries: Vectors, effort: int) -> Rows:
        index.set_ef(effort)
        found: Rows = index.knn_query(queries, k=TOP_K, num_threads=1)[0].astype(np.int64)
        return found

    return Contender(f"hnswlib, M = {LINKS}", seconds, "ef", search)


def usearch_index(vectors: Vectors) -> Contender:
    """Return usearch's HNSW in float32."""
    library: Any = import_module("usearch.index")
    index = library.Index(
        ndim=vectors.shape[1], metric="ip", dtype="f32",
        connectivity=LINKS, expansion_add=EF_CONSTRUCTION,
    )  # fmt: skip
    started = time.perf_counter()
    index.add(np.arange(len(vectors)), vectors, threads=2)
    seconds = time.perf_counter() - started

    def search(queries: Vectors, effort: int) -> Rows:
        index.expansion_search = effort
        keys = np.atleast_2d(index.search(queries, TOP_K, threads=1).keys)
        return keys.astype(np.int64)

    return Contender(f"usearch, connectivity = {LINKS}", seconds, "expansion", search)


def recall(found: Rows, truth: Rows) -> float:
    """Return the mean share of the true neighbours that were found."""
    shares = [len(set(a) & set(b)) / len(b) for a, b in zip(found, truth, strict=True)]
    return statistics.fmean(shares)


def least_effort(contender: Contender, queries: Vectors, truth: Rows, target: float) -> int:
    """Return the least effort whose recall reaches the target, by bisection."""
    low, high = 0, 16
    while recall(contender.search(queries, high), truth) < target and high < _MOST_EFFORT:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        reached = recall(contender.search(queries, middle), truth) >= target
        low, high = (low, middle) if reached else (middle, high)
    return high


def by_turns(contenders: list[Contender], queries: dict[bool, Vectors]) -> None:
    """Search query by query, each contender in turn, in an order that changes."""
    rng = np.random.default_rng(_SEED)
    for _ in range(_ROUNDS):
        for at in range(len(queries[False])):
            for place in rng.permutation(len(contenders)):
                contender = contenders[place]
                query = queries[contender.raw][at : at + 1]
                started = time.perf_counter()
                contender.search(query, contender.effort)
                contender.milliseconds.append(1e3 * (time.perf_counter() - started))


def measure(folder: str) -> Iterator[dict[str, Any]]:
    """Yield one line for each contender."""
    store = EmbeddingStore.open(folder)
    record = store.corpus()
    moments = store.total_moments(part for part in record.parts if part.rows)
    whitening = Whitening.fit(moments, WhiteningConfig(k=K, exponent=0.0))
    raw = np.concatenate(list(CorpusEmbeddings(store, record).blocks())).astype(np.float32)
    held_out = np.random.default_rng(_SEED).permutation(len(raw))[:_HELD_OUT]
    asked, raw = raw[held_out], np.delete(raw, held_out, axis=0)
    vectors = unit_rows(whitening.apply(raw)).astype(np.float32)
    wanted = unit_rows(whitening.apply(asked)).astype(np.float32)
    exact = inner_index("Flat", K)
    exact.add(vectors)
    truth = exact.search(wanted, TOP_K)[1]
    lists = 4 * int(len(vectors) ** 0.5)
    contenders = [
        *ours(f"HNSW{LINKS}", vectors, whitening),
        *ours(OF_AUTO, vectors, whitening),
        *ours(f"IVF{lists},Flat", vectors, whitening),
        hnswlib_index(vectors),
        usearch_index(vectors),
    ]
    set_threads(1)
    for target in TARGETS:
        yield from at_recall(
            target, contenders, {False: wanted, True: asked}, truth, rows=len(vectors)
        )


def at_recall(
    target: float,
    contenders: list[Contender],
    queries: dict[bool, Vectors],
    truth: Rows,
    *,
    rows: int,
) -> Iterator[dict[str, Any]]:
    """Yield one line for each contender, at the least effort that reaches a recall.

    Args:
        target: recall@10.
        contenders: filled.
        queries: (q, k) vectors, and under True (q, d) raw embeddings; the first half sets the
            effort, the second is measured.
        truth: (q, 10) their exact neighbours.
        rows: that each of them holds.
    """
    half = len(truth) // 2
    for contender in contenders:
        own = queries[contender.raw]
        contender.effort = least_effort(contender, own[:half], truth[:half], target)
        contender.recall = recall(contender.search(own[half:], contender.effort), truth[half:])
        contender.milliseconds = []
    by_turns(contenders, {raw: own[half:] for raw, own in queries.items()})
    for contender in contenders:
        spent = np.array(contender.milliseconds)
        yield {
            "contender": contender.name,
            "rows": rows,
            "k": K,
            "build_seconds": contender.build_seconds,
            "effort": {contender.effort_is: contender.effort},
            "recall@10": contender.recall,
            "target": target,
            **{f"p{p}_ms": float(np.percentile(spent, p)) for p in (50, 95, 99)},
            "queries": len(spent),
            "hnswlib": version("hnswlib"),
            "usearch": version("usearch"),
            "faiss": version("faiss-cpu"),
        }


if __name__ == "__main__":
    print(write("graph_peers", measure(sys.argv[1])))
