"""A sweep whose indexes are filled and searched on a GPU, which is a recording CPU here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from fake_gpu import FakeGpu

from whiten_index.cli import cli
from whiten_index.errors import ConfigError
from whiten_index.sweep import run_sweep, sweep_config

ROWS, DIM = 600, 12


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    rows = np.random.default_rng(0).standard_normal((ROWS, DIM)).astype(np.float32)
    column = pa.FixedSizeListArray.from_arrays(rows.ravel(), DIM)
    pq.write_table(pa.table({"id": range(ROWS), "v": column}), tmp_path / "c.parquet")
    return {
        "corpus": [str(tmp_path / "c.parquet")], "embedding_column": "v", "id_column": "id",
        "out": str(tmp_path / "out"), "sample": 50, "threads": 1, "widths": "4,8",
        "transforms": "pca", "codecs": "fp32,sq8", "baselines": False,
    }  # fmt: skip


def points(options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    path = run_sweep(sweep_config(options)).results
    records = map(json.loads, path.read_text().splitlines())
    return {record["key"]: record for record in records if record["type"] == "point"}


def test_kinds_that_a_gpu_takes_are_measured_there_and_find_the_same(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu = points({**options, "out": str(tmp_path / "cpu")})
    fake = FakeGpu(monkeypatch)
    on_gpu = points({**options, "index_device": "gpu", "store": str(tmp_path / "cpu/store")})
    assert on_cpu.keys() == on_gpu.keys()
    where = {"/".join(key.split("/")[3:]): found["device"] for key, found in on_gpu.items()}
    assert where == {
        "fp32/flat": "gpu", "fp32/ivf": "gpu", "fp32/hnsw": "cpu", "sq8/flat": "cpu",
        "sq8/ivf": "gpu",
    }  # fmt: skip
    assert {found["device"] for found in on_cpu.values()} == {"cpu"}
    asked = {name for name, _ in fake.calls}
    assert asked == {"to gpu", "train", "add", "search", "to cpu"}
    for key, found in on_gpu.items():
        if key.endswith("flat"):
            assert found["index_recall@10"] == pytest.approx(on_cpu[key]["index_recall@10"])
            assert found["agreement@10"] == pytest.approx(on_cpu[key]["agreement@10"])
        # Lists differ in what they were clustered from, not in what they were tuned to.
        assert found["index_recall@10"] > 0.85
        assert found["bytes"]["codes"] == on_cpu[key]["bytes"]["codes"]
        assert ("nprobe" in found["parameters"]) == key.endswith("ivf")


def test_figures_of_a_gpu_are_another_run_and_name_it(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    points(options)
    FakeGpu(monkeypatch)
    path = run_sweep(sweep_config({**options, "index_device": "gpu"})).results
    heads = [r for r in map(json.loads, path.read_text().splitlines()) if r["type"] == "sweep"]
    assert [head["settings"].get("index_device") for head in heads] == [None, "gpu"]
    assert ["gpu" in head["machine"] for head in heads] == [False, True]
    assert heads[0]["run"] != heads[1]["run"]


@pytest.mark.parametrize("step", ["train", "add"])
def test_where_its_memory_runs_out_auto_measures_on_the_cpu(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    FakeGpu(monkeypatch).fails[step] = "out of memory"
    found = points({**options, "index_device": "auto", "indexes": "ivf", "codecs": "fp32"})
    assert {record["device"] for record in found.values()} == {"cpu"}
    assert all(record["index_recall@10"] > 0.85 for record in found.values())


@pytest.mark.parametrize("step", ["train", "add"])
def test_where_the_memory_of_a_gpu_asked_for_runs_out_a_point_is_skipped_and_tried_again(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    fake = FakeGpu(monkeypatch)
    fake.fails[step] = "out of memory"
    given = {**options, "index_device": "gpu", "indexes": "ivf", "codecs": "fp32"}
    report = run_sweep(sweep_config(given))
    assert report.measured == 0
    assert len(report.skipped) == 2
    assert all("the GPU's memory ran out" in why for why in report.skipped.values())
    fake.fails.clear()
    assert run_sweep(sweep_config(given)).measured == 2


def test_without_a_gpu_the_command_says_so_before_any_work(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeGpu(monkeypatch, gpus=0)
    with pytest.raises(ConfigError, match="FAISS sees no GPU; use cpu or auto"):
        run_sweep(sweep_config({**options, "index_device": "gpu"}))
    command = ["sweep", options["corpus"][0], "--embedding-column", "v", "--out", options["out"]]
    done = CliRunner().invoke(cli, [*command, "--index-device", "gpu"])
    assert done.exit_code == 2
    assert "--index-device gpu: FAISS sees no GPU; use cpu or auto" in done.output
    assert not (tmp_path / "out").exists()
    # What auto leaves on the CPU is the same run.
    found = points({**options, "indexes": "flat"})
    assert {record["device"] for record in found.values()} == {"cpu"}
    report = run_sweep(sweep_config({**options, "index_device": "auto", "indexes": "flat"}))
    assert (report.measured, report.found) == (0, len(found))
