"""An index made in this process: in memory, or on disk where the budget has no room for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from whiten_index import index as faiss_index
from whiten_index.assemble.examination import Examination, examine, prepare, set_to_target
from whiten_index.assemble.job import Job
from whiten_index.assemble.plan import Assembled, Carry, IndexPlan
from whiten_index.index import IndexBytes
from whiten_index.versions import bundle, published


def carried_over(carry: Carry, job: Job, folder: Path) -> Assembled:
    """Write an index of codes taken over and of new ones, in memory or on disk as for any other."""
    # Mapped, so that no more of the old one is held than what is being copied.
    old, again = (bundle.read_index(carry.source, mapped=True) for _ in range(2))
    carried = faiss_index.CarriedCodes(old, again, carry.old_rows)
    vectors = job.vectors_of(carried.new_rows, carried.index, stage="project and add")
    inner = faiss_index.inner_of(carried.index)
    made = _made_on_disk(faiss_index.Placed(inner, "cpu"), job.plan)
    path = folder / published.INDEX
    if made == "codes":
        index = carried.stream(vectors, path)
    elif made == "lists":
        expected, work = job.plan.choice.expected, job.plan.work_bytes
        assert work is not None
        index = carried.spill(vectors, folder, most=lists_in_memory(expected, work))
        if not kept_on_disk(job.plan):
            faiss_index.gather(faiss_index.inner_of(index))
            (folder / faiss_index.IVF_DATA).unlink()
        published.write_index(index, path)
    else:
        index = carried.fill(vectors)
        published.write_index(index, path)
    return Assembled.of(index, folder, carry.tuned, carry.rerank, "cpu")


def kept_on_disk(plan: IndexPlan) -> bool:
    """Tell whether finished lists stay a file of their own, for want of room in memory."""
    return plan.budget is not None and plan.choice.expected.total > plan.room


def lists_in_memory(expected: IndexBytes, work: int) -> int:
    """Return the bytes of lists held: half is for blocks of rows and what FAISS makes of them."""
    return max(work // 2 - expected.fixed, work // 4)


def made_here(job: Job, folder: Path) -> Assembled:
    """Write the index with every row in it, in the order of the corpus, into a folder."""
    placed, held_out = prepare(job)
    return _fill(placed, examine(held_out, job), job, folder)


def _fill(
    placed: faiss_index.Placed, examination: Examination | None, job: Job, folder: Path
) -> Assembled:
    """Add every row, tune, and write, in memory or on disk as the budget has it."""
    made = _made_on_disk(placed, job.plan)
    if made == "codes":
        return _streamed(placed, examination, job, folder)
    if made == "lists":
        return _spilled(placed, examination, job, folder)

    def add(index: Any) -> None:
        for vectors in job.vectors(job.transforms(), stage="project and add"):
            index.add(vectors)

    # Taken before rows are added, this is trained and empty.
    device, note = job.plan.device, job.stages.watcher.note
    placed = placed.attempt(add, instead=placed.on_cpu(), device=device, note=note)
    tuned, rerank = set_to_target(placed.index, examination, job)
    index = job.wrapped(placed.on_cpu())
    published.write_index(index, folder / published.INDEX)
    return Assembled.of(index, folder, tuned, rerank, placed.device)


def _made_on_disk(placed: faiss_index.Placed, plan: IndexPlan) -> str | None:
    """Return ``codes`` or ``lists`` where an index is made on disk, None where in memory."""
    if plan.budget is None:
        return None
    kind = faiss_index.kind_on_disk(placed.on_cpu())
    expected = plan.choice.expected
    # Lists grow by doubling.
    if kind == "lists" and expected.fixed + 2 * expected.per_row_total <= plan.room:
        return None
    return kind


def _streamed(
    placed: faiss_index.Placed, examination: Examination | None, job: Job, folder: Path
) -> Assembled:
    """Write codes into the index's file as they come."""
    index = job.wrapped(placed.on_cpu())
    with faiss_index.StreamedCodes(index, folder / published.INDEX) as writer:
        for vectors in job.vectors(index, stage="project and add"):
            writer.add(vectors)
    opened = writer.opened()
    tuned, rerank = set_to_target(faiss_index.inner_of(opened), examination, job)
    return Assembled.of(opened, folder, tuned, rerank, placed.device)


def _spilled(
    placed: faiss_index.Placed, examination: Examination | None, job: Job, folder: Path
) -> Assembled:
    """Write lists in parts, and join them on disk; in memory where they fit after all."""
    expected, work = job.plan.choice.expected, job.plan.work_bytes
    assert work is not None
    inner = placed.on_cpu()
    most = lists_in_memory(expected, work)
    with faiss_index.SpilledLists(inner, folder, most=most) as writer:
        for vectors in job.vectors(job.transforms(), stage="project and add"):
            writer.add(vectors)
        writer.join()
    if not kept_on_disk(job.plan):
        faiss_index.gather(inner)
        (folder / faiss_index.IVF_DATA).unlink()
    tuned, rerank = set_to_target(inner, examination, job)
    index = job.wrapped(inner)
    published.write_index(index, folder / published.INDEX)
    return Assembled.of(index, folder, tuned, rerank, placed.device)
