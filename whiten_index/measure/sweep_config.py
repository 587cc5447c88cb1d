"""Configuration of a sweep, checked when it is made."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whiten_index.errors import ConfigError
from whiten_index.paths import is_uri, require_folder, require_no_secret
from whiten_index.pipeline.build_config import BuildConfig

AUTO, TRUNCATE, NONE = "auto", "truncate", "none"
TRANSFORMS = (AUTO, "pca", "whitening", TRUNCATE, "all-but-the-top", "random")
INDEXES = ("flat", "ivf", "hnsw")
FP32 = "fp32"

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
    if codec == "pq" and k % 4:
        raise ConfigError("product quantization by 4 dims a byte does not divide k")
    if codec == "pqfs" and k % 4:
        raise ConfigError("product quantization in 4 bits by 2 dims takes a k that 4 divides")
    if codec in CODECS:
        return CODECS[codec].replace("{4}", str(k // 4)).replace("{2}", str(k // 2))
    if (found := _PQ_BYTES.fullmatch(codec)) is None:
        return codec
    if k % int(found[1]):
        raise ConfigError(f"{codec} cuts vectors into {found[1]} parts, and k = {k} is no multiple")
    return f"PQ{found[1]}"


def parse_transform(text: str) -> tuple[str, float | None]:
    """Return kind and exponent of a transform such as ``pca`` or ``whitening:0.25``."""
    name, colon, exponent = text.strip().partition(":")
    if name not in TRANSFORMS:
        raise ConfigError(
            f"--transforms {text!r} is unknown; use {', '.join(TRANSFORMS)}, or whitening with "
            "an exponent, such as whitening:0.25"
        )
    if not colon:
        return name, None
    with contextlib.suppress(ValueError):
        if name == "whitening" and 0 <= float(exponent) <= 2:
            return name, float(exponent)
    raise ConfigError(
        f"--transforms {text!r} is not understood; an exponent from 0 (PCA) to 2 follows "
        "whitening, such as whitening:0.25"
    )


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Options of a sweep.

    Attributes:
        build: corpus, encoder, store, threads, seed, device of the indexes, and the index recall
            that lists and graphs are tuned to, as a build takes them. Its transform and factory
            are ignored.
        out: folder of the results and the report.
        queries, qrels, qrels_split: files of judged queries, which measure quality. Without them
            rows of the corpus are held out of the indexes and serve as queries.
        ks: widths to try.
        transforms: see ``parse_transform``.
        codecs: see ``CODECS``.
        indexes: flat, ivf, hnsw.
        baselines: also measure raw embeddings and FAISS's own transforms.
        rerank: candidates per query that are ranked again from the store for coarse codecs; 0
            for none.
        sample: rows held out as queries if no queries are given.
        name: name of the dataset in the report, by default the corpus's file or folder.
    """

    build: BuildConfig
    out: str
    queries: str | None = None
    qrels: str | None = None
    qrels_split: str | None = None
    ks: tuple[int, ...] = (32, 64, 128, 256)
    transforms: tuple[str, ...] = (AUTO, "pca", "whitening", TRUNCATE)
    codecs: tuple[str, ...] = (FP32, "fp16", "sq8", "pq")
    indexes: tuple[str, ...] = INDEXES
    baselines: bool = True
    rerank: int = 100
    sample: int = 500
    name: str | None = None

    def __post_init__(self) -> None:
        require_no_secret(vars(self), what="an option of a sweep")
        if not self.out:
            raise ConfigError("say where results and report go: --out DIR")
        for place in (self.out, self.build.store or ""):
            require_folder(place, what="a sweep")
        if self.build.runner != "local":
            raise ConfigError(
                "a sweep works on one machine: fill a store with encode --runner ray, and sweep "
                "that store"
            )
        if (self.queries is None) != (self.qrels is None):
            missing = "--queries" if self.queries is None else "--qrels"
            raise ConfigError(
                f"{missing} is missing: --queries FILE holds the texts and --qrels FILE says which "
                "documents answer them; without both, agreement with the raw embeddings is measured"
            )
        if self.qrels is None and self.qrels_split is not None:
            raise ConfigError(f"--qrels-split {self.qrels_split} needs --qrels FILE")
        for transform in self.transforms:
            parse_transform(transform)
        for codec in self.codecs:
            if not (codec in CODECS or _PQ_BYTES.fullmatch(codec) or _OF_FAISS.fullmatch(codec)):
                raise ConfigError(
                    f"--codecs {codec!r} is unknown; use {', '.join(CODECS)}, pqN for N bytes a "
                    "vector, or the name of a codec in FAISS's factory strings, such as PRQ16x3x8"
                )
        for index in self.indexes:
            if index not in INDEXES:
                raise ConfigError(f"--indexes {index!r} is unknown; use {', '.join(INDEXES)}")
        for option, values in (
            ("--k", self.ks),
            ("--transforms", self.transforms),
            ("--codecs", self.codecs),
            ("--indexes", self.indexes),
        ):
            if not values:
                raise ConfigError(f"{option} is empty; name one or more, separated by commas")
            if len(set(values)) < len(values):
                raise ConfigError(f"{option} names something twice; name each once")
        if min(self.ks) < 1:
            raise ConfigError(f"--k {min(self.ks)} is no width; give whole numbers from 1")
        if self.rerank and self.rerank < 10:
            raise ConfigError(
                f"--rerank {self.rerank} is fewer than the 10 hits that are measured; give 10 or "
                "more, or 0 to leave re-ranking out"
            )
        if self.sample < 30:
            raise ConfigError(f"--sample {self.sample} is too small; hold out 30 rows or more")

    @property
    def folder(self) -> Path:
        """Folder of the results and the report."""
        return Path(self.out)

    @property
    def dataset_name(self) -> str:
        """Name of the corpus in the report."""
        if self.name is not None:
            return self.name
        if not self.build.corpus:
            return Path(self.build.store_place).name
        # A relative path has no name of its folder.
        path = Path(self.build.corpus[0])
        path = path if is_uri(self.build.corpus[0]) else path.absolute()
        return path.parent.name if path.stem in ("corpus", "*") else path.stem


