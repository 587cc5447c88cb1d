"""The geometry in the manifest, and the rows it is measured on: against numpy, on all rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from tests.whitening_helpers import make_rows
from whiten_index import BuildConfig, build_index
from whiten_index.cli import cli
from whiten_index.evaluation import Geometry
from whiten_index.pipeline import publish as diagnosing
from whiten_index.pipeline.build import BuildReport
from whiten_index.pipeline.publish import geometry
from whiten_index.store import CorpusPart, CorpusRecord
from whiten_index.store.sampling import drawn_rows
from whiten_index.whitening import Whitening

Array = NDArray[np.float64]
ROWS, DIM = 150, 12


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    faiss.omp_set_num_threads(1)


def build(root: Path, embeddings: list[Any] | NDArray[Any], **options: Any) -> BuildReport:
    root.mkdir(parents=True, exist_ok=True)
    listed = [None if row is None else np.asarray(row, np.float32) for row in embeddings]
    pq.write_table(pa.table({"id": range(len(listed)), "e": listed}), root / "c.parquet")
    given_ = {"embedding_column": "e", "id_column": "id", "shard_rows": 40, **options}
    return build_index(
        BuildConfig(corpus=(str(root / "c.parquet"),), out=str(root / "out"), **given_)
    )


def transform(report: BuildReport) -> Whitening:
    return Whitening.load(report.out / "versions" / report.version / "whitening.safetensors")


def shape(report: BuildReport) -> dict[str, Any]:
    found = report.manifest["geometry"]
    assert isinstance(found, dict)
    return found


def mean_cosine(rows: Array) -> float:
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    cosines = unit @ unit.T
    return float(cosines[~np.eye(len(rows), dtype=bool)].mean())


def dims_in_use(rows: Array) -> tuple[float, float]:
    """Return IsoScore and effective rank of rows at unit length, from their covariance."""
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    values = np.maximum(np.linalg.eigvalsh(np.cov(unit.T)), 0)
    shares = values / values.sum()
    shares = shares[shares > 1e-15]
    participation = values.sum() ** 2 / (values @ values)
    return (participation - 1) / (len(values) - 1), float(np.exp(-shares @ np.log(shares)))


# --------------------------------------------------------------------------- geometry


@pytest.mark.parametrize(
    "options",
    [
        {"whiten": "pca", "k": 5},
        {"whiten": "pca", "k": 5, "remove_top": 2},
        {"whiten": "whitening", "k": 7},
        {"whiten": "whitening", "k": "full", "exponent": 0.3},
        {"whiten": "whitening", "k": 7, "center": False},
        {"whiten": "all-but-the-top"},
        {"whiten": "zca-cor"},
        {"whiten": "random", "k": 5},
        {"whiten": "whitening", "normalize_input": True},
        {"whiten": "whitening", "shrinkage": 0.5},
        {"whiten": "none"},
        {"whiten": "auto"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_the_geometry_is_that_of_embeddings_and_of_the_vectors_made_of_them(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    rows = make_rows(0, ROWS, DIM, ratio=0.3).astype(np.float32).astype(np.float64)
    report = build(tmp_path, rows, **options)
    vectors = transform(report).apply(rows)
    for name, truth in (("raw", rows), ("vectors", vectors)):
        found = shape(report)[name]
        assert found["rows"] == ROWS
        assert found["mean_cosine"] == pytest.approx(mean_cosine(truth), abs=1e-6)
        isoscore, effective_rank = dims_in_use(truth)
        assert found["isoscore"] == pytest.approx(isoscore, rel=1e-6)
        assert found["effective_rank"] == pytest.approx(effective_rank, rel=1e-6)


@pytest.mark.parametrize("rows", [1, 2])
def test_too_few_rows_have_no_geometry_and_the_index_is_built(tmp_path: Path, rows: int) -> None:
    report = build(tmp_path, make_rows(0, rows, DIM), whiten="none")
    assert report.manifest["geometry"] is None
    result = CliRunner().invoke(cli, ["inspect", str(report.out)])
    assert result.exit_code == 0, result.stderr
    assert "geometry" not in result.stdout


def test_a_large_corpus_is_measured_on_a_sample_of_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make_rows(0, ROWS, DIM, ratio=0.3).astype(np.float32).astype(np.float64)
    monkeypatch.setattr(diagnosing, "_ROWS", 50)
    report = build(tmp_path, rows, whiten="whitening", k=4)
    found = shape(report)
    assert found["raw"]["rows"] == found["vectors"]["rows"] == 50
    store, record, whitening = report.encoded.store, report.encoded.record, transform(report)
    assert geometry(store, record, whitening, seed=0) == found
    other = geometry(store, record, whitening, seed=1)
    assert other is not None
    assert other["raw"]["mean_cosine"] != found["raw"]["mean_cosine"]
    # Raw and whitened are of the same rows.
    sample = np.sort(drawn_rows(record, 50, np.random.default_rng(0)))
    for name, truth in (("raw", rows[sample]), ("vectors", whitening.apply(rows[sample]))):
        measured = (found[name]["isoscore"], found[name]["effective_rank"])
        assert measured == pytest.approx(dims_in_use(truth), rel=1e-6)
        assert found[name]["hubness"] == pytest.approx(Geometry.of(truth).hubness, abs=1e-6)


# --------------------------------------------------------------------------- the draw


def record_of(rows: list[int]) -> CorpusRecord:
    parts = tuple(CorpusPart("s" if n else "", "", n, n, 0) for n in rows)
    return CorpusRecord({}, parts, {})


def test_every_row_of_a_small_corpus_is_as_likely_as_another():
    record = record_of([30, 0, 10, 60])
    counts = np.zeros(100)
    for seed in range(400):
        counts[drawn_rows(record, 20, np.random.default_rng(seed))] += 1
    # 80 each, with a standard deviation of 8.
    assert abs(counts - 80).max() < 40
    assert counts[:30].mean() == pytest.approx(80, abs=6)
