"""From stored embeddings and a whitening to a FAISS index with every row in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from whiten_index import index as faiss_index
from whiten_index.assemble.here import carried_over, made_here
from whiten_index.assemble.job import Job, blocks
from whiten_index.assemble.plan import Assembled, Carry, IndexPlan
from whiten_index.assemble.spread import made_on_workers
from whiten_index.progress import Stages
from whiten_index.runners import Calls
from whiten_index.store import CorpusRecord, EmbeddingStore
from whiten_index.whitening import Whitening

__all__ = ["Assembled", "Carry", "IndexPlan", "assemble_index", "blocks"]


def assemble_index(
    store: EmbeddingStore,
    record: CorpusRecord,
    whitening: Whitening,
    plan: IndexPlan,
    stages: Stages,
    folder: Path,
    *,
    carry: Carry | None = None,
    calls: Calls | None = None,
    subset: NDArray[np.int64] | None = None,
) -> Assembled:
    """Write the FAISS index with every row in it, in the order of the corpus, into a folder.

    Builds, updates and sweeps all make their indexes here.

    Args:
        store: holds the embeddings.
        record: the corpus.
        whitening: the transform.
        plan: the index to make.
        stages: told of the work.
        folder: that is there; where workers elsewhere do the work, on a disk that all share.
        carry: a version with the same transform and index, whose codes of rows that stay are taken.
        calls: who does the work, this process where it is left out.
        subset: (n,) row numbers of the corpus, in rising order, that the index is to hold; all
            where it is left out.

    Raises:
        ConfigError: FAISS cannot build or train the factory asked for.
        OSError: the disk is full or cannot be written.
    """
    if plan.budget is not None:
        # What reading and fitting freed is not to count.
        faiss_index.give_back()
    inner = faiss_index.inner_index(plan.built, whitening.k)
    rotation = faiss_index.rotation_for(inner, whitening.k, seed=plan.seed)
    job = Job(store, record, whitening, plan, stages, rotation, subset)
    if carry is not None:
        return carried_over(carry, job, folder)
    faiss_index.require_training_rows(inner, plan.built, rows=job.rows)
    if calls is not None and calls.elsewhere:
        return made_on_workers(job, folder, calls)
    return made_here(job, folder)
