"""Results of sweeps as JSON lines, and the setting that they recommend.

A line starts a run; each other line is a point.
"""

import contextlib
import json
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whiten_index.artifacts.files import exists, open_regular, reading, writing
from whiten_index.artifacts.limits import LimitError, iterate_lines, load_json
from whiten_index.artifacts.manifest import sealed, unsealed
from whiten_index.artifacts.storage import LOCAL, Storage
from whiten_index.errors import ArtifactError, first_line
from whiten_index.index.choice import TARGET_RECALL

RESULTS, _TORN = "results.jsonl", "torn"
_GB = 1e9
# Figures by which points are compared, as ``Measured.number`` reads them.
PER_ROW, LATENCY = "bytes.per_row", "latency_ms.p50"
NDCG, AGREEMENT = "quality.ndcg@10", "agreement@10"
# Without judgements: the score by pieces of the texts, times the neighbours that the index finds.
ESTIMATE = "estimate"
INTERVAL = "ndcg@10_to_raw"  # 95 % interval of the difference to raw embeddings
Record = dict[str, Any]
_TRANSFORMS = {
    "pca": "PCA", "truncate": "truncation", "none": "raw", "faiss-pca": "FAISS PCA",
    "faiss-pcaw": "FAISS PCAW",
}  # fmt: skip
_INDEXES = {"flat": "", "ivf": "IVF", "hnsw": "HNSW"}
_NAMED = 3  # points of one reason that are named one by one
ABSENT = "–"  # in tables


class Measured:
    """A measured point, whose missing figures are None."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.k = round(self.number("k") or 0)
        self.candidates = round(self.number("rerank.candidates") or 0)
        setting = [self.text(name) for name in ("family", "codec", "index")]
        self.is_raw = setting == ["raw", "fp32", "flat"] and not self.candidates

    def number(self, path: str) -> float | None:
        """Return a figure of the record, such as ``quality.ndcg@10``, or the estimate."""
        if path == ESTIMATE:
            score, found = self.number("pieces"), self.number("index_recall@10")
            return None if score is None or found is None else score * found
        value: Any = self.record
        for name in path.split("."):
            value = (value or {}).get(name)
        return value if value is None else float(value)

    def limits(self, name: str) -> tuple[float, float] | None:
        """Return the 95 % interval of a figure, or of the difference ``INTERVAL``."""
        found = (self.record.get("intervals") or {}).get(name)
        return None if found is None else (float(found[0]), float(found[1]))

    def text(self, name: str) -> str:
        """Return a field of the setting as text, empty if it is missing."""
        return str(self.record.get(name) or "")

    @property
    def anchor(self) -> str:
        """Name of its row on the page."""
        return f"{self.text('run')}/{self.text('key')}"

    @property
    def interval(self) -> str:
        """95 % interval of nDCG@10 less that of raw embeddings, times 100, empty if unknown."""
        limits = self.limits(INTERVAL) or ()
        return " to ".join(f"{100 * each:+.2f}" for each in limits)

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
        if self.text("family") == "faiss" or not (factory or "push" in self.record):
            return ""
        options = ["--whiten", transform]
        if transform in ("auto", "pca", "whitening") and exponent is not None:
            options = ["--whiten", "whitening" if exponent else "pca"]
            options += ["--exponent", f"{exponent:g}"] if exponent else []
            if center is not None:
                options.append("--center" if center else "--no-center")
        options += [] if transform == "none" else ["--k", str(self.k)]
        options += ["--factory", factory] if factory else []
        if factory and self.text("index") != "flat" and target_recall not in (None, TARGET_RECALL):
            options += ["--target-recall", f"{target_recall:g}"]
        return shlex.join(options)


@dataclass(eq=False)
class Sweep:
    """One run of a results file: its first line, its points, and why others were left out."""

    run: str
    header: Record = field(default_factory=dict)
    by_key: dict[str, Measured] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    torn: bool = False  # whether the last line was cut off, and its point is missing

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
        elif kind == _TORN:
            self.torn = True

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
    """A results file that only grows, and its runs by name; of a bucket, a copy."""

    def __init__(self, path: Path, mirror: Storage = LOCAL) -> None:
        """Read the file if there is one, and cut off a torn last line."""
        self.path, self._mirror, self._tag = path, mirror, mirror.latest(path)
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
        """Write one line and sync it to the disk, and put the file into the bucket."""
        line = line_of(record)
        with writing(self.path), self.path.open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        if self._mirror.uri:
            self._mirror.replace(self.path, self.path.read_bytes(), self._tag)
            self._tag = self._mirror.latest(self.path)
        self.runs[record["run"]].add(unsealed(json.loads(line)))


def line_of(record: Mapping[str, Any]) -> bytes:
    """Return a record as a line of a results file, with its checksum."""
    line = json.dumps(sealed(record), ensure_ascii=False, allow_nan=False) + "\n"
    return line.encode("utf-8", "surrogatepass")


def _read_lines(path: Path) -> Iterator[Record]:
    record: Record = {}
    try:
        with reading(path), open_regular(path) as file:
            for number, line in enumerate(iterate_lines(file), 1):
                # Only the start of a line of a sweep can be one that was torn.
                start = b'{"type": "' if record else b'{"type": "sweep", "run": "'
                torn = not line.endswith(b"\n") and start.startswith(line[: len(start)])
                if torn and record:
                    yield {"type": _TORN, "run": record.get("run")}
                elif line.strip() and not torn:
                    try:
                        record = unsealed(load_json(line))
                    except (ValueError, AttributeError) as error:
                        raise ArtifactError(
                            f"line {number} of {path} is damaged ({error}); remove that line, and "
                            "run the same sweep again to measure its point"
                        ) from error
                    yield record
    except LimitError as error:
        raise ArtifactError(f"{path}: {error}; sweep into another folder") from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ArtifactError(
            f"cannot read {path}: {error.strerror}; name a folder that whiten-index sweep --out "
            "wrote"
        ) from error


def read_runs(path: Path) -> dict[str, Sweep]:
    """Read a results file, except a torn last line, which its run names: name -> the run."""
    runs: dict[str, Sweep] = {}
    with fields_of(path):
        for record in _read_lines(path):
            name = str(record.get("run"))
            runs.setdefault(name, Sweep(name)).add(record)
        for sweep in runs.values():
            _price(sweep)
    return runs


def _price(sweep: Sweep) -> None:
    """Give points in a database the price of a million rows and a month, by the last prices."""
    prices = sweep.header.get("database") or {}
    memory, disk = prices.get("memory_price"), prices.get("disk_price")
    for point in sweep.points if (memory, disk) != (None, None) else ():
        if (table := point.number("bytes.table")) is not None:
            # What searches read is in memory: the index, or the table if it has no index.
            index = point.number("bytes.index") or 0.0
            each = (index or table) * (memory or 0.0) + (index + table) * (disk or 0.0)
            point.record["dollars"] = 1e6 / _GB * each


def titles(sweeps: Iterable[Sweep]) -> dict[str, str]:
    """Return the run of each sweep -> its name, with the run if others have the name too."""
    named = [(sweep.run, sweep.name) for sweep in sweeps]
    count = Counter(name for _, name in named)
    return {run: name if count[name] == 1 else f"{name}, run {run}" for run, name in named}


@contextlib.contextmanager
def fields_of(path: Path) -> Iterator[None]:
    """Let a field of another type in a results file be an ``ArtifactError``."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"{path} has a field of another type than sweep writes ({first_line(error)}); sweep "
            "into another folder"
        ) from error


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


