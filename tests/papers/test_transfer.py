"""A task of pairs through a tiny encoder, checked by scikit-learn beside."""

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
    encoder = Encoder.load(str(tiny_model), pooling="mean")
    u, v = (encoder.encode(side).astype(float) for side in (first, second))
    rows, test = np.hstack([abs(u - v), u * v]), splits == "test"
    model = LogisticRegression(C=found["chosen"][0], max_iter=5000, tol=1e-6)
    expected = model.fit(rows[~test], labels[~test]).score(rows[test], labels[test])
    assert found["accuracy"] == pytest.approx(100 * expected, abs=100 / test.sum())
    assert found["rows"] == {"train": 60, "test": 30}
