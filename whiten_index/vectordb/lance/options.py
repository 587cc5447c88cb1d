"""What an address of LanceDB and its options say."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from whiten_index.errors import ConfigError
from whiten_index.vectordb.database_writer import Metric
from whiten_index.vectordb.option_values import one_of, real_number, require_known, whole_number

DISTANCES = {Metric.COSINE: "cosine", Metric.INNER_PRODUCT: "dot"}
_STORAGE = "storage."
_NONE, _AUTO = "none", "auto"
# Option -> the argument of the class that it is.
_OF_PARTITIONS = ("num_partitions", "sample_rate")
_OF_CODES = ("num_sub_vectors", "num_bits")
_OF_GRAPH = ("m", "ef_construction")
# Classes of ``lancedb.index`` by name: options are read where the client is not installed, too.
_KINDS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "ivf_flat": ("IvfFlat", _OF_PARTITIONS),
    "ivf_sq": ("IvfSq", _OF_PARTITIONS),
    "ivf_pq": ("IvfPq", (*_OF_PARTITIONS, *_OF_CODES)),
    "ivf_hnsw_sq": ("HnswSq", (*_OF_PARTITIONS, *_OF_GRAPH)),
}
# Rows from which the engine learns where one partition lies.
_TRAINED_BY = 256
# Of whitened vectors, which have no clusters, it is built sooner than graphs and loses less than
# products' codes.
_DEFAULT = "ivf_sq"
# Of these a table is made; the others are of the store, of searches and of what is kept.
SHAPING = frozenset({"index", *(name for _, names in _KINDS.values() for name in names)})
_OF_SEARCH = ("nprobes", "refine_factor", "ef")
_KEEP_DAYS = "keep_days"
# A hundred years; datetime knows of no such numbers as float does.
_MOST_DAYS = 36_500
# Up to here a search reads all vectors in tens of milliseconds.
_FEW = 100_000
# Codes are learnt from 256 rows at least, and so few rows are read sooner than an index.
_LEAST = 1000


@dataclass(frozen=True, kw_only=True)
class LanceOptions:
    """How a table is indexed, searched and tidied.

    Attributes:
        index: ``ivf_flat``, ``ivf_sq``, ``ivf_pq``, ``ivf_hnsw_sq``, ``none``, or ``auto``:
            ``ivf_sq`` from 100,000 rows on and none below.
        building: arguments of the index. There are √rows / 2 partitions by default, one where each
            has a graph; the rest is the engine's to choose.
        searching: ``nprobes``, ``refine_factor`` and ``ef`` of searches by the index: by default a
            quarter of the partitions, and 2: the scores are those of the vectors, not of codes.
        keep_days: for which versions of the table that are no longer the latest are kept.
        storage: options of the object store.
    """

    index: str = _AUTO
    building: Mapping[str, int] = field(default_factory=dict)
    searching: Mapping[str, int] = field(default_factory=dict)
    keep_days: float = 7.0
    storage: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> LanceOptions:
        """Read what ``--option NAME=VALUE`` gave.

        Raises:
            ConfigError: an option is not known, out of its bounds, or of another kind of index.
        """
        storage = {
            name.removeprefix(_STORAGE): value
            for name, value in options.items()
            if name.startswith(_STORAGE)
        }
        given = {name: each for name, each in options.items() if not name.startswith(_STORAGE)}
        kind = one_of("index", given.pop("index", _AUTO), (_AUTO, _NONE, *_KINDS))
        taken = _KINDS[_DEFAULT if kind == _AUTO else kind][1] if kind != _NONE else ()
        keep_days = real_number(_KEEP_DAYS, given.pop(_KEEP_DAYS, "7"), most=_MOST_DAYS)
        known = (*taken, *_OF_SEARCH)
        require_known(
            given,
            ("index", *known, _KEEP_DAYS, f"{_STORAGE}NAME"),
            f"LanceDB with index={kind}",
        )
        numbers = {name: whole_number(name, value) for name, value in given.items()}
        return cls(
            index=kind,
            building={name: numbers[name] for name in taken if name in numbers},
            searching={name: numbers[name] for name in _OF_SEARCH if name in numbers},
            keep_days=keep_days,
            storage=storage,
        )

    def config(self, rows: int, metric: Metric) -> Any | None:
        """Return the index for a table with some rows, None where it is to have none."""
        kind = self.index
        if kind == _AUTO:
            kind = _DEFAULT if rows >= _FEW else _NONE
        if kind == _NONE or rows < _LEAST:
            return None
        building = {"num_partitions": self._partitions(rows), **self.building}
        made = getattr(importlib.import_module("lancedb.index"), _KINDS[kind][0])
        return made(distance_type=DISTANCES[metric], **building)

    def of_search(self, rows: int) -> dict[str, int]:
        """Return how the index of a table with some rows is searched."""
        probes = max(20, self._partitions(rows) // 4)
        return {"nprobes": probes, "refine_factor": 2, **self.searching}

    def _partitions(self, rows: int) -> int:
        most = min(math.isqrt(rows) // 2, rows // _TRAINED_BY)
        by_default = 1 if self.index == "ivf_hnsw_sq" else max(1, most)
        return self.building.get("num_partitions", by_default)


# What of these a table is made of where nothing else is given; the engine has its own, too.
DEFAULTS: Mapping[str, str] = {"index": LanceOptions.index}


def folder_of(address: str) -> str:
    """Return the folder, or the URL of an object store, that an address names.

    Raises:
        ConfigError: the address names a host, no folder, or holds what such an address has not.
    """
    parts = urlsplit(address)
    scheme = parts.scheme.partition("+")[2]
    if parts.query or parts.fragment:
        raise ConfigError(
            f"{address} has a query or a fragment, of which LanceDB knows nothing; write % for "
            "what has a meaning in a URL (? is %3F, # is %23)"
        )
    if scheme:
        if not parts.netloc:
            raise ConfigError(f"{address} names no bucket; write {parts.scheme}://bucket/prefix")
        return f"{scheme}://{parts.netloc}{unquote(parts.path)}"
    if parts.netloc or not parts.path.strip("/"):
        raise ConfigError(
            f"{address} names no folder; write the folder from the root on, with "
            "three slashes: lancedb:///data/vectors"
        )
    return unquote(parts.path)
