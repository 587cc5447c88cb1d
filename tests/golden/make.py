"""Make the golden artifacts of a format version; run once when a format is new, never after.

Run ``python tests/golden/make.py`` from the root of the project.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from whiten_index import BuildConfig, build_index

FINAL = Path(__file__).parent / "v1"
# Manifests hold absolute paths; these are of no one's home.
FOLDER = Path("/tmp/whiten-index-golden")


def main() -> None:
    """Build a store and an index of eight 4-dim embeddings."""
    if FINAL.exists():
        sys.exit(f"{FINAL} exists: golden artifacts are never made anew")
    rows = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)
    corpus = FOLDER / "corpus.parquet"
    FOLDER.mkdir()
    table = pa.table(
        {
            "id": [f"doc-{i}" for i in range(8)],
            "year": [2000 + i for i in range(8)],
            "embedding": pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), 4),
        }
    )
    pq.write_table(table, corpus)
    config = BuildConfig(
        corpus=(str(corpus),),
        embedding_column="embedding",
        id_column="id",
        keep=("year",),
        k=2,
        whiten="whitening",
        out=str(FOLDER / "index"),
        store=str(FOLDER / "store"),
    )
    build_index(config)
    for lock in FOLDER.rglob(".lock"):
        lock.unlink()
    shutil.move(FOLDER, FINAL)


if __name__ == "__main__":
    main()
