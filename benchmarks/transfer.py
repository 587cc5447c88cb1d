"""Transfer tasks of MiniLM, raw and whitened, beside a reference by scikit-learn alone.

Run ``WHITEN_INDEX_DATA=… python -m benchmarks.transfer [STORE]``; a store keeps the embeddings
for later runs. The reference is ``LogisticRegressionCV`` with its own choices (ten C from 1e-4 to
1e4, five folds), tested on the same folds or on the same test split.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegressionCV
from sklearn.model_selection import StratifiedKFold, cross_val_score
from threadpoolctl import threadpool_limits

from benchmarks.results_file import data_folder, write
from pipelines.papers.entailment import evaluate_entailment
from pipelines.papers.transfer import evaluate_transfer
from pipelines.papers.transfer_tasks import Task, pair_features, read_task, task_files
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.measure.eval_config import EvalConfig
from whiten_index.measure.spaces import EncodedTexts, TextEmbedder
from whiten_index.progress import Progress, Stages
from whiten_index.whitening.whitening_config import Kind, WhiteningConfig

ENCODER = EncoderConfig(model=None, pooling="mean", max_length=256)
TRANSFORMS = (WhiteningConfig(kind=Kind.WHITENING, k=256),)
SEED, FOLDS, RTE = 0, 10, "rte"


def measure(store: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each set raw, with the reference, and for each set and transform."""
    tasks = [read_task(path) for path in task_files([data_folder() / "senteval"])]
    raw = EvalConfig(encoder=ENCODER, store=store, seed=SEED)
    embedder = EncodedTexts(raw, Stages(Progress()))
    embedder.embed([text for task in tasks for text in task.texts])
    for transforms in ((), TRANSFORMS):
        config = EvalConfig(encoder=ENCODER, store=store, seed=SEED, transforms=transforms)
        report = evaluate_transfer(config, [t for t in tasks if t.name != RTE], folds=FOLDS)
        for task in tasks:
            if task.name == RTE:
                report["datasets"] |= evaluate_entailment(config, task)["datasets"]
        facts = {"encoder": report["encoder"], "setting": report["setting"], "seed": SEED}
        for task in tasks:
            found = report["datasets"][task.name]
            beside = {"reference": reference(task, embedder)} if not transforms else {}
            yield {"set": task.name, **facts, **found, **beside}
        yield {"set": "mean", **facts, **(report["average"] or {})}


def reference(task: Task, embedder: TextEmbedder) -> dict[str, float] | None:
    """Return accuracy × 100 by scikit-learn alone, over folds with their deviation; None for RTE.

    The dev split joins train in MRPC, as in the library; elsewhere it is not used.
    """
    if task.name == RTE:
        return None
    features: NDArray[np.floating] = embedder.embed(task.first)
    if task.second is not None:
        features = pair_features(features, embedder.embed(task.second))
    model = LogisticRegressionCV(Cs=10, cv=5, max_iter=1000, scoring="accuracy")
    # On arrays of this width more threads a product are slower.
    with threadpool_limits(1), warnings.catch_warnings():
        # Its smallest penalties converge slowly, and its attributes are about to change.
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", FutureWarning)
        if (task.splits == "all").all():
            outer = StratifiedKFold(FOLDS, shuffle=True, random_state=SEED)
            each = 100 * cross_val_score(model, features, task.labels, cv=outer)
            return {"accuracy": float(each.mean()), "deviation": float(each.std(ddof=1))}
        known = np.isin(task.splits, ("train", "dev") if task.name == "mrpc" else ("train",))
        test = task.splits == "test"
        model.fit(features[known], task.labels[known])
        return {"accuracy": 100 * float(model.score(features[test], task.labels[test]))}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as own:
        print(write("transfer_MiniLM", measure(sys.argv[1] if len(sys.argv) > 1 else own)))
