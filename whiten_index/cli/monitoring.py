"""Metrics of the nightly job of an index, as a text file for Prometheus' node_exporter."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from whiten_index.artifacts.atomic import replace_file, require_plain_target
from whiten_index.artifacts.files import is_folder, read_bounded, writing
from whiten_index.artifacts.manifest import MANIFEST
from whiten_index.errors import ConfigError, StorageError, WhitenIndexError
from whiten_index.paths import cut, require_path
from whiten_index.versions.published import read_published

_PREFIX = "whiten_index_"
_LAST_SUCCESS = "last_success_timestamp_seconds"
# All are gauges: a file that is rewritten each night cannot count across runs.
METRICS = {
    "last_run_timestamp_seconds": "When the last run ended, in seconds since 1970.",
    "last_run_duration_seconds": "Wall time of the last run.",
    "last_run_exit_code": "Exit status of the last run: 0 done, 9 a gate failed, see the README.",
    "last_run_outcome": "Outcome of the last run: 1 at that outcome, else 0.",
    _LAST_SUCCESS: "When a run last left the index as new as the corpus, in seconds since 1970.",
    "published_info": "The version that is published, always 1.",
    "published_version_number": "Number of the version that is published; less after a rollback.",
    "published_created_timestamp_seconds": "When the published version was made, since 1970.",
    "published_rows": "Rows of the published version.",
    "published_size_bytes": "Bytes of the files of the published version.",
    "update_rows": "Rows of the corpus, by what the last run found; all but deleted are in it.",
    "update_read_rows": "Rows that the last run took from the corpus.",
    "update_encoded_rows": "Rows that the last run encoded.",
    "update_reused_rows": "Rows whose embeddings the last run found in the store.",
    "update_truncated_rows": "Rows longer than the encoder takes.",
    "update_skipped_rows": "Rows that the last run left out, by reason.",
    "update_files": "Files of the corpus, by whether the last run read or skipped them.",
    "update_stage_duration_seconds": "Wall time of each stage of the last run; a/b is a part of a.",
    "update_stage_rows": "Rows that each stage of the last run handled.",
    "update_refit": "Whether the last run fitted the whitening anew (1) or kept it (0).",
    "update_drift": "Drift between the rows of the fit and those of today, by figure.",
    "update_drift_threshold": "Drift above which the whitening is refitted, in nats a dimension.",
    "update_gate_passed": "Whether what the last run made passed this gate (1) or not (0).",
}
_COUNTS = ("read", "encoded", "reused", "truncated")
_Sample = tuple[str, dict[str, str], float]


class Outcome(Enum):
    """Outcome of a run; the names are those of its last log line."""

    PUBLISHED = "published"
    UP_TO_DATE = "up_to_date"
    GATE_FAILED = "gate_failed"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


def check_metrics(path: Path) -> None:
    """Refuse a file before the work if it could not be written, or read, after it."""
    _client()
    require_path(str(path), what="metrics")
    if path.suffix != ".prom":
        raise ConfigError(
            f"metrics file {cut(str(path))} does not end in .prom, and node_exporter reads no "
            "others; rename it"
        )
    if is_folder(path) or not is_folder(path.parent):
        raise ConfigError(
            f"metrics file {cut(str(path))} must be a file in a folder that exists; name one in "
            "the folder that node_exporter reads (--collector.textfile.directory)"
        )
    require_plain_target(path)
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise StorageError(
            f"cannot write {path}: permission is denied; let the job's user write {path.parent}"
        )


def write_metrics(
    path: Path,
    *,
    index: Path,
    outcome: Outcome,
    exit_code: int,
    seconds: float,
    report: Mapping[str, Any] | None = None,
    gates: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write the metrics of a run and of the published version in one step.

    Every metric has the label ``index``, the folder's absolute path. The time of the last success
    is taken over from the file that is there. ``report`` is that of an update that succeeded.
    """
    label, now = _shown(str(index.absolute())), time.time()
    samples: list[_Sample] = [
        ("last_run_timestamp_seconds", {}, now),
        ("last_run_duration_seconds", {}, seconds),
        ("last_run_exit_code", {}, exit_code),
        *(("last_run_outcome", {"outcome": o.value}, float(o is outcome)) for o in Outcome),
    ]
    # After an update that succeeded the index is as new as the corpus, even if a later step failed.
    success = _last_success(path, label) if report is None else now
    if success is not None:
        samples.append((_LAST_SUCCESS, {}, success))
    samples += _published(index)
    samples += _of_report(report or {})
    for gate in gates:
        samples.append(("update_gate_passed", {"gate": gate["name"]}, float(gate["passed"])))
    registry = _client().CollectorRegistry()
    for name, text in METRICS.items():
        found = [(labels, value) for given, labels, value in samples if given == name]
        if found:
            names = ["index", *found[0][0]]
            gauge = _client().Gauge(_PREFIX + name, text, names, registry=registry)
            for labels, value in found:
                gauge.labels(label, *map(_shown, labels.values())).set(value)
    # node_exporter reads no folders, so that it never sees half of the file.
    with writing(path, kept=""):
        replace_file(path, _client().generate_latest(registry))


