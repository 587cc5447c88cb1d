"""One thread that encodes and searches. Queries that wait meanwhile are encoded together."""

import asyncio
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.search.search_index import Hits, Opened
from whiten_index.serving.metrics import Metrics

# Queries encoded at once; more take no less time each.
_MOST = 256
_WAIT_SECONDS = 0.005


@dataclass(eq=False)
class Job:
    """A request: texts, raw embeddings or a document's id, and what is asked about them."""

    opened: Opened  # the version that answers all of it
    texts: Sequence[str] = ()
    embeddings: NDArray[np.floating] | None = None  # given, or of the texts
    document_id: str | int | None = None
    top_k: int = 0  # 0: reduced vectors are asked for, not hits
    row_filter: str | None = None
    rerank: int | None = None
    asked: float = field(default_factory=time.perf_counter)

    def run(self) -> list[Hits] | tuple[NDArray[np.float64], int]:
        """Return the hits of each query, or the vectors and their tokens; texts are encoded."""
        opened = self.opened
        if self.document_id is not None:
            chosen = opened.filter(self.row_filter)
            return [opened.search_like(self.document_id, self.top_k, chosen)]
        assert self.embeddings is not None
        if not self.top_k:
            tokens = opened.queries.get().count_tokens(self.texts)
            return opened.bundle.whitening.vectors(self.embeddings), tokens
        chosen = opened.filter(self.row_filter)
        return opened.search(self.embeddings, self.top_k, chosen, rerank=self.rerank)


_Pair = tuple[Job, asyncio.Future[Any]]


class Batcher:
    """Runs jobs in one thread, so that encoder and index take turns on the cores.

    A job that comes alone starts at once. While others run, jobs collect; after a batch of several
    the thread waits for as many again, 5 ms at most.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._jobs: queue.SimpleQueue[_Pair | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self._thread.start()

    async def run(self, job: Job) -> Any:
        """Return the result of a job, or raise its error."""
        future = asyncio.get_running_loop().create_future()
        self._jobs.put((job, future))
        return await future

    def close(self) -> None:
        """Stop the thread when the jobs before are done."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        expected = 1
        while batch := self._next(expected):
            expected = len(batch)
            # Their clients may be gone.
            batch = [pair for pair in batch if not pair[1].cancelled()]
            for some in _by(batch, lambda job: id(job.opened.queries)):
                self._answer(some)

    def _next(self, expected: int) -> list[_Pair]:
        """Return the jobs that wait; none when it is time to end."""
        first = self._jobs.get()
        batch = [] if first is None else [first]
        until, texts = time.perf_counter() + _WAIT_SECONDS, 0
        while batch and texts < _MOST:
            left = until - time.perf_counter() if len(batch) < expected else 0
            try:
                found = self._jobs.get(timeout=left) if left > 0 else self._jobs.get_nowait()
            except queue.Empty:
                break
            if found is None:
                self._jobs.put(None)  # after this batch
                break
            batch.append(found)
            texts += len(found[0].texts)
        return batch

    def _answer(self, batch: list[_Pair]) -> None:
        """Encode the texts of a batch at once, then search; an error hits no other job."""
        started = time.perf_counter()
        results: list[Any] = []
        try:
            self._encode([job for job, _ in batch])
        except Exception as error:
            if len(batch) == 1:
                _deliver([(batch[0][1], error)])
                return
            for pair in batch:
                self._answer([pair])
            return
        encoded = time.perf_counter()
        for job, future in batch:
            try:
                results.append((future, job.run()))
            except Exception as error:
                results.append((future, error))
        ended = time.perf_counter()
        _deliver(results)
        self._metrics.batch(
            [started - job.asked for job, _ in batch], encoded - started, ended - encoded
        )

    def _encode(self, jobs: Sequence[Job]) -> None:
        with_texts = [job for job in jobs if job.texts]
        if with_texts:
            texts = [text for job in with_texts for text in job.texts]
            embeddings = with_texts[0].opened.encode(texts)
            start = 0
            for job in with_texts:
                job.embeddings = embeddings[start : start + len(job.texts)]
                start += len(job.texts)


def _by(batch: Iterable[_Pair], key: Callable[[Job], Any]) -> Iterable[list[_Pair]]:
    groups: defaultdict[Any, list[_Pair]] = defaultdict(list)
    for pair in batch:
        groups[key(pair[0])].append(pair)
    return groups.values()


def _deliver(results: Sequence[tuple[asyncio.Future[Any], Any]]) -> None:
    """Hand results to the event loop, which is woken once."""

    def set_all() -> None:
        for future, result in results:
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

    results[0][0].get_loop().call_soon_threadsafe(set_all)
