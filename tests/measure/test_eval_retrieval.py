"""Retrieval judged: by brute force, by run files, by public figures; what does not fit is said."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import tiny_models
from tests.helpers.builds import cosines
from tests.helpers.code_models import edit_json
from tests.helpers.corpora import write_judged, write_set
from tests.helpers.judged import evaluate
from whiten_index.encoding.load_encoder import load_encoder
from whiten_index.errors import ConfigError
from whiten_index.evaluation.trec_run import read_run
from whiten_index.measure.eval_config import RetrievalConfig
from whiten_index.measure.evaluate_retrieval import evaluate_retrieval
from whiten_index.measure.measure_options import METRICS
from whiten_index.versions.gc import gc_store


@pytest.fixture(scope="module")
def beir(tmp_path_factory, tiny_words) -> Path:
    return write_judged(tmp_path_factory.mktemp("sets") / "one", tiny_words, grades=(2, 1))


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("store"))


def judged(tiny_model: Path, **options: Any) -> dict[str, Any]:
    """Return the report of an evaluation whose options are those of the command line."""
    given = {"model": str(tiny_model), "threads": 1, **options}
    return evaluate_retrieval(RetrievalConfig.from_options(given))


def figures(found: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in found.items() if "@" in name}


def by_brute_force(rows, asked, *, names, own=None) -> dict[str, dict[str, float]]:
    """Return the 100 documents nearest to each query by cosine, its own left out."""
    run = {}
    for number, each in enumerate(cosines(asked, rows)):
        if own is not None:
            each[own[number]] = -np.inf
        best = np.argsort(-each)[:100]
        run[f"q{number}"] = {names[i]: float(each[i]) for i in best}
    return run


def test_a_run_written_is_judged_as_the_search_was(tiny_model, beir, store, tmp_path):
    found = judged(
        tiny_model,
        sets=[str(beir)],
        store=store,
        whiten="pca",
        k=("8", "0.9"),
        run_out=str(tmp_path / "runs"),
    )
    written = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert written == ["one.pca-k0.9.trec", "one.pca-k8.trec"]
    for run, name in zip(found["runs"], ("8", "0.9"), strict=True):
        path = tmp_path / f"runs/one.pca-k{name}.trec"
        read = evaluate_retrieval(RetrievalConfig(sets=(str(beir),), run=str(path)))
        assert figures(read["datasets"]["one"]) == figures(run["datasets"]["one"])
        assert read["encoder"] == {}
    deep, metrics = tmp_path / "deep/runs", ["map@20"]
    raw = judged(tiny_model, sets=[str(beir)], store=store, run_out=str(deep), metrics=metrics)
    one = deep / "one.raw.trec"
    assert {len(hits) for hits in read_run(one).values()} == {20}
    read = evaluate_retrieval(
        RetrievalConfig(qrels=str(beir / "qrels/test.tsv"), run=str(one), metrics=("map@20",))
    )
    assert figures(read["datasets"]["one"]) == figures(raw["datasets"]["one"])


def test_queries_of_a_changed_model_are_encoded_again(beir, tmp_path):
    """The store has both halves' embeddings, and documents stay what they were."""
    model = tiny_models.bert(tmp_path / "model")
    tiny_models.add_modules(model, prompts={"query": "the king sang "})
    with_prompt = judged(model, sets=[str(beir)], store=str(tmp_path / "store"))
    edit_json(model / "config_sentence_transformers.json", prompts={"query": "a cold river "})
    found = judged(model, sets=[str(beir)], store=str(tmp_path / "store"))
    fresh = judged(model, sets=[str(beir)], store=str(tmp_path / "fresh"))
    one, two, three = (figures(each["datasets"]["one"]) for each in (with_prompt, found, fresh))
    assert one != two == three


def test_a_store_that_sets_were_judged_with_remembers_their_corpus_and_no_index(
    tiny_model, beir, tmp_path
):
    store = tmp_path / "store"
    for _ in range(2):
        judged(tiny_model, sets=[str(beir)], store=str(store))
    found = gc_store(store, keep_days=0)
    assert (found.indexes, found.references, found.segments) == ((), 1, 0)
    (record,) = store.glob("*/corpora/*.json")
    assert json.loads(record.read_text())["source"]["sources"] == [str(beir / "corpus.jsonl")]


def test_a_split_is_not_asked_for_of_judgements_that_have_none(beir, write_parquet, tmp_path):
    folder = shutil.copytree(beir, tmp_path / "set")
    rows = {"query-id": ["q0"], "corpus-id": ["d0"], "score": [1]}
    write_parquet(folder / "qrels.parquet", rows)
    for given in ({"sets": [str(folder)]}, {"qrels": str(folder / "qrels.parquet")}):
        config = RetrievalConfig(**given, qrels_split="dev", run="none.trec")
        with pytest.raises(ConfigError, match="has no column split"):
            evaluate_retrieval(config)


