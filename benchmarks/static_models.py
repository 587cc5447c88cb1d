"""A static model distilled from MiniLM, beside MiniLM: quality with and without whitening, speed.

Run ``WHITEN_INDEX_DATA=… python -m benchmarks.static_models WORK_FOLDER``, which needs model2vec
and skeletoken. All dims
are kept. STS is the mean over seven sets of Spearman's correlation × 100, each fitted on its
own sentences; SciFact's queries are searched exactly, with intervals by bootstrap over queries.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from model2vec.distill import distill
from numpy.typing import NDArray

from benchmarks.judged_sets import joined_texts, judged_set, ndcg_each
from benchmarks.results_file import data_folder, write
from benchmarks.short_texts import SETS
from whiten_index import Moments, Whitening, WhiteningConfig, load_encoder
from whiten_index.encoding.models import find_model
from whiten_index.encoding.window_encoder import WindowEncoder
from whiten_index.evaluation.metrics import mean_interval, spearman
from whiten_index.whitening.spectrum import unit_rows

EXPONENTS, ROUNDS, SENTENCES = (None, 0.25, 0.5, 1.0), 5, 20_000
FEWER = 20  # sentences for MiniLM, by this factor

Rows = NDArray[np.float64]


def transformed(exponent: float | None, fitted: Rows, rows: Rows) -> Rows:
    """Return rows (n, d) under a transform of others, or as they are."""
    if exponent is None:
        return rows
    config = WhiteningConfig(k="full", exponent=exponent)
    return Whitening.fit(Moments.of(fitted), config).apply(rows).astype(np.float64)


def sts(encoder: WindowEncoder) -> list[float]:
    """Return the mean over the sets under each transform."""
    table = pq.read_table(data_folder() / "sts" / "sts_raw.parquet")
    table = table.filter(pc.and_(pc.equal(table["split"], "test"), pc.is_valid(table["score"])))
    found = []
    for name in SETS:
        rows = table.filter(pc.equal(table["dataset"], name))
        sides = [rows[f"sentence{side}"].to_pylist() for side in (1, 2)]
        first, second = (encoder.encode(texts).astype(np.float64) for texts in sides)
        distinct = np.unique(np.concatenate([first, second]), axis=0)
        gold = rows["score"].to_numpy()
        pairs = (
            [unit_rows(transformed(each, distinct, side)) for side in (first, second)]
            for each in EXPONENTS
        )
        found.append([100 * spearman(gold, (one * other).sum(axis=1)) for one, other in pairs])
    return [float(each) for each in np.mean(found, axis=0)]


def measure(work: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each model and transform, then the speeds."""
    static = work / "static"
    if not static.exists():
        folder = str(find_model("all-MiniLM-L6-v2").path)
        distill(folder, pca_dims="auto", quantize_to="float32").save_pretrained(static)
    judged = judged_set(data_folder(), "scifact")
    ids, texts = joined_texts(judged)
    options = {"max_length": 256, "pooling": "mean"}
    encoders = {
        "MiniLM": load_encoder("all-MiniLM-L6-v2", **options),
        "static": load_encoder(str(static), **options),
    }
    for name, encoder in encoders.items():
        documents = encoder.encode(texts).astype(np.float64)
        queries = encoder.encode_queries(list(judged.queries.values())).astype(np.float64)
        raw = ndcg_each(judged, ids, documents, queries)
        for exponent, correlation in zip(EXPONENTS, sts(encoder), strict=True):
            both = (transformed(exponent, documents, rows) for rows in (documents, queries))
            each = ndcg_each(judged, ids, *both)
            yield {
                "model": name, "exponent": exponent, "sts": correlation,
                "ndcg": float(each.mean()), "difference": float((each - raw).mean()),
                "interval": mean_interval(each - raw),
            }  # fmt: skip
    column = pq.read_table(data_folder() / "sentences" / "wikinews_en.parquet")["text"]
    sentences = column[:SENTENCES].to_pylist()
    of_each = {"MiniLM": sentences[::FEWER], "static": sentences}
    rates: dict[str, list[float]] = {name: [] for name in encoders}
    for _ in range(ROUNDS):
        for name, encoder in encoders.items():
            rates[name].append(_rate(encoder, of_each[name]))
    for name, found in rates.items():
        yield {"model": name, "texts_a_second": statistics.median(found), "rounds": found}


def _rate(encoder: WindowEncoder, texts: Sequence[str]) -> float:
    started = time.perf_counter()
    encoder.encode(texts)
    return len(texts) / (time.perf_counter() - started)


def main(given: Sequence[str] | None = None) -> None:
    """Measure."""
    parser = argparse.ArgumentParser("python -m benchmarks.static_models", description=__doc__)
    parser.add_argument("work", type=Path)
    arguments = parser.parse_args(given)
    arguments.work.mkdir(parents=True, exist_ok=True)
    write("static_models", measure(arguments.work))


if __name__ == "__main__":
    main()