TOLERANCE = 0.006  # of nDCG@10, that the interval of a difference to raw must end above
_ESTIMATE_LOSS = 0.03  # of the estimate, as ``auto`` allows for a width
_DEEP, _DEEP_LOSS = "quality.recall@100", 0.01  # the reason names a loss above this
_LEVELS = (0.95, 0.9, 0.8)  # of agreement, if nothing is judged
# Times whose medians differ by more than this factor from round to round are not compared.
_STEADY = 1.5


def _number(value: float) -> str:
    """Return a count with thousands separators, and one decimal unless it is whole."""
    whole = value >= 1000 or abs(value - round(value)) < 0.05
    return f"{value:,.0f}" if whole else f"{value:,.1f}"


def _share(value: float) -> str:
    """Return a share of 1 as a percentage. Less than all of it never reads 100 %."""
    text = f"{100 * value:.1f}%"
    return "99.9%" if value < 1 and text == "100.0%" else text


def _milliseconds(value: float) -> str:
    """Return a time with three significant digits."""
    decimals = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{decimals}f}\u00a0ms"


# Place of a figure in the record -> its name and its format.
COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    PER_ROW: ("bytes per row", _number),
    "bytes.fixed": ("fixed bytes", _number),
    "bytes.table": ("table bytes per row", _number),
    "bytes.index": ("index bytes per row", _number),
    "rerank.bytes_per_row": ("re-rank bytes per row", _number),
    NDCG: ("nDCG@10", lambda value: f"{100 * value:.2f}"),
    "quality.recall@100": ("recall@100", lambda value: f"{100 * value:.2f}"),
    "quality.mrr@10": ("MRR@10", lambda value: f"{100 * value:.2f}"),
    "pieces": ("score by pieces", lambda value: f"{value:.3f}"),
    ESTIMATE: ("estimated score", lambda value: f"{value:.3f}"),
    AGREEMENT: ("agreement@10", _share),
    "index_recall@10": ("index recall@10", _share),
    LATENCY: ("query p50", _milliseconds),
    "latency_ms.p95": ("p95", _milliseconds),
    "latency_ms.p99": ("p99", _milliseconds),
    "latency_ms.spread": ("spread", lambda value: f"{value:.3g}"),
    "latency_ms_many.p50": ("8 clients p50", _milliseconds),
    "latency_ms_many.p95": ("8 clients p95", _milliseconds),
    "latency_ms_many.p99": ("8 clients p99", _milliseconds),
    "throughput.queries_per_second": ("queries/s in batches", _number),
    "seconds.total": ("build", lambda s: f"{s:,.0f}\u00a0s" if s >= 100 else f"{s:.2g}\u00a0s"),
    "memory.build": ("build memory", lambda value: f"{value / (1 << 20):,.0f}\u00a0MB"),
    "dollars": ("$ a month per million rows", lambda value: f"{value:,.2f}"),
    "exponent": ("γ", lambda value: f"{value:.3g}"),
}


