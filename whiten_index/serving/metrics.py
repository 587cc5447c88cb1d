"""Metrics of the server, for Prometheus."""

from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_PREFIX = "whiten_index_serve_"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Counters of one server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self._registry}
        self._requests = Counter(
            _PREFIX + "requests", "Requests answered.", ["route", "status"], **own
        )
        self._request_seconds = Histogram(
            _PREFIX + "request_seconds", "Time of a request.", ["route"], buckets=_SECONDS, **own
        )
        self.under_way = Gauge(_PREFIX + "requests_under_way", "Requests under way.", **own)
        self._batch_jobs = Histogram(
            _PREFIX + "batch_requests", "Requests encoded together.", buckets=_SIZES, **own
        )
        stage_seconds = Histogram(
            _PREFIX + "stage_seconds",
            "Time of a request in the queue, and of a batch in the encoder and in the index.",
            ["stage"],
            buckets=_SECONDS,
            **own,
        )
        stages = ("queue", "encoder", "index")
        self._queue, self._encoder, self._index = map(stage_seconds.labels, stages)
        self._version = Gauge(
            _PREFIX + "version_info", "The version that answers.", ["index", "version"], **own
        )
        self._rows = Gauge(_PREFIX + "rows", "Rows of that version.", ["index"], **own)
        self._fault = Gauge(
            _PREFIX + "reload_failed",
            "1 if the newest version cannot be opened or searched.",
            ["index"],
            **own,
        )

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count a request."""
        self._requests.labels(route, str(status)).inc()
        self._request_seconds.labels(route).observe(seconds)

    def batch(self, waits: Sequence[float], searching: float) -> None:
        """Count a batch: the seconds that each of its requests waited, and those of the search."""
        self._batch_jobs.observe(len(waits))
        for seconds in waits:
            self._queue.observe(seconds)
        self._index.observe(searching)

    def encoded(self, seconds: float) -> None:
        """Count the seconds in which the texts of a batch were encoded."""
        self._encoder.observe(seconds)

    def version(self, index: str, version: str, rows: int, before: str | None) -> None:
        """Note the version that answers now."""
        if before is not None:
            self._version.remove(index, before)
        self._version.labels(index, version).set(1)
        self._rows.labels(index).set(rows)
        self.fault(index, failed=False)

    def fault(self, index: str, *, failed: bool) -> None:
        """Note whether the newest version cannot be opened."""
        self._fault.labels(index).set(failed)

    def text(self) -> bytes:
        """Return all of it as Prometheus reads it."""
        return generate_latest(self._registry)
