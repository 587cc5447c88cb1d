"""Artifacts written by earlier releases are read by this one, to the same answers."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from whiten_index import (
    BuildConfig,
    EmbeddingStore,
    Moments,
    Whitening,
    build_index,
    open_index,
)

GOLDEN = sorted(Path(__file__).parent.glob("golden/v*"))


@pytest.fixture(params=GOLDEN, ids=lambda folder: folder.name)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy, since reading must not depend on being able to write there but may not spoil it."""
    return Path(shutil.copytree(request.param, tmp_path / "golden"))


def raw(golden: Path) -> np.ndarray:
    column = pq.read_table(golden / "corpus.parquet").column("embedding")
    return np.array(column.to_pylist(), dtype=np.float64)


def closed_form(x: np.ndarray, k: int) -> np.ndarray:
    values, vectors = np.linalg.eigh(np.cov(x.T))
    z = (x - x.mean(axis=0)) @ (vectors[:, ::-1] / np.sqrt(values[::-1]))[:, :k]
    return z / np.linalg.norm(z, axis=1, keepdims=True)


def test_there_is_one_for_every_format_so_far() -> None:
    assert [folder.name for folder in GOLDEN] == ["v1"]


def test_an_index_answers_as_when_it_was_written(golden: Path) -> None:
    index = open_index(golden / "index")
    z = closed_form(raw(golden), 2)
    hits = index.search_embeddings(raw(golden), top_k=8)
    for row, found in enumerate(hits):
        scores = {hit.row: hit.score for hit in found}
        assert [scores[i] for i in range(8)] == pytest.approx(z @ z[row], abs=1e-5)
        assert found[0].id == f"doc-{row}"
        assert found[0].columns["year"] == 2000 + row


def test_a_store_is_whole_and_can_be_indexed(golden: Path, tmp_path: Path) -> None:
    store = EmbeddingStore.open(golden / "store")
    (part,) = store.corpus().parts
    assert store.require(part.shard).rows == 8
    assert np.array_equal(store.embeddings(part.shard), raw(golden).astype(np.float32))
    assert store.documents(part).column("id").to_pylist() == [f"doc-{i}" for i in range(8)]
    report = build_index(BuildConfig(store=str(golden / "store"), k=3, out=str(tmp_path / "new")))
    assert report.encoded.counts.reused == 8


def test_moments_and_whitening_are_read(golden: Path) -> None:
    (version,) = (golden / "index" / "versions").iterdir()
    moments = Moments.load(version / "moments.safetensors")
    whitening = Whitening.load(version / "whitening.safetensors")
    assert np.allclose(moments.covariance(), np.cov(raw(golden).T), atol=1e-12)
    assert np.allclose(np.cov(whitening.apply(raw(golden)).T), np.eye(2), atol=1e-6)


def test_the_same_corpus_is_found_done(golden: Path) -> None:
    """Fingerprints of rows and shards have not changed since."""
    config = BuildConfig(
        corpus=(str(golden / "corpus.parquet"),),
        embedding_column="embedding",
        id_column="id",
        keep=("year",),
        k=2,
        out=str(golden / "index"),
        store=str(golden / "store"),
    )
    report = build_index(config)
    assert report.encoded.counts.reused == 8
    assert report.up_to_date
