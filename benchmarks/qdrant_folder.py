"""Rows of an index pushed to a folder of Qdrant's client, beside the client's own upload, by turns.

Run ``python -m benchmarks.qdrant_folder``. The folder is the client's own engine, which searches
with numpy and keeps every point in SQLite; Qdrant's server is not measured.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from qdrant_client import QdrantClient, models

from benchmarks.results_file import write
from whiten_index import BuildConfig, build_index
from whiten_index.vectordb.push import push_index
from whiten_index.vectordb.push_config import PushConfig

ROWS, DIM, K, ROUNDS, QUERIES = (500, 2_000), 384, 128, 3, 50


def main() -> int:
    """Measure, and write the results."""
    with tempfile.TemporaryDirectory() as work:
        print(write("qdrant_folder", rates(Path(work))))
    return 0


def rates(work: Path) -> Iterator[dict[str, Any]]:
    """Yield rows a second of both ways and milliseconds of a query, for each number of rows."""
    for rows in ROWS:
        index = built(work / str(rows), rows)
        found: dict[str, list[float]] = {"push": [], "upload_collection": []}
        milliseconds = list[float]()
        for number in range(ROUNDS):
            folder = work / f"{rows}-{number}"
            for way in list(found)[:: 1 if number % 2 else -1]:
                start = time.perf_counter()
                if way == "push":
                    push_index(PushConfig(index=str(index), to=f"qdrant://{folder}", table="rows"))
                else:
                    upload(rows, folder.with_suffix(".own"))
                found[way].append(rows / (time.perf_counter() - start))
            milliseconds += searched(folder)
        yield {
            "rows": rows,
            "k": K,
            "client": version("qdrant-client"),
            "rounds": found,
            "milliseconds": statistics.median(milliseconds),
        }


def built(folder: Path, rows: int) -> Path:
    """Return an index of random rows."""
    folder.mkdir()
    embeddings = np.random.default_rng(0).normal(size=(rows, DIM)).astype(np.float32)
    table = pa.table({"id": pa.array(range(rows)), "embedding": list(embeddings)})
    pq.write_table(table, folder / "rows.parquet")
    build_index(
        BuildConfig(
            corpus=(str(folder / "rows.parquet"),), embedding_column="embedding", id_column="id",
            out=str(folder / "index"), k=K,
        )
    )  # fmt: skip
    return folder / "index"


def upload(rows: int, folder: Path) -> None:
    """Send as many random vectors by the client's own way."""
    vectors = np.random.default_rng(2).normal(size=(rows, K)).astype(np.float32)
    client = QdrantClient(path=str(folder))
    params = models.VectorParams(size=vectors.shape[1], distance=models.Distance.COSINE)
    client.create_collection("rows", vectors_config=params)
    client.upload_collection("rows", vectors=vectors, ids=range(len(vectors)), wait=True)
    client.close()


def searched(folder: Path) -> list[float]:
    """Return the milliseconds of single queries."""
    client, taken = QdrantClient(path=str(folder)), list[float]()
    for query in np.random.default_rng(1).normal(size=(QUERIES, K)).astype(np.float32):
        start = time.perf_counter()
        client.query_points("rows", query, limit=10)
        taken.append(1e3 * (time.perf_counter() - start))
    client.close()
    return taken


if __name__ == "__main__":
    sys.exit(main())
