"""Means of metrics over judged queries."""

from collections.abc import Sequence

import numpy as np

from whiten_index.evaluation.metrics import Qrels, Run, evaluate_each


def evaluate(qrels: Qrels, run: Run, metrics: Sequence[str]) -> dict[str, float]:
    """Return the mean of each metric over the judged queries."""
    scores = {metric: list(evaluate_each(qrels, run, metric).values()) for metric in metrics}
    return {metric: float(np.mean(each)) for metric, each in scores.items()}
