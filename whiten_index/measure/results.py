"""Results of sweeps as JSON lines: a line that starts a run, then a line for each point."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whiten_index.artifacts.files import exists, open_regular, reading, writing
from whiten_index.artifacts.limits import LimitError, iterate_lines, load_json
from whiten_index.artifacts.manifest import sealed, unsealed
from whiten_index.errors import ArtifactError
from whiten_index.index.choice import TARGET_RECALL

RESULTS = "results.jsonl"
# Figures by which points are compared, as ``Measured.number`` reads them.
PER_ROW, LATENCY = "bytes.per_row", "latency_ms.p50"
NDCG, AGREEMENT = "quality.ndcg@10", "agreement@10"
Record = dict[str, Any]
_TRANSFORMS = {
    "pca": "PCA", "truncate": "truncation", "none": "raw", "faiss-pca": "FAISS PCA",
    "faiss-pcaw": "FAISS PCAW",
}  # fmt: skip
_INDEXES = {"flat": "", "ivf": "IVF", "hnsw": "HNSW"}
_NAMED = 3  # points of one reason that are named one by one


class Measured:
    """A measured point, whose missing figures are None."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.k = round(self.number("k") or 0)
        self.candidates = round(self.number("rerank.candidates") or 0)
        setting = [self.text(name) for name in ("family", "codec", "index")]
        self.is_raw = setting == ["raw", "fp32", "flat"] and not self.candidates

    def number(self, path: str) -> float | None:
        """Return a figure of the record, such as ``quality.ndcg@10``."""
        value: Any = self.record
        for name in path.split("."):
            value = (value or {}).get(name)
        return value if value is None else float(value)

    def text(self, name: str) -> str:
        """Return a field of the setting as text, empty if it is missing."""
        return str(self.record.get(name) or "")

    @property
    def name(self) -> str:
        """Short name, such as ``auto k=64 SQ8 IVF``."""
        transform, codec, index = map(self.text, ("transform", "codec", "index"))
        exponent = self.number("exponent")
        soft = transform == "whitening" and exponent not in (None, 1.0)
        parts = (
            _TRANSFORMS.get(transform, transform),
            f"γ={exponent:g}" if soft else "",
            "" if transform == "none" else f"k={self.k}",
            codec.upper() if codec.startswith(("sq", "pq")) else codec,
            _INDEXES.get(index, index),
            f"+ {self.candidates} re-ranked" if self.candidates else "",
        )
        return " ".join(filter(None, parts))

    def build_options(self, target_recall: float | None) -> str:
        """Return the options of ``whiten-index build`` that make the point; empty if none do."""
        transform, factory = self.text("transform"), self.text("factory")
        exponent, center = self.number("exponent"), self.record.get("center")
        if self.text("family") == "faiss" or not factory:
            return ""
        options = ["--whiten", transform]
        if transform in ("auto", "pca", "whitening") and exponent is not None:
            options = ["--whiten", "whitening" if exponent else "pca"]
            options += ["--exponent", f"{exponent:g}"] if exponent else []
            if center is not None:
                options.append("--center" if center else "--no-center")
        options += [] if transform == "none" else ["--k", str(self.k)]
        options += ["--factory", factory]
        if self.text("index") != "flat" and target_recall not in (None, TARGET_RECALL):
            options += ["--target-recall", f"{target_recall:g}"]
        return shlex.join(options)


@dataclass(eq=False)
class Sweep:
    """One run of a results file: its first line, its points, and why others were left out."""

    run: str
    header: Record = field(default_factory=dict)
    by_key: dict[str, Measured] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        """Take one line of the run; of equal keys the last one counts."""
        key, kind = str(record.get("key")), record.get("type")
        if kind == "sweep":
            self.header = record
        elif kind == "point":
            self.skipped.pop(key, None)
            self.by_key[key] = Measured(record)
        elif kind == "skipped":
            self.skipped[key] = str(record.get("why") or "-")

    @property
    def points(self) -> list[Measured]:
        """The points, in the order measured."""
        return list(self.by_key.values())

    @property
    def dataset(self) -> Mapping[str, Any]:
        """Facts of the corpus."""
        return self.header.get("dataset") or {}

    @property
    def name(self) -> str:
        """Name of the corpus."""
        return str(self.dataset.get("name") or self.run)

    @property
    def raw(self) -> Measured | None:
        """Exact search of the raw embeddings."""
        return next((point for point in self.points if point.is_raw), None)


class Results:
    """A results file that only grows, and its runs by name."""

    def __init__(self, path: Path) -> None:
        """Read the file if there is one, and cut off a torn last line."""
        self.path = path
        self.runs = read_runs(path) if exists(path) else dict[str, Sweep]()
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if exists(path):
                with path.open("r+b") as file:
                    whole = (line for line in iterate_lines(file) if line.endswith(b"\n"))
                    file.truncate(sum(map(len, whole)))

    def start(self, record: Record) -> Sweep:
        """Return a run, whose first line is written unless its last one says the same."""
        run = self.runs.setdefault(record["run"], Sweep(record["run"]))
        if {**run.header, "time": None} != {**record, "time": None}:
            self.append(record)
        return run

    def append(self, record: Record) -> None:
        """Write one line and sync it to the disk."""
        line = line_of(record)
        with writing(self.path), self.path.open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self.runs[record["run"]].add(unsealed(json.loads(line)))


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


def read_runs(path: Path) -> dict[str, Sweep]:
    """Read a results file, except a torn last line: name of a run -> the run."""
    runs: dict[str, Sweep] = {}
    for record in _read_lines(path):
        name = str(record.get("run"))
        runs.setdefault(name, Sweep(name)).add(record)
    return runs


def read_sweeps(path: Path) -> list[Sweep]:
    """Read every run of a results file, in the order in which they were started."""
    runs = read_runs(path).values()
    for sweep in runs:
        if not sweep.header and (sweep.by_key or sweep.skipped):
            raise ArtifactError(
                f"{path} has points of run {sweep.run}, whose first line is not in the file; start "
                "the same sweep again, which writes it, or sweep into an empty folder"
            )
    found = [sweep for sweep in runs if sweep.header]
    if not found:
        raise ArtifactError(f"{path} holds no sweep; run whiten-index sweep … --out {path.parent}")
    return found


def by_reason(skipped: Mapping[str, str]) -> list[str]:
    """Return a line for each reason: the points skipped for it, or their number if many."""
    reasons: dict[str, list[str]] = {}
    for key, why in skipped.items():
        reasons.setdefault(why, []).append(key)
    return [
        f"{', '.join(keys) if len(keys) <= _NAMED else f'{len(keys)} points'}: {why}"
        for why, keys in reasons.items()
    ]
