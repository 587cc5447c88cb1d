"""Transfer tasks: what is written is what is read, and what cannot be used is named."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.papers.transfer_tasks import read_task
from whiten_index.errors import CorpusError

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
