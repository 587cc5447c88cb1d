"""A build on a cluster beside one on this machine: the same result, what it costs, how it grows.

Run ``python -m benchmarks.cluster equal|overhead|empty WORK_FOLDER [ROUNDS]``. The cluster is of
several raylets of Ray on this machine, on loopback. ``equal`` needs the evaluation data.

- ``equal``: Wikinews by embedding column, and 20,000 rows of it by MiniLM, built both ways.
- ``overhead``: shards of about a minute, encoded by this machine and by one worker with all its
  cores, whole processes by turns.
- ``empty``: 10,000 and 100,000 shards of a row each, of which one in a thousand holds an embedding:
  planned, handed out, remembered, summed and indexed; seconds and memory of the driver.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.local_cluster import Cluster
from benchmarks.results_file import data_folder, write
from whiten_index import BuildConfig, build_index
from whiten_index.index.factory import inner_of
from whiten_index.index.library import load_faiss
from whiten_index.pipeline.encode import encode_corpus
from whiten_index.pipeline.publish import BuildReport
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.whitening.moments import Moments

TEXT_ROWS, MINUTE_ROWS, SHARDS = 20_000, 25_000, 4
EMPTY = (10_000, 100_000)
_WIKINEWS = "sentences/wikinews_en.parquet"
_DIM = 8


def equal(work: Path) -> Iterator[dict[str, Any]]:
    """Build both ways, from an embedding column and from texts, and compare all there is."""
    column = _column(work)
    texts = data_folder() / _WIKINEWS
    cluster = Cluster(work / "nodes", nodes=2)
    try:
        for kind, options in (
            ("column", {"corpus": (str(column),), "embedding_column": "embedding"}),
            (
                "texts",
                {"corpus": (str(texts),), "text_columns": ("text",), "limit": TEXT_ROWS,
                 "shard_rows": 2_048, "factory": "IVF256,Flat"},
            ),
        ):  # fmt: skip
            reports = {}
            for name, where in (("here", {}), ("there", _on(cluster))):
                out = work / f"{kind}-{name}"
                shutil.rmtree(out, ignore_errors=True)
                config = BuildConfig(out=str(out), k=128, whiten="whitening", **options, **where)
                reports[name] = build_index(config)
            yield {"kind": kind, **_compared(reports["here"], reports["there"])}
    finally:
        cluster.stop()


def _on(cluster: Cluster) -> dict[str, Any]:
    return {"runner": "ray", "address": cluster.address}


def _column(work: Path) -> Path:
    """Write the embeddings of Wikinews as a column, encoded once."""
    path = work / "column.parquet"
    if path.exists():
        return path
    config = BuildConfig(
        corpus=(str(data_folder() / _WIKINEWS),), text_columns=("text",), store=str(work / "store")
    )
    report = encode_corpus(config)
    with pq.ParquetWriter(path, pa.schema([("embedding", pa.list_(pa.float16(), 384))])) as writer:
        for part in report.record.parts:
            rows = report.store.embeddings(part)[:].astype(np.float16)
            array = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), rows.shape[1])
            writer.write_table(pa.table({"embedding": array}))
    return path


def _compared(here: BuildReport, there: BuildReport) -> dict[str, Any]:
    folders = [Path(each.out) / "versions" / each.version for each in (here, there)]
    moments = [Moments.load(folder / "moments.safetensors") for folder in folders]
    scatters = [each.scatter for each in moments]
    index = [(folder / "index.faiss").read_bytes() for folder in folders]
    documents = [(folder / "documents.arrow").read_bytes() for folder in folders]
    return {
        "rows": here.encoded.record.rows,
        "factory": here.manifest["factory"]["built"],
        "same_shards": here.encoded.record.fingerprint == there.encoded.record.fingerprint,
        "same_ids": documents[0] == documents[1],
        "same_index": index[0] == index[1],
        **_index_apart(*(folder / "index.faiss" for folder in folders)),
        "least_cosine": _least_cosine(here.encoded.store, there),
        "moments_apart": float(
            np.linalg.norm(scatters[0] - scatters[1]) / np.linalg.norm(scatters[0])
        ),
        "seconds": {"here": here.encoded.stages.seconds, "there": there.encoded.stages.seconds},
        "train_seconds": there.encoded.stages.seconds.get("train", 0.0),
        "join_seconds": there.encoded.stages.seconds["join"],
        "index_bytes": len(index[1]),
        "runner": there.encoded.executor.to_json(),
    }


def _index_apart(here: Path, there: Path) -> dict[str, float]:
    """Return the least cosine of a row's vectors in two indexes, and the share of equal lists."""
    faiss, vectors, lists = load_faiss(), [], []
    for path in (here, there):
        opened = faiss.read_index(str(path))
        inner = inner_of(opened)
        inner.make_direct_map()
        vectors.append(inner.reconstruct_n(0, inner.ntotal))
        found = np.empty(inner.ntotal, dtype=np.int32)
        for number in range(inner.nlist):
            size = inner.invlists.list_size(number)
            found[faiss.rev_swig_ptr(inner.invlists.get_ids(number), size)] = number
        lists.append(found)
    lengths = np.linalg.norm(vectors[0], axis=1) * np.linalg.norm(vectors[1], axis=1)
    cosines = (vectors[0].astype(np.float64) * vectors[1]).sum(axis=1) / lengths
    return {
        "least_vector_cosine": float(cosines.min()),
        "rows_in_the_same_list": float((lists[0] == lists[1]).mean()),
    }


