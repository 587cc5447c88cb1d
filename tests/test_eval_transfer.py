"""``eval transfer``: a folder of tasks through a tiny encoder, checked by scikit-learn beside."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_score

from tests.bad_input_helpers import CORPUS, OPTIONS, assert_one_error, run
from whiten_index import Encoder
from whiten_index.encoding import EncoderConfig
from whiten_index.evaluate.config import EvalConfig
from whiten_index.evaluate.transfer import average, evaluate_transfer
from whiten_index.labels import read_task
from whiten_index.whitening import Kind, WhiteningConfig

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = 90


class Watcher:
    """Remembers how many rows each stage was of."""

    def __init__(self):
        self.totals = {}

    def start(self, stage, total):
        self.totals[stage] = total

    def advance(self, rows): ...

    def finish(self, stage, seconds): ...

    def note(self, message): ...


def sentences(words, seed):
    """Sentences of a cat or a dog, and which of them is meant, one in ten told wrongly."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(ROWS) % 2)
    told = np.where(rng.random(ROWS) < 0.1, 1 - labels, labels)
    texts = [
        " ".join([*rng.choice(words, 2), *[("cat", "dog")[label]] * 3, *rng.choice(words, 1)])
        for label in told
    ]
    return texts, labels


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_words):
    """Tasks of every layout: folds, train and test, all three splits, pairs, and rte."""
    place = tmp_path_factory.mktemp("tasks")
    words = [word for word in tiny_words if word not in ("cat", "dog")]
    thirds = np.array(["train", "dev", "test"])[np.arange(ROWS) % 3]
    splits = {
        "mr": np.array(["all"] * ROWS),
        "trec": np.where(thirds == "test", "test", "train"),
        "sst2": thirds,
        "mrpc": thirds,
        "rte": np.where(thirds == "test", "dev", "train"),
    }
    for number, (name, parts) in enumerate(splits.items()):
        texts, labels = sentences(words, number)
        columns = {"text": texts}
        if name in ("mrpc", "rte"):
            other, more = sentences(words, 10 + number)
            columns = {"sentence1": texts, "sentence2": other}
            labels = (labels != more).astype(int)
        pq.write_table(
            pa.table({**columns, "label": labels, "split": parts}), place / f"{name}.parquet"
        )
    return place


@pytest.fixture(scope="module")
def report(folder, tiny_model):
    status, out, _ = run(
        "eval",
        "transfer",
        folder,
        "--model",
        tiny_model,
        "--pooling",
        "mean",
        "--folds",
        3,
        "--json",
    )
    assert status == 0
    return json.loads(out)


def embeddings_of(texts, tiny_model):
    return Encoder.load(str(tiny_model), pooling="mean").encode(texts)


def search(grid):
    inner = StratifiedKFold(3, shuffle=True, random_state=0)
    return GridSearchCV(LogisticRegression(max_iter=5000, tol=1e-6), {"C": grid}, cv=inner)


def test_the_figures_are_those_of_a_search_on_the_same_embeddings(report, folder, tiny_model):
    task = read_task(folder / "mr.parquet")
    outer = StratifiedKFold(3, shuffle=True, random_state=0)
    rows = embeddings_of(task.first, tiny_model)
    each = cross_val_score(search([0.25, 0.5, 1, 2, 4, 8]), rows, task.labels, cv=outer)
    found = report["datasets"]["mr"]
    assert found["accuracy"] == pytest.approx(100 * each.mean(), abs=100 * 2 / ROWS)
    assert found["accuracy"] > found["majority"] + 10
    assert found["rows"] == {"all": ROWS}
    assert found["dropped"] == {"text": 0, "label": 0}


