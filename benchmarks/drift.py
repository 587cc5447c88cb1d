"""When does a transform stop fitting: drift and what keeping costs, on real text.

Run ``python -m benchmarks.drift WORK``: Wikinews sentences encoded by MiniLM, then sentences of
Wikipedia added at 1, 5, 20 and 50 % of their number. For each, the drift that an update measures,
what it decides, and how far the neighbours of an index that keeps its transform agree with those of
one that is fitted again. Needs ``WHITEN_INDEX_DATA``; encoding takes half an hour, and is kept in
WORK or the folder that ``WHITEN_INDEX_STORE`` names.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.results_file import data_folder, write
from whiten_index import BuildConfig, Moments, Whitening
from whiten_index.index.exact import exact_neighbours
from whiten_index.pipeline.encode import encode_corpus
from whiten_index.store.sampling import CorpusEmbeddings
from whiten_index.whitening.drift import Drift, decide
from whiten_index.whitening.spectrum import unit_rows
from whiten_index.whitening.whitening_config import WhiteningConfig

SHARES = (0.0, 0.01, 0.05, 0.2, 0.5)
SETTINGS = {
    "whitening, k = 128": WhiteningConfig(k=128),
    "γ = 0.25, k = 128": WhiteningConfig(k=128, exponent=0.25),
    "PCA, k = 128": WhiteningConfig(k=128, exponent=0.0),
}
QUERIES, TOP_K, _BLOCK = 1_000, 10, 8192


def embeddings(name: str, work: Path, *, limit: int | None) -> NDArray[np.float16]:
    """Return MiniLM's embeddings (n, 384) of sentences, encoded once."""
    config = BuildConfig(
        corpus=(str(data_folder() / f"sentences/{name}.parquet"),),
        text_columns=("text",),
        keep=("text",),
        pooling="mean",
        max_length=256,
        limit=limit,
        store=os.environ.get("WHITEN_INDEX_STORE", str(work / "store")),
    )
    report = encode_corpus(config)
    return np.concatenate(list(CorpusEmbeddings(report.store, report.record).blocks())).astype(
        np.float16
    )


def neighbours(
    rows: NDArray[np.float16], whitening: Whitening, queries: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the rows (q, 10) nearest to some rows by cosine, these themselves left out."""

    def vectors(some: NDArray[np.float16]) -> NDArray[np.float32]:
        return unit_rows(whitening.apply(some)).astype(np.float32)

    blocks = (vectors(rows[i : i + _BLOCK]) for i in range(0, len(rows), _BLOCK))
    _, found = exact_neighbours(blocks, vectors(rows[queries]), TOP_K + 1)
    others = [row[row != own][:TOP_K] for row, own in zip(found, queries, strict=True)]
    return np.array(others)


def overlap(one: NDArray[np.int64], other: NDArray[np.int64]) -> float:
    """Return the share of neighbours that two searches have in common."""
    pairs = zip(one, other, strict=True)
    return float(np.mean([len(np.intersect1d(a, b)) / TOP_K for a, b in pairs]))


def measure(work: Path) -> list[dict[str, Any]]:
    """Return a row for each share of new text and transform."""
    news = embeddings("wikinews_en", work, limit=None)
    wiki = embeddings("wikipedia_en", work, limit=round(max(SHARES) * len(news)) + 1_000)
    wiki = wiki[: round(max(SHARES) * len(news))]
    fitted, rng, found = Moments.of(news), np.random.default_rng(0), list[dict[str, Any]]()
    # Half of the news, fitted again: what two samples of one population come to.
    half = rng.permutation(len(news))[: len(news) // 2]
    for name, setting in SETTINGS.items():
        before = Whitening.fit(fitted, setting)
        found.append(
            {"figure": "half of the same text", "setting": name}
            | Drift.measure(before, fitted, Moments.of(news[half]), shared=len(half)).to_json()
        )
    for share in SHARES:
        rows = np.concatenate([news, wiki[: round(share * len(news))]])
        today = Moments.of(rows)
        # Queries from old and new text alike.
        queries = np.sort(rng.permutation(len(rows))[:QUERIES])
        of_new = queries >= len(news)
        for name, setting in SETTINGS.items():
            before, again = Whitening.fit(fitted, setting), Whitening.fit(today, setting)
            drift = Drift.measure(before, fitted, today, shared=len(news))
            kept, refitted = (neighbours(rows, each, queries) for each in (before, again))
            found.append(
                {
                    "figure": "wikipedia added",
                    "setting": name,
                    "share": share,
                    "rows": len(rows),
                    **drift.to_json(),
                    "decision": asdict(decide(drift)),
                    "agreement": overlap(kept, refitted),
                    "agreement_new": overlap(kept[of_new], refitted[of_new])
                    if of_new.any()
                    else None,
                }
            )
            print(found[-1], flush=True)
    return found


def main(arguments: Sequence[str]) -> int:
    """Measure, and write ``results/drift.jsonl``."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    work = Path(arguments[0])
    work.mkdir(parents=True, exist_ok=True)
    print(write("drift", measure(work)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
