"""Results of sweeps as JSON lines: a line that starts a run, then a line for each point."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whiten_index.artifacts.files import exists, open_regular, reading, writing
from whiten_index.artifacts.limits import LimitError, iterate_lines, load_json
from whiten_index.artifacts.manifest import sealed, unsealed
from whiten_index.errors import ArtifactError

RESULTS = "results.jsonl"
Record = dict[str, Any]


@dataclass(eq=False)
class Results:
    """A results file and its records. The file only grows; of equal keys the last record counts."""

    path: Path
    headers: dict[str, Record] = field(default_factory=dict)
    points: dict[str, dict[str, Record]] = field(default_factory=dict)
    skipped: dict[str, dict[str, Record]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> Results:
        """Read a results file in order to append to it, and cut off a torn last line."""
        results = cls.read(path) if exists(path) else cls(path)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if exists(path):
                with path.open("r+b") as file:
                    whole = (line for line in iterate_lines(file) if line.endswith(b"\n"))
                    file.truncate(sum(map(len, whole)))
        return results

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read a results file, except a torn last line."""
        results = cls(path)
        for record in _read_lines(path):
            results._add(record)
        return results

    def start(self, record: Mapping[str, Any]) -> None:
        """Write the line that starts a run, unless its last one says the same."""
        before = self.headers.get(record["run"])
        if before is None or {**before, "time": None} != {**record, "time": None}:
            self.append(record)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line and sync it to the disk."""
        line = line_of(record)
        with writing(self.path), self.path.open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._add(json.loads(line))

    def _add(self, record: Record) -> None:
        run, key, kind = str(record.get("run")), str(record.get("key")), record.get("type")
        points, skipped = self.points.setdefault(run, {}), self.skipped.setdefault(run, {})
        if kind == "sweep":
            self.headers[run] = record
        elif kind == "point":
            points.pop(key, None)
            skipped.pop(key, None)
            points[key] = record
        elif kind == "skipped":
            skipped[key] = record


def line_of(record: Mapping[str, Any]) -> bytes:
    """Return a record as a line of a results file, with its checksum."""
    line = json.dumps(sealed(record), ensure_ascii=False, allow_nan=False) + "\n"
    return line.encode("utf-8", "surrogatepass")


def _read_lines(path: Path) -> Iterator[Record]:
    try:
        with reading(path), open_regular(path) as file:
            for number, line in enumerate(iterate_lines(file), 1):
                if line.endswith(b"\n") and line.strip():
                    yield _parse_line(line, number, path)
    except LimitError as error:
        raise ArtifactError(f"{path}: {error}; sweep into another folder") from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ArtifactError(
            f"cannot read {path}: {error.strerror}; name a folder that whiten-index sweep --out "
            "wrote"
        ) from error


def _parse_line(line: bytes, number: int, path: Path) -> Record:
    try:
        return unsealed(load_json(line))
    except (ValueError, AttributeError) as error:
        raise ArtifactError(
            f"line {number} of {path} is damaged ({error}); remove that line, and run the same "
            "sweep again to measure its point"
        ) from error


class Measured:
    """A measured point. A figure of another type than a finite number counts as None."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.k = round(self.number("k") or 0)
        self.candidates = round(self.number("rerank.candidates") or 0)
        self.per_row = self.number("bytes.per_row")
        self.p50 = self.number("latency_ms.p50")
        self.ndcg = self.number("quality.ndcg@10")
        self.agreement = self.number("agreement@10")
        setting = [self.text(name) for name in ("family", "codec", "index")]
        self.is_raw = setting == ["raw", "fp32", "flat"] and not self.candidates

    def number(self, path: str) -> float | None:
        """Return a figure of the record, such as ``quality.ndcg@10``."""
        return _number(self.record, *path.split("."))

    def text(self, name: str) -> str:
        """Return a field of the setting as text, empty if it is missing."""
        return str(self.record.get(name) or "")


@dataclass(frozen=True)
class Sweep:
    """One run of a results file."""

    run: str
    header: Mapping[str, Any]
    name: str
    dataset: Mapping[str, Any]
    raw: Measured | None
    raw_bytes: float | None
    points: tuple[Measured, ...]
    skipped: Mapping[str, str]

    @classmethod
    def of(cls, run: str, results: Results) -> Sweep:
        """Select one run of a results file."""
        header, points = results.headers[run], tuple(map(Measured, results.points[run].values()))
        dataset, skipped = mapping(header, "dataset"), results.skipped[run]
        return cls(
            run=run,
            header=header,
            name=str(dataset.get("name") or run),
            dataset=dataset,
            raw=next((point for point in points if point.is_raw), None),
            raw_bytes=_number(dataset, "raw_bytes_per_row"),
            points=points,
            skipped={key: str(record.get("why") or "-") for key, record in skipped.items()},
        )

    @property
    def target_recall(self) -> float | None:
        """Index recall that lists and graphs were tuned to."""
        return _number(self.header, "settings", "target_recall")

    @property
    def eigenvalues(self) -> list[float]:
        """Positive eigenvalues of the covariance within its rank, in falling order."""
        spectrum = mapping(self.header, "spectrum")
        listed, rank = spectrum.get("eigenvalues"), _number(spectrum, "rank")
        numbers = [_number({"": v}, "") or 0.0 for v in listed] if isinstance(listed, list) else []
        found = sorted((value for value in numbers if value > 0), reverse=True)
        return found if rank is None or rank < 1 else found[: round(rank)]


def read_sweeps(path: Path) -> list[Sweep]:
    """Read every run of a results file, in the order in which they were started."""
    results = Results.read(path)
    for run, points in results.points.items():
        if run not in results.headers and (points or results.skipped[run]):
            raise ArtifactError(
                f"{path} has points of run {run}, whose first line is not in the file; start the "
                "same sweep again, which writes it, or sweep into an empty folder"
            )
    if not results.headers:
        raise ArtifactError(f"{path} holds no sweep; run whiten-index sweep … --out {path.parent}")
    return [Sweep.of(run, results) for run in results.points if run in results.headers]


def mapping(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a field that should be an object, empty if it is something else."""
    value = record.get(name)
    return value if isinstance(value, dict) else {}


def _number(record: Mapping[str, Any], *path: str) -> float | None:
    value: Any = record
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None
