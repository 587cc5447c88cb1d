"""The results of sweeps, read from JSON lines: a line that starts a sweep, then a line a point."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whiten_index.artifacts.files import open_regular, reading
from whiten_index.artifacts.limits import LimitError, iterate_lines, load_json
from whiten_index.artifacts.manifest import sealed, unsealed
from whiten_index.errors import ArtifactError


@dataclass(frozen=True)
class Point:
    """One setting and what was measured of it; None where it was not.

    Attributes:
        family: ours, truncate, raw, or faiss (FAISS's own transforms).
        per_row: bytes that each row adds to the index.
        fixed: bytes of the index that do not grow with rows: matrix, codebooks, centroids.
        candidates: how many hits of the index are ranked again from the store.
        rerank_bytes: bytes a row in the store that re-ranking reads, beside the index.
        p50, p95, p99: milliseconds of a single query.
        raw_p50: milliseconds of exact search of raw embeddings in the same rounds.
        spread: the largest median of a round divided by the smallest.
        throughput: queries a second in batches.
        device: where the index was filled and searched, cpu or gpu.
        index_recall: share of the exact ten neighbours among the same vectors that are found.
        agreement: share of the exact ten neighbours among the raw embeddings that are found.
        ndcg, recall, mrr: nDCG@10, recall@100 and MRR@10 by judgements, 0 to 1.
    """

    key: str
    family: str
    transform: str
    k: int
    codec: str
    index: str
    exponent: float | None = None
    center: bool | None = None
    factory: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    per_row: float | None = None
    fixed: float | None = None
    candidates: int | None = None
    rerank_bytes: float | None = None
    build_seconds: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    raw_p50: float | None = None
    spread: float | None = None
    throughput: float | None = None
    threads: int | None = None
    device: str = "cpu"
    index_recall: float | None = None
    agreement: float | None = None
    ndcg: float | None = None
    recall: float | None = None
    mrr: float | None = None

    @property
    def is_raw(self) -> bool:
        """Whether this is exact search of the raw embeddings at full precision."""
        plain = self.family == "raw" and self.codec == "fp32" and self.index == "flat"
        return plain and self.candidates is None


@dataclass(frozen=True)
class Skipped:
    """A setting that was not measured, and why; a point without figures where it is named."""

    key: str
    why: str
    point: Point | None = None


@dataclass(frozen=True)
class Sweep:
    """One sweep of one dataset: its header and its points."""

    run: str
    name: str
    header: Mapping[str, Any]
    points: tuple[Point, ...]
    skipped: tuple[Skipped, ...]

    @property
    def dataset(self) -> Mapping[str, Any]:
        """Facts of the corpus: rows, dim, encoder, queries."""
        return _mapping(self.header, "dataset")

    @property
    def settings(self) -> Mapping[str, Any]:
        """What the sweep was asked for: k, transforms, codecs, indexes."""
        return _mapping(self.header, "settings")

    @property
    def target_recall(self) -> float | None:
        """Index recall that lists and graphs were tuned to."""
        return _number(self.settings, "target_recall")

    @property
    def rows(self) -> int | None:
        """Rows of the corpus."""
        return _count(self.dataset, "rows")

    @property
    def raw(self) -> Point | None:
        """The baseline: exact search of the raw embeddings, where it was measured."""
        return next((point for point in self.points if point.is_raw), None)

    @property
    def raw_bytes(self) -> float | None:
        """Bytes a row of the raw embeddings in float32."""
        if (kept := _number(self.dataset, "raw_bytes_per_row")) is not None:
            return kept
        if self.raw is not None:
            return self.raw.per_row
        dim = _count(self.dataset, "dim")
        return None if dim is None else 4.0 * dim


def read_results(path: Path) -> list[Sweep]:
    """Read every sweep of a results file, in the order in which they were started.

    A torn last line, which an interruption leaves behind, is left out, and of a point that was
    measured twice the later record counts. The line that starts a sweep may stand after its
    points: where the first was lost, a sweep that goes on writes it again.

    Raises:
        ArtifactError: the file is missing, holds no sweep, a line is no record, or a point belongs
            to a sweep that the file does not have.
    """
    records = list(read_lines(path))
    headers: dict[str, dict[str, Any]] = {}
    for _, record in records:
        if record.get("type") == "sweep":
            run = str(record.get("run"))
            headers[run] = {**headers.get(run, {}), **record}
    points: dict[str, dict[str, Point | Skipped]] = {}
    for number, record in records:
        kind, run = record.get("type"), str(record.get("run"))
        if kind not in ("sweep", "point", "skipped"):
            continue
        if run not in headers:
            raise ArtifactError(
                f"line {number} of {path} is a {kind} of run {run}, whose own first line is not "
                "in the file; start the same sweep again, which writes it, or sweep into an empty "
                "folder"
            )
        found = points.setdefault(run, {})
        if kind != "sweep":
            key = str(record.get("key", f"line {number}"))
            found.pop(key, None)
            found[key] = _point(record, key) if kind == "point" else _skipped(record, key)
    if not headers:
        raise ArtifactError(f"{path} holds no sweep; run whiten-index sweep … --out {path.parent}")
    return [_sweep(run, headers[run], list(found.values())) for run, found in points.items()]


def line_of(record: Mapping[str, Any]) -> bytes:
    """Return a record as a line of a results file, with its checksum."""
    line = json.dumps(sealed(record), ensure_ascii=False, allow_nan=False) + "\n"
    return line.encode("utf-8", "surrogatepass")


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and record of each line of a results file, but for a torn last one.

    Raises:
        ArtifactError: the file cannot be read, or a line is damaged.
    """
    try:
        with reading(path), open_regular(path) as file:
            for number, line in enumerate(iterate_lines(file), 1):
                if line.endswith(b"\n") and line.strip():
                    yield number, _record(line, number, path)
    except LimitError as error:
        raise ArtifactError(f"{path}: {error}; sweep into another folder") from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ArtifactError(
            f"cannot read {path}: {error.strerror}; name a folder that whiten-index sweep --out "
            "wrote"
        ) from error


def _record(line: bytes, number: int, path: Path) -> dict[str, Any]:
    try:
        return unsealed(load_json(line))
    except (ValueError, AttributeError) as error:
        raise ArtifactError(
            f"line {number} of {path} is damaged ({error}); remove that line, and run the same "
            "sweep again to measure its point"
        ) from error


def cut_torn_line(path: Path) -> None:
    """Cut off a last line without an end, which a writer left who was stopped within it."""
    with path.open("r+b") as file:
        whole = sum(len(line) for line in iterate_lines(file) if line.endswith(b"\n"))
        file.truncate(whole)


def _sweep(run: str, header: Mapping[str, Any], records: list[Point | Skipped]) -> Sweep:
    return Sweep(
        run=run,
        name=str(_mapping(header, "dataset").get("name") or run),
        header=header,
        points=tuple(point for point in records if isinstance(point, Point)),
        skipped=tuple(skipped for skipped in records if isinstance(skipped, Skipped)),
    )


def _point(record: Mapping[str, Any], key: str) -> Point:
    size, quality = _mapping(record, "bytes"), _mapping(record, "quality")
    rerank, latency = _mapping(record, "rerank"), _mapping(record, "latency_ms")
    throughput = _mapping(record, "throughput")
    center = record.get("center")
    return Point(
        key=key,
        family=str(record.get("family") or "ours"),
        transform=str(record.get("transform") or "none"),
        k=_count(record, "k") or 0,
        codec=str(record.get("codec") or "fp32"),
        index=str(record.get("index") or "flat"),
        exponent=_number(record, "exponent"),
        center=center if isinstance(center, bool) else None,
        factory=str(record["factory"]) if record.get("factory") else None,
        parameters=_mapping(record, "parameters"),
        per_row=_number(size, "per_row"),
        fixed=_number(size, "fixed"),
        candidates=_count(rerank, "candidates"),
        rerank_bytes=_number(rerank, "bytes_per_row"),
        build_seconds=_number(_mapping(record, "seconds"), "total"),
        p50=_number(latency, "p50"),
        p95=_number(latency, "p95"),
        p99=_number(latency, "p99"),
        raw_p50=_number(latency, "raw_p50"),
        spread=_number(latency, "spread"),
        throughput=_number(throughput, "queries_per_second"),
        threads=_count(latency, "threads"),
        device=str(record.get("device") or "cpu"),
        index_recall=_number(record, "index_recall@10"),
        agreement=_number(record, "agreement@10"),
        ndcg=_number(quality, "ndcg@10"),
        recall=_number(quality, "recall@100"),
        mrr=_number(quality, "mrr@10"),
    )


def _skipped(record: Mapping[str, Any], key: str) -> Skipped:
    named = record.get("transform") is not None and _count(record, "k") is not None
    return Skipped(
        why=str(record.get("why") or "not said"),
        point=_point(record, key) if named else None,
        key=key,
    )


def _mapping(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = record.get(name)
    return value if isinstance(value, dict) else {}


def _number(record: Mapping[str, Any], name: str) -> float | None:
    """Return a finite number, or None: NaN and infinity are not measurements."""
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _count(record: Mapping[str, Any], name: str) -> int | None:
    value = _number(record, name)
    return None if value is None else round(value)
