"""Transfer tasks and scores: read as written, and scored as by scikit-learn's own searches."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.datasets import make_classification
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_score

from pipelines.papers.transfer import evaluate_transfer
from pipelines.papers.transfer_tasks import read_task, score_transfer
from whiten_index import EvalConfig, load_encoder
from whiten_index.cli import measure_commands
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.errors import CorpusError

pytestmark = pytest.mark.usefixtures("one_thread")

GRID, GRID_OF_FOLDS = [0.25, 0.5, 1, 2, 4, 8], [0.5, 1, 2, 4, 8, 16, 32]


def make_task(classes=2, seed=0):
    return make_classification(
        300, 12, n_informative=6, n_classes=classes, flip_y=0.15, class_sep=0.6, random_state=seed
    )


def search(grid, folds, seed):
    inner = StratifiedKFold(folds, shuffle=True, random_state=seed)
    model = LogisticRegression(max_iter=5000, tol=1e-6)
    return GridSearchCV(model, {"C": grid}, cv=inner, scoring="accuracy")


@pytest.mark.parametrize("classes", [2, 3])
def test_split_all_is_a_search_within_each_fold(classes):
    features, labels = make_task(classes=classes)
    found = score_transfer(features, labels, np.array(["all"] * 300), folds=5, seed=7)
    outer = StratifiedKFold(5, shuffle=True, random_state=7)
    each = cross_val_score(search(GRID, 5, 7), features, labels, cv=outer)
    # Where two C differ by rounding alone another may be chosen, which moves a row or two.
    assert found["accuracy"] == pytest.approx(each.mean(), abs=2 / 300)
    assert found["deviation"] == pytest.approx(each.std(ddof=1), abs=0.01)
    assert found["deviation_of"] == "folds"
    assert found["chosen_by"] == "nested folds"
    assert len(found["chosen"]) == 5
    assert set(found["chosen"]) <= set(GRID)
    assert found["rows"] == {"all": 300}


@pytest.mark.parametrize("classes", [2, 4])
def test_train_and_test_is_a_search_over_folds_of_train(classes):
    features, labels = make_task(classes=classes, seed=1)
    splits = np.where(np.arange(300) % 3, "train", "test")
    found = score_transfer(features, labels, splits, folds=5, seed=3)
    train, test = splits == "train", splits == "test"
    fitted = search(GRID_OF_FOLDS, 5, 3).fit(features[train], labels[train])
    assert found["accuracy"] == pytest.approx(fitted.score(features[test], labels[test]), abs=0.011)
    assert found["chosen_by"] == "train folds"
    assert found["rows"] == {"train": 200, "test": 100}
    assert found["deviation_of"] == "binomial"
    assert found["deviation"] ** 2 * 100 == pytest.approx(
        found["accuracy"] * (1 - found["accuracy"])
    )


ROWS = 90


@pytest.mark.usefixtures("one_thread")
def test_pairs_are_classified_by_difference_and_product_and_dev_trains_too(
    tmp_path, tiny_words, tiny_model
):
    rng = np.random.default_rng(0)
    same = rng.permutation(np.arange(ROWS) % 2)
    first = [" ".join(rng.choice(tiny_words, 3)) for _ in range(ROWS)]
    other = [" ".join(rng.choice(tiny_words, 3)) for _ in range(ROWS)]
    second = [one if equal else two for one, two, equal in zip(first, other, same, strict=True)]
    labels = np.where(rng.random(ROWS) < 0.1, 1 - same, same)
    splits = np.array(["train", "dev", "test"])[np.arange(ROWS) % 3]
    columns = {"sentence1": first, "sentence2": second, "label": labels, "split": splits}
    pq.write_table(pa.table(columns), tmp_path / "mrpc.parquet")
    task = read_task(tmp_path / "mrpc.parquet")
    config = EvalConfig(encoder=EncoderConfig(model=str(tiny_model), pooling="mean"))
    found = evaluate_transfer(config, [task], folds=3)["datasets"]["mrpc"]
    encoder = load_encoder(str(tiny_model), pooling="mean")
    u, v = (encoder.encode(side).astype(float) for side in (first, second))
    rows, test = np.hstack([abs(u - v), u * v]), splits == "test"
    model = LogisticRegression(C=found["chosen"][0], max_iter=5000, tol=1e-6)
    expected = model.fit(rows[~test], labels[~test]).score(rows[test], labels[test])
    assert found["accuracy"] == pytest.approx(100 * expected, abs=100 / test.sum())
    assert found["rows"] == {"train": 60, "test": 30}


def test_the_module_is_a_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["transfer", "--help"])
    # What the script adds to the commands of this process is taken back at the end.
    monkeypatch.setitem(measure_commands.evaluate.commands, "transfer", None)
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_module("pipelines.papers.transfer", run_name="__main__")
    assert "a linear classifier" in capsys.readouterr().out


TEXTS, LABELS = ["a cat", "a dog", "a bird", "a fish"], [1, 0, 1, 0]
SPLITS = ["train", "train", "test", "test"]


def parquet(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def sound(path: Path, **changed: Any) -> Path:
    return parquet(path, **{"text": TEXTS, "label": LABELS, "split": SPLITS, **changed})


@pytest.mark.parametrize("ending", [".parquet", ".jsonl", ".tsv"])
def test_texts_labels_and_splits_are_read_from_every_format(tmp_path, ending):
    path = tmp_path / f"mood{ending}"
    if ending == ".parquet":
        sound(path)
    else:
        rows = list(zip(TEXTS, LABELS, SPLITS, strict=True))
        names = ("text", "label", "split")
        records = [json.dumps(dict(zip(names, row, strict=True))) for row in rows]
        fields = ["\t".join(map(str, row)) for row in (names, *rows)]
        path.write_text("\n".join(records if ending == ".jsonl" else fields) + "\n")
    task = read_task(path)
    assert (task.name, task.first, task.second) == ("mood", TEXTS, None)
    assert task.labels.tolist() == LABELS
    assert task.classes == ("0", "1")
    assert task.splits.tolist() == SPLITS
    assert task.dropped == {"text": 0, "label": 0}


def test_rows_without_text_or_label_are_dropped_and_counted(tmp_path):
    path = parquet(
        tmp_path / "t.parquet",
        text=["a", None, "  ", "b", "c", "d"],
        label=[0.0, 1.0, 1.0, None, float("nan"), 1.0],
        split=["all"] * 6,
    )
    task = read_task(path)
    assert task.first == ["a", "d"]
    assert task.labels.tolist() == [0, 1]
    assert task.dropped == {"text": 2, "label": 2}


def test_minus_one_is_hidden_where_it_is_all_of_a_split_and_a_class_where_it_is_not(tmp_path):
    """As GLUE gives the test split of SST-2, and as polarities are written."""
    texts, splits = ["a", "b", "c", "d", "e", "f"], ["train", "train", "dev", "dev", "test", "test"]
    path = parquet(tmp_path / "t.parquet", text=texts, label=[0, 1, 1, 0, -1, -1], split=splits)
    task = read_task(path)
    assert (task.classes, task.dropped["label"]) == (("0", "1"), 2)
    assert set(task.splits.tolist()) == {"train", "dev"}
    for labels in ([-1, 1, 1, 1, -1, -1], [-1, 1, -1, 1, -1, 1]):
        path = parquet(tmp_path / "t.parquet", text=texts, label=labels, split=splits)
        task = read_task(path)
        assert (task.classes, task.dropped["label"]) == (("-1", "1"), 0)
    with pytest.raises(CorpusError, match=r"all 4 rows .* have the label '-1'"):
        read_task(sound(tmp_path / "t.parquet", label=[-1] * 4))


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ({"sentence": TEXTS, "label": LABELS, "split": SPLITS},
         "no column text, and not both sentence1 and sentence2 .*columns are sentence, label, spl"),
        ({"sentence1": TEXTS, "label": LABELS, "split": SPLITS}, "not both sentence1"),
        ({"text": TEXTS, "split": SPLITS}, "no column label .*its columns are text, split"),
        ({"text": TEXTS, "label": LABELS}, "no column split"),
        ({"text": TEXTS}, "no column label and no split"),
        ({"text": TEXTS, "sentence1": TEXTS, "sentence2": TEXTS, "label": LABELS, "split": SPLITS},
         "has the columns text and sentence1 and sentence2"),
        ({"text": TEXTS, "label": [3] * 4, "split": SPLITS}, "all 4 rows .* have the label '3'"),
        ({"text": TEXTS, "label": [0.5, 1, 1, 0], "split": SPLITS},
         r"row 0 \(from 0\), has 0.5 as label, expected a class: a whole number or a name"),
        ({"text": TEXTS, "label": LABELS, "split": ["test"] * 4}, "has the splits test; a task"),
        ({"text": TEXTS, "label": LABELS, "split": ["train"] * 4}, "has the splits train; a task"),
        ({"text": TEXTS, "label": LABELS, "split": ["all", "all", "all", "test"]},
         "has the splits all, test; a task has all; or train and test"),
        ({"text": TEXTS, "label": LABELS, "split": ["train", None, "test", "test"]},
         "has the splits None, test, train"),
        ({"text": [None] * 4, "label": LABELS, "split": SPLITS}, r"no row .*\(4 lack a text, 0"),
        ({"text": [1, 2, 3, 4], "label": LABELS, "split": SPLITS}, "has 1 as text, expected a tex"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named(tmp_path, columns, match):
    with pytest.raises(CorpusError, match=match):
        read_task(parquet(tmp_path / "t.parquet", **columns))
