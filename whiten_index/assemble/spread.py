"""An index made by workers: one trains it, all code ranges of rows, one joins what they wrote.

What they hand on lies beside the index to be, in a folder that is gone when it is done.
"""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index import index as faiss_index
from whiten_index.artifacts.atomic import discard, remove_path
from whiten_index.artifacts.files import exists, fsync_path
from whiten_index.assemble.examination import (
    Examination,
    examination_of,
    nearest,
    prepare,
    set_to_target,
)
from whiten_index.assemble.here import kept_on_disk, lists_in_memory
from whiten_index.assemble.job import Job
from whiten_index.assemble.plan import Assembled
from whiten_index.at_work import at_work
from whiten_index.index.exact import merged
from whiten_index.progress import Silent, Stages
from whiten_index.runners import Calls
from whiten_index.store import CorpusPart
from whiten_index.versions import published

_PARTS, _TRAINED, _QUERIES = "ranges", "trained.faiss", "queries.npy"
_TRIES, _SECONDS_BETWEEN_TRIES = 20, 0.25
_RANGE_ROWS, _MOST_RANGES = 65_536, 2_000
# Of lists that wait to be joined, where the user set no budget.
_LISTS_BYTES = 2 << 30


@dataclass(frozen=True)
class Range:
    """Neighbouring parts of a corpus, the first of whose rows has the number ``start``."""

    start: int
    parts: tuple[CorpusPart, ...]

    @property
    def rows(self) -> int:
        """How many rows they have."""
        return sum(part.rows for part in self.parts)

    def file(self, folder: Path, what: str) -> Path:
        """Return where something of this range is kept."""
        return folder / f"{self.start:012d}.{what}.npy"


def made_on_workers(job: Job, folder: Path, calls: Calls) -> Assembled:
    """Write the index with every row in it, in the order of the corpus, into a shared folder."""
    stages, parts = job.stages, folder / _PARTS
    parts.mkdir()
    job = replace(job, stages=Stages(Silent()))
    device, held_out = at_work(calls, stages, _trained, job, parts)
    ranges = tuple(_ranges(job.record.parts))
    code = functools.partial(_code, replace(job, record=replace(job.record, parts=())), parts)
    with stages.stage("project and add", job.record.rows) as watcher:
        # Told 0 by and by, so that whoever wants to stop is heard.
        done = calls.map(code, ranges, advance=lambda _: watcher.advance(0))
        for each, _ in zip(ranges, done, strict=True):
            watcher.advance(each.rows)
    assembled: Assembled = at_work(
        calls, stages, _joined, job, parts, folder, ranges, device, held_out
    )
    _remove(parts)
    return assembled


def _remove(folder: Path) -> None:
    """Remove a folder in which a worker that was late may write as it is being ended."""
    for _ in range(_TRIES):
        discard(folder)
        if not exists(folder):
            return
        time.sleep(_SECONDS_BETWEEN_TRIES)
    remove_path(folder)


