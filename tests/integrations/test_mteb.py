"""The encoder with its whitening as a model of mteb: scores equal those by hand."""

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from tests.helpers import tiny_models
from tests.helpers.builds import build_texts, closed_form
from tests.helpers.judged import evaluate
from whiten_index import Whitening, WhiteningConfig, load_encoder
from whiten_index.errors import ConfigError
from whiten_index.evaluation.metrics import spearman
from whiten_index.whitening.spectrum import unit_rows

PROMPTS = {"query": "query: ", "document": "passage: "}
WORDS = ("cat", "sat", "mat", "dog", "ran", "river", "sang", "king", "queen", "book", "cold", "a")
K, DOCUMENTS, QUERIES = 8, 70, 12
# mteb rounds scores to five digits.
ROUNDED = 1e-5


def sentences(seed: int, count: int) -> list[str]:
    """Distinct texts of some words, so that none has the rank of another."""
    rng = np.random.default_rng(seed)
    return [f"{i} " + " ".join(rng.choice(WORDS, rng.integers(3, 10))) for i in range(count)]


@dataclass(frozen=True)
class Retrieval:
    """A small retrieval task; ids hold what a filter's text has to quote."""

    documents: list[dict[str, str]]
    queries: list[dict[str, str]]
    qrels: dict[str, dict[str, int]]

    @property
    def texts(self) -> list[str]:
        return [f"{each['title']} {each['text']}".strip() for each in self.documents]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The module of tasks, imported late: mteb takes seconds, and makes a folder of results."""
    os.environ["MTEB_CACHE"] = str(tmp_path_factory.mktemp("mteb"))
    os.environ["HF_DATASETS_CACHE"] = str(tmp_path_factory.mktemp("datasets"))
    os.environ["HF_DATASETS_OFFLINE"] = "1"
    return importlib.import_module("tests.integrations.mteb_tasks")


@pytest.fixture(scope="module")
def ours(tasks: Any) -> Any:
    return importlib.import_module("whiten_index.integrations.mteb")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_models.bert(tmp_path_factory.mktemp("models") / "tiny-bert")
    return tiny_models.add_modules(folder, prompts=PROMPTS)


@pytest.fixture(scope="module")
def retrieval() -> Retrieval:
    rng = np.random.default_rng(1)
    titles = [text if i % 3 else "" for i, text in enumerate(sentences(2, DOCUMENTS))]
    ids = [f"d'{i}\"\\" for i in range(DOCUMENTS)]
    rows = zip(ids, titles, sentences(3, DOCUMENTS), strict=True)
    documents = [{"id": id_, "title": title, "text": text} for id_, title, text in rows]
    queries = [{"id": f"q{i}", "text": text} for i, text in enumerate(sentences(4, QUERIES))]
    judged = [rng.choice(DOCUMENTS, 6, replace=False) for _ in queries]
    qrels = {
        query["id"]: {ids[row]: int(rng.integers(1, 3)) for row in rows}
        for query, rows in zip(queries, judged, strict=True)
    }
    return Retrieval(documents, queries, qrels)


@pytest.fixture(scope="module")
def embed(folder: Path, tasks: Any) -> Any:
    """Return embeddings (n, d) of texts by sentence-transformers, which is not ours."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu")

    def embed(texts: Sequence[str], side: str) -> NDArray[np.float64]:
        prompted = [PROMPTS[side] + text for text in texts]
        return model.encode(prompted, prompt="").astype(np.float64)

    return embed


def run(model: Any, task: Any, **options: Any) -> dict[str, Any]:
    import mteb

    options = {"cache": None, "show_progress_bar": False, "co2_tracker": False, **options}
    return mteb.evaluate(model, task, **options).task_results[0].scores["test"][0]


def cosines(retrieval: Retrieval, embed: Any) -> dict[str, dict[str, float]]:
    """Return the run of every query over every document by whitened cosines."""
    documents = embed(retrieval.texts, "document")
    queries = embed([each["text"] for each in retrieval.queries], "query")
    first, second = (
        unit_rows(closed_form(rows, k=K, fitted_on=documents)) for rows in (queries, documents)
    )
    ids = [each["id"] for each in retrieval.documents]
    return {
        query["id"]: dict(zip(ids, row.tolist(), strict=True))
        for query, row in zip(retrieval.queries, first @ second.T, strict=True)
    }


