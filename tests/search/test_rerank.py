"""Re-ranking against brute force on the raw embeddings; stores that moved, changed or are gone."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.helpers.builds import build_of, closed_form, cosines
from whiten_index import open_index
from whiten_index.errors import ArtifactError
from whiten_index.search import rerank as reranking
from whiten_index.versions.gc import gc_store
from whiten_index.versions.retention import prune

ROWS, DIM, K = 400, 12, 6


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    random = np.random.default_rng(0)
    return (random.standard_normal((ROWS, DIM)) * np.linspace(2, 0.5, DIM) + 0.5).astype(np.float32)


@pytest.fixture(scope="module")
def queries() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((6, DIM)).astype(np.float32)


def build(folder: Path, rows: np.ndarray, **options: Any) -> Path:
    even = [bool(i % 2 == 0) for i in range(len(rows))]
    table = pa.table({"id": np.arange(len(rows)), "e": list(rows), "even": even})
    settled = {"whiten": "whitening", "k": K, "factory": "SQ4", "keep": "even", "shard_rows": 90}
    return build_of(table, folder, **{**settled, **options})


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, rows: np.ndarray) -> Path:
    """A published index of 4-bit codes; do not write to it."""
    return build(tmp_path_factory.mktemp("rerank"), rows)


def truth(rows: np.ndarray, asked: np.ndarray, by: str) -> np.ndarray:
    if by == "embeddings":
        return cosines(asked.astype(float), rows.astype(float))
    return cosines(closed_form(asked, k=K, fitted_on=rows), closed_form(rows, k=K))


@pytest.mark.parametrize("by", ["vectors", "embeddings"])
@pytest.mark.parametrize("held", [1 << 14, 50, 1])
def test_all_rows_as_candidates_give_exact_search(
    monkeypatch: pytest.MonkeyPatch,
    index: Path,
    rows: np.ndarray,
    queries: np.ndarray,
    by: str,
    held: int,
) -> None:
    monkeypatch.setattr(reranking, "_HELD_ROWS", held)
    opened = open_index(index, rerank=10 * ROWS, rerank_by=by)
    expected = truth(rows, queries, by)
    for hits, row in zip(opened.search_embeddings(queries, top_k=15), expected, strict=True):
        best = np.argsort(-row)[:15]
        assert [hit.row for hit in hits] == best.tolist()
        np.testing.assert_allclose([hit.score for hit in hits], row[best], atol=1e-6)


@pytest.mark.parametrize("by", ["vectors", "embeddings"])
def test_a_filter_and_a_document_go_with_it(index: Path, rows: np.ndarray, by: str) -> None:
    opened = open_index(index, rerank=ROWS, rerank_by=by)
    expected = truth(rows, rows, by)
    for row in (0, 89, 90, ROWS - 1):
        order = [i for i in np.argsort(-expected[row]) if i != row]
        assert [hit.row for hit in opened.search_like(row)] == order[:10]
        even = [i for i in order if i % 2 == 0][:10]
        assert [hit.row for hit in opened.search_like(row, row_filter="even")] == even
        (hits,) = opened.search_embeddings(rows[row : row + 1], row_filter="id == 5")
        assert [hit.row for hit in hits] == [5]
    assert opened.search_embeddings(rows[:2], row_filter="even and not even") == [[], []]
    assert opened.search_embeddings(rows[:0]) == []


@pytest.mark.parametrize("where", ["inside", "beside", "elsewhere", "relative"])
def test_a_store_is_found_where_the_build_had_it(
    tmp_path: Path, rows: np.ndarray, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    options = {
        "inside": {},
        "beside": {"store": str(tmp_path / "work" / "raw")},
        "elsewhere": {"store": str(tmp_path / "far" / "raw")},
        "relative": {"store": "raw", "out": "o"},
    }[where]
    out = build(tmp_path / "work", rows, **options)
    assert open_index(out, rerank=5).search_embeddings(rows[:1])[0][0].row == 0
    # Moved with all that is beside it, and asked from another folder.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work").rename(tmp_path / "moved")
    assert open_index(tmp_path / "moved" / "o", rerank=5).search_embeddings(rows[:1])
    # Moved alone.
    if where in ("beside", "relative"):
        (tmp_path / "moved" / "o").rename(tmp_path / "alone")
        with pytest.raises(ArtifactError, match=r"none in .*--store DIR, or search with --rerank"):
            open_index(tmp_path / "alone", rerank=5)
        store = tmp_path / "moved" / "raw"
        assert open_index(tmp_path / "alone", rerank=5, store=store).search_embeddings(rows[:1])


def test_an_index_ranks_by_its_own_rows_after_the_corpus_changed(
    tmp_path: Path, rows: np.ndarray
) -> None:
    out = build(tmp_path, rows)
    shutil.copytree(out, tmp_path / "before")
    build(tmp_path, rows[:-1])
    opened = open_index(tmp_path / "before", rerank=5, store=out / "store")
    assert opened.search_embeddings(rows[-1:])[0][0].row == len(rows) - 1
    assert open_index(out, rerank=5).search_embeddings(rows[:1])


def test_what_was_pruned_under_an_open_searcher_says_to_reload(
    tmp_path: Path, rows: np.ndarray
) -> None:
    """What it read before it reads again; for what it did not, the store has nothing any more."""
    out = build(tmp_path, rows)
    opened, other = open_index(out, rerank=5), open_index(out, rerank=5)
    before = opened.search_embeddings(rows, top_k=1)
    build(tmp_path, rows + np.float32(1))
    prune(out, keep=1)
    gc_store(out / "store", keep_days=0)
    assert opened.search_embeddings(rows, top_k=1) == before
    with pytest.raises(ArtifactError, match=r"was pruned while .* call reload\(\), or open"):
        other.search_embeddings(rows, top_k=1)
    for searcher in (opened, other):
        assert searcher.reload()
        assert searcher.search_embeddings(rows[7:8] + np.float32(1))[0][0].row == 7
