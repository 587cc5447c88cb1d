"""Options of the vector databases, given as ``--option NAME=VALUE``.

They are read without the database's client.
"""

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from whiten_index.errors import ConfigError
from whiten_index.paths import cut

_MOST = 999_999_999
Count = Annotated[int, Field(ge=0, le=_MOST)]
Positive = Annotated[int, Field(ge=1, le=_MOST)]
# Bytes by which the name of a collection is longer than its alias.
SUFFIX_BYTES = 10


class EngineOptions(BaseModel):
    """Options of one engine, and how to reach it; None leaves a value to the engine."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    engine: ClassVar[str]  # its name
    schemes: ClassVar[tuple[str, ...]]  # of its addresses
    example: ClassVar[str]  # addresses
    ports: ClassVar[tuple[int, int]] = (0, 0)  # default of a server, without and with TLS
    client: ClassVar[str]  # module of its client
    extra: ClassVar[str]  # that installs the client
    writer: ClassVar[str]  # module and class of its writer
    # Form of the name of a table, its most bytes, and the rule in words.
    name: ClassVar[tuple[str, int, str]]
    # Allowed in an address after the question mark; none can be a secret.
    parameters: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Self:
        """Return the options given as text."""
        try:
            return cls.model_validate(dict(given))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = cut(str(first["loc"][0]), most=60)
            if first["type"] == "extra_forbidden":
                names = (field.alias or name for name, field in cls.model_fields.items())
                wrong = f" is unknown to {cls.engine}; use one of {', '.join(names)}"
            else:
                wrong = f": {first['msg']}; {cut(given[name], most=60)!r} was given"
            raise ConfigError(f"--option {name}{wrong}") from None


class QdrantOptions(EngineOptions):
    """Options of a Qdrant server."""

    engine = "Qdrant"
    schemes = ("qdrant", "qdrant+https")
    example = "qdrant://host:6333 or qdrant:///folder"
    ports = (6333, 6333)
    client, extra, writer = "qdrant_client", "qdrant", "qdrant_writer:QdrantWriter"
    # A collection is a folder of the server, whose name is longer than the alias.
    name = (
        r'(?!\.{1,2}$)[^<>:"/\\|?*\x00-\x1f\x7f]+', 255 - SUFFIX_BYTES,
        'no control characters and none of < > : " / \\ | ? *',
    )  # fmt: skip

    m: Count | None = None
    ef_construct: Positive | None = None
    indexing_threshold: Count = 10_000
    quantization: Literal["none", "scalar", "binary"] = "none"
    on_disk: bool | None = None
    shard_number: Positive | None = None
    replication_factor: Positive | None = None
    prefer_grpc: bool = False
    grpc_port: Annotated[int, Field(ge=1, le=65_535)] = 6334
    timeout: Positive = 60
    index_timeout: Positive = 3600


class MilvusOptions(EngineOptions):
    """Options of Milvus and Milvus Lite."""

    engine = "Milvus"
    schemes = ("milvus", "milvus+https")
    example = "milvus://host:19530 or milvus:///file.db"
    ports = (19530, 443)
    client, extra, writer = "pymilvus", "milvus", "milvus_writer:MilvusWriter"
    name = (
        "[A-Za-z_][A-Za-z0-9_]*", 255 - SUFFIX_BYTES,
        "letters, digits and underscores, no digit first",
    )  # fmt: skip
    parameters = frozenset(
        ("ca_pem_path", "client_key_path", "client_pem_path", "server_name", "server_pem_path")
    )

    db: str = ""
    index: Literal["hnsw", "flat", "ivf_flat", "autoindex"] = "hnsw"
    m: Positive = 16
    ef_construction: Positive = 200
    nlist: Positive | None = None
    index_timeout: Positive = 3600

    def index_params(self, rows: int) -> dict[str, int]:
        """Return the parameters of the index of a collection with some rows."""
        if self.index == "hnsw":
            return {"M": self.m, "efConstruction": self.ef_construction}
        if self.index == "ivf_flat":
            # k-means wants 39 rows or more for each centre.
            by_default = max(1, min(int(4 * math.sqrt(rows)), rows // 39))
            return {"nlist": self.nlist or by_default}
        return {}


_PARTITIONS = ("num_partitions", "sample_rate")
# Kind of index of LanceDB -> its options.
_OF_INDEX = {
    "ivf_pq": (*_PARTITIONS, "num_sub_vectors", "num_bits"),
    "ivf_hnsw_sq": (*_PARTITIONS, "m", "ef_construction"),
}


class LanceOptions(EngineOptions):
    """Options of LanceDB."""

    engine = "LanceDB"
    schemes = ("lancedb", "lancedb+s3", "lancedb+gs", "lancedb+az")
    example = "lancedb:///folder or lancedb+s3://bucket/prefix"
    client, extra, writer = "lancedb", "lancedb", "lance_writer:LanceWriter"
    name = (
        r"(?!.*__pending$)[A-Za-z0-9_.-]+", 200,
        "letters and digits of ASCII, _, - and ., and another end than __pending",
    )  # fmt: skip

    index: Literal["auto", "none", "ivf_flat", "ivf_sq", "ivf_pq", "ivf_hnsw_sq"] = "auto"
    num_partitions: Positive | None = None
    sample_rate: Positive | None = None
    num_sub_vectors: Positive | None = None
    num_bits: Positive | None = None
    m: Positive | None = None
    ef_construction: Positive | None = None
    keep_days: Annotated[float, Field(ge=0, le=36_500)] = 7.0

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
        names = _OF_INDEX.get(self.index, _PARTITIONS)
        given = self.model_dump(include=set(names), exclude_none=True)
        return {**given, "num_partitions": self.partitions(rows)}

    def partitions(self, rows: int) -> int:
        """Return the number of partitions of the index of a table with some rows."""
        if self.index == "ivf_hnsw_sq":
            return self.num_partitions or 1
        # The engine learns the place of each from 256 rows.
        return self.num_partitions or max(1, min(math.isqrt(rows) // 2, rows // 256))


class PostgresOptions(EngineOptions):
    """Options of PostgreSQL; ``lock_timeout`` is in seconds, also of a swap."""

    engine = "PostgreSQL"
    schemes = ("postgresql", "postgres")
    example = "postgresql://user@host/database"
    client, extra, writer = "psycopg", "postgres", "postgres_writer:PostgresWriter"
    # PostgreSQL's 63 bytes, less the longest ending of the name of an index.
    name = (
        r"[^.\x00\s]([^.\x00]*[^.\x00\s])?", 52,
        "no dot, and no blank at either end; --option schema=NAME names the schema",
    )  # fmt: skip
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

    index: Literal["hnsw", "ivfflat", "none"] = "hnsw"
    m: Annotated[int, Field(ge=2, le=100)] = 16
    ef_construction: Annotated[int, Field(ge=4, le=1000)] = 64
    lists: Annotated[int, Field(ge=1, le=32_768)] | None = None
    maintenance_work_mem: Annotated[str, Field(pattern=r"^\d{1,12}(kB|MB|GB|TB)$")] | None = None
    max_parallel_maintenance_workers: Annotated[int, Field(ge=0, le=1024)] | None = None
    lock_timeout: Annotated[int, Field(ge=1, le=86_400)] = 10
    schema_name: str | None = Field(None, alias="schema")

    def index_params(self, rows: int) -> dict[str, int]:
        """Return the parameters of the index of a table with some rows."""
        if self.index == "hnsw":
            return {"m": self.m, "ef_construction": self.ef_construction}
        by_default = rows // 1000 if rows <= 1_000_000 else math.isqrt(rows)
        return {"lists": self.lists or max(1, min(32_768, by_default))}
