"""One thread that encodes and searches, and one for each API that gives embeddings.

Queries that wait meanwhile are encoded together.
"""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.files import unforeseen
from whiten_index.corpus.row_filter import RowFilter
from whiten_index.encoding.spec import RemoteSpec
from whiten_index.errors import EndpointError, WhitenIndexError, first_line
from whiten_index.search.search_index import Opened
from whiten_index.serving.metrics import Metrics
from whiten_index.whitening.transform import Whitening

_LOG = logging.getLogger("whiten_index.serving")
# Queries of a batch: while one is encoded, the requests of the next are read.
_MOST = 64
_WAIT_SECONDS = 0.005


@dataclass(eq=False)
class Job:
    """A request: texts, raw embeddings or a document's id, and what is asked about them.

    Without ``top_k`` and ``reduced``, its result are the raw embeddings of its texts.
    """

    opened: Opened  # the version that answers all of it
    texts: Sequence[str] = ()
    embeddings: NDArray[np.floating] | None = None  # given, or of the texts
    document_id: str | int | None = None
    top_k: int = 0
    row_filter: str | None = None
    rerank: int | None = None
    reduced: Whitening | None = None  # the transform of requested vectors
    asked: float = field(default_factory=time.perf_counter)
    chosen: RowFilter | None = None
    seconds: float = 0.0  # spent on the search alone

    @property
    def queries(self) -> int:
        """Number of queries in the request."""
        return max(len(self.texts), 0 if self.embeddings is None else len(self.embeddings), 1)

    @property
    def endpoint(self) -> str:
        """Address of the API that has to be asked; empty if none has."""
        encoder = self.opened.queries.recorded if self.texts else None
        return encoder.endpoint if isinstance(encoder, RemoteSpec) else ""

    @property
    def alike(self) -> object:
        """Key of the jobs that can be searched together."""
        if self.embeddings is None or not self.top_k:
            return id(self)
        return id(self.opened), self.top_k, self.row_filter, self.rerank

    def run(self, embeddings: NDArray[np.floating] | None) -> Any:
        """Return the hits of each query, or its vector with the tokens of all."""
        if self.document_id is not None:
            like = self.document_id, self.top_k, self.chosen
            return [self.opened.search_like(*like, rerank=self.rerank)]
        assert embeddings is not None
        if self.reduced is not None:
            tokens = self.opened.queries.get().count_tokens(self.texts)
            return self.reduced.vectors(embeddings), tokens
        if not self.top_k:
            return embeddings
        return self.opened.search(embeddings, self.top_k, self.chosen, rerank=self.rerank)


_Pair = tuple[Job, asyncio.Future[Any]]
_Result = tuple[asyncio.Future[Any], Any]