def cell_of(point: Measured, path: str) -> str:
    """Return a figure in its format, with its interval if it has one; a dash if it is unknown."""
    (_, text), value, limits = COLUMNS[path], point.number(path), point.limits(path)
    if value is None:
        return ABSENT
    return text(value) + (f" ({' to '.join(map(text, limits))})" if limits else "")


@dataclass(frozen=True)
class Recommendation:
    """The recommended point of a sweep, by ``NDCG``, ``ESTIMATE`` or ``AGREEMENT``."""

    measure: str
    point: Measured | None
    reason: str
    command: str = ""  # that builds the point, empty if none does


def recommend(sweep: Sweep) -> Recommendation:
    """Return the point with the fewest bytes per row that loses no more than the tolerance.

    By judgements, the interval of its difference to raw embeddings must end above that. Without
    them the estimate stands for quality; where texts cannot be cut into pieces, the highest level
    of agreement that a point reaches. Points that re-rank are a last resort. If none qualifies, it
    is the best point, and the reason says so.
    """
    measure = next(
        (m for m in (NDCG, ESTIMATE) if any(p.number(m) is not None for p in sweep.points)),
        AGREEMENT,
    )
    known = [p for p in sweep.points if None not in (p.number(measure), p.number(PER_ROW))]
    others = [point for point in known if not point.is_raw]
    if not others:
        why = "only raw embeddings were measured" if known else "no point has the figures it needs"
        return Recommendation(measure, None, f"There is nothing to recommend: {why}.")

    def order(point: Measured) -> tuple[bool, float, float, float]:
        slow, size = point.number(LATENCY), point.number(PER_ROW) or 0.0
        score = _score(point, measure)
        return bool(point.candidates), size, -score, float("inf") if slow is None else slow

    least, goal, note = _goal(sweep, measure, known)

    def is_near(point: Measured) -> bool:
        limits = point.limits(INTERVAL) if measure == NDCG else None
        return _score(point, measure) >= least - 1e-9 if limits is None else limits[0] > -TOLERANCE

    near, end = list(filter(is_near, others)), "."
    if near:
        point = min(near, key=order)
        # Raw embeddings of no more bytes beat it.
        point = next((p for p in known if p.is_raw and order(p)[1:3] <= order(point)[1:3]), point)
        said = f"{point.name} takes the fewest bytes per row among the settings {goal}"
    else:
        point = max(others, key=lambda p: (_score(p, measure), -(p.number(PER_ROW) or 0.0)))
        said = f"No setting is {goal}; the nearest is {point.name}"
        if measure != AGREEMENT:
            end = ": keep the raw embeddings, or sweep a larger k."
    end += note
    found = COLUMNS[measure][1](point.number(measure) or 0.0)
    deep = [0.0 if p is None else p.number(_DEEP) or 0.0 for p in (sweep.raw, point)]
    if (lost := deep[0] - deep[1]) > _DEEP_LOSS:
        end += f" It loses {100 * lost:.1f} points of recall@100."
    if any(p.candidates and order(p)[1] < order(point)[1] for p in near):
        end += " With re-ranking, which reads the store for each query, fewer bytes do."
    reason = f"{said}: {found} at {_bytes(sweep, point)}{end}"
    return Recommendation(measure, point, reason, command_of(sweep, point))


