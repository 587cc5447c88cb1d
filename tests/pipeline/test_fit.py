"""From a store to a transform: weights, unit input and shrinkage are those of the rows themselves.

Truth is numpy's own mean, covariance (``aweights``) and eigh, rows written out as often as they
count, and scikit-learn's shrinkage.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from whiten_index import BuildConfig, build_index
from whiten_index.cli import cli
from whiten_index.pipeline.build import BuildReport
from whiten_index.whitening.transform import Whitening

Array = NDArray[np.float64]
ROWS, DIM, K = 90, 8, 5
CORPUS = 3


def made(rows: int = ROWS, seed: int = 0) -> Array:
    """Rows of float32 values around a mean, with spreads that no two directions share."""
    rng = np.random.default_rng(seed)
    turn = np.linalg.qr(rng.normal(size=(DIM, DIM)))[0]
    cloud = rng.normal(size=(rows, DIM)) * np.linspace(0.3, 2, DIM) @ turn + rng.normal(size=DIM)
    return cloud.astype(np.float32).astype(np.float64)


def frequencies(seed: int = 1) -> NDArray[np.int64]:
    """Few rows that are frequent, many that are rare, and some that never occur."""
    return np.random.default_rng(seed).zipf(1.6, ROWS).clip(max=40) - 1


def write(path: Path, rows: Array, **columns: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    columns.setdefault("id", [f"d{i}" for i in range(len(rows))])
    columns.setdefault("e", list(rows.astype(np.float32)))
    pq.write_table(pa.table(columns), path)
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


def closed_form(rows: Array, weights: Array | None = None) -> tuple[Array, Array]:
    """Return mean and whitening matrix (d, k) of weighted rows."""
    mean = np.average(rows, axis=0, weights=weights)
    values, vectors = np.linalg.eigh(np.cov(rows.T, aweights=weights))
    return mean, vectors[:, ::-1][:, :K] * values[::-1][:K] ** -0.5


def run(*arguments: Any) -> tuple[int, str]:
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stderr


@pytest.mark.parametrize("weighting", ["zipfian", "inverse-frequency"])
def test_the_whitening_is_the_closed_form_of_the_weighted_rows(
    tmp_path: Path, weighting: str
) -> None:
    rows, counts = made(), frequencies()
    corpus = write(tmp_path / "c.parquet", rows, f=counts)
    report = build(tmp_path / "out", corpus, weight_column="f", weighting=weighting)
    # Arora, Liang and Ma 2017, a / (a + p), with an a of the mean p.
    weights = counts.astype(float) if weighting == "zipfian" else 1 / (1 + counts / counts.mean())
    mean, matrix = closed_form(rows, weights)
    found = fitted(report)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-9, atol=1e-12)
    assert_same_but_for_scale(found.matrix(), matrix)
    assert found.count == pytest.approx(ROWS)


@pytest.mark.parametrize("weighted", [False, True])
def test_unit_input_is_fitted_on_rows_of_length_one(tmp_path: Path, weighted: bool) -> None:
    rows, counts = made(), frequencies()
    corpus = write(tmp_path / "c.parquet", rows, f=counts)
    options = {"weight_column": "f"} if weighted else {}
    report = build(tmp_path / "out", corpus, normalize_input=True, **options)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    mean, matrix = closed_form(unit, counts.astype(float) if weighted else None)
    np.testing.assert_allclose(fitted(report).mean, mean, rtol=1e-9, atol=1e-12)
    assert_same_but_for_scale(fitted(report).matrix(), matrix)


BAD = {
    "negative": ([1.0, -2.0] + [1.0] * 88, "not negative"),
    "a little negative": ([-1e-300] + [1.0] * 89, "not negative"),
    "NaN": ([float("nan")] + [1.0] * 89, "finite"),
    "infinite": ([float("inf")] + [1.0] * 89, "finite"),
    "all zero": ([0] * 90, "all counts are zero"),
    "null": ([None, 3] + [1] * 88, "1 nulls"),
    "texts": (["3"] * 90, "string"),
    "booleans": ([True] * 90, "bool"),
    "lists": ([[1.0]] * 90, "list"),
    "dates": (pa.array(range(90), pa.timestamp("s")), "timestamp"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("whiten", ["whitening", "auto"])
def test_what_is_no_frequency_is_refused(tmp_path: Path, name: str, whiten: str) -> None:
    values, told = BAD[name]
    corpus = write(tmp_path / "c.parquet", made(), f=values)
    columns = ("--embedding-column", "e", "--id-column", "id", "--weight-column", "f")
    status, stderr = run("build", corpus, *columns, "--out", tmp_path / "out", "--whiten", whiten)
    assert status == CORPUS, stderr
    last = stderr.splitlines()[-1]
    assert last.startswith("Error: ")
    assert re.search(f"column f .*{told}", last), last
    assert not (tmp_path / "out" / "CURRENT").exists()
