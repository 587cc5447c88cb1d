"""What a sweep would measure, and how many bytes that takes, before any work is done."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

from whiten_index.artifacts.files import exists
from whiten_index.index import expected_bytes, require_device
from whiten_index.pipeline.plan import plan_build
from whiten_index.progress import Progress
from whiten_index.store import EmbeddingStore
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
        work_bytes: of the index files that the sweep writes and removes, at most at a time.
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
    seconds = None
    if config.build.corpus:
        build = plan_build(config.build, progress=progress)
        rows, dim, to_encode = build.reused + build.to_encode, build.dim, build.to_encode
        seconds = build.seconds
    else:
        store = EmbeddingStore.open(config.build.store_place)
        rows, dim, to_encode = store.corpus().rows, int(store.encoder["dim"]), 0
    points = grid(config, dim=dim, rank=dim, rows=rows)
    path = config.folder / RESULTS
    keys = _found(Results.read(path), config, rows) if exists(path) else set()
    sizes = _sizes(points, rows=rows, dim=dim)
    return SweepPlan(
        rows=rows,
        to_encode=to_encode,
        encode_seconds=seconds,
        dim=dim,
        points=len(points.points),
        by_family=dict(Counter(point.vectors.family for point in points.points)),
        found=sum(point.key in keys for point in points.points),
        skipped={point.key: why for point, why in points.skipped},
        # Those over the same vectors, and the raw embeddings.
        work_bytes=4 * rows * dim + max(map(sum, sizes), default=0),
        largest_index_bytes=max((size for some in sizes for size in some), default=0),
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


def _sizes(points: Grid, *, rows: int, dim: int) -> list[list[int]]:
    """Return the expected bytes of our indexes, those over the same vectors together."""
    return [
        [expected_bytes(point.factory(rows), rows=rows, dim=dim, k=where.k).total for point in some]
        for where, some in points.by_vectors().items()
        if where.family != FAISS
    ]