def test_the_dev_split_of_mrpc_joins_train(report, folder, tiny_model):
    task = read_task(folder / "mrpc.parquet")
    u, v = (embeddings_of(side, tiny_model).astype(float) for side in (task.first, task.second))
    rows, test = np.hstack([abs(u - v), u * v]), task.splits == "test"
    fitted = search([0.5, 1, 2, 4, 8, 16, 32]).fit(rows[~test], task.labels[~test])
    found = report["datasets"]["mrpc"]
    assert found["rows"] == {"train": 60, "test": 30}
    assert found["chosen_by"] == "train folds"
    assert (found["f1"] is not None, found["positive"]) == (True, "1")
    expected = fitted.score(rows[test], task.labels[test])
    assert found["accuracy"] == pytest.approx(100 * expected, abs=100 / 30 + 1e-6)


def test_rte_is_scored_by_the_cosine_on_dev(report, folder, tiny_model):
    task = read_task(folder / "rte.parquet")
    u, v = (embeddings_of(side, tiny_model).astype(float) for side in (task.first, task.second))
    cosines = (u * v).sum(1) / np.linalg.norm(u, axis=1) / np.linalg.norm(v, axis=1)
    dev, entailed = task.splits == "dev", task.labels == 0
    found = report["datasets"]["rte"]
    assert found["accuracy"] == pytest.approx(100 * ((cosines >= 0.5) == entailed)[dev].mean())
    tried = [((cosines >= t) == entailed)[~dev].mean() for t in cosines]
    at_tuned = ((cosines >= found["tuned_threshold"]) == entailed)[~dev].mean()
    assert at_tuned >= max(tried)
    assert found["rows"] == {"train": 60, "dev": 30}


def named_alike(folder, place, names):
    """Return mrpc with names for its classes 0 and 1."""
    table = pq.read_table(folder / "mrpc.parquet")
    named = pa.array([names[label] for label in table["label"].to_pylist()])
    where = table.column_names.index("label")
    pq.write_table(table.set_column(where, "label", named), place / "mrpc.parquet")
    return read_task(place / "mrpc.parquet")


@pytest.mark.parametrize(
    ("names", "positive"),
    [
        (("different", "equivalent"), "equivalent"),
        (("no", "Yes"), "Yes"),
        (("not_equivalent", "equivalent"), "equivalent"),
        (("unrelated", "paraphrase"), "paraphrase"),
    ],
)
def test_f1_is_of_the_class_that_means_a_paraphrase_whatever_its_place(
    folder, tmp_path, tiny_model, names, positive
):
    task = named_alike(folder, tmp_path, names)
    config = EvalConfig(encoder=EncoderConfig(model=str(tiny_model), pooling="mean"))
    found = evaluate_transfer(config, [task], folds=3)["datasets"]["mrpc"]
    u, v = (embeddings_of(side, tiny_model).astype(float) for side in (task.first, task.second))
    rows, test = np.hstack([abs(u - v), u * v]), task.splits == "test"
    gold = task.labels == task.classes.index(positive)
    model = LogisticRegression(C=found["chosen"][0], max_iter=5000, tol=1e-6)
    called = model.fit(rows[~test], gold[~test]).predict(rows[test])
    f1, of_other = (
        200 * (ours & truth).sum() / (ours.sum() + truth.sum())
        for ours, truth in ((called, gold[test]), (~called, ~gold[test]))
    )
    assert abs(f1 - of_other) > 5
    assert found["f1"] == pytest.approx(f1, abs=1)
    assert found["positive"] == positive
    assert not [note for note in found["notes"] if "F1" in note]


def test_pairs_whose_positive_class_is_not_known_have_no_f1_and_it_is_said(
    folder, tmp_path, tiny_model
):
    named_alike(folder, tmp_path, ("far", "near"))
    arguments = ("eval", "transfer", tmp_path, "--model", tiny_model, "--folds", 3)
    status, out, _ = run(*arguments, "--json")
    assert status == 0
    found = json.loads(out)["datasets"]["mrpc"]
    assert (found["f1"], found["positive"]) == (None, None)
    _, out, _ = run(*arguments)
    assert "note: mrpc: no F1, as neither far nor near is known to be the positive class" in out
    assert "paraphrase" in out


