"""What float16 in the store costs: raw and whitened vectors against float32.

Run ``WHITEN_INDEX_DATA=… python -m benchmarks.store_dtype [ROWS]``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.results_file import data_folder, write
from whiten_index import Moments, ParquetCorpus, Whitening, load_encoder
from whiten_index.corpus.batches import TextBatch
from whiten_index.corpus.corpus_config import CorpusConfig
from whiten_index.store.dtypes import StoreDtype, as_kept
from whiten_index.whitening.spectrum import unit_rows
from whiten_index.whitening.whitening_config import WhiteningConfig

_QUERIES, _TOP_K = 1000, 10


def measure(rows: int) -> Iterator[dict[str, Any]]:
    """Yield the agreement of float16 with float32, for raw vectors and two widths."""
    corpus = ParquetCorpus.open(
        CorpusConfig(
            sources=(str(data_folder() / "retrieval/scifact/corpus.parquet"),),
            text_columns=("title", "text"),
            limit=rows,
        )
    )
    texts = [t for batch in corpus.batches() if isinstance(batch, TextBatch) for t in batch.texts]
    exact = load_encoder(max_length=256).encode(texts)
    half = as_kept(exact, StoreDtype.FLOAT16)
    for name, k in (("raw", None), ("whitening", 128), ("whitening", "full")):
        vectors = [unit_rows(_transform(x, k)) for x in (exact, half)]
        yield {
            "benchmark": "store_dtype",
            "rows": len(texts),
            "setting": name,
            "k": k,
            "kept_as": str(half.dtype),
            "cosine_min": float((vectors[0] * vectors[1]).sum(axis=1).min()),
            "top10_overlap": _overlap(*vectors),
        }


def _transform(rows: NDArray[np.floating], k: int | str | None) -> NDArray[np.float64]:
    if k is None:
        return rows.astype(np.float64)
    return Whitening.fit(Moments.of(rows), WhiteningConfig(k=k)).apply(rows)


def _overlap(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Return the share of the ten nearest rows, the row itself left out, that both agree on."""
    chosen = np.random.default_rng(0).choice(len(a), min(_QUERIES, len(a)), replace=False)
    nearest = []
    for vectors in (a, b):
        scores = vectors[chosen] @ vectors.T
        scores[np.arange(len(chosen)), chosen] = -np.inf
        nearest.append(np.argpartition(-scores, _TOP_K, axis=1)[:, :_TOP_K])
    shared = [len(np.intersect1d(*pair)) for pair in zip(*nearest, strict=True)]
    return float(np.mean(shared)) / _TOP_K


if __name__ == "__main__":
    print(write("store_dtype", measure(int(sys.argv[1]) if len(sys.argv) > 1 else 5183)))
