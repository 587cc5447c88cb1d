"""Metrics files: read back by the library's own parser, and held to Prometheus' rules of names."""

import re
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from whiten_index.cli.monitoring import OUTCOMES, write_metrics

REPORT: dict[str, Any] = {
    "version": "000012-0123456789ab", "up_to_date": False,
    "rows": {"total": 1000, "new": 5, "changed": 10, "document": 2, "deleted": 4, "unchanged": 983},
    "counts": {"read": 1003, "encoded": 15, "reused": 985, "truncated": 7,
        "skipped": {"null_text": 2, "blank_text": 1}},
    "files": {"read": 3, "skipped": 40},
    "drift": {"mean_shift": 0.25, "kl_per_dim": 0.004, "eigenvalues": {"min": 0.9, "max": 1.25},
        "all": [1.0, 2.0], "why": "text", "kept": None},
    "decision": {"whitening": "keep", "index": "carried", "why": "0.004 < 0.01", "threshold": 0.01},
    "gates": [{"name": "counts", "passed": True, "found": {}, "bound": {}, "why": ""},
        {"name": "canaries", "passed": False, "found": {}, "bound": {}, "why": "recall"}],
    "seconds": {"read": 1.5, "encode": 20.25},
    "stage_rows": {"read": 1003, "encode": 15},
}  # fmt: skip
DONE: dict[str, Any] = {"outcome": "published", "exit_code": 0, "seconds": 33.5}
DONE |= {"report": REPORT, "gates": REPORT["gates"]}
FAILED: dict[str, Any] = {"outcome": "failed", "exit_code": 7, "seconds": 2.0}


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
        ("update_rows", "new"): 5, ("update_rows", "changed"): 10, ("update_rows", "document"): 2,
        ("update_rows", "deleted"): 4, ("update_rows", "unchanged"): 983,
        ("update_read_rows",): 1003, ("update_encoded_rows",): 15, ("update_reused_rows",): 985,
        ("update_truncated_rows",): 7, ("update_skipped_rows", "null_text"): 2,
        ("update_skipped_rows", "blank_text"): 1, ("update_files", "read"): 3,
        ("update_files", "skipped"): 40, ("update_stage_duration_seconds", "encode"): 20.25,
        ("update_stage_rows", "encode"): 15, ("update_refit",): 0,
        ("update_drift", "mean_shift"): 0.25,
        ("update_drift", "kl_per_dim"): 0.004,
        ("update_drift", "eigenvalues.max"): 1.25,
        ("update_drift_threshold",): 0.01,
        ("update_gate_passed", "counts"): 1,
        ("update_gate_passed", "canaries"): 0,
    }  # fmt: skip
    assert {key: found.get(key) for key in said} == said
    outcomes = [key for key in found if key[0] == "last_run_outcome"]
    assert len(outcomes) == len(OUTCOMES)
    # What is in the corpus adds up; the total is no part of it.
    kinds = {key[1]: value for key, value in found.items() if key[0] == "update_rows"}
    assert sum(kinds.values()) - kinds["deleted"] == REPORT["rows"]["total"]
    drift = {key[1] for key in found if key[0] == "update_drift"}
    assert drift == {"mean_shift", "kl_per_dim", "eigenvalues.min", "eigenvalues.max"}


def test_a_failed_run_keeps_the_last_success_and_says_nothing_of_rows(
    place: tuple[Path, Path],
) -> None:
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
        assert not [key for key in found if key[0].startswith("update_")]
    write_metrics(path, **FAILED, index=index.parent / "other")
    assert ("last_success_timestamp_seconds",) not in read(path)