def command_of(sweep: Sweep, point: Measured) -> str:
    """Return the commands that build, push and search a point, empty if none do."""
    options = point.build_options((sweep.header.get("settings") or {}).get("target_recall"))
    if not options:
        return ""
    build = f"{sweep.header.get('build') or 'whiten-index build …'} --out INDEX {options}"
    if "push" not in point.record:
        # An index of a named factory ranks again only if its searches ask for it.
        asked = "TEXT" if sweep.header.get("texts", True) else "--like ID"
        again = f" && whiten-index search INDEX --rerank {point.candidates} {asked}"
        return build + (again if point.candidates else "")
    address = shlex.quote(str((sweep.header.get("database") or {}).get("address")))
    push = f"whiten-index push INDEX --to {address} --table TABLE {point.text('push')}"
    return f"{build.strip()} && {push.strip()}"


def _score(point: Measured, measure: str) -> float:
    """Return a figure as it is shown, so that a reader who subtracts finds the same."""
    return round(100 * (point.number(measure) or 0.0), 2)


def _goal(sweep: Sweep, measure: str, known: Sequence[Measured]) -> tuple[float, str, str]:
    """Return the least score of a point that can be recommended, in words too, and a note."""
    if measure == AGREEMENT:
        most = max(_score(point, measure) for point in known if not point.is_raw)
        least = 100 * next((level for level in _LEVELS if 100 * level <= most + 1e-9), _LEVELS[-1])
        goal = f"at {least:.0f}% or more of the raw embeddings' ten nearest neighbours"
        return least, goal, " Without judgements quality is unknown."
    raw, name = sweep.raw, "the raw embeddings"
    if raw is None or raw.number(measure) is None:
        raw = max(known, key=lambda point: _score(point, measure))
        name = "the best point (raw: unknown)"
    reference = _score(raw, measure)
    if measure == ESTIMATE:
        goal = f"within {_ESTIMATE_LOSS:.0%} of the score of {name} ({reference / 100:.3f})"
        note = " The score is an estimate from pieces of the texts, without judgements."
        return reference * (1 - _ESTIMATE_LOSS), goal, note
    goal = f"within {100 * TOLERANCE:g} points of the nDCG@10 of {name} ({reference:.2f})"
    if any(point.limits(INTERVAL) for point in known if not point.is_raw):
        goal += " by the 95% interval"
    return reference - 100 * TOLERANCE, goal, ""


def _bytes(sweep: Sweep, point: Measured) -> str:
    stored, raw = point.number("rerank.bytes_per_row"), sweep.dataset.get("raw_bytes_per_row")
    beside = [f"{_number(stored)} more in the store"] if stored else []
    beside += [f"raw {_number(raw)}"] if raw else []
    shown = f" ({', '.join(beside)})" if beside else ""
    return f"{_number(point.number(PER_ROW) or 0.0)} bytes per row{shown}"


def front(points: Iterable[Measured], cost: str, gain: str) -> list[Measured]:
    """Return the points that no other beats in both figures, in rising order of cost.

    A point is beaten by one that costs no more and gains no less, and differs in one of the two.
    Points without one of the figures take no part; of equal ones the first stays.
    """
    known = [
        (paid, gained, point)
        for point in points
        if (paid := point.number(cost)) is not None and (gained := point.number(gain)) is not None
    ]
    kept: list[Measured] = []
    best = float("-inf")
    for _, value, point in sorted(known, key=lambda each: (each[0], -each[1])):
        if value > best:
            kept.append(point)
            best = value
    return kept


def notes(sweep: Sweep) -> Sequence[str]:
    """Return what limits the figures of a sweep: a busy machine, judgements or points missing."""
    found = []
    if sweep.torn:
        found.append(
            "The last line of the results is cut off, so a point is missing. Run the same sweep "
            "again, which measures it."
        )
    if busy := sum((p.number("latency_ms.spread") or 0.0) > _STEADY for p in sweep.points):
        found.append(
            f"The machine was busy: the times of {busy} of the {len(sweep.points)} points differ "
            "from round to round. Do not compare times; sweep again on a quiet machine."
        )
    for name, text in (
        ("relevant_documents_missing", "relevant documents are not in the corpus"),
        ("judged_queries_without_text", "judged queries have no text and were left out"),
    ):
        if count := sweep.dataset.get(name):
            found.append(f"{count:,} {text}.")
    return found
