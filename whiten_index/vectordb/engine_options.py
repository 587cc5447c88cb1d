"""Options of the engines' indexes, connections and searches, given as ``--option NAME=VALUE``.

They are read without the engine's client. Options in ``shapes_table`` are those that a table is
made with; the others belong to a connection or to searches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from whiten_index.errors import ConfigError
from whiten_index.paths import cut

_MOST = 999_999_999
Count = Annotated[int, Field(ge=0, le=_MOST)]
Positive = Annotated[int, Field(ge=1, le=_MOST)]
STORAGE = "storage."


class EngineOptions(BaseModel):
    """Options of one engine, and how to reach it; None leaves a value to the engine.

    Attributes:
        engine: its name.
        schemes: of its addresses.
        example: addresses.
        client: module of its client.
        extra: that installs the client.
        writer: module and class of its writer.
        parameters: allowed in an address after the question mark; none can be a secret.
        shapes_table: names of the options that a table is made with.
        of_index: kind of index -> names of the options that this kind alone has.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    engine: ClassVar[str]
    schemes: ClassVar[tuple[str, ...]]
    example: ClassVar[str]
    client: ClassVar[str]
    extra: ClassVar[str]
    writer: ClassVar[str]
    parameters: ClassVar[frozenset[str]] = frozenset()
    shapes_table: ClassVar[tuple[str, ...]]
    of_index: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Self:
        """Return the options given as text."""
        try:
            options = cls.model_validate(dict(given))
        except ValidationError as error:
            raise ConfigError(cls._explain(error, given)) from None
        if useless := options._of_other_indexes() & options.model_fields_set:
            raise ConfigError(
                f"--option {min(useless)} is of no use to index={options._index}; leave it out"
            )
        return options

    @classmethod
    def _explain(cls, error: ValidationError, given: Mapping[str, str]) -> str:
        first = error.errors(include_url=False)[0]
        name = cut(str(first["loc"][0]), most=60)
        if first["type"] == "extra_forbidden":
            names = (field.alias or name for name, field in cls.model_fields.items())
            known = ", ".join(names).replace("storage", f"{STORAGE}NAME")
            return f"--option {name} is unknown to {cls.engine}; use one of {known}"
        return f"--option {name}: {first['msg']}; {cut(given[name], most=60)!r} was given"

    def shaping(self) -> dict[str, str]:
        """Return the options that the table is made with, defaults included, as text."""
        names = set(self.shapes_table) - self._of_other_indexes()
        values = self.model_dump(include=names, exclude_none=True)
        return {name: str(value).lower() for name, value in values.items()}

    @property
    def _index(self) -> str:
        return str(getattr(self, "index", ""))

    def _of_other_indexes(self) -> set[str]:
        every = {name for names in self.of_index.values() for name in names}
        return every - set(self.of_index.get(self._index, ()))


class QdrantOptions(EngineOptions):
    """Options of a Qdrant server; ``hnsw_ef`` and ``oversampling`` are of the check's searches."""

    engine = "Qdrant"
    schemes = ("qdrant", "qdrant+https")
    example = "qdrant://host:6333 or qdrant:///folder"
    client, extra, writer = "qdrant_client", "qdrant", "qdrant_writer:QdrantWriter"
    shapes_table = (
        "m", "ef_construct", "indexing_threshold", "quantization", "on_disk", "shard_number",
        "replication_factor",
    )  # fmt: skip

    m: Count | None = None
    ef_construct: Positive | None = None
    hnsw_ef: Positive | None = None
    indexing_threshold: Count = 10_000
    quantization: Literal["none", "scalar", "binary"] = "none"
    oversampling: Annotated[float, Field(ge=1, le=1000)] | None = None
    on_disk: bool | None = None
    shard_number: Positive | None = None
    replication_factor: Positive | None = None
    prefer_grpc: bool = False
    grpc_port: Annotated[int, Field(ge=1, le=65_535)] = 6334
    timeout: Positive = 60
    index_timeout: Positive = 3600
    tls_ca: str | None = None


