"""Building and searching an index on a GPU beside the CPU, through the public Python API.

Run ``python -m benchmarks.gpu_index [ROWS]`` on a machine with a CUDA device and FAISS for GPUs.
Rows are clustered, as ``benchmarks.clustered`` makes them; every index holds the same 128 dims.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.clustered import EMBEDDING, ID, clustered_rows, write_clustered
from benchmarks.results_file import write
from whiten_index import BuildConfig, build_index, open_index
from whiten_index.search.search_index import SearchIndex

_ROWS, _DIM, _K = 300_000, 256, 128
_FACTORIES = ("Flat", "IVF2048,Flat", "IVF2048,SQ8", "IVF2048,PQ32")
_QUERIES, _TOP_K, _ROUNDS = 1_000, 10, 5
_Device = Literal["cpu", "gpu"]
_DEVICES: tuple[_Device, ...] = ("cpu", "gpu")


def measure(rows: int) -> Iterator[dict[str, Any]]:
    """Yield for each factory and device the seconds of its stages and of a batch of queries."""
    queries = np.concatenate([*clustered_rows(rows + _QUERIES, dim=_DIM)])[-_QUERIES:]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_clustered(work / "c.parquet", rows, dim=_DIM)
        exact: NDArray[np.int64] | None = None
        for factory in _FACTORIES:
            for device in _DEVICES:
                seconds, index = _built(work, factory, device)
                taken, found = _searched(index, queries)
                exact = found if exact is None else exact
                yield {
                    "factory": factory,
                    "device": device,
                    "device_name": _name(device),
                    "rows": rows,
                    "k": _K,
                    "stages": seconds,
                    "queries": _QUERIES,
                    "search_seconds": taken,
                    "queries_per_second": _QUERIES / statistics.median(taken),
                    "recall@10": _shared(found, exact),
                }


def _built(work: Path, factory: str, device: _Device) -> tuple[dict[str, float], SearchIndex]:
    out = work / f"{factory}-{device}"
    config = BuildConfig(
        corpus=(str(work / "c.parquet"),), embedding_column=EMBEDDING, id_column=ID,
        store=str(work / "store"), whiten="whitening", k=_K, factory=factory, index_device=device,
        out=str(out),
    )  # fmt: skip
    report = build_index(config)
    return dict(report.encoded.stages.seconds), open_index(out, index_device=device)


def _searched(
    index: SearchIndex, queries: NDArray[np.float32]
) -> tuple[list[float], NDArray[np.int64]]:
    """Return the seconds of each round of all queries at once, the first left out, and the rows."""
    seconds = []
    for _ in range(_ROUNDS + 1):
        began = time.perf_counter()
        _, found = index.bundle.search(queries, _TOP_K)
        seconds.append(time.perf_counter() - began)
    return seconds[1:], found


def _shared(found: NDArray[np.int64], exact: NDArray[np.int64]) -> float:
    pairs = zip(found, exact, strict=True)
    return float(np.mean([len({*a} & {*b}) / _TOP_K for a, b in pairs]))


def _name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "gpu" else "CPU"


if __name__ == "__main__":
    print(write("gpu_index", measure(int(sys.argv[1]) if len(sys.argv) > 1 else _ROWS)))