def sweep_config(options: Mapping[str, Any]) -> SweepConfig:
    """Return the configuration for options by their names on the command line.

    Args:
        options: those of a build's corpus and encoder, and ``widths``, ``transforms``, ``codecs``
            and ``indexes`` as texts such as ``a,b`` or as lists. A missing one has its default.

    Raises:
        ConfigError: an option is unknown or invalid.
    """
    left = dict(options)
    own = {name: left.pop(name) for name in _OWN if name in left}
    lists: dict[str, Any] = {name: _parts(left.pop(name)) for name in _LISTS if name in left}
    if (widths := lists.pop("widths", None)) is not None:
        if wrong := [width for width in widths if not width.isdecimal()]:
            raise ConfigError(f"--k {wrong[0]!r} is no width; give whole numbers such as 32,64,128")
        own["ks"] = tuple(sorted(map(int, widths)))
    out = str(left.pop("out", "") or "")
    left.setdefault("index_device", "cpu")
    if left.get("store") is None:
        left["store"] = str(Path(out) / "store")
    if unknown := sorted(left.keys() - (BuildConfig.__dataclass_fields__.keys() - _OF_BUILDS)):
        raise ConfigError(f"a sweep knows no {', '.join(unknown)}; leave it out")
    return SweepConfig(build=BuildConfig(**left), out=out, **own, **lists)


_LISTS = ("widths", "transforms", "codecs", "indexes")
_OWN = ("queries", "qrels", "qrels_split", "baselines", "rerank", "sample", "name")
# Options of a build that a sweep varies itself or does not have.
_OF_BUILDS = {
    "whiten", "k", "exponent", "center", "normalize_input", "groups", "group_size", "shuffle",
    "shrinkage", "floor", "remove_top", "pairs", "weight_column", "weighting", "factory",
    "memory_budget",
}  # fmt: skip


def _parts(text: str | Iterable[object]) -> tuple[str, ...]:
    """Return the parts of ``a,b,c``, or of a list in a job file."""
    parts = text.split(",") if isinstance(text, str) else map(str, text)
    return tuple(part.strip() for part in parts if part.strip())
