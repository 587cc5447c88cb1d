"""Transfer scores against scikit-learn's own searches, and a task of pairs through an encoder."""

import runpy
import sys

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

pytestmark = pytest.mark.usefixtures("one_thread")

GRID, GRID_OF_FOLDS = [0.25, 0.5, 1, 2, 4, 8], [0.5, 1, 2, 4, 8, 16, 32]


def make_task(n=300, d=12, classes=2, seed=0):
    return make_classification(
        n, d, n_informative=6, n_classes=classes, flip_y=0.15, class_sep=0.6, random_state=seed
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