def test_the_mean_is_of_classifiers_and_the_setting_is_raw(report):
    figures = {name: each["accuracy"] for name, each in report["datasets"].items()}
    assert report["average"]["sets"] == ["mr", "sst2", "trec", "mrpc"]
    del figures["rte"]
    assert report["average"]["accuracy"] == pytest.approx(np.mean(list(figures.values())))
    assert report["setting"]["transform"] == {"kind": "none"}
    # What the model itself may end with is not applied, and that is told.
    assert report["setting"]["normalized"] is False
    assert list(report["datasets"]) == ["mr", "sst2", "trec", "mrpc", "rte"]


def test_the_mean_of_the_seven_leaves_other_sets_out():
    seven = {name: {"accuracy": 1.0, "chosen_by": "dev"} for name in
             ("MR", "cr", "subj", "mpqa", "sst2", "trec", "mrpc")}  # fmt: skip
    others = {"sst5": {"accuracy": 99.0, "chosen_by": "dev"}, "rte": {"accuracy": 99.0}}
    assert average({**seven, **others})["accuracy"] == 1
    assert average(others) is None


def test_each_distinct_text_is_encoded_once(folder, tiny_model):
    tasks = [read_task(folder / f"{name}.parquet") for name in ("trec", "mrpc")]
    again = dataclasses.replace(tasks[0], name="again")
    watcher = Watcher()
    config = EvalConfig(encoder=EncoderConfig(model=str(tiny_model), pooling="mean"))
    evaluate_transfer(config, [*tasks, again], folds=3, progress=watcher)
    assert watcher.totals["encode"] == len({text for task in tasks for text in task.texts})


def test_a_full_soft_transform_is_one_run_a_setting(folder, tiny_model):
    config = EvalConfig(
        encoder=EncoderConfig(model=str(tiny_model), pooling="mean"),
        transforms=tuple(WhiteningConfig(kind=Kind.PCA, k=k) for k in ("full", 2)),
    )
    tasks = [read_task(folder / "mr.parquet")]
    found = evaluate_transfer(config, tasks, folds=3)
    raw = evaluate_transfer(EvalConfig(encoder=config.encoder), tasks, folds=3)
    full, two = (run["datasets"]["mr"]["accuracy"] for run in found["runs"])
    # PCA of every direction turns and shifts, which an L2 penalty does not see.
    assert full == pytest.approx(raw["datasets"]["mr"]["accuracy"], abs=100 * 2 / ROWS)
    assert two != full
    assert found["datasets"] == found["runs"][0]["datasets"]


def test_the_table_says_what_a_reader_must_know(folder, tiny_model):
    arguments = ("--model", tiny_model, "--pooling", "mean", "--folds", 3, "--k", 4)
    status, out, _ = run("eval", "transfer", folder, *arguments)
    assert status == 0
    for words in ("accuracy × 100, whitening, k = 4", "mean of 4", "tuned on train", "binomial",
                  "mrpc: F1 is of the class 1"):  # fmt: skip
        assert words in out


def test_one_class_predicted_is_noted(tmp_path, tiny_model):
    columns = {"text": ["the cat"] * 20, "label": [0] * 12 + [1] * 8, "split": ["all"] * 20}
    pq.write_table(pa.table(columns), tmp_path / "flat.parquet")
    status, out, _ = run("eval", "transfer", tmp_path, "--model", tiny_model, "--folds", 4)
    assert status == 0
    assert "note: flat: 4 of 4 classifiers predict one class only" in out


