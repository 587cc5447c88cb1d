"""The geometry in the manifest, and the rows it is measured on: against numpy, on all rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from tests.helpers.transforms import make_rows
from whiten_index import BuildConfig, build_index
from whiten_index.cli import cli
from whiten_index.pipeline.build import BuildReport
from whiten_index.whitening.transform import Whitening

Array = NDArray[np.float64]
ROWS, DIM = 150, 12


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


@pytest.mark.parametrize(
    "options",
    [
        {"whiten": "pca", "k": 5},
        {"whiten": "pca", "k": 5, "remove_top": 2}, {"whiten": "whitening", "k": 7},
        {"whiten": "whitening", "k": "full", "exponent": 0.3},
        {"whiten": "whitening", "k": 7, "center": False}, {"whiten": "all-but-the-top"},
        {"whiten": "zca-cor"}, {"whiten": "random", "k": 5},
        {"whiten": "whitening", "normalize_input": True},
        {"whiten": "whitening", "shrinkage": 0.5}, {"whiten": "none"}, {"whiten": "auto"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)  # fmt: skip
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
