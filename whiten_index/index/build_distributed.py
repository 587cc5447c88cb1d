"""Build a FAISS index by workers: one trains it, all code ranges of rows, one joins the codes.

Intermediate results are in a folder next to the index to be, which is removed at the end.
"""

from __future__ import annotations

import collections
import functools
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.atomic import discard, remove_path
from whiten_index.artifacts.files import exists, fsync_path
from whiten_index.distributed.executors import Executor
from whiten_index.distributed.remote_call import remote_call
from whiten_index.index.build_local import (
    CodeReuse,
    IndexBuildResult,
    build_from_codes,
    build_local,
    fill_and_tune,
    separate_rows,
)
from whiten_index.index.choice import IndexPlan
from whiten_index.index.exact import Vectors, exact_neighbours, merged
from whiten_index.index.factory import inner_index, is_graph
from whiten_index.index.library import INDEX, load_faiss, release_memory, write_index
from whiten_index.index.ondisk_ivf import IVF_DATA, PARTS, lists_on_disk
from whiten_index.index.training import require_training_rows, train_index
from whiten_index.index.transforms import EmbeddingReader, VectorSource, rotation_for
from whiten_index.index.tuning import NEIGHBOURS, GroundTruth
from whiten_index.progress import Silent, Stages
from whiten_index.whitening.transform import Whitening

_RANGES, _TRAINED = "ranges", "trained.faiss"
_QUERIES, _HELD_OUT = "queries.npy", "held_out.npy"
_TRIES, _SECONDS_BETWEEN_TRIES = 20, 0.25
_RANGE_ROWS, _MOST_RANGES = 65_536, 2_000


def build_faiss_index(
    embeddings: EmbeddingReader,
    whitening: Whitening,
    plan: IndexPlan,
    stages: Stages,
    folder: Path,
    *,
    reuse: CodeReuse | None = None,
    executor: Executor | None = None,
) -> IndexBuildResult:
    """Write a FAISS index with every row in it, in order, into an existing folder.

    Builds, updates and sweeps all make their indexes here. ``reuse`` is a version with the same
    transform and index, whose codes unchanged rows keep. Workers on other machines need the folder
    on a shared disk.
    """
    if plan.budget is not None:
        # Memory freed by reading and fitting is not to count.
        release_memory()
    inner = inner_index(plan.built, whitening.k)
    rotation = rotation_for(inner, whitening.k, seed=plan.seed)
    vectors = VectorSource(embeddings, whitening, rotation, plan.work_bytes)
    if reuse is not None:
        return build_from_codes(reuse, vectors, plan, stages, folder)
    require_training_rows(inner, plan.built, rows=vectors.rows)
    if executor is not None and executor.remote:
        return build_distributed(vectors, plan, stages, folder, executor)
    return build_local(vectors, plan, stages, folder)


