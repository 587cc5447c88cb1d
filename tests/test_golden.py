"""Artifacts written by earlier releases are read by this one, to the same answers."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors import safe_open

from whiten_index import (
    BuildConfig,
    EmbeddingStore,
    Moments,
    QueryTransform,
    Whitening,
    build_index,
    open_index,
)

FOLDER = Path(__file__).parent / "golden"
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
        whiten="whitening",
        out=str(golden / "index"),
        store=str(golden / "store"),
    )
    report = build_index(config)
    assert report.encoded.counts.reused == 8
    assert report.up_to_date


def test_a_whitening_of_format_1_is_written_as_it_was(golden: Path, tmp_path: Path) -> None:
    """So earlier releases read what this one writes of what they know."""
    (version,) = (golden / "index" / "versions").iterdir()
    before = version / "whitening.safetensors"
    Whitening.load(before).save(tmp_path / "again.safetensors")
    held = []
    for path in (before, tmp_path / "again.safetensors"):
        with safe_open(path, framework="numpy") as file:
            tensors = {name: file.get_tensor(name).tolist() for name in file.keys()}  # noqa: SIM118
            held.append((file.metadata(), tensors))
    assert held[0] == held[1]


def power(matrix: np.ndarray, exponent: float) -> np.ndarray:
    values, vectors = np.linalg.eigh(matrix)
    return vectors * values**exponent @ vectors.T


def in_groups(c: np.ndarray, groups: list[list[int]]) -> np.ndarray:
    z = np.empty_like(c)
    for group in groups:
        z[:, group] = c[:, group] @ power(np.cov(c[:, group].T), -0.5)
    return z


def test_whitenings_of_format_2_map_as_when_they_were_written() -> None:
    x = raw(FOLDER / "v1")
    c, cov = x - x.mean(axis=0), np.cov(x.T)
    standard = c / c.std(axis=0, ddof=1)
    values, vectors = (part[..., ::-1] for part in np.linalg.eigh(cov))
    widest, biased = vectors[:, 0], cov * 7 / 8
    noise = np.mean([np.square(np.outer(row, row) - biased).sum() for row in c]) / 8
    distance = np.square(biased - np.trace(biased) / 4 * np.eye(4)).sum()
    rho = min(noise / distance, 1)  # Ledoit and Wolf 2004
    shrunk = (1 - rho) * values + rho * values.mean()
    z = {
        "zca-cor": standard @ power(np.corrcoef(x.T), -0.5),
        "group": in_groups(c, [[3, 2], [1, 0]]),
        "all-but-the-top": c - np.outer(c @ widest, widest),
        "whitening-shrunk": (c @ vectors / np.sqrt(shrunk))[:, :2],
    }
    for name, truth in z.items():
        found = Whitening.load(FOLDER / "whitening-v2" / f"{name}.safetensors").apply(x)
        assert np.allclose(found @ found.T, truth @ truth.T, atol=1e-9), name
    random = Whitening.load(FOLDER / "whitening-v2" / "random.safetensors")
    assert (random.k, random.seed, random.center) == (3, 3, False)
    assert np.allclose(random.basis.T @ random.basis, np.eye(3), atol=1e-12)


def test_a_query_transform_of_format_1(tmp_path: Path) -> None:
    x = raw(FOLDER / "v1")
    saved = shutil.copytree(FOLDER / "query-v1", tmp_path / "query")
    found, truth = QueryTransform.load(saved).reduce(x), closed_form(x, 2)
    assert np.allclose(found @ found.T, truth @ truth.T, atol=1e-5)
