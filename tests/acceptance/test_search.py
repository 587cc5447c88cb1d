"""Searches by texts, files of queries and documents, against brute force."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import whiten_index
from tests.acceptance.commands import done
from tests.acceptance.truth import MAX_LENGTH, SciFact, nearest, unit, whitening
from tests.acceptance.vectors import (
    COLUMNS,
    RandomCorpus,
    Vectors,
    make_corpus,
    read_trec,
    recall,
    search_queries,
)

K = 12


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> RandomCorpus:
    return make_corpus(tmp_path_factory.mktemp("search"), 900, 24, seed=5)


def whitened(corpus: RandomCorpus, folder: Path, *options: object) -> Path:
    """Build an index; not to be changed."""
    build = ("build", corpus.corpus, *COLUMNS, "--whiten", "whitening", "--k", K)
    done(*build, *options, "--out", folder / "index")
    return folder / "index"


@pytest.fixture(scope="module")
def exact(corpus: RandomCorpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exact index that keeps years and languages."""
    keep = ("--keep", "year", "--keep", "lang")
    return whitened(corpus, tmp_path_factory.mktemp("exact"), *keep, "--factory", "Flat")


@pytest.fixture(scope="module")
def coarse(corpus: RandomCorpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of four bytes a row, which misses many neighbours."""
    return whitened(corpus, tmp_path_factory.mktemp("coarse"), "--factory", "PQ4")


@pytest.fixture(scope="module")
def vectors(corpus: RandomCorpus) -> tuple[np.ndarray, np.ndarray]:
    """Whitened rows and queries by the definition."""
    mean, matrix = whitening(corpus.rows.astype(np.float64), K)
    return (corpus.rows - mean) @ matrix, (corpus.questions - mean) @ matrix


def test_a_text_finds_what_brute_force_finds(
    built: Path, scifact: SciFact, embeddings: np.ndarray, query_embeddings: np.ndarray
) -> None:
    mean, matrix = whitening(embeddings, 64)
    rows, cosines = nearest((embeddings - mean) @ matrix, (query_embeddings - mean) @ matrix, 7)
    text, ids = scifact.query_texts()[3], scifact.ids()
    titles = scifact.table()["title"].to_pylist()
    (result,) = json.loads(done("search", built, text, "--top-k", 7, "--json"))["results"]
    assert result["query"] == text
    assert [hit["score"] for hit in result["hits"]] == pytest.approx(cosines[3].tolist(), abs=2e-4)
    for hit in result["hits"]:
        assert hit["columns"] == {"title": titles[ids.index(hit["id"])]}
    assert result["hits"][0]["id"] == ids[rows[3, 0]]


def test_hits_are_printed_with_score_id_and_kept_columns(exact: Path) -> None:
    (result,) = json.loads(done("search", exact, "--like", "d7", "--top-k", 2, "--json"))["results"]
    lines = done("search", exact, "--like", "d7", "--top-k", 2).splitlines()
    for hit in result["hits"]:
        (line,) = [line for line in lines if hit["id"] in line.split()]
        assert f"{hit['score']:.4f}" in line
        assert str(hit["columns"]["year"]) in line
        assert hit["columns"]["lang"] in line


def test_a_file_of_texts_becomes_a_run(
    built: Path,
    scifact: SciFact,
    embeddings: np.ndarray,
    query_embeddings: np.ndarray,
    tmp_path: Path,
) -> None:
    done(
        "search", built, "--queries", scifact.queries, "--text-column", "text",
        "--id-column", "id", "--top-k", 20, "--run", tmp_path / "run.trec",
    )  # fmt: skip
    found = read_trec(tmp_path / "run.trec")
    assert list(found) == [str(each) for each in scifact.query_ids()]
    mean, matrix = whitening(embeddings, 64)
    rows, queries = (embeddings - mean) @ matrix, (query_embeddings - mean) @ matrix
    _, cosines = nearest(rows, queries, 20)
    scores = [[score for _, score in hits] for hits in found.values()]
    np.testing.assert_allclose(scores, cosines, atol=3e-4)


def test_a_file_of_embeddings_becomes_a_run(
    exact: Path, corpus: RandomCorpus, vectors: tuple[np.ndarray, np.ndarray]
) -> None:
    found = search_queries(exact, corpus, top_k=25)
    rows, cosines = nearest(*vectors, 25)
    assert recall(found, *vectors, 25) == 1
    np.testing.assert_allclose([[s for _, s in hits] for hits in found], cosines, atol=1e-4)
    assert [[hit for hit, _ in hits] for hits in found] == [[f"d{r}" for r in n] for n in rows]


def test_runs_hold_the_same_in_every_format(
    exact: Path, corpus: RandomCorpus, tmp_path: Path
) -> None:
    asked = Vectors([f"q{i}" for i in range(len(corpus.questions))], corpus.questions)
    queries = asked.write(tmp_path / "queries.parquet")

    def path(ending: str) -> Path:
        made = tmp_path / f"run.{ending}"
        done("search", exact, "--queries", queries, *COLUMNS, "--top-k", 4, "--run", made)
        return made

    trec = [
        (query, document, score)
        for query, hits in read_trec(path("trec")).items()
        for document, score in hits
    ]
    rows = pq.read_table(path("parquet")).to_pylist()
    assert [(row["query_id"], row["doc_id"]) for row in rows] == [each[:2] for each in trec]
    assert [row["score"] for row in rows] == pytest.approx([each[2] for each in trec], abs=1e-6)
    lines = [json.loads(line) for line in path("jsonl").read_text().splitlines()]
    listed = [(line["query_id"], hit) for line in lines for hit in line["hits"]]
    assert [(query, hit["id"]) for query, hit in listed] == [each[:2] for each in trec]


def test_neighbours_of_a_document_leave_itself_out(
    exact: Path, vectors: tuple[np.ndarray, np.ndarray]
) -> None:
    rows, cosines = nearest(vectors[0], vectors[0][[17]], 6)
    (result,) = json.loads(done("search", exact, "--like", "d17", "--top-k", 5, "--json"))[
        "results"
    ]
    assert [hit["id"] for hit in result["hits"]] == [f"d{row}" for row in rows[0, 1:]]
    scores = [hit["score"] for hit in result["hits"]]
    assert scores == pytest.approx(cosines[0, 1:].tolist(), abs=1e-4)


def test_the_best_candidates_are_ranked_again_by_exact_vectors(
    coarse: Path, corpus: RandomCorpus, vectors: tuple[np.ndarray, np.ndarray]
) -> None:
    cosines = unit(vectors[1]) @ unit(vectors[0]).T
    before = search_queries(coarse, corpus)
    after = search_queries(coarse, corpus, "--rerank", 200)
    assert recall(after, *vectors) > recall(before, *vectors) + 0.1
    for number, hits in enumerate(after):
        expected = [cosines[number, int(hit[1:])] for hit, _ in hits]
        assert [score for _, score in hits] == pytest.approx(expected, abs=1e-4)
    # With all rows as candidates the search is exact.
    assert recall(search_queries(coarse, corpus, "--rerank", 900), *vectors) == 1


def test_an_index_of_a_column_takes_texts_where_its_model_is_named(
    vectors_corpus: Path,
    scifact: SciFact,
    embeddings: np.ndarray,
    query_embeddings: np.ndarray,
    tmp_path: Path,
) -> None:
    index = tmp_path / "index"
    done(
        "build", vectors_corpus, *COLUMNS, "--keep", "title", "--model", "all-MiniLM-L6-v2",
        "--pooling", "mean", "--max-length", MAX_LENGTH, "--whiten", "pca", "--k", 32,
        "--out", index,
    )  # fmt: skip
    mean, matrix = whitening(embeddings, 32, exponent=0)
    _, cosines = nearest((embeddings - mean) @ matrix, (query_embeddings - mean) @ matrix, 5)
    found = whiten_index.open_index(index).search(scifact.query_texts()[:5], top_k=5)
    for hits, scores in zip(found, cosines[:5], strict=True):
        assert [hit.score for hit in hits] == pytest.approx(scores.tolist(), abs=2e-4)
