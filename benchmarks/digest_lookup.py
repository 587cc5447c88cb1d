"""What it takes to know which rows of a corpus a store has: seconds, memory, lookups a second.

Run ``python -m benchmarks.digest_lookup [ROWS]``; it holds the digests of 10 million rows.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results_file import write
from whiten_index.store.digest_index import DigestIndex

_SEGMENT_ROWS, _LOOKUPS, _ROUNDS = 16_384, 1_000_000, 5


def measure(rows: int) -> Iterator[dict[str, Any]]:
    """Yield the figures of one index of ``rows`` digests; half of the lookups find a row."""
    rng = np.random.default_rng(0)
    digests = rng.integers(0, 256, (rows, 16), dtype=np.uint8)
    known = digests[rng.integers(0, rows, _LOOKUPS // 2)]
    asked = np.concatenate([known, rng.integers(0, 256, known.shape, dtype=np.uint8)])
    starts = range(0, rows, _SEGMENT_ROWS)

    def build() -> DigestIndex:
        return DigestIndex((f"{i}", digests[i : i + _SEGMENT_ROWS].copy()) for i in starts)

    before = _resident()
    index, seconds = _timed(build)
    gc.collect()
    held = _resident() - before
    finds = []
    for _ in range(_ROUNDS):
        found, spent = _timed(lambda: index.find(asked))
        finds.append(spent)
    assert found.known.sum() == len(known)
    yield {
        "benchmark": "digest_lookup",
        "rows": rows,
        "build_cpu_seconds": seconds,
        "resident_bytes": held,
        "lookups": len(asked),
        "find_cpu_seconds": finds,
    }


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    return work(), time.process_time() - start


def _resident() -> int:
    """Return the bytes of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


if __name__ == "__main__":
    print(write("digest_lookup", measure(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000)))
