"""A rotation leaves cosines as they are and makes lossy codes more precise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from whiten_index import BuildConfig, build_index, open_index
from whiten_index.index import inner_index
from whiten_index.index.rotation import gains_by_rotation, random_rotation
from whiten_index.whitening import unit_rows

LOSSY = [
    "SQ8", "SQ6", "SQ4", "PQ8", "PQ16x4", "PQ16x4fs", "RaBitQ", "RaBitQ2", "IVF4,SQ8", "IVF4,PQ8",
    "IVF4,PQ16x4fs", "IVF4,RaBitQ", "HNSW8_SQ8", "RQ4x8", "PRQ2x2x8", "LSQ4x8",
    "SQ4,RFlat", "PQ16x4fs,Refine(SQ8)",
]  # fmt: skip


@pytest.mark.parametrize("factory", LOSSY)
def test_lossy_codes_are_rotated(factory: str) -> None:
    assert gains_by_rotation(inner_index(factory, 32))


@pytest.mark.parametrize("k", [1, 2, 33])
def test_a_rotation_is_orthogonal_and_of_its_seed(k: int) -> None:
    turned = random_rotation(k, seed=3)
    np.testing.assert_allclose(turned @ turned.T, np.eye(k), atol=1e-12)
    np.testing.assert_array_equal(turned, random_rotation(k, seed=3))
    if k > 2:
        assert not np.allclose(turned, random_rotation(k, seed=4))


@pytest.mark.parametrize("factory", ["SQ4", "PQ8", "PQ16x4fs", "RaBitQ"])
def test_codes_of_uneven_directions_become_more_precise(factory: str) -> None:
    rng = np.random.default_rng(0)
    scale = np.arange(1, 33) ** -0.8
    rows, queries = (
        unit_rows(rng.standard_normal((n, 32)) * scale).astype(np.float32) for n in (4000, 200)
    )
    truth = np.argsort(-(queries @ rows.T), axis=1)[:, :10]

    def recall(matrix: np.ndarray) -> float:
        index = inner_index(factory, 32)
        turned = (rows @ matrix).astype(np.float32)
        index.train(turned)
        index.add(turned)
        found = index.search((queries @ matrix).astype(np.float32), 10)[1]
        pairs = zip(found, truth, strict=True)
        return float(np.mean([len(set(a) & set(b)) / 10 for a, b in pairs]))

    assert recall(random_rotation(32, seed=0)) > recall(np.eye(32)) + 0.02


def built(folder: Path, rows: np.ndarray, **options: Any) -> Path:
    folder.mkdir()
    table = pa.table({"id": np.arange(len(rows)), "e": list(rows)})
    pq.write_table(table, folder / "rows.parquet")
    config = BuildConfig(
        corpus=str(folder / "rows.parquet"), embedding_column="e", id_column="id",
        out=str(folder / "index"), **options,
    )  # fmt: skip
    build_index(config)
    return folder / "index"


@pytest.mark.parametrize("whiten", ["none", "pca", "whitening"])
@pytest.mark.parametrize("factory", ["SQ8", "IVF8,SQ8", "PQ8", "SQ8,RFlat"])
def test_a_published_index_of_lossy_codes_still_finds_by_cosine(
    tmp_path, whiten: str, factory: str
) -> None:
    rng = np.random.default_rng(1)
    rows = (rng.standard_normal((600, 16)) * np.arange(1, 17) ** -0.7 + 0.2).astype(np.float32)
    options = {} if whiten == "none" else {"k": 8}
    turned = open_index(built(tmp_path / "a", rows, whiten=whiten, factory=factory, **options))
    plain = open_index(built(tmp_path / "b", rows, whiten=whiten, factory="Flat", **options))
    assert turned.bundle.manifest["factory"]["rotated"] is True
    assert plain.bundle.manifest["factory"]["rotated"] is False
    queries = (rng.standard_normal((50, 16)) * 0.5).astype(np.float32)
    exact = {hit.row: hit.score for hit in plain.search_embeddings(queries, top_k=600)[0]}
    found = turned.search_embeddings(queries, top_k=5)[0]
    loss = 0.25 if factory == "PQ8" else 0.02
    for hit in found:
        assert hit.score == pytest.approx(exact[hit.row], abs=loss)


def test_neighbours_of_a_document_are_those_of_its_turned_code(tmp_path) -> None:
    rng = np.random.default_rng(2)
    rows = rng.standard_normal((300, 16)).astype(np.float32)
    index = open_index(built(tmp_path / "a", rows, whiten="pca", k=8, factory="SQ8"))
    by_row = [hit.row for hit in index.search_like(7, top_k=5)]
    by_embedding = [hit.row for hit in index.search_embeddings(rows[7:8], top_k=6)[0]]
    assert by_row == by_embedding[1:]
