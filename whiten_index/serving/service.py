"""Search, vectors, descriptions and comparisons of the served indexes, for HTTP and MCP."""

import asyncio
import base64
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.limits import json_value
from whiten_index.errors import (
    ArtifactError,
    ConfigError,
    NotFoundError,
    WhitenIndexError,
    first_line,
)
from whiten_index.index.library import release_memory
from whiten_index.paths import absolute, cell, shown
from whiten_index.search.query_encoder import require_texts
from whiten_index.search.search_index import Hit, Hits, Opened, SearchIndex, open_index
from whiten_index.serving.batcher import Batcher, Job
from whiten_index.serving.bodies import CompareBody, EmbeddingsBody, SearchBody
from whiten_index.serving.comparison import Comparison
from whiten_index.serving.metrics import Metrics
from whiten_index.serving.serve_options import ServeOptions
from whiten_index.versions.published import split_version
from whiten_index.versions.retention import described, list_versions

_LOG = logging.getLogger("whiten_index.serving")
T = TypeVar("T")

# Turns between two tries to open a version that could not be opened.
_MOST_LEFT = 60
# Facts of a manifest that name no files.
_DESCRIBED = ("version", "created", "rows", "counts", "whitening", "quality", "choice", "factory",
              "spectrum", "bytes", "models")  # fmt: skip
_OPENING = ("rerank", "mapped", "verify", "model", "trust_remote_code", "device",
            "backend", "threads")  # fmt: skip


class ServedIndex:
    """An opened index under a name; ``opened`` is the version that answers now."""

    def __init__(
        self,
        name: str,
        place: Path | str,
        options: ServeOptions,
        metrics: Metrics,
        others: "Sequence[ServedIndex]",
        *,
        alone: bool,
    ) -> None:
        given: dict[str, Any] = {each: getattr(options, each) for each in _OPENING}
        self.name, self._options, self._metrics, self._alone = name, options, metrics, alone
        self.place, _ = split_version(absolute(place))

        def opened(store: str | None) -> SearchIndex:
            known = {**given, "store": store if options.rerank != 0 else None}
            return open_index(place, **{k: v for k, v in known.items() if v is not None})

        # Why the store that was given was not the one that was read, last.
        self.store_fault: ArtifactError | None = None
        self._index = self._with_store(opened)
        if refusing := self._refusing():
            raise ConfigError(refusing)
        for each in others:
            self._index.share_encoder(each._index)
        if self.encodes:
            _ = self._index.encoder
        # Why the newest version does not answer, or refuses; empty if it answers.
        self.fault = ""
        self._comparing = threading.Lock()
        self._comparison: Comparison | None = None
        # Failures to open the newest version, and how often it is not tried now.
        self._failures, self._left = 0, 0
        metrics.version(name, self.opened.bundle.version, len(self.opened.bundle), None)

    @property
    def opened(self) -> Opened:
        """The version that answers."""
        return self._index.opened

    @property
    def encodes(self) -> bool:
        """True if the index knows the encoder of its queries."""
        return self._index.encoder_config is not None

    def reload(self) -> None:
        """Open the newest version; if that fails, the one before goes on answering."""
        if self._left > 0:
            self._left -= 1
            return
        before, told = self.opened.bundle.version, self.fault
        try:
            if self._index.reload():
                bundle = self.opened.bundle
                self._metrics.version(self.name, bundle.version, len(bundle), before)
                self._comparison = None
                release_memory()
            self.fault, self._failures = self._refusing(), 0
        except Exception as error:
            # It is read as a whole each time, so less and less often.
            self.fault = cell(first_line(error))
            self._failures += 1
            self._left = min(2**self._failures, _MOST_LEFT)
        self._metrics.fault(self.name, failed=bool(self.fault))
        if self.fault != told:
            _LOG.warning("%s: %s", self.name, self.fault or "the newest version answers again")

    def comparison(self) -> Comparison:
        """Return the raw embeddings of the version that answers, read on the first call.

        Raises:
            ArtifactError: the store cannot be found.
            ConfigError: they are larger than what the server may hold, or no texts can be asked.
        """
        with self._comparing:
            opened, kept = self.opened, self._comparison
            _ = opened.queries.recorded
            if kept is None or kept.opened is not opened:
                self._comparison = kept = None
                kept = self._with_store(
                    lambda store: Comparison.of(opened, store, self._options.compare_bytes)
                )
                if self.opened is opened:
                    self._comparison = kept
            return kept

    def summary(self) -> dict[str, Any]:
        """Return name, version and size."""
        bundle = self.opened.bundle
        return {
            "name": self.name,
            "version": bundle.version,
            "rows": len(bundle),
            "dim": bundle.dim,
            "k": bundle.whitening.k,
            "similarity": bundle.whitening.similarity,
            "columns": list(bundle.documents.columns),
            "texts": self.encodes,
            "fault": self.fault,
        }

    def _with_store(self, read: Callable[[str | None], T]) -> T:
        """Read with the store that was given or, if that is of another index, the recorded one."""
        try:
            return read(self._options.store)
        except ArtifactError as error:
            if self._alone or self._options.store is None:
                raise
            fault = ArtifactError(f"{self.name}: {error}")
            try:
                found = read(None)
            except ArtifactError:
                raise fault from error
            self.store_fault = fault
            _LOG.info("%s (its recorded store is read)", fault)
            return found

    def _refusing(self) -> str:
        """Return why the version that answers would refuse each search; empty if it would not."""
        read, most = _most_read(self.opened, 1), self._options.max_hits
        if read <= most:
            return ""
        return (
            f"each query of {self.name} ranks {read:,} candidates again, and a request may have "
            f"{most:,}; raise --max-hits, or give a smaller --rerank"
        )


