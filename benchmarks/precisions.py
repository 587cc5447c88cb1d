"""What bfloat16 costs in retrieval: nDCG@10 of MiniLM by the type that a CPU computes in.

Run ``WHITEN_INDEX_DATA=… python -m benchmarks.precisions`` on a processor with BF16. Raw
embeddings are searched exactly by cosine; documents and queries are encoded in the same type.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.judged_sets import joined_texts, judged_set, ndcg_each
from benchmarks.results_file import data_folder, write
from whiten_index import load_encoder
from whiten_index.encoding.encoder_config import DtypeName
from whiten_index.evaluation.metrics import mean_interval

SETS = ("scifact", "cranfield", "cacm")
DTYPES: tuple[DtypeName, ...] = ("float32", "bfloat16")


def measure() -> Iterator[dict[str, Any]]:
    """Yield a row for each set and type, with the interval of the difference from float32."""
    for name in SETS:
        judged = judged_set(data_folder(), name)
        ids, texts = joined_texts(judged)
        exact: NDArray[np.float64] | None = None
        for dtype in DTYPES:
            encoder = load_encoder("all-MiniLM-L6-v2", device="cpu", dtype=dtype)
            queries = encoder.encode(list(judged.queries.values()))
            found = ndcg_each(judged, ids, encoder.encode(texts), queries)
            exact = found if exact is None else exact
            low, high = mean_interval(found - exact)
            facts = {"set": name, "dtype": dtype, "products": encoder.runtime["products"]}
            yield {**facts, "ndcg": found.mean(), "low": low, "high": high, "queries": len(found)}


if __name__ == "__main__":
    print(write("precisions", list(measure())))
