"""Rows drawn to train an index with, and rows held out, by which searching it is set."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index import index as faiss_index
from whiten_index.assemble.job import Job
from whiten_index.assemble.plan import IndexPlan
from whiten_index.index import OperatingPoint

_HELD_OUT, _HELD_OUT_SHARE, _TOP_K = 1_000, 10, 10


@dataclass(frozen=True, eq=False)
class Examination:
    """Vectors (q, k) held out of the training, their exact neighbours (q, 10) and own rows (q,)."""

    queries: NDArray[np.float32]
    truth: NDArray[np.int64]
    rows: NDArray[np.int64]


def prepare(job: Job) -> tuple[faiss_index.Placed, NDArray[np.int64]]:
    """Return the index trained where the plan says, and the rows held out of that, in order.

    Raises:
        ConfigError: FAISS cannot build or train the factory asked for.
    """
    inner = faiss_index.inner_index(job.plan.built, job.whitening.k)
    sample, held_out = draw_rows(inner, job)
    # This also settles how it is trained, before it is copied to a GPU.
    warning = faiss_index.too_few_rows(inner, len(sample)) if len(sample) else None
    placed = faiss_index.place(inner, job.plan.device, note=job.stages.watcher.note)
    placed = _train(placed, sample, job, instead=inner)
    if warning:
        job.stages.watcher.note(warning)
    return placed, held_out


def draw_rows(inner: Any, job: Job) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return row numbers, in order, to train with and to tune with: no row is in both."""
    rows, work = job.rows, job.plan.work_bytes
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
    placed: faiss_index.Placed, sample: NDArray[np.int64], job: Job, *, instead: Any
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


def examine(held_out: NDArray[np.int64], job: Job) -> Examination | None:
    """Return vectors held out with their exact neighbours, None where none were.

    This comes before the index is filled, so that memory holds one or the other.
    """
    if not len(held_out):
        return None
    queries = job.vectors_at(held_out)
    vectors = job.vectors(job.transforms(), stage="exact neighbours")
    return examination_of(queries, held_out, *nearest(vectors, queries))


def nearest(
    vectors: Iterable[NDArray[np.float32]], queries: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return scores and places of the vectors that are nearest to each query, both (q, 12)."""
    return faiss_index.exact_neighbours(vectors, queries, _TOP_K + 2)


def examination_of(
    queries: NDArray[np.float32],
    held_out: NDArray[np.int64],
    scores: NDArray[np.float32],
    rows: NDArray[np.int64],
) -> Examination:
    """Return what queries (q, k) are to find, by their nearest rows of the corpus (q, 12)."""
    truth, counted = faiss_index.truth_of_rows(scores, rows, held_out, top_k=_TOP_K)
    return Examination(queries[counted], truth, held_out[counted])


def set_to_target(
    inner: Any, examination: Examination | None, job: Job
) -> tuple[OperatingPoint, int | None]:
    """Set an index to the recall asked for, by vectors held out of its training.

    Returns:
        What it is set to, and how many candidates are scored again, where any are.
    """
    target, rerank = job.plan.target_recall, job.plan.choice.rerank
    if examination is None:
        exact = faiss_index.is_exact(faiss_index.inner_index(job.plan.built, job.whitening.k))
        if not exact and faiss_index.has_parameters(inner):
            few = job.rows < _HELD_OUT_SHARE
            job.stages.watcher.note(
                f"note: {job.plan.built} is not set to --target-recall {target:g}: "
                + (
                    f"{job.rows} rows are too few to hold any out"
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
        job.stages.watcher.note(below_target(job.plan, point))
    return point, rerank


def below_target(plan: IndexPlan, point: OperatingPoint) -> str:
    """Return what is said of an index that finds less than it should, and what would find more."""
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
