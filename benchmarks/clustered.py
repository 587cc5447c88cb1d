"""Clustered rows as encoders give them: a spectrum that falls, a mean, many small clusters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

DIM, CLUSTERS = 768, 1000
ID, EMBEDDING = "id", "embedding"
_GROUP_ROWS = 16_384
# Of a row's variance, what its cluster explains.
_SHARE_OF_CLUSTERS = 0.5


def clustered_rows(
    rows: int, *, dim: int = DIM, clusters: int = CLUSTERS, seed: int = 0
) -> Iterator[NDArray[np.float32]]:
    """Yield float32 rows (m, dim) in blocks, ``rows`` in all; the first n are the same for any n.

    The variance of direction i falls as 1/i, the mean is as long as the spread, and each row lies
    around one of the cluster centres.
    """
    rng = np.random.default_rng(seed)
    scale = np.arange(1, dim + 1) ** -0.5
    mean = rng.standard_normal(dim) * scale
    centres = rng.standard_normal((clusters, dim)) * scale * _SHARE_OF_CLUSTERS**0.5
    around = (scale * (1 - _SHARE_OF_CLUSTERS) ** 0.5).astype(np.float32)
    for start in range(0, rows, _GROUP_ROWS):
        of_group = np.random.default_rng((seed, start))
        members = of_group.integers(clusters, size=_GROUP_ROWS)
        noise = of_group.standard_normal((_GROUP_ROWS, dim), dtype=np.float32) * around
        block = (mean + centres)[members].astype(np.float32) + noise
        yield block[: rows - start]


def write_clustered(path: Path, rows: int, *, dim: int = DIM) -> None:
    """Write clustered rows to a Parquet file of two columns, the id and the embedding."""
    schema = pa.schema([(ID, pa.int64()), (EMBEDDING, pa.list_(pa.float32(), dim))])
    start = 0
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        for block in clustered_rows(rows, dim=dim):
            values = pa.FixedSizeListArray.from_arrays(pa.array(block.ravel()), dim)
            ids = pa.array(np.arange(start, start + len(block)))
            writer.write_table(pa.table([ids, values], schema=schema))
            start += len(block)
