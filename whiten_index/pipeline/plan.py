"""What a build would do: rows, reuse, time and bytes, from the footers and a short calibration."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from whiten_index.corpus.batches import EmbeddingBatch, TextBatch
from whiten_index.corpus.sharding import Shard
from whiten_index.encoding.devices import chosen_devices
from whiten_index.errors import ConfigError
from whiten_index.index.choice import FactoryChoice
from whiten_index.pipeline.build_config import BuildConfig
from whiten_index.pipeline.early_checks import (
    check_early,
    check_labels,
    choose_index,
    possible_widths,
)
from whiten_index.pipeline.encode import open_corpus
from whiten_index.pipeline.select_labelled import read_labels
from whiten_index.pipeline.shard_encoding import ShardWork, shard_work
from whiten_index.progress import Progress, Silent, Stages
from whiten_index.store.dedup import RowFinder
from whiten_index.store.dtypes import StoreDtype
from whiten_index.whitening.selection import widths

_CALIBRATION_ROWS = 256
_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class BuildPlan:
    """An estimate; only ``read`` and ``reused`` are counted.

    Attributes:
        shards: how many there are.
        read: rows in the corpus.
        reused: rows whose embeddings are in the store.
        to_encode: rows still to be encoded.
        rows_per_second: measured on a sample, None where nothing is to be encoded.
        seconds: expected for encoding, None likewise.
        raw_bytes: of the embeddings kept in the store, the whole corpus.
        vector_bytes: of the reduced vectors in float32.
        factory: FAISS factory string.
        why: what it was chosen by.
        rerank: candidates a query that would be scored again from the store, None for none.
        index_bytes: of the index, by what they hold, as expected.
        memory_budget: bytes that the index may hold in memory, None for as many as it takes.
        dim: width d of the embeddings.
        k: kept width expected, or the widest that can be built where it is not settled.
        k_settled: whether k is known before the embeddings are.
        store: folder of the raw embeddings.
    """

    shards: int
    read: int
    reused: int
    to_encode: int
    rows_per_second: float | None
    seconds: float | None
    raw_bytes: int
    vector_bytes: int
    factory: str
    why: str
    rerank: int | None
    index_bytes: dict[str, int]
    memory_budget: int | None
    dim: int
    k: int
    k_settled: bool
    store: str

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return dict(vars(self))


@dataclass
class _Looked:
    """What the store has of a corpus, and which shards it lacks."""

    reused: int = 0
    to_encode: int = 0
    raw_bytes: int = 0
    missing: list[Shard] = field(default_factory=list)

    def add(self, shard: Shard, rows: int, size: int, unknown: int) -> None:
        self.raw_bytes += size
        self.reused += rows - unknown
        self.to_encode += unknown
        if unknown:
            self.missing.append(shard)


def plan_build(config: BuildConfig, *, progress: Progress | None = None) -> BuildPlan:
    """Say what a build or an encode would do, and write nothing.

    Raises:
        CorpusError: the corpus cannot be used.
        EncoderError: the model cannot be found or loaded.
    """
    if not config.corpus:
        raise ConfigError("--plan estimates the reading of a corpus; name one")
    stages = Stages(progress or Silent())
    corpus = open_corpus(config, stages)
    check_early(config, corpus)
    if (labels := read_labels(config)) is not None:
        check_labels(config, labels)
    work = shard_work(config, corpus, write=False)
    work = replace(work, rows=RowFinder(work.store, work.store.corpus_shards()))
    looked = _Looked()
    with stages.stage("look up shards", corpus.rows) as watcher:
        for shard in corpus.shards:
            looked.add(shard, *_look_up(work, shard))
            watcher.advance(shard.rows)
    rate = None
    if config.embedding_column is None and looked.missing:
        # GPUs add up; the cores of one CPU do not.
        devices = chosen_devices(config.encoder_config().device)
        several = len(devices) if devices[0].startswith("cuda") else 1
        rate = several * calibrate(work, looked.missing, stages)
    rows, dim = looked.reused + looked.to_encode, int(work.store.encoder["dim"])
    width = _width(config, dim)
    k, choice = _widest(config, rows=rows, dim=dim, k=width)
    return BuildPlan(
        shards=len(corpus.shards),
        read=corpus.rows,
        reused=looked.reused,
        to_encode=looked.to_encode,
        rows_per_second=rate,
        seconds=None if rate is None else looked.to_encode / rate,
        raw_bytes=looked.raw_bytes,
        vector_bytes=rows * k * _FLOAT32_BYTES,
        factory=choice.built,
        why=choice.why,
        rerank=choice.rerank,
        index_bytes=choice.expected.to_json(),
        memory_budget=config.budget,
        dim=dim,
        k=k,
        k_settled=width is not None,
        store=str(config.store_place),
    )


def _look_up(work: ShardWork, shard: Shard) -> tuple[int, int, int]:
    """Return a shard's usable rows, the bytes of their embeddings, and how many are nowhere."""
    batch = work.batch_of(shard)
    digests = batch.digests()
    fingerprint = work.store.shard_fingerprint(digests, work.dtype)
    if work.dtype is StoreDtype.OWN:
        itemsize = batch.embeddings.itemsize if isinstance(batch, EmbeddingBatch) else 4
    else:
        itemsize = np.dtype(work.dtype.value).itemsize
    unknown = 0
    if len(batch) and work.store.find(fingerprint, verify=False) is None:
        assert work.rows is not None
        unknown = int(np.count_nonzero(~work.rows.known(work.dtype, batch).find(digests).known))
    return len(batch), len(batch) * int(work.store.encoder["dim"]) * itemsize, unknown


def calibrate(work: ShardWork, missing: list[Shard], stages: Stages) -> float:
    """Return rows/s of encoding a sample from the middle of what is missing, on one device."""
    batch = work.batch_of(missing[len(missing) // 2])
    assert isinstance(batch, TextBatch)
    step = max(len(batch) // _CALIBRATION_ROWS, 1)
    sample = batch.texts[::step][:_CALIBRATION_ROWS]
    encoder = work.encoder()
    encoder.encode(sample)
    with stages.stage("calibrate", len(sample)) as watcher:
        started = time.perf_counter()
        encoder.encode(sample)
        elapsed = time.perf_counter() - started
        watcher.advance(len(sample))
    return len(sample) / elapsed


def _width(config: BuildConfig, dim: int) -> int | None:
    """Return the k to expect, None where only the embeddings will tell."""
    if config.chooses and config.k is None:
        return None
    return config.whitening_config().width(dim)


def _widest(
    config: BuildConfig, *, rows: int, dim: int, k: int | None
) -> tuple[int, FactoryChoice]:
    """Return k and its index; where only the embeddings will tell k, the widest there can be.

    Raises:
        ConfigError: nothing fits the budget.
    """
    if k is not None:
        return k, choose_index(config, rows=rows, dim=dim, k=k)
    if not config.chooses:
        # A share of the variance may come to any width.
        with contextlib.suppress(ConfigError):
            return dim, choose_index(config, rows=rows, dim=dim, k=dim)
    possible = possible_widths(config, dim, rows=rows)
    if possible is None:
        possible = (dim,) if config.budget is None else widths(dim)
    return max(possible), choose_index(config, rows=rows, dim=dim, k=max(possible))