@pytest.mark.parametrize(
    ("name", "columns", "status", "match"),
    [
        ("few", {"text": ["a", "b", "c", "d"], "label": ["x", "y"] * 2, "split": ["all"] * 4},
         OPTIONS, r"few \(classes 0: x, 1: y\): class 0 has 2 of the 4 rows, and 10 folds with"),
        ("inner", {"text": list("abcd") * 6, "label": [0, 1] * 11 + [1] * 2, "split": ["all"] * 24},
         OPTIONS, "inner .*class 0 has 11 of the 24 rows, .* need 12 .* give at most 9 folds"),
        ("long", {"text": list("abcd"), "label": ["9" * 5000, "x"] * 2, "split": ["all"] * 4},
         OPTIONS, r"long \(classes 0: 9{30}…, 1: x\): class 0 has 2"),
        ("rte", {"sentence1": list("abc"), "sentence2": list("abc"), "label": [0, 1, 2],
                 "split": ["train", "dev", "dev"]},
         CORPUS, r"rte has 3 classes \(0: 0, 1: 1, 2: 2\), and RTE tells entailment and not_ent"),
        ("half", {"text": ["a", "b"], "label": [0, 1], "split": ["train", "dev"]},
         OPTIONS, "half has no split test to score a classifier on"),
        ("rte", {"text": ["a", "b"], "label": [0, 1], "split": ["train", "dev"]},
         OPTIONS, "rte is scored by the cosine of sentence1 and sentence2 on its dev split"),
        ("rte", {"sentence1": ["a", "b"], "sentence2": ["c", "d"], "label": ["p", "q"],
                 "split": ["train", "dev"]},
         OPTIONS, "the classes of rte are p, q; call the one of entailment entailment or 0"),
        ("odd", {"words": ["a", "b"], "label": [0, 1]}, CORPUS, "its columns are words, label"),
    ],
)  # fmt: skip
def test_bad_tasks_are_refused_before_encoding(tmp_path, tiny_model, name, columns, status, match):
    pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    found, _, error = run("eval", "transfer", tmp_path, "--model", tiny_model)
    assert found == status
    assert_one_error(error, match=match)


def rte(place, labels, splits):
    texts = [f"the cat and {number}" for number in range(len(labels))]
    columns = {"sentence1": texts, "sentence2": texts[::-1], "label": labels, "split": splits}
    pq.write_table(pa.table(columns), place / "rte.parquet")


@pytest.mark.parametrize(
    ("train", "note", "dropped"),
    [
        ([-1] * 4, "no pair of train has a label, so no threshold is tuned", 4),
        ([0] * 4, "the 4 pairs of train have one class, so no threshold is tuned", 0),
    ],
)
def test_rte_without_two_classes_to_tune_on_says_so(tmp_path, tiny_model, train, note, dropped):
    rte(tmp_path, [*train, 0, 1, 1, 0], ["train"] * 4 + ["dev"] * 4)
    arguments = ("eval", "transfer", tmp_path, "--model", tiny_model)
    status, out, _ = run(*arguments, "--json")
    assert status == 0
    found = json.loads(out)["datasets"]["rte"]
    assert (found["tuned_threshold"], found["tuned_accuracy"]) == (None, None)
    assert (found["rows"], found["majority"]) == ({"train": 4 - dropped, "dev": 4}, 50)
    assert found["dropped"]["label"] == dropped
    _, out, _ = run(*arguments)
    assert f"note: rte: {note}" in out
    assert "tuned on train" not in out
    assert ("note: 4 rows of rte have no label and are left out" in out) == bool(dropped)


def test_rte_tested_on_one_class_says_so(tmp_path, tiny_model):
    rte(tmp_path, [0, 1, 0, 1, 1, 1], ["train"] * 4 + ["dev"] * 2)
    status, out, _ = run("eval", "transfer", tmp_path, "--model", tiny_model)
    assert status == 0
    assert "note: rte: the 2 tested pairs have one class" in out


def test_an_unknown_set_is_refused(folder):
    status, _, error = run("eval", "transfer", folder, "--set", "sst9")
    assert status == OPTIONS
    assert_one_error(error, match="there is no task sst9; the tasks are mr, sst2, trec, mrpc, rte")
