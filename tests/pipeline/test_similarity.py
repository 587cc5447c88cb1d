"""Search by dot product: every kind of index, update, sweep and database against numpy's own."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.bad_input import run, succeed
from tests.helpers.builds import assert_ranked_by, build, random_rows, write_rows
from tests.helpers.corpora import write_judged
from whiten_index import QueryTransform, open_index
from whiten_index.encoding.load_encoder import load_encoder
from whiten_index.errors import ConfigError
from whiten_index.evaluation.trec_run import read_run
from whiten_index.index.exact import recall
from whiten_index.measure.results import read_sweeps, recommend
from whiten_index.pipeline.update import update_index
from whiten_index.pipeline.update_config import UpdateConfig
from whiten_index.vectordb.push import differences, push_index
from whiten_index.vectordb.push_config import PushConfig
from whiten_index.vectordb.pushed_table import Layout
from whiten_index.vectordb.registry import open_writer
from whiten_index.whitening.transform import Whitening
from whiten_index.whitening.whitening_config import Kind, WhiteningConfig

ROWS, DIM, K = 900, 16, 6
DOT = {"similarity": "dot", "store_dtype": "float32", "threads": 1}


def lengthy(seed: int, rows: int = ROWS) -> np.ndarray:
    """Rows around a mean, whose lengths differ eightfold: their cosines rank otherwise."""
    lengths = np.random.default_rng(seed).uniform(0.25, 2.0, (rows, 1))
    return (random_rows(seed, rows=rows, dim=DIM, mean=0.5) * lengths * 20).astype(np.float32)


DOCUMENTS, QUERIES = lengthy(1), lengthy(2, 20)
RAW = QUERIES.astype(float) @ DOCUMENTS.astype(float).T


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_rows(tmp_path_factory.mktemp("dot") / "c.parquet", DOCUMENTS)


def projected(rows: np.ndarray) -> np.ndarray:
    """Return rows along the K widest directions of the documents, not centred."""
    vectors = np.linalg.eigh(np.cov(DOCUMENTS.astype(float).T))[1]
    return np.asarray(rows @ vectors[:, ::-1][:, :K])


def assert_exact(index: Any, expected: np.ndarray, **options: Any) -> None:
    found = index.search_embeddings(QUERIES, top_k=10, **options)
    for hits, scores in zip(found, expected, strict=True):
        assert_ranked_by(hits, scores, tolerance=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("transform", [{"whiten": "none", "k": None}, {"whiten": "pca", "k": K}])
@pytest.mark.parametrize(
    "factory", ["Flat", "IVF4,Flat", "HNSW16", "SQ8", "PQ4x4fs", "IVF4,SQ8", "IVF4,RaBitQ"]
)
def test_each_kind_of_index_ranks_by_dot_product(
    tmp_path: Path, corpus: str, factory: str, transform: dict[str, Any]
) -> None:
    if transform["whiten"] == "pca" and factory == "PQ4x4fs":
        factory = "PQ3x4fs"
    report = build(tmp_path / "i", corpus, factory=factory, target_recall=1.0, **transform, **DOT)
    index, full = open_index(tmp_path / "i"), transform["whiten"] == "none"
    expected = RAW if full else projected(QUERIES) @ projected(DOCUMENTS).T
    if factory == "Flat":
        assert_exact(index, expected)
    if factory == "HNSW16":
        # A graph does not reach every row.
        best = np.argsort(-expected, axis=1)[:, :10]
        found = [[hit.row for hit in hits] for hits in index.search_embeddings(QUERIES, top_k=10)]
        shared = sum(map(len, map(np.intersect1d, best, np.array(found))))
        assert shared >= 0.9 * best.size
    else:
        assert_exact(open_index(tmp_path / "i", rerank=ROWS), expected)
        assert_exact(open_index(tmp_path / "i", rerank=ROWS, rerank_by="embeddings"), RAW)
    made = report.manifest["whitening"]
    assert (made["similarity"], made["center"]) == ("dot", False)
    tuned = report.manifest["factory"]["tuned"]
    assert tuned["recall"] is None or tuned["recall"] > (0.9 if "Flat" in factory else 0.4)
    if full and factory == "Flat":
        assert report.manifest["quality"]["agreement_at_10"] == 1.0
    assert "dot" in succeed("inspect", tmp_path / "i")


def test_the_mean_of_documents_changes_no_ranking_and_that_of_queries_does() -> None:
    """(q − μ)ᵀM(d − μ) = qᵀMd − μᵀMd + terms of q alone, with M = WWᵀ."""
    rows, asked = DOCUMENTS.astype(float), QUERIES.astype(float)
    config = WhiteningConfig(k=K, exponent=0.5, similarity="dot")
    plain = Whitening.fit(rows, config)
    both = Whitening.fit(rows, WhiteningConfig(k=K, exponent=0.5, center=True, similarity="dot"))
    assert not plain.center
    own, half = plain.vectors(asked) @ plain.vectors(rows).T, plain.matrix()
    documents_only = plain.vectors(asked) @ both.vectors(rows).T
    np.testing.assert_allclose(np.ptp(own - documents_only, axis=1), 0, atol=1e-9)
    bias = (plain.mean @ half) @ plain.vectors(rows).T
    changed = both.vectors(asked) @ both.vectors(rows).T - (own - bias)
    np.testing.assert_allclose(np.ptp(changed, axis=1), 0, atol=1e-9)
    assert np.ptp(bias) > 0.1 * np.ptp(own)
    full = Whitening.fit(rows, WhiteningConfig(kind=Kind.PCA, k="full", similarity="dot"))
    np.testing.assert_allclose(full.vectors(asked) @ full.vectors(rows).T, RAW)
    # The directions of the covariance miss least of what ranks.
    kept = full.truncate(K)
    second = np.linalg.eigh(rows.T @ rows)[1][:, ::-1][:, :K]
    errors = [
        np.var(RAW - scores, axis=1).sum()
        for scores in (
            kept.vectors(asked) @ kept.vectors(rows).T, (asked @ second) @ (rows @ second).T,
        )
    ]  # fmt: skip
    assert errors[0] < errors[1]


@pytest.mark.parametrize("refit", ["never", "always"])
def test_an_update_keeps_the_similarity(tmp_path: Path, refit: str) -> None:
    write_rows(tmp_path / "c.parquet", DOCUMENTS[:700])
    build(tmp_path / "i", str(tmp_path / "c.parquet"), whiten="auto", k=None, factory="Flat", **DOT)
    write_rows(tmp_path / "c.parquet", DOCUMENTS)
    report = update_index(UpdateConfig(index=str(tmp_path / "i"), refit=refit))
    gates = {gate["name"]: gate["found"] for gate in report.gates}
    assert gates["canaries"]["recall"] == gates["canaries"]["self_found"] == 1.0
    whitening = report.manifest["whitening"]
    # Nothing shows what the vectors are searched for: inner products are kept.
    assert (whitening["similarity"], whitening["exponent"], whitening["center"]) == (
        "dot",
        0,
        False,
    )
    queries = QueryTransform.of(tmp_path / "i")
    assert_exact(open_index(tmp_path / "i"), queries.reduce(QUERIES) @ queries.reduce(DOCUMENTS).T)
    assert_exact(open_index(tmp_path / "i", rerank=ROWS, rerank_by="embeddings"), RAW)


def test_auto_follows_the_model(tiny_model: Path, tmp_path: Path, tiny_words: tuple) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "config_sentence_transformers.json").write_text('{"similarity_fn_name": "dot"}')
    folder = write_judged(tmp_path / "set", tiny_words)
    lines = (folder / "corpus.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    corpus, store = tmp_path / "c.parquet", tmp_path / "store"
    pq.write_table(pa.table({"text": texts}), corpus)
    encode = ("--text-column", "text", "--model", model, "--store", store, "--device", "cpu")
    status, _, noted = run("build", corpus, *encode, "--whiten", "none", "--out", tmp_path / "i")
    assert status == 0, noted
    assert "similarity" not in noted
    encoder = load_encoder(str(model))
    documents = encoder.encode(texts).astype(np.float16).astype(float)
    expected = encoder.encode_queries(texts[:3]).astype(float) @ documents.T
    for hits, scores in zip(open_index(tmp_path / "i").search(texts[:3]), expected, strict=True):
        assert_ranked_by(hits, scores, tolerance=1e-3)
    # A store alone knows its model; what is asked for comes first.
    for given, found in (((), "dot"), (("--similarity", "cosine"), "cosine")):
        succeed("build", "--store", store, "--whiten", "none", *given, "--out", tmp_path / "j")
        assert open_index(tmp_path / "j").bundle.whitening.similarity == found
    own = build(tmp_path / "k", write_rows(tmp_path / "e.parquet", DOCUMENTS))
    assert own.manifest["whitening"]["similarity"] == "cosine"
    # The baseline of an evaluation too.
    options = ("--model", model, "--device", "cpu", "--run-out", tmp_path / "runs")
    succeed("eval", "retrieval", folder, *options)
    judged = read_run(tmp_path / f"runs/{folder.name}.raw.trec")["q1"]
    asked = encoder.encode_queries([" ".join(texts[3].split()[:7])]).astype(float)
    best = np.argsort(-(asked @ documents.T)[0])[:10]
    assert list(judged)[:10] == [f"d{row}" for row in best]


def test_a_sweep_compares_by_dot_product(tmp_path: Path, corpus: str) -> None:
    lists = ("--k", f"{K},{DIM}", "--transforms", "pca,auto", "--codecs", "fp32,sq8")
    options = ("--indexes", "flat", "--threads", 1, "--store-dtype", "float32")
    given = ("--embedding-column", "embedding", "--similarity", "dot", "--out", tmp_path / "s")
    succeed("sweep", corpus, *given, *lists, *options)
    lines = map(json.loads, (tmp_path / "s/results.jsonl").read_text().splitlines())
    points = {line["key"]: line for line in lines if line["type"] == "point"}
    assert points[f"raw/none/k{DIM}/fp32/flat"]["agreement@10"] == 1.0
    assert points[f"ours/pca/k{DIM}/fp32/flat"]["agreement@10"] == 1.0
    assert points[f"ours/auto/k{DIM}/fp32/flat"]["index_recall@10"] == 1.0
    assert points[f"faiss/faiss-pca/k{K}/fp32/flat"]["factory"] == f"PCA{K},Flat"
    (swept,) = read_sweeps(tmp_path / "s/results.jsonl")
    assert "--similarity dot --out INDEX --whiten" in recommend(swept).command


def test_vectors_of_unit_length_have_the_cosine(tmp_path: Path, corpus: str) -> None:
    options = ("--embedding-column", "embedding", "--normalize-input", "--similarity", "dot")
    status, _, noted = run("build", corpus, *options, "--k", K, "--out", tmp_path / "i")
    assert status == 0, noted
    assert "note: the dot product of vectors of unit length is the cosine" in noted
    assert open_index(tmp_path / "i").bundle.whitening.similarity == "cosine"


def test_one_long_row_hides_no_lost_neighbours() -> None:
    best = np.sort(RAW, axis=1)[:, ::-1][:, :10].astype(np.float32)
    best[0] *= 1e6
    assert recall(best, best) == 1.0
    lost = best.copy()
    lost[1:] = RAW.min()
    assert recall(best, lost) == pytest.approx(1 / len(best))


def test_short_vectors_that_change_are_seen() -> None:
    ids, vectors = pa.array([1, 2]), np.array([[1e-4, 0], [0, 1e-4]], np.float32)

    def table(rows: np.ndarray) -> pa.Table:
        flat = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), 2)
        return pa.table({"id": ids, "vector": flat})

    sent = table(vectors)
    layout = Layout(sent.schema, "float16", "ip")
    assert differences(sent, sent, layout) == []
    assert "2 rows came back changed" in str(differences(sent, table(-vectors), layout))


@pytest.mark.service
@pytest.mark.parametrize("to", ["qdrant://{}/q", "lancedb://{}/l", "milvus://{}/m.db"])
def test_databases_rank_by_dot_product(tmp_path: Path, corpus: str, to: str) -> None:
    build(tmp_path / "i", corpus, whiten="pca", **DOT)
    given: dict[str, Any] = {"index": str(tmp_path / "i"), "to": to.format(tmp_path)}
    report = push_index(PushConfig(**given, table="docs"))
    assert report.check["exact_recall"] == 1.0
    best = -np.sort(-(projected(QUERIES) @ projected(DOCUMENTS).T), axis=1)[:, :5]
    with open_writer(given["to"], "docs") as writer:
        vectors = QueryTransform.of(tmp_path / "i").reduce(QUERIES)
        found = writer.search(vectors, 5, exact=True)
        stored = writer.published()
    assert stored is not None
    assert stored.metric == "ip"
    np.testing.assert_allclose(found, best, rtol=1e-4)
    with pytest.raises(ConfigError, match=r"ranks by dot product.*leave --metric out"):
        push_index(PushConfig(**given, table="docs", metric="cosine"))


def test_a_file_has_vectors_of_their_own_length(tmp_path: Path, corpus: str) -> None:
    build(tmp_path / "i", corpus, whiten="pca", **DOT)
    push_index(PushConfig(index=str(tmp_path / "i"), to=str(tmp_path / "v.npy")))
    vectors = np.load(tmp_path / "v.npy")
    np.testing.assert_allclose(
        vectors @ vectors.T, projected(DOCUMENTS) @ projected(DOCUMENTS).T, atol=1e-2
    )
    said = succeed("export", tmp_path / "i", tmp_path / "t.safetensors")
    assert "dot" in said
