"""Searches a second by readers in other processes while versions are published and pruned.

Run ``python -m benchmarks.readers FOLDER [ROWS DIM READERS VERSIONS]``, FOLDER being new.

Row i of version v is the document ``v·STEP + i``, and the rows of a version are those of the one
before, moved on by one. So the nearest row of point i tells a version, and so does its id: an
answer with ids of one version and vectors of another shows.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.results_file import write
from whiten_index import BuildConfig, build_index, open_index
from whiten_index.search.search_index import Hit, SearchIndex
from whiten_index.versions.retention import prune

STEP = 1_000_000
TOP_K, RELOADED_EVERY, OPENED_EVERY = 5, 20, 500


def points(rows: int, dim: int) -> NDArray[np.float32]:
    """Return unit vectors (rows, dim), far from each other."""
    found = np.random.default_rng(11).standard_normal((rows, dim))
    unit: NDArray[np.float32] = (found / np.linalg.norm(found, axis=1, keepdims=True)).astype("f4")
    return unit


def publish(root: Path, version: int, found: NDArray[np.float32]) -> str:
    """Build and publish a version below ``root``; return its name."""
    root.mkdir(parents=True, exist_ok=True)
    ids = version * STEP + np.arange(len(found))
    table = pa.table({"id": ids, "embedding": list(np.roll(found, version, axis=0))})
    pq.write_table(table, root / "c.parquet")
    config = BuildConfig(
        corpus=(str(root / "c.parquet"),),
        out=str(root / "out"),
        embedding_column="embedding",
        id_column="id",
        whiten="none",
    )
    return build_index(config).version


def version_of(point: int, hits: Sequence[Hit], rows: int) -> int:
    """Return the version that answered with these hits.

    Raises:
        AssertionError: its ids are not those of its vectors.
    """
    (version,) = {int(hit.id) // STEP for hit in hits}
    for hit in hits:
        assert hit.id == version * STEP + hit.row, f"row {hit.row} has the id {hit.id}"
    nearest = (point + version) % rows
    assert hits[0].row == nearest, f"{hits[0].row} is nearest, and in {version} it is {nearest}"
    assert abs(hits[0].score - 1) < 1e-5, f"with the score {hits[0].score}"
    return version


def read(out: Path, found: NDArray[np.float32], *, mapped: bool) -> dict[str, Any]:
    """Search until standard input ends, following what is published; return what was seen."""
    ended = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    random = np.random.default_rng(mapped)
    index: SearchIndex = open_index(out, mapped=mapped, threads=1)
    seen: list[int] = []
    searches = reloads = 0
    print("ready", flush=True)
    start = time.perf_counter()
    while not ended.is_set():
        if searches % OPENED_EVERY == OPENED_EVERY - 1:
            index = open_index(out, mapped=mapped, threads=1)
        elif searches % RELOADED_EVERY == RELOADED_EVERY - 1:
            reloads += index.reload()
        point = int(random.integers(len(found)))
        (hits,) = index.search_embeddings(found[point : point + 1], top_k=TOP_K)
        version = version_of(point, hits, len(found))
        if not seen or seen[-1] != version:
            seen.append(version)
        searches += 1
    seconds = time.perf_counter() - start
    return {"searches": searches, "seconds": seconds, "reloads": reloads, "versions": seen}


def measure(
    root: Path, *, rows: int = 10_000, dim: int = 64, readers: int = 2, versions: int = 50
) -> dict[str, Any]:
    """Publish versions while readers search, keeping two; return the figures of all of them.

    Raises:
        RuntimeError: a reader met an error, or an answer of two versions.
    """
    found = points(rows, dim)
    publish(root, 0, found)
    home = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-m", "benchmarks.readers", "--read", str((root / "out").absolute())]
    processes = [
        subprocess.Popen(
            [*command, str(rows), str(dim), str(number % 2)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=home,
        )
        for number in range(readers)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        start = time.perf_counter()
        for version in range(1, versions + 1):
            publish(root, version, found)
            prune(root / "out", keep=2)
        seconds = time.perf_counter() - start
        with ThreadPoolExecutor(readers) as pool:
            told = [text for text, _ in pool.map(lambda process: process.communicate(), processes)]
    finally:
        for process in processes:
            process.kill()
    failed = [process.returncode for process in processes if process.returncode]
    if failed:
        raise RuntimeError(f"{len(failed)} of {readers} readers failed; see standard error")
    return {
        "benchmark": "readers",
        "rows": rows,
        "dim": dim,
        "published": versions,
        "publishing_seconds": seconds,
        "readers": [json.loads(text) for text in told],
    }


def lines(root: Path, **sizes: int) -> Iterator[dict[str, Any]]:
    """Yield the figures, with the searches a second of all readers together."""
    found = measure(root, **sizes)
    rates = [each["searches"] / each["seconds"] for each in found["readers"]]
    yield {**found, "searches_per_second": sum(rates)}


if __name__ == "__main__":
    if sys.argv[1] == "--read":
        folder, *numbers = sys.argv[2:]
        size, width, by_map = map(int, numbers)
        print(json.dumps(read(Path(folder), points(size, width), mapped=bool(by_map))))
    else:
        folder, *numbers = sys.argv[1:]
        names = ("rows", "dim", "readers", "versions")
        given = dict(zip(names, map(int, numbers), strict=False))
        print(write("readers", lines(Path(folder), **given)))
