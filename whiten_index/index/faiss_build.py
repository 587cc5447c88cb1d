"""Build a FAISS index, in memory or on disk if the budget has no room for it.

One process does all of it, or workers do: one trains the index, all code ranges of rows, one joins
the codes. Their intermediate results are in a folder next to the index to be.
"""

import functools
import io
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.atomic import discard, remove_path, replacing
from whiten_index.artifacts.files import exists, reading, sha256_file
from whiten_index.distributed.executors import Executor, remote_call
from whiten_index.errors import ArtifactError
from whiten_index.index.choice import IndexPlan, OperatingPoint
from whiten_index.index.codes import remove_rows, reuse_codes
from whiten_index.index.exact import Vectors, exact_neighbours, merged
from whiten_index.index.factory import inner_index, inner_of, is_graph
from whiten_index.index.gpu import DeviceIndex, GpuMemoryError
from whiten_index.index.library import INDEX, load_faiss, release_memory, write_index
from whiten_index.index.ondisk_ivf import IVF_DATA, PARTS, OnDiskLists, lists_on_disk
from whiten_index.index.sizes import IndexBytes, measured_bytes
from whiten_index.index.training import require_training_rows, train_index
from whiten_index.index.transforms import VectorSource, largest_number, rotation_for
from whiten_index.index.tuning import NEIGHBOURS, GroundTruth, tune_to_recall
from whiten_index.progress import Progress, Stages
from whiten_index.store.sampling import CorpusEmbeddings
from whiten_index.whitening.transform import Whitening

_RANGES, _TRAINED = "ranges", "trained.faiss"
_TRIES, _SECONDS_BETWEEN_TRIES = 20, 0.25
_RANGE_ROWS, _MOST_RANGES = 65_536, 2_000
# Of lists that wait to be joined, without a budget.
_LISTS_BYTES = 2 << 30


@dataclass(frozen=True)
class IndexBuildResult:
    """Facts about an index that is written, and no longer held in memory."""

    sizes: IndexBytes  # bytes by their use
    file_bytes: int  # of its files together
    tuned: OperatingPoint  # its setting and index recall
    rerank: int | None  # candidates a query to score again from the store, None for its own scores
    device: str  # gpu or cpu, where it was made
    mapped: bool  # whether its lists are in a file of their own, which is mapped for search

    @classmethod
    def write(
        cls, index: Any, folder: Path, tuned: OperatingPoint, rerank: int | None, device: str
    ) -> "IndexBuildResult":
        """Write an index, and collect its facts and those of its files."""
        write_index(index, folder / INDEX)
        files = [path for path in (folder / INDEX, folder / IVF_DATA) if exists(path)]
        return cls(
            sizes=measured_bytes(index),
            file_bytes=sum(path.stat().st_size for path in files),
            tuned=tuned,
            rerank=rerank,
            device=device,
            mapped=len(files) > 1,
        )


@dataclass(frozen=True, eq=False)
class CodeReuse:
    """A published index whose codes are reused as they are."""

    open: Callable[[], Any]  # opens the index, mapped
    old_rows: NDArray[np.int64]  # (n,) the row there of each row of the new index, −1 for a new row
    tuned: OperatingPoint  # its setting and index recall
    rerank: int | None  # candidates a query to score again from the store, None for its own scores


