"""Which index of Milvus to build, and how carefully to search it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from whiten_index.errors import ConfigError
from whiten_index.vectordb.option_values import one_of, require_known, whole_number


@dataclass(frozen=True)
class _Kind:
    """An index of Milvus: option -> its parameter and default, for the build and for a search.

    A default of 0 is chosen by the rows.
    """

    name: str
    build: Mapping[str, tuple[str, int]]
    search: Mapping[str, tuple[str, int]]


_KINDS = {
    "hnsw": _Kind("HNSW", {"m": ("M", 16), "ef_construction": ("efConstruction", 200)},
                  {"ef": ("ef", 128)}),
    "flat": _Kind("FLAT", {}, {}),
    "ivf_flat": _Kind("IVF_FLAT", {"nlist": ("nlist", 0)}, {"nprobe": ("nprobe", 32)}),
    "autoindex": _Kind("AUTOINDEX", {}, {}),
}  # fmt: skip
# Of these a collection is made; the others are of the connection and of searches.
SHAPING = frozenset({"index", *(name for each in _KINDS.values() for name in each.build)})
_HNSW = "hnsw"
# What of these a collection is made of where nothing else is given.
DEFAULTS: Mapping[str, str] = {
    "index": _HNSW,
    **{name: str(default) for name, (_, default) in _KINDS[_HNSW].build.items()},
}
_EXACT = ("FLAT", "BRUTE_FORCE")
# Rows that k-means wants for each of its centres.
_ROWS_A_LIST = 39


@dataclass(frozen=True)
class IndexOptions:
    """The index to build, and how carefully to search it.

    Attributes:
        kind: as Milvus calls it, such as ``HNSW``.
        given: option -> number.
        database: of the server, "" for its default.
    """

    kind: str
    given: dict[str, int]
    database: str

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> IndexOptions:
        """Return what ``--option NAME=VALUE`` asks for.

        Raises:
            ConfigError: an option is not known, not a number, or of another index.
        """
        given = dict(options)
        every = {name for each in _KINDS.values() for name in (*each.build, *each.search)}
        require_known(given, ("db", "index", *sorted(every)), "Milvus")
        database, index = given.pop("db", ""), one_of("index", given.pop("index", _HNSW), _KINDS)
        kind = _KINDS[index]
        for name in given:
            if name not in (*kind.build, *kind.search):
                raise ConfigError(f"--option {name} is of no use to index={index}; leave it out")
        numbers = {name: whole_number(name, value) for name, value in given.items()}
        return cls(kind.name, numbers, database)

    def building(self, rows: int) -> dict[str, int]:
        """Return the parameters of the build over so many rows."""
        asked = self._asked(self.kind, "build")
        if asked.get("nlist") == 0:
            asked["nlist"] = max(1, min(int(4 * math.sqrt(rows)), rows // _ROWS_A_LIST))
        return asked

    def searching(self, kind: str, top_k: int) -> dict[str, int]:
        """Return the parameters of a search of an index of some kind."""
        asked = self._asked(kind, "search")
        if "ef" in asked:
            # Milvus refuses to look at fewer rows than it is to return.
            asked["ef"] = max(asked["ef"], top_k)
        return asked

    def _asked(self, kind: str, of: str) -> dict[str, int]:
        return {
            to: self.given.get(name, default)
            for each in _KINDS.values()
            if each.name == kind
            for name, (to, default) in getattr(each, of).items()
        }


def is_exact(kind: str) -> bool:
    """Tell whether an index of a kind finds what a search of all rows finds."""
    return kind in _EXACT
