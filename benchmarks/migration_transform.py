"""nDCG@10 of bridged versions by their transform: centred or not, by either model's exponent.

Run ``WHITEN_INDEX_DATA=… python -m benchmarks.migration_transform WORK STATIC``, with a static
model of MiniLM (``docs/static-models.md``). ``auto`` chooses an exponent at k = 128 for each model
on the whole corpus. Transforms are fitted on the mixed rows of ``benchmarks.migration``, which
queries of the new model search exactly.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.judged_sets import judged_set, ndcg_each
from benchmarks.migration import LEAST, SET, Rows, interval, mixed_rows
from benchmarks.results_file import data_folder, write
from benchmarks.scifact import corpus_config
from whiten_index import BuildConfig, Moments, Whitening, WhiteningConfig, build_index, open_index
from whiten_index.store.sampling import CorpusEmbeddings, ids_of
from whiten_index.whitening.spectrum import unit_rows

K, SHARES = 128, (0.0, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
PAIRS = (("static", "last"), ("last", "static"))


def measure(work: Path, static: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each pair of models, share of encoded rows, and transform."""
    judged = judged_set(data_folder(), SET)
    rows, exponents, ids = dict[str, tuple[Rows, Rows]](), dict[str, float](), list[Any]()
    given: dict[str, Any] = {**vars(corpus_config(data_folder(), work)), "factory": "Flat"}
    given |= {"whiten": "auto", "k": K}
    plain: dict[str, Any] = {"model": str(static), "pooling": None, "max_length": None}
    for name, options in (("static", plain), ("last", {"model": "all-MiniLM-L6-v2"})):
        config = BuildConfig(**{**given, **options, "out": str(work / name)})
        made = build_index(config)
        store, record = made.encoded.store, made.encoded.record
        embeddings = np.concatenate([*CorpusEmbeddings(store, record).blocks()])
        ids = ids_of(store, record, np.arange(len(embeddings)))
        encoder = open_index(work / name).encoder
        queries = encoder.encode_queries(list(judged.queries.values()))
        rows[name] = unit_rows(embeddings.astype(float)), unit_rows(queries.astype(float))
        exponents[name] = made.manifest["whitening"]["exponent"]
    score = functools.partial(ndcg_each, judged, ids)
    order = np.random.default_rng(0).permutation(len(ids))
    for old, new in PAIRS:
        for share in SHARES:
            known = order[: round(max(share, LEAST) * len(ids))]
            mixed, _ = mixed_rows(rows[old][0], rows[new][0], known, used=round(share * len(ids)))
            moments, before = Moments.of(mixed), None
            for by, center in (("old", True), ("old", False), ("new", False)):
                exponent = exponents[old if by == "old" else new]
                wanted = WhiteningConfig(k=K, exponent=exponent, center=center)
                fit = Whitening.fit(moments, wanted)
                each = score(*(fit.apply(side).astype(float) for side in (mixed, rows[new][1])))
                before = each if before is None else before
                yield {
                    "set": SET, "k": K, "old": old, "new": new, "share": share, "by": by,
                    "exponent": exponent, "center": center, "ndcg": float(each.mean()),
                    "less_first": interval(each, before),
                }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        "python -m benchmarks.migration_transform", description=__doc__
    )
    parser.add_argument("work", type=Path)
    parser.add_argument("static", type=Path)
    given = parser.parse_args()
    print(write("migration_transform", measure(given.work, given.static)))
