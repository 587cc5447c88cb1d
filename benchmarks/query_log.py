"""Transforms fitted on a log of queries, and baselines, beside those fitted on the documents.

Run ``WHITEN_INDEX_DATA=… python -m benchmarks.query_log``. SciFact's judged queries of the split
test are searched; the log is all its other queries, without judgements. Every interval is of the
difference to exact search of the raw embeddings, or between two ways, by paired bootstrap over the
queries. In float8 (e4m3) are the documents alone, scaled so that the largest number is 448.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from benchmarks.judged_sets import joined_texts, judged_set, ndcg_each
from benchmarks.results_file import data_folder, write
from whiten_index import Moments, Whitening, WhiteningConfig, load_encoder
from whiten_index.evaluation.metrics import mean_interval
from whiten_index.whitening.spectrum import unit_rows
from whiten_index.whitening.whitening_config import Kind

WIDTHS = (32, 64, 128, 192, 256)
_EXPONENT = 0.25
_DRAWS, _NEIGHBOURS = 5, 10
_MOST_E4M3 = 448.0
_GENTLE = f"γ = {_EXPONENT:g}"
# Of each two ways, the first is compared with the second.
_PAIRS = (
    ("PCA of the log", "PCA of the documents"),
    (f"{_GENTLE} of the log", f"{_GENTLE} of the documents"),
    (f"{_GENTLE} of the documents", "PCA of the documents"),
    ("PCA of the documents, float8", "PCA of the documents"),
)

Rows = NDArray[np.float64]
# Documents and queries (n, d), (q, d) to vectors (n, k), (q, k).
Reduce = Callable[[Rows, Rows], tuple[Rows, Rows]]


def measure() -> Iterator[dict[str, Any]]:
    """Yield a row for each way and width."""
    judged = judged_set(data_folder(), "scifact")
    ids, texts = joined_texts(judged)
    every = pq.read_table(data_folder() / "retrieval/scifact/queries.parquet").to_pylist()
    asked = [row["text"] for row in every if str(row["id"]) not in judged.queries]
    encoder = load_encoder("all-MiniLM-L6-v2", max_length=256)
    documents = encoder.encode(texts).astype(np.float64)
    log = encoder.encode_queries(asked).astype(np.float64)
    queries = encoder.encode_queries(list(judged.queries.values())).astype(np.float64)

    def scored(reduce: Reduce) -> NDArray[np.float64]:
        return ndcg_each(judged, ids, *reduce(documents, queries))

    raw = scored(lambda *both: both)
    yield {"way": "raw", "k": documents.shape[1], "log": len(log), "ndcg": float(raw.mean())}
    coded = scored(_in_float8(lambda *both: both))
    yield {"way": "float8", "k": documents.shape[1], **_beside(coded, raw)}
    for k in WIDTHS:
        each = dict[str, NDArray[np.float64]]()
        for name, reductions in ways(documents, log, k).items():
            each[name] = np.mean([scored(reduce) for reduce in reductions], axis=0)
            yield {"way": name, "k": k, **_beside(each[name], raw)}
        for first, second in _PAIRS:
            yield {"first": first, "second": second, "k": k, **_beside(each[first], each[second])}
        half, rest = (100 * found_by_half(documents, log, k, log=on) for on in (True, False))
        pair = {"first": "directions of half of the log", "second": "of the documents"}
        yield {**pair, "k": k, **_beside(half, rest)}


def _beside(found: NDArray[np.float64], other: NDArray[np.float64]) -> dict[str, Any]:
    """Return the mean, its difference to another, and the interval of that."""
    difference = found - other
    means = {"ndcg": float(found.mean()), "difference": float(difference.mean())}
    return {**means, "interval": mean_interval(difference)}


def found_by_half(documents: Rows, queries: Rows, k: int, *, log: bool) -> NDArray[np.float64]:
    """Return the share (q,) of the ten nearest raw documents that half of the queries find by PCA.

    It is fitted on the other half if ``log``, else on the documents, and not centred.
    """
    order = np.random.default_rng(0).permutation(len(queries))
    asked, others = np.array_split(queries[order], 2)
    fitted = Moments.of(others if log else documents)
    pca = Whitening.fit(fitted, WhiteningConfig(k=k, exponent=0.0, center=False))

    def nearest(rows: Rows, asked: Rows) -> NDArray[np.int64]:
        scores = unit_rows(asked) @ unit_rows(rows).T
        places: NDArray[np.int64] = np.argpartition(-scores, _NEIGHBOURS, axis=1)
        return places[:, :_NEIGHBOURS]

    right, found = nearest(documents, asked), nearest(pca.apply(documents), pca.apply(asked))
    share: NDArray[np.float64] = (found[:, :, None] == right[:, None, :]).any(axis=1).mean(axis=1)
    return share


def ways(documents: Rows, log: Rows, k: int) -> dict[str, list[Reduce]]:
    """Return the reductions to k dims by name; of random ones several."""
    moments = {"documents": Moments.of(documents), "log": Moments.of(log)}
    found: dict[str, list[Reduce]] = {}
    for kind, exponent in (("PCA", 0.0), (_GENTLE, _EXPONENT), ("γ = 1", 1.0)):
        for on, of in moments.items():
            whitening = Whitening.fit(of, WhiteningConfig(k=k, exponent=exponent))
            found[f"{kind} of the {on}"] = [_both(whitening.apply)]
    (plain,) = found["PCA of the documents"]
    found["PCA of the documents, float8"] = [_in_float8(plain)]
    found["LeanVec-Sphering"] = [sphering(documents, log, k)]
    pca = WhiteningConfig(kind=Kind.PCA, k=k)
    normed = Whitening.fit(Moments.of(layer_norm(documents)), pca)
    found["LayerNorm, then PCA"] = [_both(lambda rows: normed.apply(layer_norm(rows)))]
    draws = [
        np.random.default_rng(seed).permutation(documents.shape[1])[:k] for seed in range(_DRAWS)
    ]
    found["coordinates at random"] = [_both(partial(_columns, drawn)) for drawn in draws]
    return found


def _columns(drawn: NDArray[np.int64], rows: Rows) -> Rows:
    return rows[:, drawn]


def _both(reduce: Callable[[Rows], Rows]) -> Reduce:
    return lambda documents, queries: (reduce(documents), reduce(queries))


def _in_float8(reduce: Reduce) -> Reduce:
    """Return the reduction whose documents are then rounded to e4m3, at unit length and scaled."""

    def coded(documents: Rows, queries: Rows) -> tuple[Rows, Rows]:
        vectors, asked = reduce(documents, queries)
        vectors = unit_rows(vectors)
        scaled = torch.from_numpy(vectors * (_MOST_E4M3 / np.abs(vectors).max()))
        rounded: Rows = scaled.to(torch.float8_e4m3fn).to(torch.float64).numpy()
        return rounded, asked

    return coded


def layer_norm(rows: Rows) -> Rows:
    """Return rows (n, d) with mean 0 and variance 1 each."""
    centred = rows - rows.mean(axis=1, keepdims=True)
    normed: Rows = centred / centred.std(axis=1, keepdims=True)
    return normed


def sphering(documents: Rows, log: Rows, k: int) -> Reduce:
    """Return LeanVec-Sphering (Tepper et al. 2024, arXiv 2410.22347) for inner products.

    With the second moments Q of the log and X of the documents, both of unit rows, and P the k
    leading eigenvectors of Q^½ X Q^½, documents get Pᵀ Q^½ and queries Pᵀ Q^-½. Scores are inner
    products, so each document gets a coordinate that makes its length that of the longest, which
    the cosine then ranks alike.
    """
    x, q = unit_rows(documents), unit_rows(log)
    values, vectors = np.linalg.eigh(q.T @ q / len(q))
    values = np.maximum(values, 1e-6 * values.max())
    root, inverse = ((vectors * values**power) @ vectors.T for power in (0.5, -0.5))
    leading = np.linalg.eigh(root @ (x.T @ x / len(x)) @ root)[1][:, ::-1][:, :k]

    def reduce(documents: Rows, queries: Rows) -> tuple[Rows, Rows]:
        vectors, asked = (
            unit_rows(documents) @ root @ leading,
            unit_rows(queries) @ inverse @ leading,
        )
        lengths = (vectors**2).sum(axis=1)
        rest = np.sqrt(np.maximum(lengths.max() - lengths, 0))
        return np.column_stack([vectors, rest]), np.column_stack([asked, np.zeros(len(asked))])

    return reduce


if __name__ == "__main__":
    print(write("query_log", measure()))
