"""One point of a sweep: build the index, tune it, and measure bytes, time and quality."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.errors import ConfigError
from whiten_index.index import (
    expected_bytes,
    measured_bytes,
    peer_index,
    search_with,
    tune,
    wrap,
)
from whiten_index.index.grouping import search_documents
from whiten_index.index.trials import Filled, filled, filled_peer, searcher
from whiten_index.rerank import Reranker
from whiten_index.sweep.codecs import FP32
from whiten_index.sweep.config import SweepConfig
from whiten_index.sweep.dataset import Dataset
from whiten_index.sweep.files import available_memory
from whiten_index.sweep.grid import FAISS, Point, Vectors
from whiten_index.sweep.judged import DEPTH
from whiten_index.sweep.spaces import TOP_K, Space

Found = tuple[NDArray[np.float32], NDArray[np.int64]]
Search = Callable[[NDArray[np.float32], int], Found]

# One query after the other: so many, or for so long, but never fewer than the least.
_SINGLE, _SINGLE_SECONDS, _LEAST_SINGLE, _WARM = 300, 1.0, 30, 3
_BATCH_SECONDS, _MOST_BATCHES = 0.2, 5
# A batch that takes longer is not repeated whole.
_LONG_SECONDS, _FEW_QUERIES = 1.0, 100


@dataclass(frozen=True, eq=False)
class Trial:
    """What is needed to measure the points over one kind of vectors.

    Attributes:
        config: of the sweep.
        dataset: rows and queries.
        raw_truth: (q, 10) exact neighbours of the queries among the raw embeddings.
        threads: CPU threads of FAISS.
    """

    config: SweepConfig
    dataset: Dataset
    raw_truth: NDArray[np.int64]
    threads: int
    _peer_truth: dict[Vectors, NDArray[np.int64]] = field(default_factory=dict, repr=False)

    def measure(self, point: Point, space: Space) -> dict[str, Any]:
        """Return the record of a point, but for its type, run and key.

        Args:
            point: what to build.
            space: the vectors; of a peer's point the raw ones.

        Raises:
            ConfigError: FAISS cannot make the index, or memory does not hold it.
        """
        factory = point.factory(self.dataset.rows)
        made, index, parameters = self._built(point, factory, space)
        search = _search_of(point, index, made)
        if point.rerank:
            search = self._reranked(search, space, point.rerank)
        size = measured_bytes(index)
        near, throughput = self._in_batches(search)
        # FAISS's own transforms are trained and applied with the index.
        project = 0.0 if point.vectors.family == FAISS else space.seconds
        whitening = None if point.vectors.family == FAISS else space.whitening
        setting = point.setting()
        if setting["rerank"]:
            setting["rerank"]["bytes_per_row"] = self.dataset.facts["stored_bytes_per_row"]
        return {
            **setting,
            "exponent": None if whitening is None else whitening.exponent,
            "center": None if whitening is None else whitening.center,
            "factory": factory,
            "parameters": parameters,
            "device": made.placed.device,
            "bytes": {
                **size.to_json(),
                "per_row": size.per_row_total / self.dataset.rows,
                "fixed": size.fixed,
            },
            "seconds": {
                "project": project,
                "train": made.train_seconds,
                "add": made.add_seconds,
                "total": project + made.train_seconds + made.add_seconds,
            },
            "latency_ms": self._latency(search),
            "throughput": throughput,
            "index_recall@10": overlap(self._truth(point, space, near), near),
            "agreement@10": overlap(self.raw_truth, near),
            "quality": self._quality(search),
        }

    def _truth(self, point: Point, space: Space, near: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the exact neighbours (q, 10) among the vectors that a point's index holds."""
        where = point.vectors
        if where.family != FAISS:
            return space.truth
        if point.codec == FP32:
            self._peer_truth[where] = near
        elif where not in self._peer_truth:
            exact = replace(point, codec=FP32)
            made, index, _ = self._built(exact, exact.factory(self.dataset.rows), space)
            search = _search_of(exact, index, made)
            self._peer_truth[where] = search(self.dataset.queries, TOP_K)[1]
        return self._peer_truth[where]

    def _built(
        self, point: Point, factory: str, space: Space
    ) -> tuple[Filled, Any, dict[str, int]]:
        """Return the filled index, the same behind its transforms, and what it was tuned to."""
        seed = self.config.build.seed
        if point.vectors.family == FAISS:
            peer, rng = peer_index(factory, self.dataset.dim), np.random.default_rng(seed)
            return filled_peer(peer, self.dataset.raw, rng=rng), peer, {}
        self._require_memory(factory, point.vectors.k)
        device = self.config.build.index_device
        shared = space.shared_lists(seed, device) if point.index == "ivf" else None
        made = filled(factory, space.vectors, shared=shared, seed=seed, device=device)
        parameters = {}
        if point.index != "flat":
            parameters = tune(
                made.placed.index,
                made.turned(space.tuning),
                space.tuning_truth,
                target=self.config.build.target_recall,
                top_k=TOP_K,
                exclude_self=space.own,
            ).parameters
        inner = made.placed.on_cpu()
        return made, wrap(inner, space.whitening, rotation=made.rotation), parameters

    def _require_memory(self, factory: str, k: int) -> None:
        """Refuse an index that would push the machine out of memory.

        Raises:
            ConfigError: it is larger than what is free.
        """
        size = expected_bytes(factory, rows=self.dataset.rows, dim=self.dataset.dim, k=k).total
        free = available_memory()
        if free is not None and size > free:
            raise ConfigError(
                f"{factory} takes {size:,} bytes of memory, more than are free; free memory and "
                "sweep again, or sweep fewer rows with --limit"
            )

    def _reranked(self, search: Search, space: Space, candidates: int) -> Search:
        """Return a search whose hits are scored again from the store, as a bundle does it."""
        store, record = self.dataset.encoded.store, self.dataset.encoded.record
        numbers = self.dataset.numbers
        again = Reranker(store, record, space.whitening, candidates=candidates)

        def reranked(queries: NDArray[np.float32], top_k: int) -> Found:
            _, found = search(queries, max(candidates, top_k))
            scores = again(queries, np.where(found < 0, -1, numbers[found]))
            order = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
            return np.take_along_axis(scores, order, 1), np.take_along_axis(found, order, 1)

        return reranked

    def _latency(self, search: Search) -> dict[str, Any]:
        """Return percentiles of the milliseconds of single queries, one after the other."""
        queries = self.dataset.queries[:_SINGLE]
        for row in range(_WARM):
            search(queries[row : row + 1], TOP_K)
        spent = list[float]()
        began = time.perf_counter()
        for row in range(len(queries)):
            started = time.perf_counter()
            search(queries[row : row + 1], TOP_K)
            ended = time.perf_counter()
            spent.append(1000 * (ended - started))
            if ended - began > _SINGLE_SECONDS and len(spent) >= _LEAST_SINGLE:
                break
        p50, p95, p99 = np.percentile(spent, (50, 95, 99)).tolist()
        return {"p50": p50, "p95": p95, "p99": p99, "queries": len(spent), "threads": self.threads}

    def _in_batches(self, search: Search) -> tuple[NDArray[np.int64], dict[str, Any]]:
        """Return the rows (q, 10) nearest to the queries, and how many of these a second.

        The best of two rounds counts, of more where that is too quick to time. All queries come in
        one batch, but for a second round of fewer where the first took long.
        """
        every = self.dataset.queries
        near, spent = self._timed(search, every)
        rounds = [(len(every) / spent, len(every))]
        again = every[:_FEW_QUERIES] if spent > _LONG_SECONDS else every
        while len(rounds) < 2 or (spent < _BATCH_SECONDS and len(rounds) < _MOST_BATCHES):
            _, seconds = self._timed(search, again)
            rounds.append((len(again) / seconds, len(again)))
            spent += seconds
        best, batch = max(rounds)
        return near, {"queries_per_second": best, "batch": batch, "threads": self.threads}

    def _timed(
        self, search: Search, queries: NDArray[np.float32]
    ) -> tuple[NDArray[np.int64], float]:
        started = time.perf_counter()
        _, near = search(queries, TOP_K)
        return near, time.perf_counter() - started

    def _quality(self, search: Search) -> dict[str, float] | None:
        """Return each metric, by hits as a bundle gives them: a document once, by its best row."""
        judged, documents = self.dataset.judged, self.dataset.documents
        if judged is None or documents is None:
            return None
        find = search
        if documents.several:
            find = partial(_by_document, search, documents.number_of)
        # What looks further for a hundred hits than for ten finds better ones among the ten too.
        found = {depth: find(self.dataset.queries, depth) for depth in (TOP_K, DEPTH)}
        return judged.quality(found, documents.names)


def _by_document(
    search: Search,
    number_of: NDArray[np.int64],
    queries: NDArray[np.float32],
    top_k: int,
) -> Found:
    return search_documents(
        search, lambda rows: number_of[rows], queries, top_k=top_k, rows=len(number_of)
    )


def overlap(truth: NDArray[np.int64], found: NDArray[np.int64]) -> float:
    """Return the share of the true rows (q, m) that are among those found (q, m)."""
    there = truth >= 0
    hits = (truth[:, :, None] == found[:, None, :]) & there[:, :, None]
    return float(hits.any(axis=2).sum() / max(int(there.sum()), 1))


def _search_of(point: Point, index: Any, made: Filled) -> Search:
    """Return how an index is searched: FAISS's own by FAISS alone, others as in a bundle."""
    if point.vectors.family == FAISS:
        return partial(search_with, index)
    return searcher(index, made.placed)
