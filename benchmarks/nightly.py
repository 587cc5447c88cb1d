"""What a nightly update costs, and how far it is from a build from scratch.

Run ``python -m benchmarks.nightly night WORK`` (50,000 Wikinews sentences encoded by MiniLM: one
night on which 1 % of the rows are changed, 0.5 % new and 0.5 % deleted) or ``… nights WORK`` (all
237,766, from a column of embeddings, thirty such nights). Both need ``WHITEN_INDEX_DATA``; each
command that is timed is a process of its own. ``night`` times the update and the build with the
machine to themselves.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.results_file import data_folder, write
from whiten_index import BuildConfig, Moments, open_index
from whiten_index.pipeline.encode import encode_corpus
from whiten_index.store.sampling import CorpusEmbeddings

ROWS, NIGHTS = 50_000, 30
CHANGED, NEW, DELETED = 0.01, 0.005, 0.005
MODEL, K = "all-MiniLM-L6-v2", 128
ENCODER = ("--model", MODEL, "--pooling", "mean", "--max-length", "128")
TRANSFORM = ("--whiten", "whitening", "--exponent", "0.25", "--k", str(K))
_BLOCK = 8192
_STORED = ("segments", "digests", "rows")
_COMMAND = "from whiten_index.cli import main; main()"


def night(work: Path) -> list[dict[str, Any]]:
    """Measure one night of texts."""
    sentences = pq.read_table(data_folder() / "sentences/wikinews_en.parquet")["text"]
    texts = sentences.slice(0, 2 * ROWS).to_pylist()
    rng = np.random.default_rng(0)
    before = {row: texts[row] for row in range(ROWS)}
    after = _next(before, rng, lambda used: texts[ROWS + used])
    corpus = work / "corpus"
    fresh = ("build", corpus, *_texts(), *ENCODER, *TRANSFORM)
    _write_texts(corpus, before)
    built = _timed(*fresh, "--out", work / "index")
    _write_texts(corpus, after)
    updated = _timed("update", work / "index")
    rows = [
        {"figure": "night", "what": "build", **built},
        {"figure": "night", "what": "update", "kept": True, **updated},
    ]
    # A fresh build of the new corpus, and an update that fits again, for comparison.
    _timed(*fresh, "--out", work / "fresh")
    refitted = _timed("update", work / "index", "--refit", "always")
    rows.append({"figure": "night", "what": "refit", **refitted})
    rows.append({"figure": "equal", **compare(work / "index", work / "fresh")})
    return rows


def nights(work: Path) -> list[dict[str, Any]]:
    """Measure thirty nights of embeddings, then what they come to."""
    embeddings = _wikinews_embeddings(work)
    rng = np.random.default_rng(0)
    rows = {row: embeddings[row] for row in range(len(embeddings))}
    corpus = work / "corpus"
    fresh = ("build", corpus, "--embedding-column", "embedding", "--id-column", "id", *TRANSFORM)
    _write_embeddings(corpus, rows)
    found = [
        {"figure": "nights", "night": 0, "what": "build", **_timed(*fresh, "--out", work / "index")}
    ]
    for number in range(1, NIGHTS + 1):
        rows = _next(rows, rng, lambda _: _between(embeddings, rng))
        _write_embeddings(corpus, rows)
        done = _timed("update", work / "index")
        found.append({"figure": "nights", "night": number, "what": "update", **done})
        print(json.dumps(found[-1]), flush=True)
    refitted = _timed("update", work / "index", "--refit", "always")
    found.append({"figure": "nights", "night": NIGHTS, "what": "refit", **refitted})
    built = _timed(*fresh, "--out", work / "fresh")
    found.append({"figure": "nights", "night": NIGHTS, "what": "fresh build", **built})
    found.append({"figure": "equal after nights", **compare(work / "index", work / "fresh")})
    sizes = {
        name: _bytes(work / "index" / "store", name) for name in ("segments", "digests", "rows")
    }
    found.append({"figure": "store", "when": "after nights", **sizes})
    gc = ("gc", work / "index/store", "--keep-days", "0")
    for command in (("prune", work / "index", "--keep", "1"), gc):
        done = _timed(*command)
        found.append({"figure": "upkeep", "what": command[0], **done})
    done = _timed("compact", work / "index/store")
    found.append({"figure": "upkeep", "what": "compact", **done})
    _timed(*gc)
    sizes = {
        name: _bytes(work / "index" / "store", name) for name in ("segments", "digests", "rows")
    }
    found.append({"figure": "store", "when": "after upkeep", **sizes})
    found.append({"figure": "equal after upkeep", **compare(work / "index", work / "fresh")})
    return found


def compare(index: Path, fresh: Path) -> dict[str, Any]:
    """Return how far two indexes of one corpus are apart: ids, vectors, moments."""
    ours, theirs = (open_index(path).bundle for path in (index, fresh))
    rows = range(len(ours))
    same = len(ours) == len(theirs) and ours.documents.ids(rows) == theirs.documents.ids(rows)
    left, right = (_embeddings(path) for path in (index, fresh))
    least = 1.0
    for start in range(0, len(ours), _BLOCK):
        part = slice(start, start + _BLOCK)
        one = ours.whitening.apply(left[part])
        two = theirs.whitening.apply(right[part])
        lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(two, axis=1)
        # Signs of directions are settled by a rule, so that vectors compare as they are.
        least = min(least, float(((one * two).sum(axis=1) / lengths).min()))
    mine, other = (Moments.load(bundle.folder / "moments.safetensors") for bundle in (ours, theirs))
    covariances = [moments.covariance() for moments in (mine, other)]
    apart = np.linalg.norm(covariances[0] - covariances[1]) / np.linalg.norm(covariances[1])
    direct = Moments.of(left).covariance()
    exact = np.linalg.norm(covariances[0] - direct) / np.linalg.norm(direct)
    return {
        "rows": len(ours),
        "same_ids_in_order": same,
        "least_cosine": least,
        "covariance_apart": float(apart),
        "mean_apart": float(np.linalg.norm(mine.mean - other.mean) / np.linalg.norm(other.mean)),
        "covariance_from_recomputed": float(exact),
        "embeddings_identical": float(np.mean((left == right).all(axis=1))),
    }


def _embeddings(index: Path) -> NDArray[np.floating]:
    """Return the raw embeddings (n, d) of the rows of an index, in its order."""
    reranker = open_index(index, rerank=1).reranker
    assert reranker is not None
    rows = np.arange(len(open_index(index).bundle))
    return np.concatenate(
        [reranker.embeddings(rows[i : i + _BLOCK]) for i in range(0, len(rows), _BLOCK)]
    )


def _next(rows: Mapping[int, Any], rng: np.random.Generator, fresh: Any) -> dict[int, Any]:
    """Return the corpus of the next night: rows changed and deleted at random, new ones behind."""
    count, ids = len(rows), np.array(list(rows))
    touched = rng.permutation(ids)[: round((CHANGED + DELETED) * count)]
    changed, deleted = np.split(touched, [round(CHANGED * count)])
    after, used = dict(rows), 0
    for row in changed.tolist():
        after[row] = fresh(used)
        used += 1
    for row in deleted.tolist():
        del after[row]
    first = int(ids.max()) + 1
    for row in range(first, first + round(NEW * count)):
        after[row] = fresh(used)
        used += 1
    return after


def _between(embeddings: NDArray[np.float16], rng: np.random.Generator) -> NDArray[np.float16]:
    one, other = embeddings[rng.integers(len(embeddings), size=2)].astype(np.float32)
    share = rng.uniform(0.6, 1)
    middle: NDArray[np.float16] = (share * one + (1 - share) * other).astype(np.float16)
    return middle


def _wikinews_embeddings(work: Path) -> NDArray[np.float16]:
    """Return MiniLM's embeddings of all Wikinews sentences (237,766, 384), encoded once."""
    config = BuildConfig(
        corpus=(str(data_folder() / "sentences/wikinews_en.parquet"),),
        text_columns=("text",),
        keep=("text",),
        pooling="mean",
        max_length=256,
        store=os.environ.get("WHITEN_INDEX_STORE", str(work / "wikinews")),
    )
    report = encode_corpus(config)
    return np.concatenate(list(CorpusEmbeddings(report.store, report.record).blocks())).astype(
        np.float16
    )


