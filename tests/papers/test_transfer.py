"""``eval transfer``: a folder of tasks through a tiny encoder, checked by scikit-learn beside."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.linear_model import LogisticRegression

from pipelines.papers.transfer import evaluate_transfer
from pipelines.papers.transfer_tasks import read_task
from whiten_index import Encoder
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.measure.eval_config import EvalConfig

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = 90


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
    """Tasks of every layout: folds, train and test, all three splits, pairs, train and dev."""
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


def embeddings_of(texts, tiny_model):
    return Encoder.load(str(tiny_model), pooling="mean").encode(texts)


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
