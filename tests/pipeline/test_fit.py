"""From a store to a transform: unit input is that of the rows themselves, by numpy's eigh."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from whiten_index import BuildConfig, build_index
from whiten_index.pipeline.build import BuildReport
from whiten_index.whitening.transform import Whitening

Array = NDArray[np.float64]
ROWS, DIM, K = 90, 8, 5


def made(rows: int = ROWS, seed: int = 0) -> Array:
    """Rows of float32 values around a mean, with spreads that no two directions share."""
    rng = np.random.default_rng(seed)
    turn = np.linalg.qr(rng.normal(size=(DIM, DIM)))[0]
    cloud = rng.normal(size=(rows, DIM)) * np.linspace(0.3, 2, DIM) @ turn + rng.normal(size=DIM)
    return cloud.astype(np.float32).astype(np.float64)


def write(path: Path, rows: Array) -> str:
    ids = [f"d{i}" for i in range(len(rows))]
    pq.write_table(pa.table({"id": ids, "e": list(rows.astype(np.float32))}), path)
    return str(path)


def build(out: Path, *corpus: str, **options: Any) -> BuildReport:
    given = {"embedding_column": "e", "id_column": "id", "whiten": "whitening", "k": K, **options}
    return build_index(BuildConfig(corpus=corpus, out=str(out), shard_rows=37, **given))


def fitted(report: BuildReport) -> Whitening:
    return Whitening.load(report.out / "versions" / report.version / "whitening.safetensors")


def assert_same_but_for_scale(found: Array, expected: Array) -> None:
    """Columns may be turned round, and all of them be longer by one factor."""
    signs = np.sign(np.sum(found * expected, axis=0))
    factor = np.linalg.norm(found) / np.linalg.norm(expected)
    np.testing.assert_allclose(found, factor * expected * signs, rtol=1e-6, atol=1e-9)


def closed_form(rows: Array) -> tuple[Array, Array]:
    """Return mean and whitening matrix (d, k) of rows."""
    mean, (values, vectors) = rows.mean(axis=0), np.linalg.eigh(np.cov(rows.T))
    return mean, vectors[:, ::-1][:, :K] * values[::-1][:K] ** -0.5


def test_unit_input_is_fitted_on_rows_of_length_one(tmp_path: Path) -> None:
    rows = made()
    corpus = write(tmp_path / "c.parquet", rows)
    report = build(tmp_path / "out", corpus, normalize_input=True)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    mean, matrix = closed_form(unit)
    np.testing.assert_allclose(fitted(report).mean, mean, rtol=1e-9, atol=1e-12)
    assert_same_but_for_scale(fitted(report).matrix(), matrix)
