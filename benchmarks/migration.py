"""nDCG@10 in the course of a migration: rows of the new model, the others mapped to its space.

Run ``WHITEN_INDEX_DATA=… python -m benchmarks.migration STATIC TRAINED``, with a static model of
MiniLM (``docs/static-models.md``) and a MiniLM trained further
(``whiten-index train SCIFACT/corpus.parquet --text-column text --model all-MiniLM-L6-v2 --pooling
mean --batch-size 32 --precision bf16 --no-whiten --positives 1 --max-steps 100 --out TRAINED``).
Rows are drawn at random, the map is chosen on one in eight of them, and queries of the new model
ask by exact search of raw embeddings. At 0 %, the map is fitted on a tenth of the rows and all rows
are mapped.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.intervals import interval_over_sets
from benchmarks.judged_sets import joined_texts, judged_set, ndcg_each
from benchmarks.results_file import data_folder, write
from whiten_index import load_encoder
from whiten_index.whitening.bridge import Bridge, joint_moments
from whiten_index.whitening.spectrum import unit_rows

SET, HELD_OUT = "scifact", 8
SHARES, LEAST = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0), 0.1
PAIRS = (
    ("static", "last"), ("layer 3", "last"), ("last", "trained"), ("trained", "last"),
    ("last", "static"), ("last", "layer 3"),
)  # fmt: skip

Rows = NDArray[np.float64]


def measure(static: Path, trained: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each pair of models and share of rows that the new one has encoded."""
    judged = judged_set(data_folder(), SET)
    ids, texts = joined_texts(judged)
    rows: dict[str, tuple[Rows, Rows]] = {}
    for name, model, options in (
        ("static", str(static), {}),
        ("trained", str(trained), {"max_length": 256}),
        ("layer 3", "all-MiniLM-L6-v2", {"layers": (3,), "max_length": 256}),
        ("last", "all-MiniLM-L6-v2", {"max_length": 256}),
    ):
        encoder = load_encoder(model, **options)
        queries = encoder.encode_queries(list(judged.queries.values()))
        rows[name] = unit_rows(encoder.encode(texts).astype(float)), queries.astype(float)
    score = functools.partial(ndcg_each, judged, ids)
    for old, new in PAIRS:
        before, after = score(*rows[old]), score(*rows[new])
        facts = {"set": SET, "old": old, "new": new, "old_ndcg": float(before.mean())}
        order, least = np.random.default_rng(0).permutation(len(ids)), before
        for share in SHARES:
            known = order[: round(max(share, LEAST) * len(ids))]
            mixed, bridge = mixed_rows(
                rows[old][0], rows[new][0], known, used=round(share * len(ids))
            )
            each = score(mixed, rows[new][1])
            if not share:
                least = min(before, each, key=np.mean)
            yield {
                **facts, "share": share, "ndcg": float(each.mean()), "bridge": bridge,
                "less_old": interval(each, before), "less_least": interval(each, least),
                "of_new": float(each.mean() / after.mean()),
                "of_new_interval": interval(each, after, np.divide),
            }  # fmt: skip


def mixed_rows(
    old: Rows, new: Rows, known: NDArray[np.int64], *, used: int
) -> tuple[Rows, str | None]:
    """Return rows of which ``used`` are the new model's, the others mapped, and the map's kind."""
    if len(known) == len(new):
        return new, None
    held, fitted = known[::HELD_OUT], np.delete(known, np.s_[::HELD_OUT])
    moments = joint_moments([(old[fitted], new[fitted])])
    bridge = Bridge.choose(moments, (old[held], new[held]))
    mixed = unit_rows(bridge.apply(old))
    mixed[known[:used]] = new[known[:used]]
    return mixed, bridge.kind


def interval(
    some: Rows, others: Rows, compared: Callable[[Any, Any], Any] = np.subtract
) -> list[float]:
    """Return the 95 % interval of the difference, or quotient, of two means over the queries."""

    def figure(at: NDArray[np.int64]) -> float:
        return float(compared(some[at].mean(), others[at].mean()))

    return interval_over_sets([(len(some), figure)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m benchmarks.migration", description=__doc__)
    parser.add_argument("static", type=Path)
    parser.add_argument("trained", type=Path)
    given = parser.parse_args()
    print(write("migration", measure(given.static, given.trained)))
