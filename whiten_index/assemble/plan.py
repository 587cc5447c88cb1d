"""Which index to make, and what was found out about it when it was made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index import index as faiss_index
from whiten_index.artifacts.files import exists
from whiten_index.index import FactoryChoice, IndexBytes, OperatingPoint
from whiten_index.versions import published


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
        names = (published.INDEX, faiss_index.IVF_DATA)
        files = [path for path in (folder / name for name in names) if exists(path)]
        file_bytes = sum(path.stat().st_size for path in files)
        return cls(
            nprobe=faiss_index.nprobe(index),
            sizes=faiss_index.measured_bytes(index),
            vector_bytes=published.vector_bytes(index, file_bytes=file_bytes),
            file_bytes=file_bytes,
            tuned=tuned,
            rerank=rerank,
            device=device,
            mapped=len(files) > 1,
            rotated=faiss_index.gains_by_rotation(faiss_index.inner_of(index)),
        )


@dataclass(frozen=True, eq=False)
class Carry:
    """A version whose codes are taken over as they are.

    Attributes:
        source: the version and its files.
        old_rows: (n,) int64, the row there of each row to be, −1 where it is new.
        tuned: what that index is set to, and its index recall.
        rerank: candidates a query to score again from the store, None for its own scores.
    """

    source: published.Version
    old_rows: NDArray[np.int64]
    tuned: OperatingPoint
    rerank: int | None
