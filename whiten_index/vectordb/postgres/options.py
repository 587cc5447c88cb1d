"""What may be said about the index and the load of a table in PostgreSQL."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from whiten_index.errors import ConfigError
from whiten_index.vectordb.database_writer import Layout, VectorDtype
from whiten_index.vectordb.option_values import one_of, require_known, whole_number

# The widest vectors that pgvector keeps, and that its indexes take.
_MOST_KEPT = 16_000
MOST_INDEXED = {VectorDtype.FLOAT32: 2000, VectorDtype.FLOAT16: 4000}

_WHOLE = {
    "m": (2, 100),
    "ef_construction": (4, 1000),
    "ef_search": (1, 1000),
    "lists": (1, 32768),
    "probes": (1, 32768),
    "max_parallel_maintenance_workers": (0, 1024),
    "lock_timeout": (1, 86400),
}
# Of these a table is made; the others are of the load, of searches and of waiting.
SHAPING = frozenset({"index", "m", "ef_construction", "lists"})
_TEXTS = ("index", "maintenance_work_mem", "schema")


class IndexKind(Enum):
    """How vectors are found without looking at all of them."""

    HNSW = "hnsw"
    IVFFLAT = "ivfflat"
    NONE = "none"


_OF_KIND = {
    "m": IndexKind.HNSW,
    "ef_construction": IndexKind.HNSW,
    "ef_search": IndexKind.HNSW,
    "lists": IndexKind.IVFFLAT,
    "probes": IndexKind.IVFFLAT,
}


@dataclass(frozen=True, kw_only=True)
class PostgresOptions:
    """Of the index and the load.

    Attributes:
        index: of the vectors, built after the load.
        m: links of a node of HNSW in each layer.
        ef_construction: candidates that are looked at when a node is linked.
        ef_search: candidates of an approximate search by HNSW, for the check of a push; by default
            the server's own setting, 40 unless it was changed.
        lists: of IVFFlat; by default a thousandth of the rows, their root from a million on.
        probes: lists that an approximate search looks at; by default the root of ``lists``.
        maintenance_work_mem: memory of the server to build an index in, such as ``2GB``; by
            default the server's own setting.
        max_parallel_maintenance_workers: of the server, to build an index with.
        lock_timeout: seconds to wait for a lock that others hold, and to try for that of the
            swap, a fifth of a second each time.
        schema: of the table; by default the first one of the search path.
    """

    index: IndexKind = IndexKind.HNSW
    m: int = 16
    ef_construction: int = 64
    ef_search: int | None = None
    lists: int | None = None
    probes: int | None = None
    maintenance_work_mem: str | None = None
    max_parallel_maintenance_workers: int | None = None
    lock_timeout: int = 10
    schema: str | None = None

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> PostgresOptions:
        """Return options as ``--option NAME=VALUE`` gives them.

        Raises:
            ConfigError: a name is unknown, a value out of its bounds, or of another kind of index.
        """
        require_known(given, sorted((*_TEXTS, *_WHOLE)), "PostgreSQL")
        index = IndexKind(
            one_of("index", given.get("index", IndexKind.HNSW.value), [e.value for e in IndexKind])
        )
        for name, kind in _OF_KIND.items():
            if name in given and kind is not index:
                raise ConfigError(
                    f"--option {name} is of index={kind.value} and the index is {index.value}"
                )
        memory = given.get("maintenance_work_mem")
        if memory is not None and not re.fullmatch(r"\d{1,12}(kB|MB|GB|TB)", memory):
            raise ConfigError(
                f"--option maintenance_work_mem takes a number and kB, MB or GB, such as 2GB; "
                f"{memory!r} was given"
            )
        numbers = {
            name: whole_number(name, given[name], least=least, most=most)
            for name, (least, most) in _WHOLE.items()
            if name in given
        }
        made = cls(index=index, maintenance_work_mem=memory, schema=given.get("schema"), **numbers)
        if made.ef_construction < 2 * made.m:
            raise ConfigError(
                f"--option ef_construction takes twice m or more; m is {made.m} and "
                f"ef_construction {made.ef_construction}"
            )
        return made

    def require_width(self, layout: Layout) -> None:
        """Refuse vectors that are too wide, before any is sent.

        Raises:
            ConfigError: pgvector cannot keep them, or not index them.
        """
        k, dtype = layout.k, layout.dtype
        if k > _MOST_KEPT:
            raise ConfigError(
                f"pgvector keeps vectors of {_MOST_KEPT:,} numbers and these have {k:,}; push "
                "fewer with --k"
            )
        most = MOST_INDEXED[dtype]
        if self.index is IndexKind.NONE or k <= most:
            return
        half = MOST_INDEXED[VectorDtype.FLOAT16]
        smaller = "--dtype float16 or " if dtype is VectorDtype.FLOAT32 and k <= half else ""
        raise ConfigError(
            f"an index of pgvector takes {most:,} numbers of {dtype.value} and these vectors have "
            f"{k:,}; push fewer with --k, or give {smaller}--option index=none"
        )

    def lists_of(self, rows: int) -> int:
        """Return how many lists an IVFFlat index of so many rows has."""
        if self.lists is not None:
            return self.lists
        return max(1, min(32768, rows // 1000 if rows <= 1_000_000 else int(rows**0.5)))

    def probes_of(self, rows: int) -> int:
        """Return how many lists a search looks at."""
        return self.probes or max(1, round(self.lists_of(rows) ** 0.5))


# What of these a table is made of where nothing else is given.
DEFAULTS: Mapping[str, str] = {
    "index": PostgresOptions.index.value,
    "m": str(PostgresOptions.m),
    "ef_construction": str(PostgresOptions.ef_construction),
}