class MilvusOptions(EngineOptions):
    """Options of Milvus and Milvus Lite; ``ef`` and ``nprobe`` are of the check's searches."""

    engine = "Milvus"
    schemes = ("milvus", "milvus+https")
    example = "milvus://host:19530 or milvus:///file.db"
    client, extra, writer = "pymilvus", "milvus", "milvus_writer:MilvusWriter"
    parameters = frozenset(
        ("ca_pem_path", "client_key_path", "client_pem_path", "server_name", "server_pem_path")
    )
    shapes_table = ("index", "m", "ef_construction", "nlist")
    of_index: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "hnsw": ("m", "ef_construction", "ef"),
        "ivf_flat": ("nlist", "nprobe"),
    }

    db: str = ""
    index: Literal["hnsw", "flat", "ivf_flat", "autoindex"] = "hnsw"
    m: Positive = 16
    ef_construction: Positive = 200
    ef: Positive = 128
    nlist: Positive | None = None
    nprobe: Positive = 32

    def index_params(self, rows: int) -> dict[str, int]:
        """Return the parameters of the index of a collection with some rows."""
        if self.index == "hnsw":
            return {"M": self.m, "efConstruction": self.ef_construction}
        if self.index == "ivf_flat":
            # k-means wants 39 rows or more for each centre.
            by_default = max(1, min(int(4 * math.sqrt(rows)), rows // 39))
            return {"nlist": self.nlist or by_default}
        return {}

    def search_params(self, index_type: str, top_k: int) -> dict[str, int]:
        """Return the parameters of a search of an index of some type."""
        # Milvus refuses to compare fewer rows than it is to return.
        found = {"HNSW": {"ef": max(self.ef, top_k)}, "IVF_FLAT": {"nprobe": self.nprobe}}
        return found.get(index_type, {})


_PARTITIONS = ("num_partitions", "sample_rate")


class LanceOptions(EngineOptions):
    """Options of LanceDB; ``nprobes``, ``refine_factor`` and ``ef`` are of the check's searches."""

    engine = "LanceDB"
    schemes = ("lancedb", "lancedb+s3", "lancedb+gs", "lancedb+az")
    example = "lancedb:///folder or lancedb+s3://bucket/prefix"
    client, extra, writer = "lancedb", "lancedb", "lance_writer:LanceWriter"
    shapes_table = (
        "index", *_PARTITIONS, "num_sub_vectors", "num_bits", "m", "ef_construction",
    )  # fmt: skip
    of_index: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "auto": _PARTITIONS,
        "ivf_flat": _PARTITIONS,
        "ivf_sq": _PARTITIONS,
        "ivf_pq": (*_PARTITIONS, "num_sub_vectors", "num_bits"),
        "ivf_hnsw_sq": (*_PARTITIONS, "m", "ef_construction"),
    }

    index: Literal["auto", "none", "ivf_flat", "ivf_sq", "ivf_pq", "ivf_hnsw_sq"] = "auto"
    num_partitions: Positive | None = None
    sample_rate: Positive | None = None
    num_sub_vectors: Positive | None = None
    num_bits: Positive | None = None
    m: Positive | None = None
    ef_construction: Positive | None = None
    nprobes: Positive | None = None
    refine_factor: Positive = 2
    ef: Positive | None = None
    keep_days: Annotated[float, Field(ge=0, le=36_500)] = 7.0
    storage: dict[str, str] = Field(default={}, repr=False)

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Self:
        """Return the options given as text; see ``EngineOptions.parse``."""
        storage = {
            name.removeprefix(STORAGE): value
            for name, value in given.items()
            if name.startswith(STORAGE)
        }
        others = {name: value for name, value in given.items() if not name.startswith(STORAGE)}
        if "storage" in others:
            raise ConfigError("--option storage needs the name of a setting: storage.NAME=VALUE")
        return super().parse(others).model_copy(update={"storage": storage})

    def index_kind(self, rows: int) -> str:
        """Return the kind of index of a table with some rows, ``none`` for no index."""
        kind = self.index
        if kind == "auto":
            # A search reads so many vectors in tens of milliseconds.
            kind = "ivf_sq" if rows >= 100_000 else "none"
        # Codes are learnt from 256 rows at least, and few rows are read faster than an index.
        return kind if rows >= 1000 else "none"

    def index_params(self, rows: int) -> dict[str, int]:
        """Return the arguments of the index of a table with some rows."""
        given = self.model_dump(include=set(self.of_index.get(self.index, ())), exclude_none=True)
        return {**given, "num_partitions": self._partitions(rows)}

    def search_params(self, rows: int) -> dict[str, int]:
        """Return how a table with some rows is searched by its index."""
        nprobes = self.nprobes or max(20, self._partitions(rows) // 4)
        found = {"nprobes": nprobes, "refine_factor": self.refine_factor}
        return found if self.ef is None else {**found, "ef": self.ef}

    def _partitions(self, rows: int) -> int:
        if self.index == "ivf_hnsw_sq":
            return self.num_partitions or 1
        # The engine learns the place of each from 256 rows.
        return self.num_partitions or max(1, min(math.isqrt(rows) // 2, rows // 256))


class PostgresOptions(EngineOptions):
    """Options of PostgreSQL; ``ef_search`` and ``probes`` are of the check's searches.

    ``lock_timeout`` is in seconds, also for the attempts of a swap to lock the published table.
    """

    engine = "PostgreSQL"
    schemes = ("postgresql", "postgres")
    example = "postgresql://user@host/database"
    client, extra, writer = "psycopg", "postgres", "postgres_writer:PostgresWriter"
    parameters = frozenset((
        "application_name", "channel_binding", "client_encoding", "connect_timeout", "dbname",
        "fallback_application_name", "gssdelegation", "gssencmode", "gsslib", "host", "hostaddr",
        "keepalives", "keepalives_count", "keepalives_idle", "keepalives_interval", "krbsrvname",
        "load_balance_hosts", "max_protocol_version", "min_protocol_version", "options",
        "passfile", "port", "require_auth", "requirepeer", "service", "ssl",
        "ssl_max_protocol_version", "ssl_min_protocol_version", "sslcert", "sslcertmode",
        "sslcompression", "sslcrl", "sslcrldir", "sslkey", "sslmode", "sslnegotiation",
        "sslrootcert", "sslsni", "target_session_attrs", "tcp_user_timeout", "user",
    ))  # fmt: skip
    shapes_table = ("index", "m", "ef_construction", "lists")
    of_index: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "hnsw": ("m", "ef_construction", "ef_search"),
        "ivfflat": ("lists", "probes"),
    }

    index: Literal["hnsw", "ivfflat", "none"] = "hnsw"
    m: Annotated[int, Field(ge=2, le=100)] = 16
    ef_construction: Annotated[int, Field(ge=4, le=1000)] = 64
    ef_search: Annotated[int, Field(ge=1, le=1000)] | None = None
    lists: Annotated[int, Field(ge=1, le=32_768)] | None = None
    probes: Annotated[int, Field(ge=1, le=32_768)] | None = None
    maintenance_work_mem: Annotated[str, Field(pattern=r"^\d{1,12}(kB|MB|GB|TB)$")] | None = None
    max_parallel_maintenance_workers: Annotated[int, Field(ge=0, le=1024)] | None = None
    lock_timeout: Annotated[int, Field(ge=1, le=86_400)] = 10
    schema_name: str | None = Field(None, alias="schema")

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Self:
        """Return the options given as text; see ``EngineOptions.parse``."""
        options = super().parse(given)
        if options.ef_construction < 2 * options.m:
            raise ConfigError(
                f"--option ef_construction takes twice m or more; m is {options.m} and "
                f"ef_construction {options.ef_construction}"
            )
        return options

    def index_params(self, rows: int) -> dict[str, int]:
        """Return the parameters of the index of a table with some rows."""
        if self.index == "hnsw":
            return {"m": self.m, "ef_construction": self.ef_construction}
        return {"lists": self._lists(rows)}

    def search_params(self, rows: int, top_k: int) -> dict[str, int]:
        """Return the settings of a search by the index of a table with some rows."""
        found = {"ivfflat.probes": self.probes or max(1, round(math.sqrt(self._lists(rows))))}
        # Otherwise the server's own setting applies, as it does for users; pgvector's is 40.
        wide = self.ef_search or (top_k if top_k > 40 else None)
        return found if wide is None else {**found, "hnsw.ef_search": min(wide, 1000)}

    def _lists(self, rows: int) -> int:
        by_default = rows // 1000 if rows <= 1_000_000 else math.isqrt(rows)
        return self.lists or max(1, min(32_768, by_default))