def _client() -> Any:
    try:
        import prometheus_client
    except ImportError as error:
        raise ConfigError(
            "metrics need prometheus-client; pip install 'whiten-index[metrics]'"
        ) from error
    return prometheus_client


def _published(index: Path) -> Iterator[_Sample]:
    """Return samples of the published version; none if it is missing or damaged."""
    try:
        published = read_published(index)
        folder, fields = published.folder, published.fields
        sizes = {name: int(entry["bytes"]) for name, entry in fields["files"].items()}
        sizes[MANIFEST] = (folder / MANIFEST).stat().st_size
    except (WhitenIndexError, OSError):
        return
    version = str(fields["version"])
    created = datetime.datetime.fromisoformat(fields["created"])
    yield "published_info", {"version": version}, 1.0
    yield "published_version_number", {}, float(version.partition("-")[0])
    yield "published_created_timestamp_seconds", {}, created.timestamp()
    yield "published_rows", {}, float(fields["rows"])
    for name, size in sizes.items():
        yield "published_size_bytes", {"file": name}, float(size)


def _of_report(report: Mapping[str, Any]) -> Iterator[_Sample]:
    counts = report.get("counts") or {}
    for name in _COUNTS:
        if name in counts:
            yield f"update_{name}_rows", {}, float(counts[name])
    for metric, label, values in (
        ("update_rows", "kind", report.get("rows")),
        ("update_skipped_rows", "reason", counts.get("skipped")),
        ("update_files", "state", report.get("files")),
        ("update_stage_duration_seconds", "stage", report.get("seconds")),
        ("update_stage_rows", "stage", report.get("stage_rows")),
        ("update_drift", "figure", report.get("drift")),
    ):
        for name, value in _figures(values or {}):
            # A total next to its parts would double every sum.
            if (metric, name) != ("update_rows", "total"):
                yield metric, {label: name}, value
    if decision := report.get("decision"):
        yield "update_refit", {}, float(decision["whitening"] == "refit")
        if decision.get("threshold") is not None:
            yield "update_drift_threshold", {}, float(decision["threshold"])


def _figures(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, float]]:
    """Return the numbers among JSON values by name; what is nested is named with dots."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _figures(value, f"{above}{name}.")
        elif isinstance(value, int | float):
            yield f"{above}{name}", float(value)


def _last_success(path: Path, index: str) -> float | None:
    """Return the time of the last success in an earlier file, if it can be read."""
    _client()
    from prometheus_client import parser

    read: Callable[[str], Any] = parser.text_string_to_metric_families
    try:
        for family in read(read_bounded(path).decode()):
            for sample in family.samples:
                if sample.name == _PREFIX + _LAST_SUCCESS and sample.labels.get("index") == index:
                    return float(sample.value)
    except (OSError, ValueError):
        return None
    return None


def _shown(text: str) -> str:
    """Return the value of a label, which must be UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")
