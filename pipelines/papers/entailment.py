"""RTE by the cosine of its pairs, as Huang et al. (2021), WhiteningBERT, score it."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipelines.papers.transfer_tasks import Task, binomial_error
from whiten_index.errors import ConfigError
from whiten_index.evaluation.metrics import pair_cosines
from whiten_index.measure.eval_config import EvalConfig
from whiten_index.measure.spaces import Scores, Spaces, TextEmbedder, evaluate_sets
from whiten_index.progress import Progress

THRESHOLD = 0.5
_ENTAILMENT = ("entailment", "0")


def evaluate_entailment(
    config: EvalConfig,
    task: Task,
    *,
    embedder: TextEmbedder | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Call the pairs of dev entailment whose cosine is 0.5 or more, in each space.

    Transforms are fitted on the sentences of train and dev.

    Returns:
        As ``evaluate_transfer``: accuracy × 100, its deviation and the share of the larger class.
    """
    known = [name for name in _ENTAILMENT if name in task.classes]
    tested = task.splits == "dev"
    if task.second is None or not known or not tested.any():
        raise ConfigError(
            f"{task.name} is scored by the cosine of sentence1 and sentence2 on its dev split, and "
            f"its class of entailment is called {' or '.join(_ENTAILMENT)}; rename what differs"
        )
    gold = (task.labels == task.classes.index(known[0]))[tested]

    def score(task: Task, embedder: TextEmbedder, spaces: Spaces) -> Scores:
        first, second = embedder.embed(task.first), embedder.embed(task.second or [])
        for space in spaces.of(task.texts, scored=tested):
            called = pair_cosines(space.apply(first), space.apply(second))[tested] >= THRESHOLD
            accuracy = float(np.mean(called == gold))
            notes = []
            if called.all() or not called.any():
                notes.append(f"every pair is called the same at threshold {THRESHOLD:.2f}")
            yield (
                space,
                {
                    "accuracy": 100 * accuracy,
                    "deviation": 100 * binomial_error(accuracy, len(gold)),
                    "deviation_of": "binomial",
                    "majority": 100 * float(max(gold.mean(), 1 - gold.mean())),
                    "notes": notes,
                },
            )

    return evaluate_sets(config, [task], score, stage="score", embedder=embedder, progress=progress)
