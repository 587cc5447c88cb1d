"""Evaluations and sweeps against scipy and brute force over embeddings by transformers."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.stats import pearsonr, spearmanr  # type: ignore[import-untyped]

from tests.acceptance.commands import done, refused
from tests.acceptance.truth import MAX_LENGTH, SciFact, encode, ndcg, nearest, unit, whitening
from tests.acceptance.vectors import COLUMNS, read_trec

ENCODER = ("--pooling", "mean", "--max-length", MAX_LENGTH)
PAIRS, DROPPED, SIDES = 60, 7, ("sentence1", "sentence2")


@dataclass(frozen=True)
class Pairs:
    """Scored pairs of distinct sentences, in two subsets of unequal sizes, with embeddings.

    In the file, ``DROPPED`` others without a score come before them.
    """

    path: Path
    rows: list[dict[str, Any]]
    left: np.ndarray
    right: np.ndarray

    @property
    def scores(self) -> np.ndarray:
        return np.array([row["score"] for row in self.rows])

    def cosines(self, by: tuple[Any, np.ndarray] | None = None) -> np.ndarray:
        """Return those of the pairs, mapped by a mean and a matrix."""
        mean, matrix = by or (0, np.eye(self.left.shape[1]))
        left, right = (unit((side - mean) @ matrix) for side in (self.left, self.right))
        return (left * right).sum(axis=1)

    @property
    def texts(self) -> np.ndarray:
        return np.concatenate([self.left, self.right])


@pytest.fixture(scope="module")
def pairs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    table = pq.read_table(data / "sts" / "sts_raw.parquet").to_pylist()
    test = [row for row in table if (row["dataset"], row["split"]) == ("STSB", "test")]
    rows: list[dict[str, Any]] = []
    for row in test[::17]:
        seen = {each[side] for each in rows for side in SIDES}
        texts = {row[side] for side in SIDES}
        if len(rows) < PAIRS and len(texts) == 2 and not texts & seen:
            rows.append(row)
    for number, row in enumerate(rows):
        row |= {"dataset": "mine", "subset": "first" if number % 3 else "second"}
        row |= {"score": None} if number < DROPPED else {}
    path = tmp_path_factory.mktemp("pairs") / "pairs.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    found = encode([row[side] for side in SIDES for row in rows])
    left, right = found[: len(rows)], found[len(rows) :]
    return Pairs(path, rows[DROPPED:], left[DROPPED:], right[DROPPED:])


@dataclass(frozen=True)
class Beir:
    """A small set in BEIR form, with embeddings of its documents and queries."""

    folder: Path
    ids: list[str]
    relevant: dict[str, dict[str, int]]
    documents: np.ndarray
    queries: np.ndarray

    def ndcg(self, documents: np.ndarray, queries: np.ndarray) -> float:
        """Return nDCG@10 times 100 by brute force."""
        rows, _ = nearest(documents, queries, 10)
        values = [
            ndcg([self.ids[row] for row in near], self.relevant[f"q{number}"])
            for number, near in enumerate(rows)
        ]
        return 100 * float(np.mean(values))


@pytest.fixture(scope="module")
def beir(scifact: SciFact, tmp_path_factory: pytest.TempPathFactory) -> Beir:
    """Sixty short documents; a query is what follows the part that its document holds."""
    folder = tmp_path_factory.mktemp("beir") / "small"
    (folder / "qrels").mkdir(parents=True)
    rows = [row for row in scifact.table().to_pylist() if len(row["text"]) > 300][:60]
    ids = [f"doc{row['id']}" for row in rows]
    documents = [
        {"_id": each, "title": row["title"][:30], "text": row["text"][:100]}
        for each, row in zip(ids, rows, strict=True)
    ]
    queries = [{"_id": f"q{i}", "text": row["text"][100:160]} for i, row in enumerate(rows[:15])]
    for name, listed in (("corpus", documents), ("queries", queries)):
        lines = "".join(json.dumps(each) + "\n" for each in listed)
        (folder / f"{name}.jsonl").write_text(lines)
    # Each has a second document that is less relevant.
    relevant = {f"q{i}": {ids[i]: 2, ids[i + 1]: 1} for i in range(len(queries))}
    judged = [f"{q}\t{d}\t{gain}" for q, listed in relevant.items() for d, gain in listed.items()]
    (folder / "qrels" / "test.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *judged]))
    texts = [f"{each['title']} {each['text']}" for each in documents]
    return Beir(folder, ids, relevant, encode(texts), encode([q["text"] for q in queries]))


def evaluated(*arguments: object) -> list[dict[str, Any]]:
    """Return the runs of an evaluation."""
    return json.loads(done("eval", *arguments, "--json"))["runs"]


def test_an_index_is_judged_as_by_brute_force(
    built: Path, scifact: SciFact, embeddings: np.ndarray, query_embeddings: np.ndarray
) -> None:
    (run,) = evaluated(
        "retrieval", "--index", built, "--queries", scifact.queries, "--qrels", scifact.qrels,
    )  # fmt: skip
    (figures,) = run["datasets"].values()
    mean, matrix = whitening(embeddings, 64)
    rows, _ = nearest((embeddings - mean) @ matrix, (query_embeddings - mean) @ matrix, 100)
    ids, relevant = [str(each) for each in scifact.ids()], scifact.relevant()
    ndcgs, recalls, ranks = [], [], []
    for query, near in zip(map(str, scifact.query_ids()), rows, strict=True):
        ranking = [ids[row] for row in near]
        wanted = {each for each, gain in relevant[query].items() if gain > 0}
        ndcgs.append(ndcg(ranking, relevant[query]))
        recalls.append(len(wanted & set(ranking)) / len(wanted))
        places = [place for place, each in enumerate(ranking[:10], 1) if each in wanted]
        ranks.append(1 / places[0] if places else 0)
    # One swap of two documents whose cosines are equal but for rounding is allowed for.
    assert figures["ndcg@10"] == pytest.approx(100 * np.mean(ndcgs), abs=0.3)
    assert figures["recall@100"] == pytest.approx(100 * np.mean(recalls), abs=0.5)
    assert figures["mrr@10"] == pytest.approx(100 * np.mean(ranks), abs=0.5)


def test_transforms_of_a_folder_are_judged_side_by_side(beir: Beir, tmp_path: Path) -> None:
    runs = evaluated(
        "retrieval", beir.folder, *ENCODER, "--whiten", "pca", "--k", 8, "--k", 24,
        "--run-out", tmp_path / "runs", "--metric", "ndcg@10",
    )  # fmt: skip
    written = sorted((tmp_path / "runs").iterdir())
    assert (len(runs), len(written)) == (2, 2)
    for run, k in zip(runs, (8, 24), strict=True):
        mean, matrix = whitening(beir.documents, k, exponent=0)
        documents, queries = (beir.documents - mean) @ matrix, (beir.queries - mean) @ matrix
        (figures,) = run["datasets"].values()
        assert figures["ndcg@10"] == pytest.approx(beir.ndcg(documents, queries), abs=0.5)
        assert "recall@100" not in figures
        (path,) = [path for path in written if str(k) in path.name]
        for number, hits in enumerate(read_trec(path).values()):
            _, scores = nearest(documents, queries[[number]], 5)
            assert [score for _, score in hits[:5]] == pytest.approx(scores[0].tolist(), abs=2e-3)


def test_a_run_of_another_set_is_refused(beir: Beir, tmp_path: Path) -> None:
    (tmp_path / "run.trec").write_text("q0 Q0 nowhere 1 0.5 some\n")
    qrels = beir.folder / "qrels" / "test.tsv"
    error = refused(3, "eval", "retrieval", "--run", tmp_path / "run.trec", "--qrels", qrels)
    assert "nowhere" in error


@pytest.mark.parametrize("k", [None, 16])
def test_correlations_are_those_of_scipy_in_each_aggregation(k: int | None, pairs: Pairs) -> None:
    """Whitening is fitted on all sentences as often as they occur."""
    options = [] if k is None else ["--whiten", "whitening", "--k", k]
    (run,) = evaluated("sts", pairs.path, *ENCODER, *options)
    figures = run["datasets"]["mine"]
    found = pairs.cosines(None if k is None else whitening(pairs.texts, k))
    gold = pairs.scores
    first = np.array([row["subset"] == "first" for row in pairs.rows])
    for name, correlate in (("spearman", spearmanr), ("pearson", pearsonr)):
        parts = [100 * correlate(found[part], gold[part]).statistic for part in (first, ~first)]
        weights = [first.sum(), (~first).sum()]
        whole = 100 * correlate(found, gold).statistic
        expected = {
            "all": whole,
            "mean": np.mean(parts),
            "wmean": np.average(parts, weights=weights),
        }
        assert figures[name] == pytest.approx(expected, abs=0.1)
    assert (figures["pairs"], figures["dropped"]) == (PAIRS - DROPPED, DROPPED)


def test_an_index_is_evaluated_with_its_own_transform(
    built: Path, embeddings: np.ndarray, pairs: Pairs
) -> None:
    (run,) = evaluated("sts", pairs.path, "--index", built)
    found = pairs.cosines(whitening(embeddings, 64))
    expected = 100 * spearmanr(found, pairs.scores).statistic
    assert run["datasets"]["mine"]["spearman"]["all"] == pytest.approx(expected, abs=0.1)


def test_judged_points_have_the_quality_of_brute_force(
    vectors_corpus: Path,
    scifact: SciFact,
    embeddings: np.ndarray,
    query_embeddings: np.ndarray,
    tmp_path: Path,
) -> None:
    out = tmp_path / "sweep"
    done(
        "sweep", vectors_corpus, *COLUMNS, "--model", "all-MiniLM-L6-v2", "--pooling", "mean",
        "--max-length", MAX_LENGTH, "--queries", scifact.queries, "--qrels", scifact.qrels,
        "--k", "16,64", "--transforms", "pca,whitening,truncate", "--codecs", "fp32",
        "--indexes", "flat", "--no-baselines", "--out", out,
    )  # fmt: skip
    ids, relevant = [str(each) for each in scifact.ids()], scifact.relevant()
    asked = [str(each) for each in scifact.query_ids()]
    seen = 0
    lines = map(json.loads, (out / "results.jsonl").read_text().splitlines())
    for point in (line for line in lines if line["type"] == "point"):
        transform, k = point["transform"], point["k"]
        mean, matrix = whitening(embeddings, k, exponent=float(transform == "whitening"))
        if transform in ("none", "truncate"):
            mean, matrix = np.zeros(embeddings.shape[1]), np.eye(embeddings.shape[1])[:, :k]
        rows, _ = nearest((embeddings - mean) @ matrix, (query_embeddings - mean) @ matrix, 10)
        if point["rerank"] is not None or point["index_recall@10"] < 1:
            continue
        values = [
            ndcg([ids[row] for row in near], relevant[query])
            for query, near in zip(asked, rows, strict=True)
        ]
        assert point["quality"]["ndcg@10"] == pytest.approx(np.mean(values), abs=0.005)
        seen += 1
    assert seen >= 6
