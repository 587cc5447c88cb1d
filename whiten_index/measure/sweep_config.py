"""Configuration of a sweep, and its grid: transform × k × codec × structure, and baselines."""

import contextlib
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from whiten_index.errors import ConfigError, WhiteningError
from whiten_index.index.factory import inner_index
from whiten_index.measure.measure_options import SweepOptions
from whiten_index.options import changed, schema
from whiten_index.paths import as_place, is_uri
from whiten_index.pipeline.build_config import BuildConfig
from whiten_index.pipeline.build_options import EncodeOptions, JudgementOptions
from whiten_index.vectordb.registry import require_database

AUTO, TRUNCATE, NONE = "auto", "truncate", "none"
TRANSFORMS = (AUTO, "pca", "whitening", TRUNCATE, "all-but-the-top")
INDEXES = ("flat", "ivf", "hnsw")
FP32 = "fp32"
DEFAULT_CODECS = (FP32, "fp16", "sq8", "pq")
# Options that a sweep inside a database does not take.
_OF_FAISS_ALONE = ("indexes", "rerank", "target_recall", "index_device")

# Codec -> its part of a FAISS factory string; {4} stands for k / 4, {2} for k / 2.
CODECS = {
    FP32: "Flat", "fp16": "SQfp16", "sq8": "SQ8", "sq6": "SQ6", "sq4": "SQ4", "pq": "PQ{4}",
    "pqfs": "PQ{2}x4fs", "rabitq": "RaBitQ", "rabitq2": "RaBitQ2", "rabitq4": "RaBitQ4",
}  # fmt: skip
_PQ_BYTES = re.compile(r"pq([1-9][0-9]*)")
# FAISS's own names start with a capital, ours never do.
_OF_FAISS = re.compile(r"[A-Z][A-Za-z0-9_]*")


