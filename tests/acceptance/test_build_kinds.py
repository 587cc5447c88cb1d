"""Builds of every kind of transform, index and input, against definitions and brute force."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

import whiten_index
from tests.acceptance.commands import done
from tests.acceptance.truth import (
    MAX_LENGTH,
    SciFact,
    encode,
    model_folder,
    nearest,
    unit,
    whitening,
)
from tests.acceptance.vectors import (
    COLUMNS,
    RandomCorpus,
    make_corpus,
    recall,
    search_queries,
    version_folder,
)

DIM = 32
Truth = Callable[[np.ndarray], np.ndarray]


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> RandomCorpus:
    return make_corpus(tmp_path_factory.mktemp("kinds"), 1500, DIM)


def shrunk(rows: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(np.cov(rows.T))
    found: np.ndarray = (rows - rows.mean(axis=0)) @ vectors
    return found / np.sqrt(0.7 * values + 0.3 * values.mean())


def all_but_the_top(rows: np.ndarray) -> np.ndarray:
    mean, matrix = whitening(rows, 2, exponent=0)
    return (rows - mean) - (rows - mean) @ matrix @ matrix.T


def of_unit_rows(rows: np.ndarray) -> np.ndarray:
    return directions(12, 1)(unit(rows))


def without_the_top(rows: np.ndarray) -> np.ndarray:
    mean, matrix = whitening(rows, 14)
    return (rows - mean) @ matrix[:, 2:]


def above_the_floor(rows: np.ndarray) -> np.ndarray:
    values = np.linalg.eigvalsh(np.cov(rows.T))
    return directions(int((values >= 0.1 * values.max()).sum()), 1)(rows)


def directions(k: int, exponent: float, *, center: bool = True) -> Truth:
    def reduce(rows: np.ndarray) -> np.ndarray:
        mean, matrix = whitening(rows, k, exponent=exponent)
        return (rows - mean * center) @ matrix

    return reduce


@pytest.mark.parametrize(
    ("options", "truth"),
    [
        (["none"], lambda rows: rows),
        (["truncate", "--k", 12], lambda rows: rows[:, :12]),
        (["pca", "--k", 12], directions(12, 0)),
        (["pca", "--k", 12, "--no-center"], directions(12, 0, center=False)),
        (["whitening", "--k", 12], directions(12, 1)),
        (["whitening", "--k", 12, "--exponent", 0.25], directions(12, 0.25)),
        (["whitening", "--k", "full"], directions(DIM, 1)),
        (["whitening", "--k", 12, "--normalize-input"], of_unit_rows),
        (["whitening", "--k", 12, "--remove-top", 2], without_the_top),
        (["whitening", "--k", "full", "--floor", 0.1], above_the_floor),
        (["whitening", "--k", "full", "--shrinkage", 0.3], shrunk),
        (["all-but-the-top", "--remove-top", 2], all_but_the_top),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, list) else "",
)
def test_vectors_are_those_of_the_definition(
    options: list[object], truth: Truth, vectors: RandomCorpus, tmp_path: Path
) -> None:
    """Inner products are compared: they know no sign of a direction."""
    done("build", vectors.corpus, *COLUMNS, "--whiten", *options, "--out", tmp_path / "index")
    made = whiten_index.QueryTransform.of(tmp_path / "index").reduce(vectors.rows[:200])
    exact = unit(truth(vectors.rows.astype(np.float64)))[:200]
    np.testing.assert_allclose(made @ made.T, exact @ exact.T, atol=2e-4)


def test_a_share_of_variance_is_the_fewest_directions_that_hold_it(
    vectors: RandomCorpus, tmp_path: Path
) -> None:
    done("build", vectors.corpus, *COLUMNS, "--whiten", "pca", "--k", 0.9, "--out", tmp_path / "i")
    values = np.linalg.eigvalsh(np.cov(vectors.rows.astype(np.float64).T))[::-1]
    k = int(np.searchsorted(np.cumsum(values) / values.sum(), 0.9)) + 1
    assert whiten_index.QueryTransform.of(tmp_path / "i").reduce(vectors.rows[:1]).shape == (1, k)


@pytest.mark.parametrize(
    ("factory", "least"),
    [("Flat", 1.0), ("IVF16,Flat", 0.85), ("HNSW16", 0.9), ("SQ8", 0.9), ("PQ8", 0.5)],
)
def test_kinds_of_index_find_the_neighbours_of_brute_force(
    factory: str, least: float, vectors: RandomCorpus, tmp_path: Path
) -> None:
    done(
        "build", vectors.corpus, *COLUMNS, "--whiten", "whitening", "--k", 16,
        "--factory", factory, "--out", tmp_path / "index",
    )  # fmt: skip
    mean, matrix = whitening(vectors.rows.astype(np.float64), 16)
    found = search_queries(tmp_path / "index", vectors)
    rows, queries = (vectors.rows - mean) @ matrix, (vectors.questions - mean) @ matrix
    assert recall(found, rows, queries) >= least
    inner = {
        "Flat": faiss.IndexFlat, "IVF16,Flat": faiss.IndexIVFFlat, "HNSW16": faiss.IndexHNSW,
        "SQ8": faiss.IndexScalarQuantizer, "PQ8": faiss.IndexPQ,
    }[factory]  # fmt: skip
    index: Any = faiss.read_index(str(version_folder(tmp_path / "index") / "index.faiss"))
    assert isinstance(faiss.downcast_index(index.index), inner)


@pytest.mark.parametrize(
    "condition", ["lang == 'en'", "year >= 2010 and lang != 'de'", "lang in ['de', 'fr']"]
)
def test_a_row_filter_leaves_rows_out_before_the_fit(
    condition: str, vectors: RandomCorpus, tmp_path: Path
) -> None:
    year, lang = vectors.years, vectors.languages
    kept = {
        "lang == 'en'": lang == "en",
        "year >= 2010 and lang != 'de'": (year >= 2010) & (lang != "de"),
        "lang in ['de', 'fr']": (lang == "de") | (lang == "fr"),
    }[condition]
    done(
        "build", vectors.corpus, *COLUMNS, "--filter", condition, "--whiten", "whitening",
        "--k", 16, "--out", tmp_path / "index",
    )  # fmt: skip
    rows = vectors.rows[kept].astype(np.float64)
    mean, matrix = whitening(rows, 16)
    expected, cosines = nearest((rows - mean) @ matrix, (vectors.questions - mean) @ matrix, 10)
    numbers = np.flatnonzero(kept)
    for hits, near, scores in zip(
        search_queries(tmp_path / "index", vectors), expected, cosines, strict=True
    ):
        assert [hit for hit, _ in hits] == [f"d{numbers[row]}" for row in near]
        assert [score for _, score in hits] == pytest.approx(scores.tolist(), abs=1e-4)


def test_a_limit_counts_rows_before_the_filter(vectors: RandomCorpus, tmp_path: Path) -> None:
    done(
        "build", vectors.corpus, *COLUMNS, "--limit", 301, "--filter", "lang == 'en'",
        "--whiten", "none", "--out", tmp_path / "index",
    )  # fmt: skip
    found = search_queries(tmp_path / "index", vectors, top_k=400)
    # More hits than there are rows are all rows, once.
    expected = sorted(f"d{row}" for row in range(0, 301, 3))
    assert all(sorted(hit for hit, _ in hits) == expected for hits in found)


def test_a_store_in_half_precision_is_half_as_large(vectors: RandomCorpus, tmp_path: Path) -> None:
    size = {}
    for dtype in ("float32", "float16"):
        store, index = tmp_path / dtype, tmp_path / f"index-{dtype}"
        done(
            "build", vectors.corpus, *COLUMNS, "--whiten", "whitening", "--k", 16,
            "--store-dtype", dtype, "--store", store, "--out", index,
        )  # fmt: skip
        size[dtype] = max(path.stat().st_size for path in store.rglob("*") if path.is_file())
    # Two bytes a number less, and next to nothing for headers.
    assert size["float32"] - size["float16"] == pytest.approx(2 * vectors.rows.size, abs=100)
    halves = vectors.rows.astype(np.float16).astype(np.float64)
    mean, matrix = whitening(halves, 16)
    expected, cosines = nearest((halves - mean) @ matrix, (vectors.questions - mean) @ matrix, 10)
    found = search_queries(tmp_path / "index-float16", vectors)
    scores = [[score for _, score in hits] for hits in found]
    np.testing.assert_allclose(scores, cosines, atol=1e-3)
    named = [[f"d{row}" for row in near] for near in expected]
    assert np.mean(np.array([[hit for hit, _ in hits] for hits in found]) == named) > 0.97


def test_a_plan_writes_nothing(vectors: RandomCorpus, tmp_path: Path) -> None:
    out = tmp_path / "index"
    done("build", vectors.corpus, *COLUMNS, "--k", 4, "--out", out, "--plan")
    assert not out.exists()


def test_auto_chooses_from_texts_without_labels_and_tells(scifact: SciFact, tmp_path: Path) -> None:
    """The vectors are of the exponent and the centring that the report names."""
    encoder = ("--pooling", "mean", "--max-length", 48)
    out = done(
        "build", scifact.corpus, "--text-column", "text", "--id-column", "id", *encoder,
        "--choose-sample", 50, "--k", 16, "--limit", 100, "--out", tmp_path / "index", "--json",
    )  # fmt: skip
    report = json.loads(out)
    assert report["choice"] is not None
    made = report["whitening"]
    assert made["k"] == 16
    texts = scifact.table()["text"].to_pylist()[:100]
    rows = whiten_index.load_encoder(pooling="mean", max_length=48).encode(texts)
    mean, matrix = whitening(rows.astype(np.float64), 16, exponent=made["exponent"])
    exact = unit((rows - mean * made["center"]) @ matrix)
    vectors = whiten_index.QueryTransform.of(tmp_path / "index").reduce(rows)
    np.testing.assert_allclose(vectors @ vectors.T, exact @ exact.T, atol=5e-3)


@pytest.mark.parametrize(
    ("options", "pool"),
    [
        (["--pooling", "cls"], lambda states, mask: states[-1][:, 0]),
        (["--pooling", "mean", "--layers", "1,-1"], lambda *given: mean_of(*given)),
        (["--pooling", "max"], lambda states, mask: states[-1].where(mask, -torch.inf).amax(1)),
    ],
    ids=["cls", "layers", "max"],
)
def test_texts_are_pooled_and_prompted_as_was_asked(
    options: list[str],
    pool: Callable[[tuple[torch.Tensor, ...], torch.Tensor], torch.Tensor],
    scifact: SciFact,
    tmp_path: Path,
) -> None:
    done(
        "build", scifact.corpus, "--text-column", "title", "--id-column", "id", "--limit", 30,
        *options, "--document-prompt", "passage: ", "--query-prompt", "query: ",
        "--whiten", "none", "--store-dtype", "float32", "--out", tmp_path / "index",
    )  # fmt: skip
    titles, query = scifact.table()["title"].to_pylist()[:30], scifact.query_texts()[0]
    folder = model_folder()
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    texts = [*(f"passage: {title}" for title in titles), f"query: {query}"]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        states = model(**batch, output_hidden_states=True).hidden_states
        rows = pool(states, batch["attention_mask"][:, :, None] > 0).double().numpy()
    _, cosines = nearest(rows[:-1], rows[-1:], 30)
    (hits,) = whiten_index.open_index(tmp_path / "index").search([query], top_k=30)
    assert [hit.score for hit in hits] == pytest.approx(cosines[0].tolist(), abs=1e-4)


def mean_of(states: tuple[torch.Tensor, ...], mask: torch.Tensor) -> torch.Tensor:
    """Return the mean over the tokens of the first layer's and the last one's states."""
    return ((states[1] + states[-1]) / 2 * mask).sum(1) / mask.sum(1)


def test_passages_are_parts_of_their_document_and_encoded_alone(
    scifact: SciFact, tmp_path: Path
) -> None:
    index = tmp_path / "index"
    done(
        "build", scifact.corpus, "--text-column", "text", "--id-column", "id", "--limit", 8,
        "--passage-tokens", 48, "--overlap", 12, "--max-length", MAX_LENGTH, "--whiten", "none",
        "--store-dtype", "float32", "--out", index,
    )  # fmt: skip
    query = scifact.query_texts()[0]
    (result,) = json.loads(done("search", index, query, "--top-k", 8, "--json"))["results"]
    texts = {str(row["id"]): row["text"] for row in scifact.table().slice(0, 8).to_pylist()}
    hits = result["hits"]
    # Each document once, by its best passage.
    assert sorted(str(hit["id"]) for hit in hits) == sorted(texts)
    for hit in hits:
        columns, text = hit["columns"], texts[str(hit["id"])]
        assert columns["passage_text"] == text[columns["passage_start"] : columns["passage_end"]]
    passages = [hit["columns"]["passage_text"] for hit in hits]
    assert sum(map(len, passages)) < sum(map(len, texts.values()))
    cosines = (unit(encode(passages)) @ unit(encode([query])).T)[:, 0]
    scores = [hit["score"] for hit in hits]
    assert scores == sorted(scores, reverse=True)
    np.testing.assert_allclose(scores, cosines, atol=1e-4)


def test_rows_are_named_by_place_without_an_id_column(
    vectors: RandomCorpus, tmp_path: Path
) -> None:
    options = ("--embedding-column", "embedding", "--whiten", "none")
    done("build", vectors.corpus, *options, "--out", tmp_path / "index")
    found = search_queries(tmp_path / "index", vectors, top_k=1)
    rows, _ = nearest(vectors.rows, vectors.questions, 1)
    group_rows = pq.ParquetFile(vectors.corpus).metadata.row_group(0).num_rows
    assert group_rows == len(vectors.rows)
    assert [hits[0][0].split("#")[1] for hits in found] == [f"0:{row}" for row in rows[:, 0]]


def test_the_file_is_a_plain_faiss_index(
    built: Path, embeddings: np.ndarray, query_embeddings: np.ndarray
) -> None:
    """Raw embeddings go in: the transform is in the index, and float16 rounded them."""
    index = faiss.read_index(str(version_folder(built) / "index.faiss"))
    assert (index.d, index.ntotal) == (384, len(embeddings))
    mean, matrix = whitening(embeddings, 64)
    rows, cosines = nearest((embeddings - mean) @ matrix, (query_embeddings - mean) @ matrix, 5)
    scores, found = index.search(query_embeddings.astype(np.float32), 5)
    np.testing.assert_allclose(scores, cosines, atol=5e-4)
    assert (found == rows).mean() > 0.95
