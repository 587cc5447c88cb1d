"""From stored embeddings and a whitening to a FAISS index with every row in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index import index as faiss_index
from whiten_index.draw import CorpusEmbeddings, mapped_part
from whiten_index.errors import ConfigError
from whiten_index.index import FactoryChoice, IndexBytes, OperatingPoint
from whiten_index.progress import Stages
from whiten_index.store import CorpusRecord, EmbeddingStore
from whiten_index.whitening import Whitening, unit_rows

_ADD_ROWS, _LEAST_ROWS, _LOOKED_AT = 8192, 256, 256
_HELD_OUT, _HELD_OUT_SHARE, _TOP_K = 1_000, 10, 10


@dataclass(frozen=True)
class IndexPlan:
    """Which FAISS index to build, and how.

    Attributes:
        choice: factory asked for and built.
        seed: of the training sample and of the vectors held out.
        target_recall: index recall that searching is set to.
        budget: bytes held in memory, None for as many as it takes.
        device: auto, cpu or gpu.
    """

    choice: FactoryChoice
    seed: int
    target_recall: float = faiss_index.TARGET_RECALL
    budget: int | None = None
    device: str = "auto"

    @property
    def built(self) -> str:
        """Factory string of the index proper."""
        return self.choice.built

    @property
    def work_bytes(self) -> int | None:
        """What blocks, sample and lists may take; never less than work takes at all."""
        return None if self.budget is None else max(self.budget, faiss_index.LEAST_WORK)

    @property
    def room(self) -> int:
        """What finished lists may take in memory beside the work: three quarters of the budget."""
        assert self.budget is not None, "without one, all is made in memory"
        return self.budget * 3 // 4


@dataclass(frozen=True)
class Assembled:
    """What was found out about an index that is written, and no longer held in memory.

    Attributes:
        nprobe: lists a query looks into, None for an index without lists.
        sizes: bytes by what they hold.
        vector_bytes: of the reduced vectors, ids and the like left out.
        file_bytes: of its files together.
        tuned: what it is set to, and its index recall.
        rerank: candidates a query to score again from the store, None for its own scores.
        device: gpu or cpu, where it was made.
        mapped: whether its lists are a file of their own, which is read as it is searched.
        rotated: whether its transforms end in a random rotation.
    """

    nprobe: int | None
    sizes: IndexBytes
    vector_bytes: int
    file_bytes: int
    tuned: OperatingPoint
    rerank: int | None
    device: str
    mapped: bool
    rotated: bool

    @classmethod
    def of(
        cls, index: Any, folder: Path, tuned: OperatingPoint, rerank: int | None, device: str
    ) -> Assembled:
        """Look at an index and its files."""
        names = (faiss_index.INDEX, faiss_index.IVF_DATA)
        files = [path for path in (folder / name for name in names) if path.exists()]
        file_bytes = sum(path.stat().st_size for path in files)
        return cls(
            nprobe=faiss_index.nprobe(index),
            sizes=faiss_index.measured_bytes(index),
            vector_bytes=faiss_index.vector_bytes(index, file_bytes=file_bytes),
            file_bytes=file_bytes,
            tuned=tuned,
            rerank=rerank,
            device=device,
            mapped=len(files) > 1,
            rotated=faiss_index.gains_by_rotation(faiss_index.inner_of(index)),
        )


@dataclass(frozen=True, eq=False)
class _Examination:
    """Vectors (q, k) held out of the training, their exact neighbours (q, 10) and own rows (q,)."""

    queries: NDArray[np.float32]
    truth: NDArray[np.int64]
    rows: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class _Job:
    """What every step looks at; ``rotation`` (k, k) is None where codes gain nothing by one."""

    store: EmbeddingStore
    record: CorpusRecord
    whitening: Whitening
    plan: IndexPlan
    stages: Stages
    rotation: NDArray[np.float64] | None

    def vectors_at(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the unit vectors (n, k) of some rows, a few thousand at a time in float64."""
        found = np.empty((len(rows), self.whitening.k), dtype=np.float32)
        embeddings = CorpusEmbeddings(self.store, self.record)
        for start in range(0, len(rows), _LEAST_ROWS * 4):
            part = slice(start, start + _LEAST_ROWS * 4)
            raw = embeddings.at(rows[part])
            vectors = unit_rows(self.whitening.apply(raw))
            found[part] = vectors if self.rotation is None else vectors @ self.rotation
        return found

    def wrapped(self, inner: Any) -> Any:
        """Return an index behind the transforms."""
        return faiss_index.wrap(inner, self.whitening, rotation=self.rotation)

    def transforms(self) -> Any:
        """Return an empty index that has the transforms."""
        return self.wrapped(faiss_index.inner_index("Flat", self.whitening.k))

    def vectors(self, index: Any, *, stage: str) -> Iterator[NDArray[np.float32]]:
        """Yield the vectors of all rows as FAISS's transforms make them, under a stage."""
        transforms = faiss_index.Transforms(index)
        with self.stages.stage(stage, self.record.rows) as watcher:
            for block in blocks(self.store, self.record, rows=self._block_rows()):
                narrow = _as_float32(block)
                _require_lengths_in_float32(self.whitening, block)
                yield transforms(narrow)
                watcher.advance(len(block))

    def vectors_of(
        self, rows: NDArray[np.int64], index: Any, *, stage: str
    ) -> Iterator[NDArray[np.float32]]:
        """Yield the vectors of some rows, in rising order, as FAISS's transforms make them."""
        transforms, step = faiss_index.Transforms(index), self._block_rows()
        embeddings = CorpusEmbeddings(self.store, self.record)
        with self.stages.stage(stage, len(rows)) as watcher:
            for start in range(0, len(rows), step):
                raw = embeddings.at(rows[start : start + step])
                narrow = _as_float32(raw)
                _require_lengths_in_float32(self.whitening, raw)
                yield transforms(narrow)
                watcher.advance(len(raw))

    def _block_rows(self) -> int:
        if self.plan.work_bytes is None:
            return _ADD_ROWS
        # In the worst case raw, in float32 and centred, projected and scaled.
        a_row = 4 * (3 * self.whitening.dim + 3 * self.whitening.k)
        return min(max(self.plan.work_bytes // 8 // a_row, _LEAST_ROWS), _ADD_ROWS)


@dataclass(frozen=True, eq=False)
class Carry:
    """A version whose codes are taken over as they are.

    Attributes:
        folder: of the version.
        old_rows: (n,) int64, the row there of each row to be, −1 where it is new.
        tuned: what that index is set to, and its index recall.
        rerank: candidates a query to score again from the store, None for its own scores.
    """

    folder: Path
    old_rows: NDArray[np.int64]
    tuned: OperatingPoint
    rerank: int | None


def assemble_index(
    store: EmbeddingStore,
    record: CorpusRecord,
    whitening: Whitening,
    plan: IndexPlan,
    stages: Stages,
    folder: Path,
    *,
    carry: Carry | None = None,
) -> Assembled:
    """Write the FAISS index with every row in it, in the order of the corpus, into a folder.

    Args:
        store: holds the embeddings.
        record: the corpus.
        whitening: the transform.
        plan: the index to make.
        stages: told of the work.
        folder: that is there.
        carry: a version with the same transform and index, whose codes of rows that stay are taken.

    Raises:
        ConfigError: FAISS cannot build or train the factory asked for.
        OSError: the disk is full or cannot be written.
    """
    if plan.budget is not None:
        # What reading and fitting freed is not to count.
        faiss_index.give_back()
    inner = faiss_index.inner_index(plan.built, whitening.k)
    rotation = faiss_index.rotation_for(inner, whitening.k, seed=plan.seed)
    job = _Job(store, record, whitening, plan, stages, rotation)
    if carry is not None:
        return _carried(carry, job, folder)
    faiss_index.require_training_rows(inner, plan.built, rows=record.rows)
    sample, held_out = _drawn(inner, job)
    # This also settles how it is trained, before it is copied to a GPU.
    warning = faiss_index.too_few_rows(inner, len(sample)) if len(sample) else None
    placed = faiss_index.place(inner, plan.device, note=stages.watcher.note)
    placed = _train(placed, sample, job, instead=inner)
    if warning:
        stages.watcher.note(warning)
    return _fill(placed, _examined(held_out, job), job, folder)


def _carried(carry: Carry, job: _Job, folder: Path) -> Assembled:
    """Write an index of codes taken over and of new ones, in memory or on disk as for any other."""
    # Mapped, so that no more of the old one is held than what is being copied.
    old, again = (
        faiss_index.open_version(carry.folder, verify="manifest", mapped=True).index
        for _ in range(2)
    )
    carried = faiss_index.CarriedCodes(old, again, carry.old_rows)
    vectors = job.vectors_of(carried.new_rows, carried.index, stage="project and add")
    inner = faiss_index.inner_of(carried.index)
    made = _made_on_disk(faiss_index.Placed(inner, "cpu"), job.plan)
    path = folder / faiss_index.INDEX
    if made == "codes":
        index = carried.stream(vectors, path)
    elif made == "lists":
        expected, work = job.plan.choice.expected, job.plan.work_bytes
        assert work is not None
        index = carried.spill(vectors, folder, most=_lists_in_memory(expected, work))
        if expected.total <= job.plan.room:
            faiss_index.gather(faiss_index.inner_of(index))
            (folder / faiss_index.IVF_DATA).unlink()
        faiss_index.write_index(index, path)
    else:
        index = carried.fill(vectors)
        faiss_index.write_index(index, path)
    return Assembled.of(index, folder, carry.tuned, carry.rerank, "cpu")


def _lists_in_memory(expected: IndexBytes, work: int) -> int:
    """Return the bytes of lists held: half is for blocks of rows and what FAISS makes of them."""
    return max(work // 2 - expected.fixed, work // 4)


def blocks(
    store: EmbeddingStore, record: CorpusRecord, *, rows: int = _ADD_ROWS
) -> Iterator[NDArray[np.floating]]:
    """Yield the raw embeddings of a corpus in order, so many rows at a time, and hold no more.

    Raises:
        ArtifactError: a shard cannot be read.
    """
    for part in record.parts:
        if part.rows:
            shard = mapped_part(store, part)
            for start in range(0, len(shard), rows):
                yield np.array(shard[start : start + rows])


def _drawn(inner: Any, job: _Job) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return row numbers, in order, to train with and to tune with: no row is in both."""
    rows, work = job.record.rows, job.plan.work_bytes
    # Its clustering copies a sample once.
    most = {} if work is None else {"most_bytes": work // 4}
    size = faiss_index.training_rows(inner, rows=rows, k=job.whitening.k, **most)
    held = min(_HELD_OUT, rows // _HELD_OUT_SHARE, rows - faiss_index.least_training_rows(inner))
    if faiss_index.is_exact(inner):
        held = 0
    size = min(size, rows - held)
    drawn = np.random.default_rng(job.plan.seed).choice(rows, size + held, replace=False)
    return np.sort(drawn[:size]), np.sort(drawn[size:])


def _train(
    placed: faiss_index.Placed, sample: NDArray[np.int64], job: _Job, *, instead: Any
) -> faiss_index.Placed:
    """Train an index on the rows drawn, and return where that was done."""
    if not len(sample):
        return placed
    with job.stages.stage("train", len(sample)) as watcher:
        vectors = job.vectors_at(sample)

        def train(index: Any) -> None:
            faiss_index.train(index, vectors, job.plan.built)

        device = job.plan.device
        placed = placed.attempt(train, instead=instead, device=device, note=watcher.note)
        watcher.advance(len(sample))
    return placed


def _examined(held_out: NDArray[np.int64], job: _Job) -> _Examination | None:
    """Return vectors held out with their exact neighbours, None where none were.

    This comes before the index is filled, so that memory holds one or the other.
    """
    if not len(held_out):
        return None
    queries = job.vectors_at(held_out)
    vectors = job.vectors(job.transforms(), stage="exact neighbours")
    found = faiss_index.exact_neighbours(vectors, queries, _TOP_K + 2)
    truth, counted = faiss_index.truth_of_rows(*found, held_out, top_k=_TOP_K)
    return _Examination(queries[counted], truth, held_out[counted])


def _fill(
    placed: faiss_index.Placed, examination: _Examination | None, job: _Job, folder: Path
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
    tuned, rerank = _tuned(placed.index, examination, job)
    index = job.wrapped(placed.on_cpu())
    faiss_index.write_index(index, folder / faiss_index.INDEX)
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
    placed: faiss_index.Placed, examination: _Examination | None, job: _Job, folder: Path
) -> Assembled:
    """Write codes into the index's file as they come."""
    index = job.wrapped(placed.on_cpu())
    with faiss_index.StreamedCodes(index, folder / faiss_index.INDEX) as writer:
        for vectors in job.vectors(index, stage="project and add"):
            writer.add(vectors)
    opened = writer.opened()
    tuned, rerank = _tuned(faiss_index.inner_of(opened), examination, job)
    return Assembled.of(opened, folder, tuned, rerank, placed.device)


def _spilled(
    placed: faiss_index.Placed, examination: _Examination | None, job: _Job, folder: Path
) -> Assembled:
    """Write lists in parts, and join them on disk; in memory where they fit after all."""
    expected, work = job.plan.choice.expected, job.plan.work_bytes
    assert work is not None
    inner = placed.on_cpu()
    most = _lists_in_memory(expected, work)
    with faiss_index.SpilledLists(inner, folder, most=most) as writer:
        for vectors in job.vectors(job.transforms(), stage="project and add"):
            writer.add(vectors)
        writer.join()
    if expected.total <= job.plan.room:
        faiss_index.gather(inner)
        (folder / faiss_index.IVF_DATA).unlink()
    tuned, rerank = _tuned(inner, examination, job)
    index = job.wrapped(inner)
    faiss_index.write_index(index, folder / faiss_index.INDEX)
    return Assembled.of(index, folder, tuned, rerank, placed.device)


def _tuned(
    inner: Any, examination: _Examination | None, job: _Job
) -> tuple[OperatingPoint, int | None]:
    """Set an index to the recall asked for, by vectors held out of its training.

    Returns:
        What it is set to, and how many candidates are scored again, where any are.
    """
    target, rerank = job.plan.target_recall, job.plan.choice.rerank
    if examination is None:
        exact = faiss_index.is_exact(faiss_index.inner_index(job.plan.built, job.whitening.k))
        if not exact and faiss_index.has_parameters(inner):
            few = job.record.rows < _HELD_OUT_SHARE
            job.stages.watcher.note(
                f"note: {job.plan.built} is not set to --target-recall {target:g}: "
                + (
                    f"{job.record.rows} rows are too few to hold any out"
                    if few
                    else "it learns from every row; fewer lists leave some to be held out"
                )
            )
        return OperatingPoint(target=target, reached=exact), rerank
    asked: dict[str, Any] = {
        "queries": examination.queries,
        "truth": examination.truth,
        "exclude_self": examination.rows,
        "target": target,
        "top_k": _TOP_K,
    }
    with job.stages.stage("tune", len(examination.rows)) as watcher:
        if rerank is None:
            point = faiss_index.tune(inner, **asked)
        else:
            point, rerank = faiss_index.tune_candidates(inner, **asked)
        watcher.advance(len(examination.rows))
    if not point.reached:
        job.stages.watcher.note(_below_target(job.plan, point))
    return point, rerank


def _below_target(plan: IndexPlan, point: OperatingPoint) -> str:
    # What is scored again already takes as many candidates as were tried.
    again = (
        "" if plan.choice.rerank is not None else "scoring candidates again (search --rerank 100), "
    )
    named = plan.choice.asked != faiss_index.AUTO
    larger = "" if plan.budget is None or named else ", or a larger --memory-budget"
    finer = "float32 (Flat)" if "SQ8" in plan.built else "a codec of more bits such as SQ8"
    return (
        f"note: {plan.built} finds {point.recall:.1%} of the exact neighbours at best, below "
        f"--target-recall {plan.target_recall:g} ({point.queries} vectors held out); {again}"
        f"{finer}{larger} finds more"
    )


def _require_lengths_in_float32(whitening: Whitening, rows: NDArray[np.floating]) -> None:
    """Refuse rows whose vectors FAISS would scale to length 1 wrongly, by a look at some of them.

    Raises:
        ConfigError: the square of a length is beyond float32, or below it.
    """
    some = rows[:: max(len(rows) // _LOOKED_AT, 1)]
    lengths = [np.linalg.norm(whitening.apply(some), axis=1)]
    if whitening.normalize_input:
        lengths.append(np.linalg.norm(some.astype(np.float64), axis=1))
    least, most = np.finfo(np.float32).tiny ** 0.5, np.finfo(np.float32).max ** 0.5
    if any(((each > 0) & ((each < least) | (each > most))).any() for each in lengths):
        raise ConfigError(
            "some vectors are too long or too short for float32, which FAISS computes in; scale "
            "the embeddings to a length near 1"
        )


def _as_float32(rows: NDArray[np.floating]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        narrow = np.ascontiguousarray(rows, dtype=np.float32)
    if not np.isfinite(narrow).all():
        raise ConfigError(
            "some embeddings are beyond float32, which FAISS computes in; scale the column down"
        )
    return narrow