class Batcher:
    """Runs jobs in one thread, so that encoder and index take turns on the cores.

    While jobs run, others collect. After a batch of several the thread waits for as many again,
    5 ms at most; else a job starts at once. An API may pause, so each has another thread, which
    passes its jobs on.
    """

    def __init__(self, metrics: Metrics, *, then: "Batcher | None" = None) -> None:
        """Start the thread; ``then`` searches what it encodes."""
        self._metrics, self._then = metrics, then
        self._asking = dict[str, Batcher]()  # by endpoint
        self._jobs: queue.SimpleQueue[_Pair | None] = queue.SimpleQueue()
        self._held: _Pair | None = None  # for the next batch
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self._thread.start()

    async def run(self, job: Job) -> Any:
        """Return the result of a job, or raise its error."""
        future, batcher = asyncio.get_running_loop().create_future(), self
        if endpoint := job.endpoint:
            if endpoint not in self._asking:
                self._asking[endpoint] = Batcher(self._metrics, then=self)
            batcher = self._asking[endpoint]
        batcher._jobs.put((job, future))
        return await future

    def close(self, seconds: float) -> None:
        """Stop the thread when the jobs before are done, or when the time is over."""
        for each in self._asking.values():
            each.close(seconds)
        self._jobs.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        expected = 1
        while batch := self._next(expected):
            expected = len(batch)
            for some in _by(batch, lambda job: id(job.opened.queries)):
                try:
                    self._answer(some)
                except BaseException as error:
                    # Also a panic of the tokenizer: the next batch must find this thread alive.
                    if unforeseen(error, step="a batch") is None:
                        _LOG.exception("a batch failed")
                    _deliver([(future, error) for _, future in some])

    def _next(self, expected: int) -> list[_Pair]:
        """Return the jobs that wait, of 64 queries or one job; none when it is time to end."""
        first, self._held = self._held or self._jobs.get(), None
        if first is None:
            return []
        batch, queries = [first], first[0].queries
        until = time.perf_counter() + _WAIT_SECONDS
        while queries < _MOST:
            left = until - time.perf_counter() if len(batch) < expected else 0
            try:
                found = self._jobs.get(timeout=left) if left > 0 else self._jobs.get_nowait()
            except queue.Empty:
                break
            if found is None:
                self._jobs.put(None)  # after this batch
                break
            queries += found[0].queries
            if queries > _MOST:
                self._held = found
                break
            batch.append(found)
        return batch

    def _answer(self, batch: list[_Pair]) -> None:
        """Encode the texts of a batch at once, then search; an error hits no other job."""
        started = time.perf_counter()
        ready = list[_Pair]()
        for job, future in batch:
            # The time of some is up.
            if not future.cancelled():
                try:
                    job.chosen = job.chosen or job.opened.filter(job.row_filter)
                    ready.append((job, future))
                except WhitenIndexError as error:
                    _deliver([(future, error)])
        failed, encodes = None, False
        try:
            encodes = _encode([job for job, _ in ready])
        except WhitenIndexError as error:
            failed = error
        if failed is not None:
            if len(ready) == 1 or (isinstance(failed, EndpointError) and failed.of_any_text):
                _deliver([(future, failed) for _, future in ready])
            else:
                middle = len(ready) // 2
                self._answer(ready[:middle])
                self._answer(ready[middle:])
            return
        encoded = time.perf_counter()
        if encodes:
            self._metrics.encoded(encoded - started)
        if self._then is not None:
            for job, future in ready:
                job.asked += encoded - started
                self._then._jobs.put((job, future))
            return
        for some in _by(ready, lambda job: job.alike):
            _deliver(_search(some))
        waits = [started - job.asked for job, _ in ready]
        self._metrics.batch(waits, time.perf_counter() - encoded)


def _encode(jobs: Sequence[Job]) -> bool:
    """Encode the texts of jobs together; return whether there were any."""
    with_texts = [job for job in jobs if job.texts and job.embeddings is None]
    if with_texts:
        texts = [text for job in with_texts for text in job.texts]
        embeddings, start = with_texts[0].opened.encode(texts), 0
        for job in with_texts:
            job.embeddings = embeddings[start : start + len(job.texts)]
            start += len(job.texts)
    return bool(with_texts)


def _search(batch: list[_Pair]) -> list[_Result]:
    """Return the results of jobs that are alike; an error hits no other job."""
    batch = [pair for pair in batch if not pair[1].cancelled()]
    if not batch:
        return []
    (first, future), *others = batch
    rows = [job.embeddings for job, _ in batch if job.embeddings is not None]
    started = time.perf_counter()
    try:
        found = first.run(np.concatenate(rows) if rows else None)
    except WhitenIndexError as error:
        if not others:
            return [(future, error)]
        return [result for pair in batch for result in _search([pair])]
    for job, _ in batch:
        job.seconds = time.perf_counter() - started
    if not others:
        return [(future, found)]
    ends = np.cumsum([len(each) for each in rows]).tolist()
    pairs = zip(batch, [0, *ends], ends, strict=False)
    return [(future, found[start:end]) for (_, future), start, end in pairs]


def _by(batch: Iterable[_Pair], key: Callable[[Job], Any]) -> Iterable[list[_Pair]]:
    groups: defaultdict[Any, list[_Pair]] = defaultdict(list)
    for pair in batch:
        groups[key(pair[0])].append(pair)
    return groups.values()


def _deliver(results: Sequence[_Result]) -> None:
    """Hand results to the event loop, which is woken once."""

    def set_all() -> None:
        for future, result in results:
            if future.done():
                continue
            if not isinstance(result, BaseException):
                future.set_result(result)
            elif isinstance(result, WhitenIndexError):
                future.set_exception(result)
            else:
                future.set_exception(RuntimeError(first_line(result)))

    if results:
        with contextlib.suppress(RuntimeError):  # the server has ended
            results[0][0].get_loop().call_soon_threadsafe(set_all)
