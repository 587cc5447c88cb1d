"""Sweeps over judged queries, of sets in BEIR form."""

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from tests.helpers.corpora import write_judged, write_set
from tests.measure.sweep_records import points_of
from whiten_index import BuildConfig, SweepConfig, build_index, run_sweep
from whiten_index.errors import ConfigError, CorpusError
from whiten_index.evaluation.judgements import corpus_file, parquet_corpus, queries_file
from whiten_index.measure import trial

WISHES = {"transforms": "pca", "codecs": "fp32,sq8", "indexes": "flat", "baselines": True}


@pytest.fixture(scope="module")
def beir(tmp_path_factory, tiny_words) -> Path:
    """Return a folder of sets as BEIR has them."""
    return write_judged(tmp_path_factory.mktemp("beir") / "one", tiny_words).parent


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("store")


def options(tmp_path: Path, beir: Path, tiny_model: Path, store: Path, **more) -> dict:
    folder = beir / "one"
    return {
        "corpus": [str(parquet_corpus(corpus_file(folder), tmp_path / "corpora"))],
        "text_columns": ["title", "text"], "id_column": "id", "model": str(tiny_model),
        "store": str(store), "out": str(tmp_path / "out"), "queries": str(queries_file(folder)),
        "qrels": str(folder / "qrels" / "test.tsv"), "widths": "8,16", "threads": 1, **WISHES,
        **more,
    }  # fmt: skip


def test_queries_are_encoded_once(tmp_path, beir, tiny_model, store, monkeypatch):
    given = options(tmp_path, beir, tiny_model, store)
    run_sweep(SweepConfig(**given))
    fail = Mock(side_effect=AssertionError("the queries were encoded again"))
    monkeypatch.setattr("whiten_index.encoding.encoder.Encoder.encode_queries", fail)
    assert run_sweep(SweepConfig(**{**given, "widths": "8,16,20"})).measured > 0


def test_quality_has_the_interval_of_its_difference_to_raw(tmp_path, beir, tiny_model, store):
    given = options(tmp_path, beir, tiny_model, store, transforms="truncate")
    for widths in ("8", "8,32"):
        run_sweep(SweepConfig(**{**given, "widths": widths}))
    points = points_of(tmp_path / "out")
    raw = points.pop("raw/none/k32/fp32/flat")
    for point in points.values():
        low, high = point["intervals"]["ndcg@10_to_raw"]
        assert low <= point["quality"]["ndcg@10"] - raw["quality"]["ndcg@10"] <= high
        for name in ("agreement@10", "quality.ndcg@10", "quality.recall@100"):
            low, high = point["intervals"][name]
            found = point if "." not in name else point["quality"]
            assert low <= found[name.removeprefix("quality.")] <= high
    whole = points["truncate/truncate/k32/fp32/flat"]["intervals"]
    assert whole["ndcg@10_to_raw"] == [0, 0]


def test_the_prompt_of_queries_tells_runs_apart(tmp_path, beir, tiny_model, store):
    few = {"widths": "8", "codecs": "fp32", "baselines": False}
    plain, asked = (
        run_sweep(SweepConfig(**options(tmp_path, beir, tiny_model, store, **few, **more)))
        for more in ({}, {"query_prompt": "w1 w2 w3 "})
    )
    assert plain.runs != asked.runs
    assert (plain.measured, asked.measured) == (1, 1)


def test_queries_beside_a_column_without_its_model_are_refused_before_any_work(tmp_path, beir):
    given = options(tmp_path, beir, tmp_path, tmp_path / "s", embedding_column="e")
    del given["model"], given["text_columns"]
    with pytest.raises(ConfigError, match="name the model of the embedding column with --model"):
        run_sweep(SweepConfig(**given))
    assert not (tmp_path / "s").exists()
    assert not (tmp_path / "out").exists()


def test_judgements_of_other_documents_are_refused_with_examples(
    tmp_path, beir, tiny_model, store, write_parquet
):
    qrels = write_parquet(
        tmp_path / "q.parquet", {"query_id": ["q1"], "doc_id": ["z9"], "relevance": [1]}
    )
    given = options(tmp_path, beir, tiny_model, store, qrels=str(qrels))
    with pytest.raises(CorpusError, match=r"no document of the corpus: it judges 'z9', .* 'd0'"):
        run_sweep(SweepConfig(**given))


def test_passages_count_once_a_document(tmp_path, beir, tiny_model, store):
    given = options(tmp_path, beir, tiny_model, store, passage_tokens=6, widths="16")
    report = run_sweep(SweepConfig(**given))
    assert report.dataset["rows"] > 160
    raw = points_of(tmp_path / "out")["raw/none/k32/fp32/flat"]["quality"]
    # Of 160 documents 100 are looked at, so that passages do not crowd them out.
    assert raw["recall@100"] > 0.8


def test_bad_sets_say_what_is_wrong(tmp_path):
    with pytest.raises(ConfigError, match=r"no retrieval set: it has no queries.parquet and no"):
        queries_file(tmp_path)
    broken = tmp_path / "broken"
    write_set(broken, {"a": "x"}, {"q": "x"}, {"q": {"a": 1}})
    (broken / "corpus.jsonl").write_text('{"_id": "a", "text": "x"}\n{"text": "y"}\n')
    with pytest.raises(CorpusError, match=r"corpus.jsonl, line 2, is not a document of BEIR"):
        parquet_corpus(corpus_file(broken), tmp_path / "work")


POINTS = {
    "ours/pca/k8/pq4/flat": {"whiten": "pca", "k": 8},
    "ours/whitening/k16/sq8/ivf": {"whiten": "whitening", "k": 16},
    "ours/pca/k16/fp32/hnsw": {"whiten": "pca", "k": 16},
    "raw/none/k32/pq8/flat": {"whiten": "none"},
}


def test_a_point_and_a_build_are_the_same_index_to_the_byte(
    tmp_path, tiny_model, tiny_words, store, monkeypatch
) -> None:
    rng = np.random.default_rng(8)
    texts = {f"d{i}": " ".join(rng.choice(tiny_words, size=9)) for i in range(300)}
    asked = {f"q{i}": " ".join(texts[f"d{i}"].split()[:5]) for i in range(12)}
    write_set(tmp_path / "one", texts, asked, {f"q{i}": {f"d{i}": 1} for i in range(12)})
    wishes = {"transforms": "pca,whitening", "codecs": "fp32,pq4,sq8", "indexes": "flat,ivf,hnsw"}
    given = options(tmp_path, tmp_path, tiny_model, store, **wishes)
    files = dict[str, bytes]()
    measured = trial.Trial.time

    def remember(self, group, reference) -> None:
        files.update({made.point.key: (made.folder / "index.faiss").read_bytes() for made in group})
        measured(self, group, reference)

    monkeypatch.setattr(trial.Trial, "time", remember)
    run_sweep(SweepConfig(**given))
    points = points_of(tmp_path / "out")
    for key, settings in POINTS.items():
        config = BuildConfig(
            corpus=tuple(given["corpus"]), text_columns=("title", "text"), id_column="id",
            model=str(tiny_model), store=str(store), out=str(tmp_path / "index"), threads=1,
            index_device="cpu", factory=points[key]["factory"], **settings,
        )  # fmt: skip
        (found,) = (tmp_path / "index" / "versions" / build_index(config).version).glob(
            "index.faiss"
        )
        assert found.read_bytes() == files[key], key
