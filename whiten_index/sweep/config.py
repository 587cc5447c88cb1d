"""What a sweep is asked to do: one frozen configuration, checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whiten_index.artifacts.paths import is_uri, require_folder, require_no_secret
from whiten_index.errors import ConfigError
from whiten_index.pipeline.build_config import BuildConfig
from whiten_index.sweep.codecs import require_codec

AUTO, TRUNCATE, NONE = "auto", "truncate", "none"
TRANSFORMS = (AUTO, "pca", "whitening", TRUNCATE, "all-but-the-top", "random")
INDEXES = ("flat", "ivf", "hnsw")
DEFAULT_KS = (32, 64, 128, 256)
DEFAULT_TRANSFORMS = (AUTO, "pca", "whitening", TRUNCATE)
DEFAULT_CODECS = ("fp32", "fp16", "sq8", "pq")
_OF_WHITENING = "whitening"


@dataclass(frozen=True, slots=True)
class Wish:
    """A transform to try: ``pca``, or ``whitening:0.25`` with an exponent of its own.

    Attributes:
        name: of the kind, or ``auto``.
        exponent: γ, None where the kind or the choice says it.
    """

    name: str
    exponent: float | None = None

    @classmethod
    def parse(cls, text: str) -> Wish:
        """Read one of the transforms.

        Raises:
            ConfigError: it is unknown, or has an exponent that is none.
        """
        name, colon, number = text.strip().partition(":")
        if name not in TRANSFORMS:
            raise ConfigError(
                f"--transforms {text!r} is unknown; use {', '.join(TRANSFORMS)}, or whitening with "
                "an exponent, such as whitening:0.25"
            )
        if not colon:
            return cls(name)
        try:
            exponent = float(number)
        except ValueError:
            exponent = math.nan
        if name != _OF_WHITENING or not 0 <= exponent <= 2:
            raise ConfigError(
                f"--transforms {text!r} is not understood; an exponent from 0 (PCA) to 2 follows "
                "whitening, such as whitening:0.25"
            )
        return cls(name, exponent)

    def __str__(self) -> str:
        return self.name if self.exponent is None else f"{self.name}:{self.exponent:g}"


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Everything a sweep can be told.

    Attributes:
        build: corpus, encoder, store, threads, seed, where indexes are made and searched, and the
            index recall that lists and graphs are tuned for, as a build takes them; what it says of
            transform and factory does not count.
        out: folder of the results and the report.
        queries, qrels, qrels_split: files of judged queries that quality is measured by. Without
            them rows of the corpus are held out of the indexes and are the queries.
        ks: widths to try.
        transforms: see ``Wish``.
        codecs: see ``codecs.CODECS``.
        indexes: flat, ivf, hnsw.
        baselines: measure raw embeddings and FAISS's own transforms too.
        rerank: candidates a query that coarse codecs have ranked again from the store; 0 for none.
        sample: rows held out as queries where no queries are given.
        name: of the dataset in the report; the corpus's file or folder where it is left out.
    """

    build: BuildConfig
    out: str
    queries: str | None = None
    qrels: str | None = None
    qrels_split: str | None = None
    ks: tuple[int, ...] = DEFAULT_KS
    transforms: tuple[Wish, ...] = field(
        default_factory=lambda: tuple(map(Wish, DEFAULT_TRANSFORMS))
    )
    codecs: tuple[str, ...] = DEFAULT_CODECS
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
        for codec in self.codecs:
            require_codec(codec)
        for index in self.indexes:
            if index not in INDEXES:
                raise ConfigError(f"--indexes {index!r} is unknown; use {', '.join(INDEXES)}")
        self._require_bounds()

    def _require_bounds(self) -> None:
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
            raise ConfigError(f"--sample {self.sample} tells too little; hold out 30 rows or more")

    @property
    def folder(self) -> Path:
        """Where results and report go."""
        return Path(self.out)

    @property
    def dataset_name(self) -> str:
        """What the report calls the corpus."""
        if self.name is not None:
            return self.name
        if not self.build.corpus:
            return self.build.store_path.name
        # A relative path has no name of its folder.
        path = Path(self.build.corpus[0])
        path = path if is_uri(self.build.corpus[0]) else path.absolute()
        return path.parent.name if path.stem in ("corpus", "*") else path.stem


def parse_list(text: str | Iterable[object]) -> tuple[str, ...]:
    """Return the parts of ``a,b,c``, or of a list such as a job file gives."""
    parts = text.split(",") if isinstance(text, str) else map(str, text)
    return tuple(part.strip() for part in parts if part.strip())


def parse_widths(text: str | Iterable[object]) -> tuple[int, ...]:
    """Return widths in rising order.

    Raises:
        ConfigError: one is no whole number.
    """
    found = []
    for part in parse_list(text):
        if not part.isdecimal():
            raise ConfigError(f"--k {part!r} is no width; give whole numbers such as 32,64,128")
        found.append(int(part))
    return tuple(sorted(found))


def parse_transforms(text: str | Iterable[object]) -> tuple[Wish, ...]:
    """Return the transforms of ``auto,pca,whitening:0.25``."""
    return tuple(map(Wish.parse, parse_list(text)))


def sweep_config(options: Mapping[str, Any]) -> SweepConfig:
    """Return the configuration that options say, by their names on the command line.

    Args:
        options: those of a build's corpus and encoder, and ``widths``, ``transforms``, ``codecs``
            and ``indexes`` as texts such as ``a,b`` or as lists. What is missing has its default.

    Raises:
        ConfigError: one is unknown or cannot be used.
    """
    left = dict(options)
    own: dict[str, Any] = {name: left.pop(name) for name in (*_OWN, *_PARSED) if name in left}
    for name in ("queries", "qrels", "qrels_split"):
        own[name] = left.pop(name, None)
    out = str(left.pop("out", "") or "")
    left.setdefault("index_device", "cpu")
    if left.get("store") is None:
        left["store"] = str(Path(out) / "store")
    for name, parse in _PARSED.items():
        if name in own:
            own["ks" if name == "widths" else name] = parse(own.pop(name))
    if unknown := sorted(left.keys() - (BuildConfig.__dataclass_fields__.keys() - _OF_BUILDS)):
        raise ConfigError(f"a sweep knows no {', '.join(unknown)}; leave it out")
    return SweepConfig(build=BuildConfig(**left), out=out, **own)


# What a sweep tries itself, or does not do; a build alone has it.
_OF_BUILDS = {
    "whiten", "k", "exponent", "center", "normalize_input", "groups", "group_size", "shuffle",
    "shrinkage", "floor", "remove_top", "pairs", "weight_column", "weighting", "factory",
    "memory_budget",
}  # fmt: skip
_OWN = ("baselines", "rerank", "sample", "name")
_PARSED: dict[str, Callable[[Any], Any]] = {
    "widths": parse_widths,
    "transforms": parse_transforms,
    "codecs": parse_list,
    "indexes": parse_list,
}