def codec_string(codec: str, k: int) -> str:
    """Return a codec's part of a FAISS factory string over ``k`` dims."""
    if codec in CODECS:
        if codec in ("pq", "pqfs") and k % 4:
            raise ConfigError(f"{codec} takes a k that 4 divides")
        return CODECS[codec].replace("{4}", str(k // 4)).replace("{2}", str(k // 2))
    if (found := _PQ_BYTES.fullmatch(codec)) is None:
        return codec
    if k % int(found[1]):
        raise ConfigError(f"{codec} cuts vectors into {found[1]} parts, and k = {k} is no multiple")
    return f"PQ{found[1]}"


def parse_transform(text: str) -> tuple[str, float | None]:
    """Return kind and exponent of a transform such as ``pca`` or ``whitening:0.25``."""
    name, colon, exponent = text.strip().partition(":")
    if name in TRANSFORMS and not colon:
        return name, None
    with contextlib.suppress(ValueError):
        if name == "whitening" and 0 <= float(exponent) <= 2:
            return name, float(exponent)
    raise ConfigError(
        f"--transforms {text!r} is unknown; use {', '.join(TRANSFORMS)}, or whitening with an "
        "exponent from 0 (PCA) to 2, such as whitening:0.25"
    )


_LISTS = {
    "widths": "--k", "transforms": "--transforms", "codecs": "--codecs", "indexes": "--indexes",
}  # fmt: skip


@schema
class SweepConfig(SweepOptions, EncodeOptions):
    """Options of a sweep: those of ``SweepOptions``, and a build's of corpus and encoder.

    Without ``queries`` and ``qrels`` rows of the corpus are held out of the indexes and serve as
    queries. The lists also take texts such as ``"32,64"``.

    Raises:
        ConfigError: a value is out of bounds, or options do not go together.

    Examples:
        >>> SweepConfig(store="store", out="swept", widths="16,8").ks
        (8, 16)
    """

    def __post_init__(self) -> None:
        if not self.out:
            raise ConfigError("say where results and report go: --out DIR")
        object.__setattr__(self, "out", str(as_place(self.out, what="--out")))
        self.require_both()
        for address in self.databases:
            require_database(address, {})
        for flag in changed(self, only=_OF_FAISS_ALONE) if self.databases else ():
            raise ConfigError(f"{flag} is of indexes of FAISS; leave it out, or leave out --in")
        if self.codecs is None and not self.databases:
            object.__setattr__(self, "codecs", DEFAULT_CODECS)
        self._require_lists()
        if 0 < self.rerank < 10:
            raise ConfigError(
                f"--rerank {self.rerank} is fewer than the 10 hits that are measured; give 10 or "
                "more, or 0 to leave re-ranking out"
            )
        _ = self.build

    def _require_lists(self) -> None:
        for name, flag in _LISTS.items():
            if getattr(self, name) is None:
                continue
            given = ",".join(map(str, getattr(self, name))).split(",")
            parts = tuple(part.strip() for part in given if part.strip())
            if not parts:
                raise ConfigError(f"{flag} is empty; name one or more, separated by commas")
            if len(set(parts)) < len(parts):
                raise ConfigError(f"{flag} names something twice; name each once")
            object.__setattr__(self, name, parts)
        for width in self.widths:
            if not str(width).isdecimal() or int(width) < 1:
                raise ConfigError(
                    f"--k {width!r} is no width; give whole numbers from 1, such as 32,64,128"
                )
        for transform in self.transforms:
            parse_transform(transform)
        for codec in () if self.databases else self.codecs or ():
            if not (codec in CODECS or _PQ_BYTES.fullmatch(codec) or _OF_FAISS.fullmatch(codec)):
                raise ConfigError(
                    f"--codecs {codec!r} is unknown; use {', '.join(CODECS)}, pqN for N bytes a "
                    "vector, or the name of a codec in FAISS's factory strings, such as PRQ16x3x8"
                )
        for index in self.indexes:
            if index not in INDEXES:
                raise ConfigError(f"--indexes {index!r} is unknown; use {', '.join(INDEXES)}")

    @cached_property
    def build(self) -> BuildConfig:
        """Corpus, encoder, store and resources as a build takes them."""
        names = {each.name for each in fields(self)} - vars(JudgementOptions()).keys() - {"out"}
        names &= {each.name for each in fields(BuildConfig)}
        shared = {name: getattr(self, name) for name in names}
        store = self.store or f"{str(self.out).rstrip('/')}/store"
        return BuildConfig(**{**shared, "store": store})

    @property
    def ks(self) -> tuple[int, ...]:
        """Widths to try, in rising order."""
        return tuple(sorted(map(int, self.widths)))

    @property
    def search_threads(self) -> int:
        """Threads that FAISS searches with."""
        return self.build.threads or os.cpu_count() or 1

    @property
    def dataset_name(self) -> str:
        """Name of the corpus in the report."""
        if self.name is not None:
            return self.name
        if not self.corpus:
            return Path(self.build.store_place).name
        # A relative path has no name of its folder.
        path = Path(self.corpus[0])
        path = path if is_uri(self.corpus[0]) else path.absolute()
        return path.parent.name if path.stem in ("corpus", "*") else path.stem


OURS, RAW, FAISS = "ours", "raw", "faiss"
_FITTED = (OURS, TRUNCATE)
# Codecs so coarse that their best hits are worth ranking again.
_COARSE = ("pq", "rabitq", "sq4", "PQ", "EDEN", "SQtqmse", "RaBitQ")
# FAISS advises this many rows per list at least.
_ROWS_A_LIST = 39
_LEAST_LISTS = 4


@dataclass(frozen=True, slots=True)
class Point:
    """One setting to measure."""

    family: str
    transform: str
    k: int
    codec: str
    index: str
    rerank: int = 0

    @property
    def key(self) -> str:
        """Name of the point within its run."""
        again = f"/rerank{self.rerank}" if self.rerank else ""
        return f"{self.family}/{self.transform}/k{self.k}/{self.codec}/{self.index}{again}"

    @property
    def space(self) -> tuple[str, str, int]:
        """Key of the points over the same vectors."""
        return self.family, self.transform, self.k

    def setting(self) -> dict[str, Any]:
        """Return the setting as JSON values."""
        return {
            "family": self.family,
            "transform": self.transform.partition(":")[0],
            "k": self.k,
            "codec": self.codec,
            "index": self.index,
            "rerank": {"candidates": self.rerank, "from": "store"} if self.rerank else None,
        }

    def factory(self, rows: int) -> str:
        """Return the FAISS factory string of the index proper."""
        codec = codec_string(self.codec, self.k)
        if self.family == FAISS:
            transform = "PCAW" if self.transform == "faiss-pcaw" else "PCA"
            return f"{transform}{self.k},L2norm,{codec}"
        if self.index == "ivf":
            return f"IVF{lists(rows)},{codec}"
        if self.index == "hnsw":
            return "HNSW32" if self.codec == FP32 else f"HNSW32_{codec}"
        return codec


def lists(rows: int) -> int:
    """Return a number of inverted lists: 4·√n, or fewer if each would have too few rows."""
    return max(min(4 * math.isqrt(rows), rows // _ROWS_A_LIST), _LEAST_LISTS)


def grid(
    config: SweepConfig, *, dim: int, rank: int, rows: int
) -> tuple[list[Point], dict[Point, str]]:
    """Return the points of a sweep of raw embeddings with ``dim`` dims, which span ``rank``.

    The second are points that cannot be measured, with their reasons.
    """
    baselines = _baselines(config, dim) if config.baselines else ()
    wanted = dict.fromkeys([*baselines, *_ours(config)])
    reasons = {point: _why_not(point, dim=dim, rank=rank, rows=rows) for point in wanted}
    skipped = {point: why for point, why in reasons.items() if why is not None}
    points = [point for point in wanted if point not in skipped]
    if not any(point.family in _FITTED for point in points):
        whys = dict.fromkeys(why for p, why in skipped.items() if p.family in _FITTED)
        # As a build fails with a k above the rank.
        kind = WhiteningError if all(why.startswith("k = ") for why in whys) else ConfigError
        raise kind(
            f"no requested setting can be measured on {dim}-dim embeddings of rank {rank} "
            f"({'; '.join(whys)}); use other --k, --codecs or --indexes"
        )
    return points, skipped


def _why_not(point: Point, *, dim: int, rank: int, rows: int) -> str | None:
    most = dim if point.family in (RAW, TRUNCATE) else rank
    if point.k > most:
        what = "dims" if most == dim else "directions"
        return f"k = {point.k} is above the {most} {what} of the embeddings"
    if point.index == "ivf" and rows < _LEAST_LISTS * _ROWS_A_LIST:
        return f"{rows} rows are too few for inverted lists"
    try:
        factory = point.factory(rows)
        if point.family != FAISS:
            inner_index(factory, point.k)
    except ConfigError as error:
        return str(error)
    return None


def _ours(config: SweepConfig) -> Iterator[Point]:
    # A graph takes minutes to build and is the same for every codec except for its errors, so
    # graphs are built of the first codec at the two widths in the middle.
    middle, codecs = config.ks[(len(config.ks) - 1) // 2 :][:2], config.codecs or ()
    for k, transform, codec in product(config.ks, config.transforms, codecs):
        space = TRUNCATE if transform == TRUNCATE else OURS, transform, k
        for index in config.indexes:
            if index != "hnsw" or (k in middle and codec == codecs[0]):
                yield Point(*space, codec, index)
            if config.rerank and codec.startswith(_COARSE) and index != "hnsw":
                yield Point(*space, codec, index, config.rerank)


def _baselines(config: SweepConfig, dim: int) -> Iterator[Point]:
    """Yield raw embeddings in codecs of our points' sizes, and FAISS's own PCA and whitening."""
    raw = RAW, NONE, dim
    # Ours are compared with the same codec, and with product codes of the same size.
    sizes = {k // 4 for k in config.ks if k % 4 == 0} | set(config.ks)
    sized = [f"pq{size}" for size in sorted(sizes) if size < dim and dim % size == 0]
    for codec in (FP32, "fp16", "sq8", "sq4", *sized, "rabitq", "rabitq4", *(config.codecs or ())):
        yield Point(*raw, codec, "flat")
    if config.rerank:
        yield Point(*raw, "rabitq", "flat", config.rerank)
    if "ivf" in config.indexes:
        yield Point(*raw, FP32, "ivf")
        yield Point(*raw, "sq8", "ivf")
    if "hnsw" in config.indexes:
        yield Point(*raw, FP32, "hnsw")
    for k, transform, codec in product(config.ks, ("faiss-pca", "faiss-pcaw"), (FP32, "sq8")):
        yield Point(FAISS, transform, k, codec, "flat")