def _least_cosine(store: EmbeddingStore, there: BuildReport) -> float:
    """Return the least cosine of an embedding with the same row's of the other build."""
    least = 1.0
    for part in there.encoded.record.distinct_parts:
        mine, theirs = (
            each.embeddings(part)[:].astype(np.float64) for each in (store, there.encoded.store)
        )
        lengths = np.linalg.norm(mine, axis=1) * np.linalg.norm(theirs, axis=1)
        least = min(least, float(((mine * theirs).sum(axis=1) / lengths).min()))
    return least


def overhead(work: Path, rounds: int) -> Iterator[dict[str, Any]]:
    """Encode the same shards by this machine and by a worker with all its cores, by turns."""
    cores = os.cpu_count() or 1
    cluster = Cluster(work / "nodes", nodes=1, cpus=cores)
    try:
        for number in range(rounds):
            took = {}
            ways = ("here", "there") if number % 2 == 0 else ("there", "here")
            for name in ways:
                shutil.rmtree(work / "store-overhead", ignore_errors=True)
                where = ["--runner", "ray", "--address", cluster.address]
                took[name] = _encoded(work, where if name == "there" else [])
            ratio = took["there"]["seconds"] / took["here"]["seconds"]
            yield {
                "round": number,
                "shards": SHARDS,
                "rows": SHARDS * MINUTE_ROWS,
                "ratio": ratio,
                "a_shard": took["here"]["encode"] / SHARDS,
                **took,
            }
    finally:
        cluster.stop()


def _encoded(work: Path, where: list[str]) -> dict[str, Any]:
    command = [
        sys.executable, "-c", "from whiten_index.cli import main; main()", "encode",
        str(data_folder() / _WIKINEWS), "--text-column", "text", "--store",
        str(work / "store-overhead"), "--limit", str(SHARDS * MINUTE_ROWS), "--shard-rows",
        str(MINUTE_ROWS), "--device", "cpu", "--json", *where,
    ]  # fmt: skip
    began = time.perf_counter()
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    report = json.loads(ended.stdout)
    return {
        "seconds": time.perf_counter() - began,
        "encode": report["seconds"]["encode"],
        "steps": report["seconds"],
    }


def empty(work: Path) -> Iterator[dict[str, Any]]:
    """Build of shards with nothing in them, each size in a process of its own."""
    cluster = Cluster(work / "nodes", nodes=2)
    try:
        for shards in EMPTY:
            path = _almost_nothing(work, shards)
            out = work / f"empty-{shards}"
            shutil.rmtree(out, ignore_errors=True)
            command = [sys.executable, "-m", "benchmarks.cluster", "one-empty", str(path)]
            ended = subprocess.run(
                [*command, str(out), cluster.address], check=True, capture_output=True, text=True
            )
            yield {"shards": shards, **json.loads(ended.stdout.splitlines()[-1])}
    finally:
        cluster.stop()


def _almost_nothing(work: Path, shards: int) -> Path:
    path = work / f"empty-{shards}.parquet"
    rng = np.random.default_rng(0)
    rows = [
        rng.standard_normal(_DIM).astype(np.float32).tolist() if row % 1_000 == 0 else None
        for row in range(shards)
    ]
    table = pa.table({"embedding": pa.array(rows, pa.list_(pa.float32(), _DIM))})
    pq.write_table(table, path, row_group_size=1_000)
    return path


def _one_empty(corpus: str, out: str, address: str) -> None:
    """Print what a build took as JSON; the body of a process."""
    began = time.perf_counter()
    report = build_index(
        BuildConfig(
            corpus=(corpus,), out=out, embedding_column="embedding", shard_rows=1, whiten="pca",
            k=2, factory="Flat", runner="ray", address=address,
        )
    )  # fmt: skip
    found = {
        "seconds": time.perf_counter() - began,
        "driver_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "stages": report.encoded.stages.seconds,
        "read": report.encoded.counts.read,
        "rows": report.encoded.record.rows,
    }
    print(json.dumps(found))


def main() -> None:
    """Run what the command line names."""
    what = sys.argv[1] if len(sys.argv) > 1 else ""
    if what == "one-empty":
        _one_empty(*sys.argv[2:5])
        return
    if what not in ("equal", "overhead", "empty") or len(sys.argv) < 3:
        raise SystemExit(__doc__)
    work = Path(sys.argv[2])
    work.mkdir(parents=True, exist_ok=True)
    if what == "overhead":
        rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 3
        print(write("cluster_overhead", overhead(work, rounds)))
    else:
        print(write(f"cluster_{what}", {"equal": equal, "empty": empty}[what](work)))


if __name__ == "__main__":
    main()
