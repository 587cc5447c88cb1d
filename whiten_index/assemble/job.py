"""The vectors of a corpus, as FAISS's transforms make them of the embeddings in a store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index import index as faiss_index
from whiten_index.assemble.plan import IndexPlan
from whiten_index.errors import ConfigError
from whiten_index.progress import Stages
from whiten_index.store import CorpusRecord, EmbeddingStore
from whiten_index.store.sampling import CorpusEmbeddings, mapped_part
from whiten_index.whitening import Whitening, unit_rows

_ADD_ROWS, _LEAST_ROWS, _LOOKED_AT = 8192, 256, 256


@dataclass(frozen=True, eq=False)
class Job:
    """The index to make and the embeddings to make it of.

    Attributes:
        store: holds the embeddings.
        record: the corpus.
        whitening: the transform.
        plan: the index to make.
        stages: told of the work.
        rotation: (k, k) random rotation, None where the codes gain nothing by one.
        subset: (n,) row numbers of the corpus, in rising order, that the index holds; None for all.
    """

    store: EmbeddingStore
    record: CorpusRecord
    whitening: Whitening
    plan: IndexPlan
    stages: Stages
    rotation: NDArray[np.float64] | None
    subset: NDArray[np.int64] | None = None

    @property
    def rows(self) -> int:
        """The number of rows n of the index."""
        return self.record.rows if self.subset is None else len(self.subset)

    def vectors_at(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the unit vectors (n, k) of some rows, a few thousand at a time in float64."""
        rows = rows if self.subset is None else self.subset[rows]
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
        if self.subset is not None:
            yield from self.vectors_of(self.subset, index, stage=stage)
            return
        transforms = faiss_index.Transforms(index)
        with self.stages.stage(stage, self.rows) as watcher:
            for block in blocks(self.store, self.record, rows=self.block_rows):
                narrow = _as_float32(block)
                _require_lengths_in_float32(self.whitening, block)
                yield transforms(narrow)
                watcher.advance(len(block))

    def vectors_of(
        self, rows: NDArray[np.int64], index: Any, *, stage: str
    ) -> Iterator[NDArray[np.float32]]:
        """Yield the vectors of some rows, in rising order, as FAISS's transforms make them."""
        transforms, step = faiss_index.Transforms(index), self.block_rows
        embeddings = CorpusEmbeddings(self.store, self.record)
        with self.stages.stage(stage, len(rows)) as watcher:
            for start in range(0, len(rows), step):
                raw = embeddings.at(rows[start : start + step])
                narrow = _as_float32(raw)
                _require_lengths_in_float32(self.whitening, raw)
                yield transforms(narrow)
                watcher.advance(len(raw))

    @property
    def block_rows(self) -> int:
        """Rows that are made vectors of at a time."""
        if self.plan.work_bytes is None:
            return _ADD_ROWS
        # In the worst case raw, in float32 and centred, projected and scaled.
        a_row = 4 * (3 * self.whitening.dim + 3 * self.whitening.k)
        return min(max(self.plan.work_bytes // 8 // a_row, _LEAST_ROWS), _ADD_ROWS)


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
