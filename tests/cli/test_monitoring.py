"""Metrics files: read back by the library's own parser, and held to Prometheus' rules of names."""

import errno
import re
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from prometheus_client.parser import text_string_to_metric_families

from whiten_index.cli import monitoring
from whiten_index.cli.monitoring import OUTCOMES, check_metrics, write_metrics
from whiten_index.errors import ConfigError, StorageError

DONE: dict[str, Any] = {"outcome": "published", "exit_code": 0, "seconds": 33.5, "updated": True}
FAILED: dict[str, Any] = {"outcome": "failed", "exit_code": 7, "seconds": 2.0, "updated": False}


def read(path: Path) -> dict[tuple[str, ...], float]:
    """Return (name, label values apart from the index's) -> value."""
    found = {}
    for family in text_string_to_metric_families(path.read_text(encoding="utf-8")):
        assert family.type == "gauge"
        for sample in family.samples:
            assert sample.name == family.name
            labels = dict(sample.labels)
            assert labels.pop("index")
            key = (sample.name.removeprefix("whiten_index_"), *labels.values())
            assert key not in found
            found[key] = sample.value
    return found


@pytest.fixture
def place(tmp_path: Path, published: Path) -> tuple[Path, Path]:
    """A metrics file to be, and a published index to copy from."""
    return tmp_path / "night.prom", published / "out"


def test_a_run_says_what_it_did(place: tuple[Path, Path]) -> None:
    path, index = place
    before = time.time()
    write_metrics(path, **DONE, index=index)
    found = read(path)
    page = (Path(__file__).parents[2] / "docs" / "files.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| (`.*?) \|", page)
    assert {name for name, *_ in found} == set(re.findall(r"`(\w+)`", "".join(rows)))
    assert before <= found["last_run_timestamp_seconds",] <= time.time()
    assert found["last_success_timestamp_seconds",] == found["last_run_timestamp_seconds",]
    said = {
        ("last_run_duration_seconds",): 33.5, ("last_run_exit_code",): 0,
        ("last_run_outcome", "published"): 1, ("last_run_outcome", "gate_failed"): 0,
    }  # fmt: skip
    assert {key: found.get(key) for key in said} == said
    outcomes = [key for key in found if key[0] == "last_run_outcome"]
    assert len(outcomes) == len(OUTCOMES)


def test_a_failed_run_keeps_the_last_success(place: tuple[Path, Path], monkeypatch) -> None:
    path, index = place
    write_metrics(path, **FAILED, index=index)
    assert ("last_success_timestamp_seconds",) not in read(path)
    write_metrics(path, **DONE, index=index)
    success = read(path)["last_success_timestamp_seconds",]
    for _ in range(2):
        write_metrics(path, **FAILED, index=index)
        found = read(path)
        assert found["last_success_timestamp_seconds",] == success
        assert found["last_run_timestamp_seconds",] > success
        assert found["last_run_exit_code",] == 7
        assert found["last_run_outcome", "failed"] == 1
    fail = Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    with monkeypatch.context() as patch:
        patch.setattr(monitoring, "read_bounded", fail)
        with pytest.raises(StorageError, match="cannot"):
            write_metrics(path, **FAILED, index=index)
    assert read(path) == found
    # Where the disk of the index is out, the file says at least that the run failed.
    write_metrics(path, **DONE, index=index)
    with monkeypatch.context() as patch:
        out = StorageError("the disk is out")
        patch.setattr(monitoring, "read_published", Mock(side_effect=out))
        with pytest.raises(StorageError, match="the disk is out"):
            write_metrics(path, **FAILED, index=index)
    found = read(path)
    assert found["last_run_exit_code",] == 7
    assert ("published_rows",) not in found
    write_metrics(path, **FAILED, index=index.parent / "other")
    assert ("last_success_timestamp_seconds",) not in read(path)


def test_metrics_of_another_program_are_not_lost(place: tuple[Path, Path]) -> None:
    path, index = place
    path.write_text("# HELP node_backup_seconds When it ended.\n")
    with pytest.raises(ConfigError, match=r"night\.prom holds something else than metrics of a"):
        check_metrics(path)
    path.unlink()
    write_metrics(path, **DONE, index=index)
    check_metrics(path)
