"""Build a FAISS index in this process, in memory or on disk if the budget has no room for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.files import exists
from whiten_index.index.choice import IndexPlan
from whiten_index.index.code_reuse import remove_rows, reuse_codes
from whiten_index.index.exact import exact_neighbours
from whiten_index.index.factory import inner_of, is_graph, nprobe
from whiten_index.index.gpu import DeviceIndex
from whiten_index.index.library import INDEX, load_faiss, write_index
from whiten_index.index.ondisk_ivf import IVF_DATA, OnDiskLists, lists_on_disk
from whiten_index.index.sizes import IndexBytes, measured_bytes, vector_bytes
from whiten_index.index.training import train_index
from whiten_index.index.transforms import VectorSource, is_lossy
from whiten_index.index.tuning import NEIGHBOURS, GroundTruth, OperatingPoint, tune_to_recall
from whiten_index.progress import Stages

# Of lists that wait to be joined, without a budget.
_LISTS_BYTES = 2 << 30


@dataclass(frozen=True)
class IndexBuildResult:
    """Facts about an index that is written, and no longer held in memory."""

    nprobe: int | None  # lists a query looks into, None for an index without lists
    sizes: IndexBytes  # bytes by their use
    vector_bytes: int  # of the reduced vectors, without ids and the like
    file_bytes: int  # of its files together
    tuned: OperatingPoint  # its setting and index recall
    rerank: int | None  # candidates a query to score again from the store, None for its own scores
    device: str  # gpu or cpu, where it was made
    mapped: bool  # whether its lists are in a file of their own, which is mapped for search
    rotated: bool  # whether its transforms end in a random rotation

    @classmethod
    def of(
        cls, index: Any, folder: Path, tuned: OperatingPoint, rerank: int | None, device: str
    ) -> IndexBuildResult:
        """Collect the facts of an index and its files."""
        files = [path for path in (folder / INDEX, folder / IVF_DATA) if exists(path)]
        file_bytes = sum(path.stat().st_size for path in files)
        return cls(
            nprobe=nprobe(index),
            sizes=measured_bytes(index),
            vector_bytes=vector_bytes(index, file_bytes=file_bytes),
            file_bytes=file_bytes,
            tuned=tuned,
            rerank=rerank,
            device=device,
            mapped=len(files) > 1,
            rotated=is_lossy(inner_of(index)),
        )


@dataclass(frozen=True, eq=False)
class CodeReuse:
    """A published index whose codes are reused as they are."""

    open: Callable[[], Any]  # opens the index, mapped
    old_rows: NDArray[np.int64]  # (n,) the row there of each row of the new index, −1 for a new row
    tuned: OperatingPoint  # its setting and index recall
    rerank: int | None  # candidates a query to score again from the store, None for its own scores


def build_local(
    vectors: VectorSource, plan: IndexPlan, stages: Stages, folder: Path
) -> IndexBuildResult:
    """Train an index, fill it with all rows in order, tune it, and write it into a folder."""
    index, held_out = train_index(vectors, plan, stages)
    empty = index.on_cpu()
    if _on_disk(empty, plan):
        index = DeviceIndex(empty, "cpu")
    # This comes before the index is filled, so that memory holds one or the other.
    truth = find_ground_truth(vectors, held_out, stages, unseen=is_graph(empty))
    results = list[tuple[OperatingPoint, int | None]]()

    def fill(inner: Any) -> None:
        blocks = vectors.blocks(stages, "project and add")
        results.append(fill_and_tune(inner, blocks, truth, plan, stages, folder, rows=vectors.rows))

    note = stages.watcher.note
    index = index.run_with_fallback(fill, fallback=empty, device=plan.device, note=note)
    opened = vectors.wrap(index.on_cpu())
    write_index(opened, folder / INDEX)
    return IndexBuildResult.of(opened, folder, *results[-1], index.device)


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
    write_index(new, folder / INDEX)
    return IndexBuildResult.of(new, folder, reuse.tuned, reuse.rerank, "cpu")


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
        _permute(inner, np.argsort(np.concatenate([others, truth.late])))
    return tuned


def _permute(inner: Any, old_rows: NDArray[np.int64]) -> None:
    """Reorder the rows of a graph; ``old_rows`` (n,) has the old place of each."""
    faiss = load_faiss()
    inner = faiss.downcast_index(inner)
    if isinstance(inner, faiss.IndexRefine):
        _permute(inner.base_index, old_rows)
        _permute(inner.refine_index, old_rows)
    else:
        inner.permute_entries(old_rows)
