"""Differences of embedding models by judged queries, and by sentences of the documents.

Run ``WHITEN_INDEX_DATA=… python -m benchmarks.model_comparison STATIC``, with a static model of
MiniLM (``docs/static-models.md``). ``migrate --max-loss`` compares by
sentences if there are no judged queries; the judged ones say whether that is right.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.judged_sets import joined_texts, judged_set, ndcg_each
from benchmarks.results_file import data_folder, write
from whiten_index import load_encoder
from whiten_index.evaluation.metrics import mean_interval
from whiten_index.pipeline.pseudo_queries import cut_pieces
from whiten_index.whitening.selection import reciprocal_ranks
from whiten_index.whitening.spectrum import unit_rows

SETS, DOCUMENTS, MAX_LENGTH = ("scifact", "cranfield", "cacm"), 1_000, 256


def measure(static: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each set and pair of models."""
    last = load_encoder("all-MiniLM-L6-v2", max_length=MAX_LENGTH)
    third = load_encoder("all-MiniLM-L6-v2", max_length=MAX_LENGTH, layers=(3,))
    models = {"layer 3": third, "static": load_encoder(str(static)), "last": last}
    for name in SETS:
        judged = judged_set(data_folder(), name)
        ids, texts = joined_texts(judged)
        rng = np.random.default_rng(0)
        tried = (cut_pieces(texts[row], rng, most_words=256) for row in rng.permutation(len(texts)))
        cut = list(itertools.islice(filter(None, tried), DOCUMENTS))
        scores = {}
        for model, encoder in models.items():
            rows = unit_rows(encoder.encode(texts).astype(float))
            asked = encoder.encode_queries(list(judged.queries.values())).astype(float)
            sentences = unit_rows(encoder.encode_queries([each.sentence for each in cut]))
            others = unit_rows(encoder.encode([each.others for each in cut]))
            by_sentences = 100 * reciprocal_ranks(sentences, others)
            scores[model] = ndcg_each(judged, ids, rows, asked), by_sentences
        for old, new in itertools.combinations(models, 2):
            kinds = zip(("judged", "sentences"), scores[old], scores[new], strict=True)
            found = {
                kind: {
                    "old": float(before.mean()), "new": float(after.mean()),
                    "interval": mean_interval(after - before), "questions": len(before),
                }
                for kind, before, after in kinds
            }  # fmt: skip
            yield {"set": name, "old": old, "new": new, **found}


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m benchmarks.model_comparison", description=__doc__)
    parser.add_argument("static", type=Path)
    print(write("model_comparison", measure(parser.parse_args().static)))
