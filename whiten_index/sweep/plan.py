"""What a sweep would measure, and how many bytes that takes, before any work is done."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from whiten_index.artifacts.files import exists
from whiten_index.errors import ConfigError
from whiten_index.index import expected_bytes, require_device
from whiten_index.plan import plan_build
from whiten_index.progress import Progress
from whiten_index.store import EmbeddingStore, StoreDtype
from whiten_index.sweep.config import SweepConfig
from whiten_index.sweep.grid import FAISS, Grid, grid
from whiten_index.sweep.judged import Judged, require_query_encoder
from whiten_index.sweep.results import RESULTS, Results


@dataclass(frozen=True)
class SweepPlan:
    """An estimate: the embeddings may turn out to span fewer directions than they have dims.

    Attributes:
        rows: of the corpus.
        to_encode: rows that are not in the store yet.
        encode_seconds: expected for these, None where there are none.
        dim: width d of the embeddings.
        points: to measure, those found already counted in.
        by_family: family -> points.
        found: points in the results file of runs of as many rows by the same settings.
        skipped: key -> why a point cannot be measured.
        work_bytes: of the files that the sweep lays out and removes.
        largest_index_bytes: of the index that takes the most memory.
    """

    rows: int
    to_encode: int
    encode_seconds: float | None
    dim: int
    points: int
    by_family: dict[str, int]
    found: int
    skipped: dict[str, str]
    work_bytes: int
    largest_index_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return dict(vars(self))


def plan_sweep(config: SweepConfig, *, progress: Progress | None = None) -> SweepPlan:
    """Say what a sweep would do, and write nothing.

    Raises:
        CorpusError: corpus or judgements cannot be used.
        WhiteningError: no k that was asked for fits the embeddings.
    """
    require_device(config.build.index_device)
    require_query_encoder(config, Judged.read(config))
    seconds, kept = None, _kept(config)
    if config.build.corpus:
        build = plan_build(config.build, progress=progress)
        rows, dim, to_encode = build.reused + build.to_encode, build.dim, build.to_encode
        seconds = build.seconds
    else:
        store = EmbeddingStore.open(config.build.store_place)
        rows, dim, to_encode = store.corpus().rows, int(store.encoder["dim"]), 0
        kept = _stored(store)
    points = grid(config, dim=dim, rank=dim, rows=rows)
    path = config.folder / RESULTS
    keys = _found(Results.read(path), config, rows) if exists(path) else set()
    widest = max((k for k in config.ks if k <= dim), default=dim)
    return SweepPlan(
        rows=rows,
        to_encode=to_encode,
        encode_seconds=seconds,
        dim=dim,
        points=len(points.points),
        by_family=dict(Counter(point.vectors.family for point in points.points)),
        found=sum(point.key in keys for point in points.points),
        skipped={point.key: why for point, why in points.skipped},
        # Raw rows as they are kept and of unit length, the projected corpus, and one transform's.
        work_bytes=rows * (kept * dim + 4 * dim + 2 * 4 * widest),
        largest_index_bytes=_largest(points, rows=rows, dim=dim),
    )


def _found(results: Results, config: SweepConfig, rows: int) -> set[str]:
    """Return the points of runs that this one may go on with, as far as a plan can tell."""
    build, judged = config.build, config.qrels is not None
    settings = {
        "target_recall": build.target_recall,
        "threads": build.threads or os.cpu_count() or 1,
        "seed": build.seed,
        "sample": None if judged else config.sample,
        "choose_sample": build.choose_sample,
    }
    indexed = rows if judged else rows - min(config.sample, rows // 5)
    found = set[str]()
    for run, header in results.headers.items():
        same = {name: header["settings"].get(name) for name in settings} == settings
        if same and header["dataset"]["rows"] == indexed:
            found |= results.done[run]
    return found


def _kept(config: SweepConfig) -> int:
    """Return the bytes of a number that the store will have, at most."""
    kept = config.build.dtype_kept()
    return 8 if kept is StoreDtype.OWN else np.dtype(kept.value).itemsize


def _stored(store: EmbeddingStore) -> int:
    """Return the bytes of a number in a store."""
    shards = (store.require(part.shard, verify=False) for part in store.corpus().parts if part.rows)
    return max(np.dtype(shard.dtype).itemsize for shard in shards)


def _largest(points: Grid, *, rows: int, dim: int) -> int:
    sizes = [0]
    for point in points.points:
        if point.vectors.family == FAISS:
            continue
        try:
            factory = point.factory(rows)
            sizes.append(expected_bytes(factory, rows=rows, dim=dim, k=point.vectors.k).total)
        except ConfigError:
            continue
    return max(sizes)