def build_faiss_index(
    embeddings: CorpusEmbeddings,
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
    vectors = VectorSource(embeddings, whitening, rotation, plan.work_bytes, largest_number(inner))
    if reuse is not None:
        return build_from_codes(reuse, vectors, plan, stages, folder)
    require_training_rows(inner, plan.built, rows=vectors.rows)
    # FAISS adds codes in place of vectors to these.
    coded = isinstance(inner, load_faiss().IndexFlatCodes) or lists_on_disk(inner)

    def build(plan: IndexPlan) -> IndexBuildResult:
        if executor is None or not executor.remote:
            return build_local(stages, vectors, plan, folder)
        if coded:
            return build_distributed(vectors, plan, stages, folder, executor=executor)
        made: IndexBuildResult = remote_call(executor, stages, build_local, vectors, plan, folder)
        return made

    try:
        return build(plan)
    except GpuMemoryError:
        if plan.device == "gpu":
            raise
        stages.watcher.note("note: the index is made on the CPU: the GPU's memory ran out")
        remove_path(folder / _RANGES)
        return build(replace(plan, device="cpu"))


def build_local(
    stages: Stages, vectors: VectorSource, plan: IndexPlan, folder: Path
) -> IndexBuildResult:
    """Train an index, fill it with all rows in order, tune it, and write it into a folder."""
    index, held_out = train_index(vectors, plan, stages)
    empty = index.on_cpu()
    if _on_disk(empty, plan):
        index = DeviceIndex(empty, "cpu")
    # This comes before the index is filled, so that memory holds one or the other.
    truth = find_ground_truth(vectors, held_out, stages, unseen=is_graph(empty))
    with index.working() as inner:
        blocks = vectors.blocks(stages, "project and add")
        tuned = fill_and_tune(inner, blocks, truth, plan, stages, folder, rows=vectors.rows)
    return IndexBuildResult.write(vectors.wrap(index.on_cpu()), folder, *tuned, index.device)


def build_from_codes(
    reuse: CodeReuse, vectors: VectorSource, plan: IndexPlan, stages: Stages, folder: Path
) -> IndexBuildResult:
    """Write an index of reused codes and of new rows, in memory or on disk as any other."""
    # Both mapped, so that no more of the old one is held than what is being copied.
    old, new = reuse.open(), reuse.open()
    remove_rows(new)
    new_rows = np.flatnonzero(reuse.old_rows < 0)
    blocks = vectors.blocks(stages, "project and add", rows=new_rows, index=new)
    inner = inner_of(new)
    if _on_disk(inner, plan):
        with OnDiskLists(inner, folder, most=plan.list_bytes or _LISTS_BYTES) as lists:
            reuse_codes(old, new, reuse.old_rows, blocks, on_disk=lists)
            lists.join(keep=not plan.fits_in_memory())
    else:
        reuse_codes(old, new, reuse.old_rows, blocks)
    return IndexBuildResult.write(new, folder, reuse.tuned, reuse.rerank, "cpu")


def find_ground_truth(
    vectors: VectorSource, held_out: NDArray[np.int64], stages: Stages, *, unseen: bool
) -> GroundTruth | None:
    """Return the held-out rows (q,) with their exact neighbours, None without any.

    ``unseen`` leaves the rows out of their neighbours, because the index is tuned without them.
    """
    if not len(held_out):
        return None
    queries = vectors.at(held_out)
    blocks = vectors.blocks(stages, "exact neighbours")
    if unseen:
        blocks = (others for others, _ in separate_rows(blocks, held_out))
    near = exact_neighbours(blocks, queries, NEIGHBOURS)
    return GroundTruth.of(queries, *near, held_out, unseen=unseen)


def separate_rows(
    blocks: Iterable[NDArray[Any]], rows: NDArray[np.int64]
) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Yield of each block the other rows, and those of the given numbers."""
    start = 0
    for block in blocks:
        given = np.isin(np.arange(start, start + len(block)), rows)
        yield block[~given], block[given]
        start += len(block)


def _on_disk(inner: Any, plan: IndexPlan) -> bool:
    return lists_on_disk(inner) and not plan.fits_in_memory(grows=True)


def fill_and_tune(
    inner: Any,
    blocks: Iterable[NDArray[Any]],
    truth: GroundTruth | None,
    plan: IndexPlan,
    stages: Stages,
    folder: Path,
    *,
    rows: int,
    coded: bool = False,
) -> tuple[OperatingPoint, int | None]:
    """Add all rows to a trained index and tune it.

    A row of a graph is found by its own links, and so are its neighbours, which makes it an easier
    query than one from outside (recall .981 for .958). Held-out rows are therefore added to a graph
    after it is tuned, and then moved to their places.

    Blocks are vectors (m, k), or if ``coded`` codes of ``sa_encode``, whose lists are joined on
    disk. The result is that of ``tune_to_recall``.
    """
    late = list[NDArray[np.float32]]()
    if truth is not None and len(truth.late):
        for block, held in separate_rows(blocks, truth.late):
            inner.add(block)
            late.append(held)
    elif _on_disk(inner, plan) or (coded and lists_on_disk(inner)):
        with OnDiskLists(inner, folder, most=plan.list_bytes or _LISTS_BYTES) as lists:
            for block in blocks:
                lists.add_codes(block if coded else inner.sa_encode(block))
            lists.join(keep=not plan.fits_in_memory())
    else:
        if isinstance(inner, load_faiss().IndexFlatCodes):
            # Reserve the memory: vectors that grow by doubling hold twice their bytes at times.
            inner.codes.resize(rows * int(inner.code_size))
            inner.codes.resize(0)
        for block in blocks:
            (inner.add_sa_codes if coded else inner.add)(block)
    tuned = tune_to_recall(inner, truth, plan, stages, rows=rows)
    if truth is not None and late:
        inner.add(np.concatenate(late))
        others = np.delete(np.arange(rows), truth.late)
        inner.permute_entries(np.argsort(np.concatenate([others, truth.late])))
    return tuned


def build_distributed(
    vectors: VectorSource, plan: IndexPlan, stages: Stages, folder: Path, *, executor: Executor
) -> IndexBuildResult:
    """Build an index by workers that share a disk; see ``build_faiss_index``."""
    parts = folder / _RANGES
    parts.mkdir()
    trained, held_out, queries = remote_call(executor, stages, _train, vectors, plan, parts)
    split = vectors.embeddings.split(max(_RANGE_ROWS, vectors.rows // _MOST_RANGES))
    ranges = [(start, replace(vectors, embeddings=some)) for start, some in split]
    with stages.stage("project and add", vectors.rows) as watcher:
        done = executor.map(functools.partial(_code, trained, queries), ranges)
        for (_, some_vectors), _ in zip(ranges, done, strict=True):
            watcher.advance(some_vectors.rows)
    files = [_file(parts, start) for start, _ in ranges]
    result: IndexBuildResult = remote_call(
        executor, stages, _join, vectors, plan, trained, files, held_out, queries
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


@dataclass(frozen=True)
class _Trained:
    """A trained index on the disk that workers share."""

    path: Path
    device: str
    sha256: str

    def read(self) -> Any:
        with reading(self.path):
            if sha256_file(self.path) != self.sha256:
                raise _damaged(self.path)
            return load_faiss().read_index(str(self.path))


def _train(
    stages: Stages, vectors: VectorSource, plan: IndexPlan, parts: Path
) -> tuple[_Trained, NDArray[np.int64], Vectors]:
    """Train the index and write it; return it, the rows held out and their vectors."""
    index, held_out = train_index(vectors, plan, stages)
    write_index(index.on_cpu(), parts / _TRAINED)
    trained = _Trained(parts / _TRAINED, index.device, sha256_file(parts / _TRAINED))
    return trained, held_out, vectors.at(held_out)


def _code(trained: _Trained, queries: Vectors, rows: tuple[int, VectorSource]) -> None:
    """Write the codes of a range of rows, and the nearest of them to the held-out queries."""
    start, source = rows
    inner, parts = trained.read(), trained.path.parent
    codes = list[NDArray[np.uint8]]()

    def coded() -> Iterator[Vectors]:
        for block in source.blocks(Stages(Progress()), "project"):
            codes.append(inner.sa_encode(block))
            yield block

    scores, near = exact_neighbours(coded(), queries, NEIGHBOURS)
    near += np.where(near < 0, 0, start)
    # Whole or not at all, as two workers may do the same.
    with replacing(_file(parts, start)) as temporary, temporary.open("wb") as file:
        np.savez(file, codes=np.concatenate(codes), scores=scores, rows=near)


def _join(
    stages: Stages,
    vectors: VectorSource,
    plan: IndexPlan,
    trained: _Trained,
    files: Sequence[Path],
    held_out: NDArray[np.int64],
    queries: Vectors,
) -> IndexBuildResult:
    """Join the codes of all ranges in the index, tune and write it."""
    folder = trained.path.parent.parent
    for name in (INDEX, IVF_DATA, PARTS):
        # Left by a worker that died here.
        (folder / name).unlink(missing_ok=True)
    inner, truth = trained.read(), None
    if len(held_out):
        scores = np.empty((len(queries), 0), dtype=np.float32)
        near = np.empty((len(queries), 0), dtype=np.int64)
        for _, more_scores, more in map(_load, files):
            scores, near = merged(scores, near, more_scores, more, NEIGHBOURS)
        truth = GroundTruth.of(queries, scores, near, held_out)
    rows = vectors.rows
    codes = _codes(files, stages, rows)
    tuned = fill_and_tune(inner, codes, truth, plan, stages, folder, rows=rows, coded=True)
    return IndexBuildResult.write(vectors.wrap(inner), folder, *tuned, trained.device)


def _codes(files: Sequence[Path], stages: Stages, rows: int) -> Iterator[NDArray[np.uint8]]:
    with stages.whole("join", rows):
        for codes, *_ in map(_load, files):
            yield codes


def _file(parts: Path, start: int) -> Path:
    return parts / f"{start:012d}.npz"


def _load(path: Path) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return codes, scores and rows of a range, checked as a ZIP file checks its content."""
    with reading(path):
        data = path.read_bytes()
    try:
        with np.load(io.BytesIO(data)) as found:
            return found["codes"], found["scores"], found["rows"]
    except MemoryError:
        raise
    except Exception as error:
        # zipfile raises errors of many kinds.
        raise _damaged(path) from error


def _damaged(path: Path) -> ArtifactError:
    return ArtifactError(f"{path} is damaged; check its disk, then run the same command again")
