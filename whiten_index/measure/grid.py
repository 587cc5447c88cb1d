"""Grid of a sweep: transform × k × codec × structure, and the baselines."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from whiten_index.errors import ConfigError, WhiteningError
from whiten_index.index.factory import inner_index
from whiten_index.measure.sweep_config import FP32, NONE, TRUNCATE, SweepConfig, codec_string

OURS, RAW, FAISS = "ours", "raw", "faiss"
_FITTED = (OURS, TRUNCATE)
# Codecs so coarse that their best hits are worth ranking again.
_COARSE = ("pq", "rabitq", "sq4")
# FAISS advises this many rows per list at least.
_ROWS_A_LIST = 39
_LEAST_LISTS = 4


@dataclass(frozen=True, slots=True)
class Vectors:
    """Vectors of the corpus under one transform."""

    family: str
    transform: str
    k: int


@dataclass(frozen=True, slots=True)
class Point:
    """One setting to measure."""

    vectors: Vectors
    codec: str
    index: str
    rerank: int = 0

    @property
    def key(self) -> str:
        """Name of the point within its run."""
        where = self.vectors
        again = f"/rerank{self.rerank}" if self.rerank else ""
        return f"{where.family}/{where.transform}/k{where.k}/{self.codec}/{self.index}{again}"

    def setting(self) -> dict[str, Any]:
        """Return the setting as JSON values."""
        where = self.vectors
        return {
            "family": where.family,
            "transform": where.transform.partition(":")[0],
            "k": where.k,
            "codec": self.codec,
            "index": self.index,
            "rerank": {"candidates": self.rerank, "from": "store"} if self.rerank else None,
        }

    def factory(self, rows: int) -> str:
        """Return the FAISS factory string of the index proper."""
        codec = codec_string(self.codec, self.vectors.k)
        if self.vectors.family == FAISS:
            transform = "PCAW" if self.vectors.transform == "faiss-pcaw" else "PCA"
            return f"{transform}{self.vectors.k},L2norm,{codec}"
        if self.index == "ivf":
            return f"IVF{lists(rows)},{codec}"
        if self.index == "hnsw":
            return "HNSW32" if self.codec == FP32 else f"HNSW32_{codec}"
        return codec


def lists(rows: int) -> int:
    """Return a number of inverted lists: 4·√n, or fewer if each would have too few rows."""
    return max(min(4 * math.isqrt(rows), rows // _ROWS_A_LIST), _LEAST_LISTS)


@dataclass(frozen=True)
class Grid:
    """Points to measure, and points that cannot be measured with their reasons."""

    points: tuple[Point, ...]
    skipped: dict[Point, str]


def grid(config: SweepConfig, *, dim: int, rank: int, rows: int) -> Grid:
    """Return the points of a sweep of raw embeddings with ``dim`` dims, which span ``rank``."""
    baselines = _baselines(config, dim) if config.baselines else ()
    wanted = dict.fromkeys([*baselines, *_ours(config)])
    reasons = {point: _why_not(point, dim=dim, rank=rank, rows=rows) for point in wanted}
    skipped = {point: why for point, why in reasons.items() if why is not None}
    points = tuple(point for point in wanted if point not in skipped)
    if not any(point.vectors.family in _FITTED for point in points):
        whys = dict.fromkeys(why for p, why in skipped.items() if p.vectors.family in _FITTED)
        # As a build fails with a k above the rank.
        kind = WhiteningError if all(why.startswith("k = ") for why in whys) else ConfigError
        raise kind(
            f"no requested setting can be measured on {dim}-dim embeddings of rank {rank} "
            f"({'; '.join(whys)}); use other --k, --codecs or --indexes"
        )
    return Grid(points, skipped)


def _why_not(point: Point, *, dim: int, rank: int, rows: int) -> str | None:
    where = point.vectors
    most = dim if where.family in (RAW, TRUNCATE) or where.transform == "random" else rank
    if where.k > most:
        what = "dims" if most == dim else "directions"
        return f"k = {where.k} is above the {most} {what} of the embeddings"
    if point.index == "ivf" and rows < _LEAST_LISTS * _ROWS_A_LIST:
        return f"{rows} rows are too few for inverted lists"
    try:
        factory = point.factory(rows)
        if where.family != FAISS:
            inner_index(factory, where.k)
    except ConfigError as error:
        return str(error)
    return None


def _ours(config: SweepConfig) -> Iterator[Point]:
    # A graph takes minutes to build and is the same for every codec except for its errors, so
    # graphs are built of the first codec at the two widths in the middle.
    middle = config.ks[(len(config.ks) - 1) // 2 :][:2]
    for k, transform, codec in product(config.ks, config.transforms, config.codecs):
        where = Vectors(TRUNCATE if transform == TRUNCATE else OURS, transform, k)
        for index in config.indexes:
            if index != "hnsw" or (k in middle and codec == config.codecs[0]):
                yield Point(where, codec, index)
        if config.rerank and codec.startswith(_COARSE) and "flat" in config.indexes:
            yield Point(where, codec, "flat", config.rerank)


def _baselines(config: SweepConfig, dim: int) -> Iterator[Point]:
    """Yield raw embeddings in codecs of our points' sizes, and FAISS's own PCA and whitening."""
    raw = Vectors(RAW, NONE, dim)
    # Ours are compared with the same codec, and with product codes of the same size.
    sizes = {k // 4 for k in config.ks if k % 4 == 0} | set(config.ks)
    sized = [f"pq{size}" for size in sorted(sizes) if size < dim and dim % size == 0]
    for codec in (FP32, "fp16", "sq8", "sq4", *sized, "rabitq", "rabitq4", *config.codecs):
        yield Point(raw, codec, "flat")
    if config.rerank:
        yield Point(raw, "rabitq", "flat", config.rerank)
    if "ivf" in config.indexes:
        yield Point(raw, FP32, "ivf")
        yield Point(raw, "sq8", "ivf")
    if "hnsw" in config.indexes:
        yield Point(raw, FP32, "hnsw")
    for k, transform, codec in product(config.ks, ("faiss-pca", "faiss-pcaw"), (FP32, "sq8")):
        yield Point(Vectors(FAISS, transform, k), codec, "flat")
