"""From stored embeddings and a whitening to a FAISS index with every row in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index import index as faiss_index
from whiten_index.errors import ConfigError
from whiten_index.progress import Stages
from whiten_index.store import CorpusRecord, EmbeddingStore
from whiten_index.whitening import Whitening, unit_rows

_ADD_ROWS, _LOOKED_AT = 8192, 256


@dataclass(frozen=True)
class IndexPlan:
    """Which FAISS index to build.

    Attributes:
        asked: factory string of the user, or ``auto``.
        built: factory string it comes to.
        seed: of the training sample.
    """

    asked: str
    built: str
    seed: int


def assemble_index(
    store: EmbeddingStore,
    record: CorpusRecord,
    whitening: Whitening,
    plan: IndexPlan,
    stages: Stages,
) -> Any:
    """Return the FAISS index with every row in it, in the order of the corpus.

    Raises:
        ConfigError: FAISS cannot build or train the factory asked for.
    """
    inner = faiss_index.inner_index(plan.built, whitening.k)
    if sample_rows := faiss_index.training_rows(inner, rows=record.rows, k=whitening.k):
        warning = faiss_index.too_few_rows(inner, sample_rows)
        with stages.stage("train", sample_rows) as watcher:
            sample = _sample(store, record, whitening, size=sample_rows, seed=plan.seed)
            faiss_index.train(inner, sample, plan.built)
            watcher.advance(sample_rows)
        if warning:
            stages.watcher.note(warning)
    index = faiss_index.wrap(inner, whitening)
    with stages.stage("project and add", record.rows) as watcher:
        for block in blocks(store, record):
            narrow = _as_float32(block)
            _require_lengths_in_float32(whitening, block)
            index.add(narrow)
            watcher.advance(len(block))
    return index


def blocks(store: EmbeddingStore, record: CorpusRecord) -> Iterator[NDArray[np.floating]]:
    """Yield the raw embeddings of a corpus in order, a few thousand rows at a time."""
    for part in record.parts:
        if part.rows:
            rows = store.embeddings(part.shard)
            for start in range(0, len(rows), _ADD_ROWS):
                yield rows[start : start + _ADD_ROWS]


def _sample(
    store: EmbeddingStore, record: CorpusRecord, whitening: Whitening, *, size: int, seed: int
) -> NDArray[np.float32]:
    """Return unit vectors (size, k) of rows drawn at random from the whole corpus, in its order."""
    chosen = np.sort(np.random.default_rng(seed).choice(record.rows, size, replace=False))
    sample = np.empty((size, whitening.k), dtype=np.float32)
    start = filled = 0
    for part in record.parts:
        end = int(np.searchsorted(chosen, start + part.rows))
        if end > filled:
            rows = store.embeddings(part.shard)[chosen[filled:end] - start]
            sample[filled:end] = unit_rows(whitening.apply(rows))
        start, filled = start + part.rows, end
    return sample


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