def build_distributed(
    vectors: VectorSource, plan: IndexPlan, stages: Stages, folder: Path, executor: Executor
) -> IndexBuildResult:
    """Build an index by workers that share a disk; see ``build_faiss_index``."""
    parts = folder / _RANGES
    parts.mkdir()
    device, held_out = remote_call(executor, stages, _train, vectors, plan, parts)
    split = vectors.embeddings.split(max(_RANGE_ROWS, vectors.rows // _MOST_RANGES))
    ranges = [(start, replace(vectors, embeddings=some)) for start, some in split]
    with stages.stage("project and add", vectors.rows) as watcher:
        done = executor.map(functools.partial(_code, parts), ranges)
        for (_, some_vectors), _ in zip(ranges, done, strict=True):
            watcher.advance(some_vectors.rows)
    starts = [start for start, _ in ranges]
    result: IndexBuildResult = remote_call(
        executor, stages, _join, vectors, plan, parts, folder, starts, device, held_out
    )
    _remove(parts)
    return result


def _remove(folder: Path) -> None:
    """Remove a folder; a worker that is being ended may still write into it."""
    for _ in range(_TRIES):
        discard(folder)
        if not exists(folder):
            return
        time.sleep(_SECONDS_BETWEEN_TRIES)
    remove_path(folder)


def _train(
    stages: Stages, vectors: VectorSource, plan: IndexPlan, parts: Path
) -> tuple[str, NDArray[np.int64]]:
    """Train the index and write it; return the device of the training, and the rows held out."""
    index, held_out = train_index(vectors, plan, stages)
    write_index(index.on_cpu(), parts / _TRAINED)
    if len(held_out):
        _save(parts / _HELD_OUT, held_out)
        _save(parts / _QUERIES, vectors.at(held_out))
    return index.device, held_out


def _code(parts: Path, rows: tuple[int, VectorSource]) -> None:
    """Write the codes of a range of rows, and the nearest of them to the held-out queries."""
    start, source = rows
    inner = _read_trained(parts)
    blocks = list[NDArray[Any]]()

    def coded() -> Iterator[Vectors]:
        for block in source.blocks(Stages(Silent()), "project"):
            blocks.append(inner.sa_encode(block) if _adds_codes(inner) else block)
            yield block

    vectors, first = coded(), start
    if exists(parts / _QUERIES):
        if is_graph(inner):
            held_out = np.load(parts / _HELD_OUT)
            vectors = (others for others, _ in separate_rows(vectors, held_out - start))
            first -= int(np.searchsorted(held_out, start))
        scores, near = exact_neighbours(vectors, np.load(parts / _QUERIES), NEIGHBOURS)
        _save(_file(parts, start, "scores"), scores)
        _save(_file(parts, start, "rows"), near + np.where(near < 0, 0, first))
    else:
        collections.deque(vectors, maxlen=0)
    # A graph depends on the blocks in which its rows are added.
    _save(_file(parts, start, "lengths"), np.array([len(block) for block in blocks]))
    _save(_file(parts, start, "codes"), np.concatenate(blocks))


def _adds_codes(inner: Any) -> bool:
    """Return whether FAISS can add the codes of vectors instead of the vectors."""
    return isinstance(inner, load_faiss().IndexFlatCodes) or lists_on_disk(inner)


def _join(
    stages: Stages,
    vectors: VectorSource,
    plan: IndexPlan,
    parts: Path,
    folder: Path,
    starts: Sequence[int],
    device: str,
    held_out: NDArray[np.int64],
) -> IndexBuildResult:
    """Join the codes of all ranges in the index, tune and write it."""
    for name in (INDEX, IVF_DATA, PARTS):
        # Left by a worker that died here.
        (folder / name).unlink(missing_ok=True)
    inner, truth = _read_trained(parts), None
    if len(held_out):
        truth = _ground_truth(parts, starts, held_out, unseen=is_graph(inner))
    tuned = fill_and_tune(
        inner,
        _blocks(parts, starts, stages, vectors.rows),
        truth,
        plan,
        stages,
        folder,
        rows=vectors.rows,
        coded=_adds_codes(inner),
    )
    opened = vectors.wrap(inner)
    write_index(opened, folder / INDEX)
    return IndexBuildResult.of(opened, folder, *tuned, device)


def _blocks(
    parts: Path, starts: Sequence[int], stages: Stages, rows: int
) -> Iterator[NDArray[Any]]:
    with stages.stage("join", rows) as watcher:
        for start in starts:
            codes, first = np.load(_file(parts, start, "codes"), mmap_mode="r"), 0
            for length in np.load(_file(parts, start, "lengths")).tolist():
                yield np.array(codes[first : first + length])
                first += length
        watcher.advance(rows)


def _ground_truth(
    parts: Path, starts: Sequence[int], held_out: NDArray[np.int64], *, unseen: bool
) -> GroundTruth:
    queries = np.load(parts / _QUERIES)
    scores = np.empty((len(queries), 0), dtype=np.float32)
    rows = np.empty((len(queries), 0), dtype=np.int64)
    for start in starts:
        more = [np.load(_file(parts, start, name)) for name in ("scores", "rows")]
        scores, rows = merged(scores, rows, more[0], more[1], NEIGHBOURS)
    return GroundTruth.of(queries, scores, rows, held_out, unseen=unseen)


def _file(parts: Path, start: int, name: str) -> Path:
    return parts / f"{start:012d}.{name}.npy"


def _read_trained(parts: Path) -> Any:
    return load_faiss().read_index(str(parts / _TRAINED))


def _save(path: Path, array: NDArray[Any]) -> None:
    """Write an array whole or not at all; of two workers that do the same the first one counts."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    with temporary.open("wb") as file:
        np.save(file, array, allow_pickle=False)
    fsync_path(temporary)
    if not exists(path):
        temporary.replace(path)
    temporary.unlink(missing_ok=True)
