"""Metrics of the nightly job of an index, as a text file for Prometheus' node_exporter."""

import datetime
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from whiten_index.artifacts.atomic import replace_file, require_replaceable
from whiten_index.artifacts.files import (
    MANIFEST,
    is_folder,
    read_bounded,
    reading,
    size_of,
    writing,
)
from whiten_index.artifacts.storage import Place
from whiten_index.cli.log_lines import ending_of
from whiten_index.errors import (
    ArtifactError,
    ConfigError,
    FormatError,
    StorageError,
    require_installed,
)
from whiten_index.paths import absolute, cell, cut, require_path
from whiten_index.versions.published import read_published

_PREFIX = "whiten_index_"
_LAST_SUCCESS = "last_success_timestamp_seconds"
OUTCOMES = ("published", "up_to_date", "gate_failed", "failed", "interrupted")
# Name, help, name of a label, and a number or numbers by the values of the label. All are gauges:
# a file that is rewritten each night cannot count across runs.
_Metric = tuple[str, str, str, Any]


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
    require_replaceable(path, _is_ours, "metrics of a nightly run")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise StorageError(
            f"cannot write {path}: permission is denied; let the job's user write {path.parent}"
        )


def write_metrics(
    path: Path, *, index: Place, outcome: str, exit_code: int, seconds: float, updated: bool
) -> None:
    """Write the metrics of a run and of the published version in one step.

    Every metric has the label ``index``, an absolute path or a URI. The time of the last success
    stays, if the index was not ``updated``.

    Raises:
        StorageError: the file cannot be written.
        WhitenIndexError: the index cannot be read; that of the run is written then, with the status
            of this error if ``exit_code`` is 0.
    """
    version, unread = list[_Metric](), None
    try:
        version = _of_version(index)
    except Exception as error:
        unread, exit_code = error, exit_code or ending_of(error).exit_code
    place, now = _shown(str(absolute(index))), time.time()
    # After an update that succeeded the index is as new as the corpus, even if a later step failed.
    success = now if updated else _last_success(path, place)
    outcomes = {each: float(each == outcome) for each in OUTCOMES}
    metrics: list[_Metric] = [
        ("last_run_timestamp_seconds", "When the last run ended, in seconds since 1970.", "", now),
        ("last_run_duration_seconds", "Wall time of the last run.", "", seconds),
        ("last_run_exit_code", "Exit status: 0 done, 9 a gate failed.", "", exit_code),
        ("last_run_outcome", "1 at the outcome of the last run, else 0.", "outcome", outcomes),
        (_LAST_SUCCESS, "When a run last left the index as new as the corpus.", "", success),
        *version,
    ]
    registry = _client().CollectorRegistry()
    for name, text, label, value in metrics:
        if value is not None:
            names = ["index", label] if label else ["index"]
            gauge = _client().Gauge(_PREFIX + name, text, names, registry=registry)
            for key, number in (value if label else {"": value}).items():
                gauge.labels(*[place, _shown(key)][: len(names)]).set(number)
    # node_exporter reads no folders, so that it never sees half of the file.
    with writing(path, kept=""):
        replace_file(path, _client().generate_latest(registry))
    if unread is not None:
        raise unread


def _is_ours(path: Path) -> bool:
    with reading(path), path.open("rb") as file:
        beginning = f"# HELP {_PREFIX}".encode()
        return file.read(len(beginning)) in (b"", beginning)


def _client() -> Any:
    require_installed("prometheus_client", by="a file of metrics", extra="metrics")
    import prometheus_client

    return prometheus_client


def _of_version(index: Place) -> list[_Metric]:
    """Return metrics of the published version; none if it is missing or damaged."""
    try:
        published = read_published(index)
        folder, fields = published.folder, published.fields
        sizes = {name: int(entry["bytes"]) for name, entry in fields["files"].items()}
        sizes[MANIFEST] = size_of(folder / MANIFEST)
    except (ArtifactError, FormatError):
        return []
    version = str(fields["version"])
    created = datetime.datetime.fromisoformat(fields["created"]).timestamp()
    return [
        ("published_info", "The version that is published, always 1.", "version", {version: 1}),
        ("published_version_number", "Number of the published version; less after a rollback.",
         "", int(version.partition("-")[0])),
        ("published_created_timestamp_seconds", "When the published version was made, since 1970.",
         "", created),
        ("published_rows", "Rows of the published version.", "", fields["rows"]),
        ("published_size_bytes", "Bytes of the files of the published version.", "file", sizes),
    ]  # fmt: skip


def _last_success(path: Path, index: str) -> float | None:
    """Return the time of the last success in an earlier file, if it can be read."""
    from prometheus_client import parser

    read: Callable[[str], Any] = parser.text_string_to_metric_families
    try:
        with reading(path):
            text = read_bounded(path).decode()
        for family in read(text):
            for sample in family.samples:
                if sample.name == _PREFIX + _LAST_SUCCESS and sample.labels.get("index") == index:
                    return float(sample.value)
    except (FileNotFoundError, ValueError):
        return None
    return None


def _shown(text: str) -> str:
    """Return the value of a label, which must be UTF-8; people read the file too."""
    return cell(text).encode("utf-8", "replace").decode("utf-8")