def _ranges(parts: Sequence[CorpusPart]) -> Iterator[Range]:
    most = max(_RANGE_ROWS, sum(part.rows for part in parts) // _MOST_RANGES)
    start, rows, held = 0, 0, list[CorpusPart]()
    for part in parts:
        if held and rows + part.rows > most:
            yield Range(start, tuple(held))
            start, rows, held = start + rows, 0, []
        if part.rows:
            held.append(part)
            rows += part.rows
    if held:
        yield Range(start, tuple(held))


def _trained(stages: Stages, job: Job, parts: Path) -> tuple[str, NDArray[np.int64]]:
    """Train the index and write it; return where that was done, and the rows held out."""
    job = replace(job, stages=stages)
    placed, held_out = prepare(job)
    published.write_index(placed.on_cpu(), parts / _TRAINED)
    if len(held_out):
        _save(parts / _QUERIES, job.vectors_at(held_out))
    return placed.device, held_out


def _code(job: Job, parts: Path, each: Range) -> None:
    """Write the codes of a range, and what of it is nearest to the queries held out."""
    job = replace(job, record=replace(job.record, parts=each.parts))
    inner = _read_trained(parts)
    coded = list[NDArray[Any]]()

    def vectors() -> Iterator[NDArray[np.float32]]:
        for block in job.vectors(job.transforms(), stage="project"):
            # A graph is made of the vectors, by whoever joins.
            kept = block if faiss_index.kind_on_disk(inner) is None else inner.sa_encode(block)
            coded.append(kept)
            yield block

    if exists(parts / _QUERIES):
        scores, rows = nearest(vectors(), np.load(parts / _QUERIES))
        _save(each.file(parts, "scores"), scores)
        _save(each.file(parts, "rows"), rows + np.where(rows < 0, 0, each.start))
    else:
        for _ in vectors():
            pass
    _save(each.file(parts, "codes"), np.concatenate(coded))


def _joined(
    stages: Stages,
    job: Job,
    parts: Path,
    folder: Path,
    ranges: Sequence[Range],
    device: str,
    held_out: NDArray[np.int64],
) -> Assembled:
    """Join the codes of all ranges in the index's file, and set how it is searched."""
    job = replace(job, stages=stages)
    for name in (published.INDEX, faiss_index.IVF_DATA, faiss_index.PARTS):
        # Of one that died at it.
        (folder / name).unlink(missing_ok=True)
    examination = _examination(parts, ranges, held_out)
    inner, path = _read_trained(parts), folder / published.INDEX
    with stages.stage("join", job.record.rows) as watcher:
        opened = _filled(inner, _blocks(parts, ranges, job.block_rows), job, folder)
        watcher.advance(job.record.rows)
    tuned, rerank = set_to_target(faiss_index.inner_of(opened), examination, job)
    if faiss_index.kind_on_disk(inner) != "codes":
        # Flat codes are in the file already.
        published.write_index(opened, path)
    return Assembled.of(opened, folder, tuned, rerank, device)


def _filled(inner: Any, blocks: Iterator[NDArray[Any]], job: Job, folder: Path) -> Any:
    """Return the index of all codes: of flat ones in its file already, of others to be written."""
    kind = faiss_index.kind_on_disk(inner)
    if kind == "codes":
        index = job.wrapped(inner)
        with faiss_index.StreamedCodes(index, folder / published.INDEX) as writer:
            for block in blocks:
                writer.add_codes(block)
        return writer.opened()
    if kind is None:
        for block in blocks:
            inner.add(block)
        return job.wrapped(inner)
    work = job.plan.work_bytes
    most = _LISTS_BYTES if work is None else lists_in_memory(job.plan.choice.expected, work)
    with faiss_index.SpilledLists(inner, folder, most=most) as spilled:
        for block in blocks:
            spilled.add_codes(block)
        spilled.join()
    if not kept_on_disk(job.plan):
        faiss_index.gather(inner)
        (folder / faiss_index.IVF_DATA).unlink()
    return job.wrapped(inner)


def _blocks(parts: Path, ranges: Sequence[Range], rows: int) -> Iterator[NDArray[Any]]:
    """Yield codes in the blocks in which one process adds them: a graph depends on these."""
    for each in ranges:
        codes, first = np.load(each.file(parts, "codes"), mmap_mode="r"), 0
        for part in each.parts:
            for start in range(0, part.rows, rows):
                yield np.array(codes[first + start : first + min(start + rows, part.rows)])
            first += part.rows


def _examination(
    parts: Path, ranges: Sequence[Range], held_out: NDArray[np.int64]
) -> Examination | None:
    if not len(held_out):
        return None
    queries = np.load(parts / _QUERIES)
    scores = np.empty((len(queries), 0), dtype=np.float32)
    rows = np.empty((len(queries), 0), dtype=np.int64)
    for each in ranges:
        more = np.load(each.file(parts, "scores")), np.load(each.file(parts, "rows"))
        scores, rows = merged(scores, rows, *more, more[0].shape[1])
    return examination_of(queries, held_out, scores, rows)


def _read_trained(parts: Path) -> Any:
    return faiss_index.load_faiss().read_index(str(parts / _TRAINED))


def _save(path: Path, array: NDArray[Any]) -> None:
    """Write an array whole or not at all; of two workers that do the same the first one counts."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    with temporary.open("wb") as file:
        np.save(file, array, allow_pickle=False)
    fsync_path(temporary)
    if not exists(path):
        temporary.replace(path)
    temporary.unlink(missing_ok=True)