def expect(scores: dict[str, Any], retrieval: Retrieval, by_hand: Any) -> None:
    names = {"ndcg@10": "ndcg_at_10", "map@100": "map_at_100", "recall@20": "recall_at_20"}
    wanted = evaluate(retrieval.qrels, by_hand, list(names))
    assert 0.02 < wanted["ndcg@10"] < 0.98
    for name, theirs in names.items():
        assert scores[theirs] == pytest.approx(wanted[name], abs=ROUNDED)


@pytest.mark.parametrize("symmetric", ["document", "query"])
def test_sts_has_the_rank_correlation_of_the_cosines(
    tasks: Any, ours: Any, folder: Path, embed: Any, symmetric: str
) -> None:
    first, second, on = (sentences(seed, 60) for seed in (5, 6, 7))
    gold = np.random.default_rng(8).uniform(0, 5, 60)
    # The transform is fitted on documents, whosever prompt the task's texts get.
    fitted_on = embed(on, "document")
    a, b = (
        unit_rows(closed_form(embed(texts, symmetric), k=K, fitted_on=fitted_on))
        for texts in (first, second)
    )
    encoder = load_encoder(str(folder))
    whitening = Whitening.fit(encoder.encode(on), WhiteningConfig(k=K))
    model = ours.WhitenedEncoder(encoder, whitening, symmetric=symmetric)
    scores = run(model, tasks.sts(first, second, gold))
    expected = spearman(gold, (a * b).sum(axis=1))
    assert scores["cosine_spearman"] == pytest.approx(expected, abs=ROUNDED)
    assert scores["spearman"] == scores["main_score"] == scores["cosine_spearman"]
    by_dot = Whitening.fit(encoder.encode(on), WhiteningConfig(k=K, similarity="dot"))
    scores = run(
        ours.WhitenedEncoder(encoder, by_dot, symmetric=symmetric), tasks.sts(first, second, gold)
    )
    a, b = (by_dot.apply(embed(texts, symmetric)) for texts in (first, second))
    assert scores["spearman"] == pytest.approx(spearman(gold, (a * b).sum(axis=1)), abs=ROUNDED)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, folder: Path, retrieval: Retrieval) -> Path:
    """A published index over the documents of the task."""
    root = tmp_path_factory.mktemp("index")
    pq.write_table(pa.table({"text": retrieval.texts}), root / "c.parquet")
    options = {"k": K, "store_dtype": "float32", "factory": "Flat"}
    return build_texts(root / "index", root / "c.parquet", folder, **options).out


def test_an_index_scores_as_its_transform_fitted_on_the_corpus(
    tasks: Any, ours: Any, index: Path, embed: Any, retrieval: Retrieval
) -> None:
    model = ours.WhitenedEncoder.of_index(index)
    task = tasks.retrieval(retrieval.documents, retrieval.queries, retrieval.qrels)
    expect(run(model, task), retrieval, cosines(retrieval, embed))
    meta = model.mteb_model_meta
    assert (meta.name, meta.embed_dim) == (f"whiten-index/tiny-bert-whitening-k{K}", K)


def test_an_unknown_side_is_refused(ours: Any, folder: Path) -> None:
    with pytest.raises(ConfigError, match="symmetric 'both' is unknown; use document or query"):
        ours.WhitenedEncoder(load_encoder(str(folder)), symmetric="both")


@pytest.mark.data
@pytest.mark.slow
def test_sts_benchmark_has_the_published_figure(tasks: Any, ours: Any, data: Path) -> None:
    """MTEB's leaderboard has 82.03 for all-MiniLM-L6-v2 on STSBenchmark."""
    table = pq.read_table(data / "sts/sts_raw.parquet").to_pylist()
    rows = [r for r in table if (r["dataset"], r["split"]) == ("STSB", "test")]
    columns = ([row[name] for row in rows] for name in ("sentence1", "sentence2", "score"))
    scores = run(ours.WhitenedEncoder(load_encoder()), tasks.sts(*columns))
    assert len(rows) == 1379
    assert 100 * scores["cosine_spearman"] == pytest.approx(82.03, abs=0.05)