def _texts() -> tuple[str, ...]:
    return "--text-column", "text", "--id-column", "id"


def _write_texts(path: Path, rows: Mapping[int, str]) -> None:
    table = pa.table({"id": pa.array(list(rows), pa.int64()), "text": list(rows.values())})
    _replace(path, table)


def _write_embeddings(path: Path, rows: Mapping[int, NDArray[np.float16]]) -> None:
    flat = np.concatenate(list(rows.values()))
    column = pa.FixedSizeListArray.from_arrays(pa.array(flat), len(flat) // len(rows))
    _replace(path, pa.table({"id": pa.array(list(rows), pa.int64()), "embedding": column}))


def _replace(folder: Path, table: pa.Table) -> None:
    """Write a corpus of one file, as an upstream job does each night."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pq.write_table(table, folder / "rows.parquet", row_group_size=20_000)


def _timed(*arguments: Any) -> dict[str, Any]:
    """Run a command; return its wall and CPU seconds, and what it reports."""
    command = [sys.executable, "-c", _COMMAND, *map(str, arguments), "--json"]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    report = json.loads(done.stdout)
    names = ("rows", "counts", "decision", "drift", "seconds", "files")
    kept = {name: report[name] for name in names if name in report}
    return {"wall_seconds": wall, "cpu_seconds": cpu, "report": kept}


def _bytes(store: Path, name: str) -> dict[str, int]:
    files = [path for path in store.glob(f"*/{name}/**/*") if path.is_file()]
    folders = list(store.glob(f"*/{name}/*"))
    return {"entries": len(folders), "bytes": sum(path.stat().st_size for path in files)}


def main(arguments: Sequence[str]) -> int:
    """Measure, and write ``results/nightly_<what>.jsonl``."""
    if len(arguments) != 2 or arguments[0] not in ("night", "nights"):
        print(__doc__, file=sys.stderr)
        return 2
    what, work = arguments[0], Path(arguments[1])
    work.mkdir(parents=True, exist_ok=True)
    print(write(f"nightly_{what}", night(work) if what == "night" else nights(work)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