class Service:
    """Indexes by name, and one thread that answers their queries."""

    def __init__(self, places: Mapping[str, Path | str], options: ServeOptions) -> None:
        """Open the indexes and load their encoders."""
        self.options, self.metrics = options, Metrics()
        self.indexes = dict[str, ServedIndex]()
        # OpenMP keeps threads for each thread that used it, and once they are more than the cores,
        # lets them sleep between any two operations: a query took 2 ms longer. These end here.
        with ThreadPoolExecutor(1) as opening:
            for name, place in places.items():
                others = list(self.indexes.values())
                given = name, place, options, self.metrics, others
                opened = opening.submit(ServedIndex, *given, alone=len(places) == 1)
                self.indexes[name] = opened.result()
        faults = [each.store_fault for each in self.indexes.values()]
        if faults and (first := faults[0]) is not None and all(faults):
            raise first
        self._batcher = Batcher(self.metrics)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Look for new versions until the server ends."""
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(self.options.reload_seconds):
                for each in self.indexes.values():
                    each.reload()

        # A thread that nobody waits for: a large version may take minutes to open.
        threading.Thread(target=watch, name="versions", daemon=True).start()
        try:
            yield
        finally:
            stop.set()
            self._batcher.close(self.options.max_seconds)

    def find(self, name: str | None) -> ServedIndex:
        """Return an index by its name, or the only one."""
        if name is None and len(self.indexes) == 1:
            return next(iter(self.indexes.values()))
        if name is None:
            raise ConfigError(f"name an index, one of {', '.join(self.indexes)}")
        if (found := self.indexes.get(name)) is None:
            raise NotFoundError(
                f"no index is served as {shown(name)}; there are {', '.join(self.indexes)}"
            )
        return found

    async def search(self, body: SearchBody) -> dict[str, Any]:
        """Return what a search found, as ``FoundBody``."""
        served = self.find(body.index)
        opened = served.opened
        texts = [body.texts] if isinstance(body.texts, str) else body.texts or ()
        number = max(len(texts), len(body.embeddings or ()), 1)
        self._admit(texts, number, _most_read(opened, body.top_k, body.rerank))
        names = _columns(opened, body.columns)
        given = _embeddings(body.embeddings, opened)
        job = Job(opened, texts, given, body.id, body.top_k, body.filter, body.rerank)
        found: list[Hits] = await self._batcher.run(job)
        return {
            "index": served.name,
            "version": opened.bundle.version,
            "results": [{"hits": [_hit(hit, names) for hit in hits]} for hits in found],
        }

    async def vectors(self, body: EmbeddingsBody) -> dict[str, Any]:
        """Return reduced vectors of queries, as ``VectorsBody``."""
        served = self.find(body.model)
        opened = served.opened
        texts = [body.input] if isinstance(body.input, str) else body.input
        self._admit(texts, len(texts), 1)
        whitening = opened.bundle.whitening
        if body.dimensions is not None:
            whitening = whitening.truncate(body.dimensions)
        vectors, tokens = await self._batcher.run(Job(opened, texts, reduced=whitening))
        rows = np.ascontiguousarray(vectors, dtype="<f4")
        data: list[Any] = (
            [base64.b64encode(row.tobytes()).decode() for row in rows]
            if body.encoding_format == "base64"
            else rows.tolist()
        )
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": number, "embedding": each}
                for number, each in enumerate(data)
            ],
            "model": served.name,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    async def compare(self, body: CompareBody) -> dict[str, Any]:
        """Search by raw embeddings, by every index of the corpus or version, and by every width."""
        served = self.find(body.index)
        opened, comparison, note = served.opened, None, None
        self._admit([body.text], 1, _most_read(opened, body.top_k))
        try:
            comparison = await asyncio.to_thread(served.comparison)
            # One version answers in all columns of the index.
            opened = comparison.opened
        except WhitenIndexError as error:
            note = str(error)
        embedding = await self._batcher.run(Job(opened, [body.text]))
        columns = [await self._column(served.name, opened, embedding, body.top_k)]
        for name, each in self.indexes.items():
            other = each.opened
            alike = each.place == served.place or _corpus(other) == _corpus(opened)
            if each is not served and each.encodes and alike:
                own = embedding
                if not other.queries.equals(opened.queries):
                    own = await self._batcher.run(Job(other, [body.text]))
                columns.append(await self._column(name, other, own, body.top_k))
        widths = list[dict[str, Any]]()
        if comparison is not None:
            started = time.perf_counter()
            hits, each_width = await asyncio.to_thread(comparison.search, embedding[0], body.top_k)
            spent, dim, rows = time.perf_counter() - started, opened.bundle.dim, len(opened.bundle)
            raw = _compared("raw embeddings", "raw", dim, 4 * dim * rows, rows, spent, hits)
            widths = [
                _compared(f"k = {k}", "width", k, 4 * k * rows, rows, None, own_hits)
                for k, own_hits in each_width.items()
            ]
            columns.insert(0, raw)
            wanted = {hit["id"] for hit in raw["hits"]}
            for found in (*columns, *widths):
                common = wanted & {hit["id"] for hit in found["hits"]}
                found["overlap"] = len(common) / len(wanted) if wanted else None
        return {
            "index": served.name,
            "version": opened.bundle.version,
            "note": note,
            "columns": columns,
            "widths": widths,
        }

    async def _column(
        self, name: str, opened: Opened, embedding: NDArray[np.float32], top_k: int
    ) -> dict[str, Any]:
        job = Job(opened, embeddings=embedding, top_k=top_k)
        found, sizes = await self._batcher.run(job), opened.bundle.manifest["bytes"]
        size, rows, k = sizes["index"]["total"], len(opened.bundle), opened.bundle.whitening.k
        return _compared(name, "index", k, size, rows, job.seconds, found[0])

    def summaries(self) -> list[dict[str, Any]]:
        """Return name, version and size of each index."""
        return [each.summary() for each in self.indexes.values()]

    def describe(self, name: str | None) -> dict[str, Any]:
        """Return what ``whiten-index inspect`` knows of the version that answers, without paths."""
        bundle = self.find(name).opened.bundle
        facts = described(bundle.manifest, bundle.whitening)
        found = {key: facts[key] for key in _DESCRIBED if key in facts}
        model = facts["encoder"].get("model")
        found["encoder"] = {"model": model and model.rstrip("/").rpartition("/")[2]}
        if certificate := facts.get("certificate"):
            found["certificate"] = {**certificate, "inputs": None}
        return found

    def versions(self, name: str | None) -> dict[str, Any]:
        """Return what ``whiten-index versions`` lists."""
        return {"versions": list_versions(self.find(name).place)}

    def _admit(self, texts: Sequence[str], queries: int, hits: int) -> None:
        """Refuse requests that are too large or are no queries; log texts with ``log_queries``."""
        most, most_hits = self.options.max_texts, self.options.max_hits
        if queries > most:
            raise ConfigError(f"a request takes {most} texts or embeddings; {queries} were given")
        if queries * hits > most_hits:
            raise ConfigError(
                f"a request has {most_hits:,} hits or candidates at most (--max-hits), and "
                f"{queries} times {hits:,} were asked for; give a smaller top_k or rerank, or "
                "send several requests"
            )
        if self.options.log_queries:
            for text in texts:
                _LOG.info("query %s", shown(text))
        require_texts(texts)


def _most_read(opened: Opened, top_k: int, rerank: int | None = None) -> int:
    """Return the hits of a query, or the candidates that are ranked again for them."""
    if rerank is None:
        rerank = 0 if opened.reranker is None else opened.reranker.candidates
    return max(top_k, min(rerank, len(opened.bundle)))


def _corpus(opened: Opened) -> str:
    return str(opened.bundle.manifest["corpus"]["fingerprint"])


def _embeddings(
    given: Sequence[Sequence[float] | str] | None, opened: Opened
) -> NDArray[np.floating] | None:
    if given is None:
        return None
    dim = opened.bundle.dim
    rows: list[Any] = list(given)
    try:
        if isinstance(given[0], str):
            rows = [np.frombuffer(base64.b64decode(each, validate=True), "<f4") for each in rows]
    except ValueError as error:
        raise ConfigError(f"an embedding is no base64 of 32-bit floats ({error})") from error
    if (widths := {len(each) for each in rows}) != {dim}:
        raise ConfigError(
            f"embeddings of {dim} numbers are needed; "
            f"{', '.join(map(str, sorted(widths)))} were given"
        )
    return np.array(rows, dtype=np.float64)


def _columns(opened: Opened, names: Sequence[str] | None) -> Sequence[str] | None:
    known = opened.bundle.documents.columns
    if names is None:
        return None
    names = list(dict.fromkeys(names))
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(
            f"column {shown(unknown[0])} is not kept; kept are {', '.join(known) or 'none'}"
        )
    return names


def _hit(hit: Hit, names: Sequence[str] | None = None) -> dict[str, Any]:
    columns = {
        name: json_value(hit.columns[name]) for name in (hit.columns if names is None else names)
    }
    return {"id": hit.id, "score": hit.score, "columns": columns}


def _compared(
    name: str, kind: str, k: int, size: int, rows: int, seconds: float | None, hits: Hits
) -> dict[str, Any]:
    return {
        "name": name,
        "kind": kind,
        "k": k,
        "bytes_a_row": size / max(rows, 1),
        "bytes": size,
        "milliseconds": None if seconds is None else 1000 * seconds,
        "overlap": None,
        "hits": [_hit(hit) for hit in hits],
    }