def test_a_query_that_is_a_document_does_not_find_itself(tiny_model, tiny_words, tmp_path):
    """As in ArguAna: queries are documents, and what answers them is another one."""
    rng = np.random.default_rng(5)
    documents = {f"d{i}": " ".join(rng.choice(tiny_words, size=12)) for i in range(160)}
    asked = {f"d{i}": documents[f"d{i}"] for i in range(20)}
    answers = {f"d{i}": {f"d{i + 40}": 1} for i in range(20)}
    folder = write_set(tmp_path / "self", documents, asked, answers)
    # As the store keeps them.
    rows = load_encoder(str(tiny_model)).encode(list(documents.values()))
    rows = rows.astype(np.float16).astype(float)
    left_out = by_brute_force(rows, rows[:20], names=list(documents), own=range(20))
    renamed = {f"q{i}": grades for i, grades in enumerate(answers.values())}
    found = judged(tiny_model, sets=[str(folder)], store=str(tmp_path / "store"))
    expected = evaluate(renamed, left_out, METRICS)
    assert figures(found["datasets"]["self"]) == pytest.approx(
        {name: 100 * value for name, value in expected.items()}, abs=1e-6
    )
    counts = found["datasets"]["self"]["counts"]
    # One more was searched for, so that a hundred are left.
    assert (counts["hits_of_self"], counts["hits"]) == (20, 2000)
    assert found["setting"]["drop_self"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no set is named: name its folder"),
        ({"index": "i", "queries": "q.jsonl"}, "no set is named: .* judge an --index by --queries"),
        ({"sets": ["a", "b/a"]}, "the sets a, a are named; each needs another name"),
        ({"sets": ["a", "b"], "index": "i"}, "the sets a, b are named; .*a run is of one"),
        ({"sets": ["a"], "qrels": "q.tsv"}, "--qrels names the files of a set, and a folder"),
        ({"sets": ["a"], "run": "r.trec", "index": "i"}, "--index and --run each say what is"),
        ({"sets": ["a"], "run": "r.trec", "k": ("8",)}, "--whiten or --k cannot apply, since"),
        ({"sets": ["a"], "run": "r.trec", "run_out": "runs"}, "--run-out cannot apply, since"),
        ({"sets": ["a"], "index": "i", "store": "s"}, "--store cannot apply, since an index"),
        ({"sets": ["a"], "index": "i", "runner": "ray"}, "--runner cannot apply, since an index"),
        ({"sets": ["a"], "index": "i", "max_length": 9}, "--index and --max-length each say what"),
        ({"sets": ["a"], "run": "r.trec", "threads": 2}, "--threads cannot apply, since a run"),
        ({"sets": ["a"], "metrics": ["spam@10"]}, "metric 'spam@10' is unknown; use one such as"),
        ({"sets": ["a"], "metrics": ["map@" + "9" * 23]}, "of 1,000,000 hits at most"),
        ({"sets": ["a"], "whiten": "pca", "fit": "target-distinct"},
            "--fit is for pairs of sentences"),
    ],
)  # fmt: skip
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        RetrievalConfig.from_options(options)


@pytest.mark.figures
@pytest.mark.data
@pytest.mark.timeout(1800)
def test_scifact_has_its_published_figure(data, scifact_work, tmp_path):
    """All-MiniLM-L6-v2 on MTEB's board: nDCG@10 64.51."""
    store = shutil.copytree(scifact_work / "store", tmp_path / "store")
    options = {"pooling": "mean", "max_length": 256, "store": str(store)}
    sets = [str(data / "retrieval/scifact")]
    report = evaluate_retrieval(RetrievalConfig.from_options({**options, "sets": sets}))
    found = report["datasets"]["scifact"]
    assert found["ndcg@10"] == pytest.approx(64.5, abs=0.1)
    assert (found["counts"]["documents"], found["counts"]["queries"]) == (5183, 300)


@pytest.fixture
def judge(tmp_path):
    """Return a function that judges a run, both given as nested dictionaries."""

    def judged(run, qrels, metrics):
        rows = [f"{q} Q0 {d} 1 {s} x" for q, hits in run.items() for d, s in hits.items()]
        (tmp_path / "run.trec").write_text("\n".join(rows) + "\n")
        rows = [f"{q} 0 {d} {g}" for q, grades in qrels.items() for d, g in grades.items()]
        (tmp_path / "qrels.txt").write_text("\n".join(rows) + "\n")
        config = RetrievalConfig(
            run=str(tmp_path / "run.trec"), qrels=str(tmp_path / "qrels.txt"), metrics=metrics
        )  # fmt: skip
        (found,) = evaluate_retrieval(config)["datasets"].values()
        return found

    return judged


def test_ids_that_are_judged_to_be_of_other_texts_are_kept(judge):
    qrels = {"1": {"7": 1}, "2": {"2": 1}}
    run = {"1": {"1": 0.9, "7": 0.8}, "2": {"2": 0.9}}
    found = judge(run, qrels, ("mrr@10",))
    assert (found["mrr@10"], found["counts"]["hits_of_self"]) == (75, 0)
    found = judge(run, {"1": {"7": 1}, "2": {"2": 0}}, ("mrr@10",))
    assert (found["drop_self"], found["counts"]["hits_of_self"]) == (True, 2)


def test_what_run_and_judgements_lack_is_counted(judge):
    qrels = {"a": {"d1": 1, "d2": 0}, "b": {"d1": 1}, "irrelevant": {"d1": 0}}
    run = {"a": {"d1": 3.0, "d2": 2.0, "d9": 1.0}, "irrelevant": {"d1": 1.0}, "else": {"d1": 1.0}}
    found = judge(run, qrels, ("mrr@10", "recall@10"))
    assert (found["mrr@10"], found["recall@10"]) == (50, 50)
    assert found["counts"] == {
        "queries": 2, "queries_not_in_run": 1, "run_queries_not_judged": 2, "hits": 3,
        "hits_not_judged": 1, "hits_of_self": 0,
    }  # fmt: skip
