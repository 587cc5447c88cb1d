"""nDCG@10 by exponent and width on SciFact and Cranfield, in float32, fitted on all documents.

Run ``WHITEN_INDEX_DATA=… python -m benchmarks.exponents``. Every document counts, Cranfield's two
without any text as well, which a build would leave out: on layer 1 they move the figures.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.intervals import interval_over_sets
from benchmarks.judged_sets import JudgedSet, joined_texts, judged_set, ndcg_each
from benchmarks.results_file import data_folder, write
from whiten_index import Moments, Whitening, load_encoder
from whiten_index.whitening.whitening_config import Kind, WhiteningConfig

EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)
SETTINGS: tuple[tuple[str, int | None, tuple[int | str, ...]], ...] = (
    ("scifact", None, ("full", 256, 128, 64)),
    ("cranfield", None, (256, 128)),
    ("cranfield", 1, (256,)),
)


def measure() -> Iterator[dict[str, Any]]:
    """Yield the figures of every row."""
    for name, layer, widths in SETTINGS:
        judged = judged_set(data_folder(), name)
        options = {} if layer is None else {"layers": (layer,)}
        encoder = load_encoder("all-MiniLM-L6-v2", pooling="mean", max_length=256, **options)
        ids, texts = joined_texts(judged)
        documents = encoder.encode(texts)
        queries = encoder.encode_queries(list(judged.queries.values()))
        raw = _of_each(judged, ids, documents, queries)
        facts = {"set": name, "layer": layer, "raw": float(raw.mean())}
        for k in widths:
            yield {**facts, **_row(judged, ids, (documents, queries), raw, k)}


def _row(
    judged: JudgedSet,
    ids: list[str],
    rows: tuple[NDArray[np.floating], NDArray[np.floating]],
    raw: NDArray[np.float64],
    k: int | str,
) -> dict[str, Any]:
    moments = Moments.of(rows[0])

    def quality(config: WhiteningConfig) -> dict[str, Any]:
        """Return the mean, and the interval of its difference to raw embeddings."""
        each = _of_each(judged, ids, *map(Whitening.fit(moments, config).apply, rows))
        difference = functools.partial(_mean_at, each - raw)
        interval = interval_over_sets([(len(raw), difference)])
        return {"mean": float(each.mean()), "interval": interval}

    whitening, pca = Kind.WHITENING, WhiteningConfig(kind=Kind.PCA, k=k, center=False)
    return {
        "k": Whitening.fit(moments, pca).k,
        "full": k == "full",
        "truncated": None if k == "full" else quality(WhiteningConfig(kind=Kind.TRUNCATE, k=k)),
        "not_centred": quality(pca),
        "by_exponent": {
            str(exponent): quality(WhiteningConfig(kind=whitening, k=k, exponent=exponent))
            for exponent in EXPONENTS
        },
    }


def _mean_at(values: NDArray[np.float64], at: NDArray[np.int64]) -> float:
    return float(values[at].mean())


def _of_each(
    judged: JudgedSet,
    ids: list[str],
    documents: NDArray[np.floating],
    queries: NDArray[np.floating],
) -> NDArray[np.float64]:
    return ndcg_each(judged, ids, documents.astype(np.float64), queries.astype(np.float64))


if __name__ == "__main__":
    print(write("exponents", measure()))
