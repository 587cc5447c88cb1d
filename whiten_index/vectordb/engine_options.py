"""Options of the vector databases, given as ``--option NAME=VALUE``.

They are read without the database's client.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from whiten_index.errors import ConfigError
from whiten_index.paths import cut

if TYPE_CHECKING:
    from whiten_index.vectordb.pushed_table import PushedTable

# Settings of an engine's searches: name -> value.
Effort: TypeAlias = Mapping[str, int]
MB = 1 << 20
_MOST = 999_999_999
Count = Annotated[int, Field(ge=0, le=_MOST)]
Positive = Annotated[int, Field(ge=1, le=_MOST)]
# Bytes by which the name of a collection is longer than its alias.
SUFFIX_BYTES = 10


def number_bytes(dtype: str) -> int:
    """Return the bytes of a number of ``float32`` or ``float16``."""
    return 2 if dtype == "float16" else 4


@dataclass(frozen=True)
class Code:
    """A form of the vectors that searches read: options and ``--dtype`` of a push."""

    options: Mapping[str, str] = field(default_factory=dict)
    dtype: str = "float32"

    def __str__(self) -> str:
        given = [f"--option {name}={value}" for name, value in self.options.items()]
        return " ".join(given + [f"--dtype {self.dtype}"] * (self.dtype != "float32"))


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
    no_index: ClassVar[Mapping[str, str]] = {"index": "none"}  # options of a table without one

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Self:
        """Return the options given as text."""
        try:
            return cls.model_validate(dict(given))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            if not first["loc"]:
                raise ConfigError(str(first["ctx"]["error"])) from None
            name = cut(str(first["loc"][0]), most=60)
            if first["type"] == "extra_forbidden":
                names = (field.alias or name for name, field in cls.model_fields.items())
                wrong = f" is unknown to {cls.engine}; use one of {', '.join(names)}"
            else:
                wrong = f": {first['msg']}; {cut(given[name], most=60)!r} was given"
            raise ConfigError(f"--option {name}{wrong}") from None

    @classmethod
    def codes(cls, k: int) -> dict[str, Code]:  # noqa: ARG003
        """Return the forms that the engine has for vectors of k numbers, by name."""
        return {"float32": Code()}

    def code_bytes(self, rows: int, k: int, dtype: str) -> int:  # noqa: ARG002
        """Return the bytes of a vector of k numbers in the form that searches read first."""
        return k * number_bytes(dtype)

    @abstractmethod
    def index_bytes(self, rows: int, k: int, dtype: str) -> int | None:
        """Return the bytes of the index of so many vectors; None where it is not known."""

    def build_bytes(self, rows: int, k: int, dtype: str) -> int | None:
        """Return the memory, in bytes, that building the index takes; None if not known."""
        return self.index_bytes(rows, k, dtype)

    def settings_for(self, rows: int, k: int, dtype: str) -> dict[str, str]:  # noqa: ARG002
        """Return options that a push of so many rows should be given in addition to these."""
        return {}

    def efforts(self, rows: int) -> Sequence[Effort]:  # noqa: ARG002
        """Return settings of searches among so many rows, the fastest first."""
        return ({},)

    def usual_effort(self, rows: int) -> Effort:
        """Return the settings by which a push searches."""
        found = self.efforts(rows)
        return found[len(found) // 2]

    @abstractmethod
    def query(self, table: str, made: "PushedTable") -> str:
        """Return the call of the engine's client, or the SQL, that searches a table."""


# Quantization of Qdrant -> bits of a number, 0 for those of the vectors.
_QDRANT_BITS = {
    "none": 0, "scalar": 8, "binary": 1, "binary_1.5_bits": 1.5, "binary_2_bits": 2,
    "product_x16": 2, "product_x32": 1, "product_x64": 0.5, "turbo_1_bit": 1,
    "turbo_1.5_bits": 1.5, "turbo_2_bits": 2, "turbo_4_bits": 4,
}  # fmt: skip


class QdrantOptions(EngineOptions):
    """Options of a Qdrant server."""

    engine = "Qdrant"
    schemes = ("qdrant", "qdrant+https")
    example = "qdrant://host:6333 or qdrant:///folder"
    ports = (6333, 6333)
    no_index = {"indexing_threshold": "0"}
    client, extra, writer = "qdrant_client", "qdrant", "qdrant_writer:QdrantWriter"
    # A collection is a folder of the server, whose name is longer than the alias.
    name = (
        r'(?!\.{1,2}$)[^<>:"/\\|?*\x00-\x1f\x7f]+', 255 - SUFFIX_BYTES,
        'no control characters and none of < > : " / \\ | ? *',
    )  # fmt: skip

    m: Count | None = None
    ef_construct: Positive | None = None
    indexing_threshold: Count = 10_000
    quantization: Literal[
        "none", "scalar", "binary", "binary_1.5_bits", "binary_2_bits", "product_x16",
        "product_x32", "product_x64", "turbo_1_bit", "turbo_1.5_bits", "turbo_2_bits",
        "turbo_4_bits",
    ] = "none"  # fmt: skip
    on_disk: bool | None = None
    shard_number: Positive | None = None
    replication_factor: Positive | None = None
    prefer_grpc: bool = False
    grpc_port: Annotated[int, Field(ge=1, le=65_535)] = 6334
    timeout: Positive = 60
    index_timeout: Positive = 3600

    @classmethod
    def codes(cls, k: int) -> dict[str, Code]:  # noqa: ARG003
        """Return the forms of vectors."""
        names = [name for name in _QDRANT_BITS if name != "none"]
        return {
            "float32": Code(), "float16": Code(dtype="float16"),
            **{name: Code({"quantization": name}) for name in names},
        }  # fmt: skip

    def code_bytes(self, rows: int, k: int, dtype: str) -> int:  # noqa: ARG002
        """Return the bytes of a code."""
        bits = _QDRANT_BITS[self.quantization] or 8 * number_bytes(dtype)
        return math.ceil(k * bits / 8)

    def index_bytes(self, rows: int, k: int, dtype: str) -> int:
        """Return the bytes of codes and links, of which a point has 2 m on the lowest level."""
        codes = 0 if self.quantization == "none" else self.code_bytes(rows, k, dtype)
        return rows * (codes + 8 * (16 if self.m is None else self.m))

    def settings_for(self, rows: int, k: int, dtype: str) -> dict[str, str]:
        """Return a threshold that few rows pass too: the server codes indexed segments alone."""
        # It divides the rows among eight segments at most.
        each = rows * k * number_bytes(dtype) // (1024 * 16)
        if self.quantization == "none" or 0 < self.indexing_threshold <= each:
            return {}
        return {"indexing_threshold": str(max(1, each))}

    def efforts(self, rows: int) -> Sequence[Effort]:  # noqa: ARG002
        """Return widths of the search of the graph."""
        return tuple({"hnsw_ef": ef} for ef in (64, 128, 256))

    def query(self, table: str, made: "PushedTable") -> str:  # noqa: ARG002
        """Return a call of the client, with codes ranked again by the vectors."""
        params = "hnsw_ef=128"
        if self.quantization != "none":
            again = "models.QuantizationSearchParams(rescore=True, oversampling=2.0)"
            params += f", quantization={again}"
        return (
            f"client.query_points({table!r}, query=vector, limit=10, "
            f"search_params=models.SearchParams({params}))"
        )


class MilvusOptions(EngineOptions):
    """Options of Milvus and Milvus Lite."""

    engine = "Milvus"
    schemes = ("milvus", "milvus+https")
    example = "milvus://host:19530 or milvus:///file.db"
    ports = (19530, 443)
    no_index = {"index": "flat"}
    client, extra, writer = "pymilvus", "milvus", "milvus_writer:MilvusWriter"
    name = (
        "[A-Za-z_][A-Za-z0-9_]*", 255 - SUFFIX_BYTES,
        "letters, digits and underscores, no digit first",
    )  # fmt: skip
    parameters = frozenset(
        ("ca_pem_path", "client_key_path", "client_pem_path", "server_name", "server_pem_path")
    )

    db: str = ""
    index: Literal[
        "hnsw", "hnsw_sq", "flat", "ivf_flat", "ivf_sq8", "ivf_pq", "ivf_rabitq", "scann"
    ] = "hnsw"
    m: Positive = 16
    ef_construction: Positive = 200
    nlist: Positive | None = None
    pq_m: Positive | None = None
    index_timeout: Positive = 3600

    def index_params(self, rows: int, k: int) -> dict[str, Any]:
        """Return the parameters of the index of a collection with some rows."""
        if self.index.startswith("hnsw"):
            of_graph = {"M": self.m, "efConstruction": self.ef_construction}
            return of_graph | ({"sq_type": "SQ8"} if self.index == "hnsw_sq" else {})
        if self._lists:
            of_codes = {"m": self._pq_bytes(k), "nbits": 8} if self.index == "ivf_pq" else {}
            return {"nlist": self._many(rows), **of_codes}
        return {}

    @property
    def _lists(self) -> bool:
        return self.index.startswith("ivf") or self.index == "scann"

    def _many(self, rows: int) -> int:
        # k-means wants 39 rows or more for each centre.
        return self.nlist or max(1, min(int(4 * math.sqrt(rows)), rows // 39))

    def _pq_bytes(self, k: int) -> int:
        """Return the number of parts of a vector, a byte each, which divides its width."""
        most = k // 4
        return self.pq_m or max(n for n in range(1, max(1, most) + 1) if k % n == 0)

    @classmethod
    def codes(cls, k: int) -> dict[str, Code]:  # noqa: ARG003
        """Return the forms of vectors; Milvus Lite has ``sq`` and ``ivf_sq8`` alone."""
        return {
            "float32": Code(),
            "sq": Code({"index": "hnsw_sq"}),
            "ivf_sq8": Code({"index": "ivf_sq8"}),
            "pq": Code({"index": "ivf_pq"}),
            "rabitq": Code({"index": "ivf_rabitq"}),
            "scann": Code({"index": "scann"}),
        }

    def code_bytes(self, rows: int, k: int, dtype: str) -> int:
        """Return the bytes of a code."""
        by_index = {
            "hnsw_sq": k, "ivf_sq8": k, "ivf_pq": self._pq_bytes(k),
            "ivf_rabitq": math.ceil(k / 8) + 8, "scann": math.ceil(k / 4),
        }  # fmt: skip
        return by_index.get(self.index, super().code_bytes(rows, k, dtype))

    def index_bytes(self, rows: int, k: int, dtype: str) -> int:
        """Return the bytes of codes and links, of which a row has 2 m on the lowest level."""
        code = self.code_bytes(rows, k, dtype)
        links = 8 * self.m * self.index.startswith("hnsw")
        # Ranked again by the vectors, which it keeps too.
        also = k * number_bytes(dtype) if self.index == "scann" else 0
        return rows * (code + links + also)

    def efforts(self, rows: int) -> Sequence[Effort]:
        """Return widths of searches of a graph, or numbers of lists to read."""
        if self.index.startswith("hnsw"):
            return tuple({"ef": ef} for ef in (64, 128, 256))
        if self._lists:
            return tuple({"nprobe": n} for n in probes(self._many(rows)))
        return ({},)

    def query(self, table: str, made: "PushedTable") -> str:
        """Return a call of the client."""
        params = dict(self.usual_effort(made.rows))
        return (
            f"client.search({table!r}, data=[vector], limit=10, "
            f'search_params={{"params": {params}}})'
        )


_PARTITIONS = ("num_partitions", "sample_rate")
# Kind of index of LanceDB -> its options.
_OF_INDEX = {
    "ivf_pq": (*_PARTITIONS, "num_sub_vectors", "num_bits"),
    "ivf_rq": (*_PARTITIONS, "num_bits"),
    "ivf_hnsw_sq": (*_PARTITIONS, "m", "ef_construction"),
    "ivf_hnsw_flat": (*_PARTITIONS, "m", "ef_construction"),
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

    index: Literal[
        "auto", "none", "ivf_flat", "ivf_sq", "ivf_pq", "ivf_rq", "ivf_hnsw_sq", "ivf_hnsw_flat"
    ] = "auto"
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
        if "hnsw" in self.index:
            return self.num_partitions or 1
        # The engine learns the place of each from 256 rows.
        return self.num_partitions or max(1, min(math.isqrt(rows) // 2, rows // 256))

    @classmethod
    def codes(cls, k: int) -> dict[str, Code]:
        """Return the forms of vectors: numbers without an index, and codes in partitions."""
        found = {"float32": Code({"index": "none"}), "float16": Code({"index": "none"}, "float16")}
        found["sq"] = Code({"index": "ivf_sq"})
        for parts in (16, 32, 64, 128):
            if k % parts == 0 and parts < k:
                found[f"pq{parts}"] = Code({"index": "ivf_pq", "num_sub_vectors": str(parts)})
        for bits in (1, 2, 4):
            if k % 8 == 0:
                found[f"rq{bits}"] = Code({"index": "ivf_rq", "num_bits": str(bits)})
        return found

    def code_bytes(self, rows: int, k: int, dtype: str) -> int:
        """Return the bytes of a code, or of a vector where the rows are too few for an index."""
        kind = self.index_kind(rows)
        if kind == "ivf_pq":
            # The engine's own measure, if none is given.
            parts = self.num_sub_vectors or (k // 16 if k % 16 == 0 else max(1, k // 8))
            return math.ceil(parts * (self.num_bits or 8) / 8)
        if kind == "ivf_rq":
            return math.ceil(k * (self.num_bits or 1) / 8)
        return k if kind in ("ivf_sq", "ivf_hnsw_sq") else k * number_bytes(dtype)

    def index_bytes(self, rows: int, k: int, dtype: str) -> int:
        """Return the bytes of the index; those around each code were measured with LanceDB 0.40."""
        kind = self.index_kind(rows)
        if kind == "none":
            return 0
        each = self.code_bytes(rows, k, dtype) + 2
        if "hnsw" in kind:
            each += 10 * (self.m or 20)
        elif kind == "ivf_rq":
            bits = self.num_bits or 1
            # Further bits are kept of 64 numbers at a time.
            further = 24 + (-k % 64) * (bits - 1) // 8
            each += 12 if bits == 1 else further
        centres = 256 * k * 4 if kind == "ivf_pq" else 0
        return rows * each + centres + self.partitions(rows) * k * 4

    def efforts(self, rows: int) -> Sequence[Effort]:
        """Return numbers of partitions to read, and of candidates to rank by the vectors."""
        kind = self.index_kind(rows)
        if kind == "none":
            return ({},)
        again = 10 if kind in ("ivf_pq", "ivf_rq") else 2
        if "hnsw" in kind:
            return tuple({"ef": ef, "refine_factor": again} for ef in (40, 100, 200))
        many = self.partitions(rows)
        return tuple({"nprobes": n, "refine_factor": again} for n in probes(many))

    def query(self, table: str, made: "PushedTable") -> str:
        """Return a call of the client."""
        metric = {"cosine": "cosine", "ip": "dot"}[made.metric]
        calls = [f".{name}({value})" for name, value in self.usual_effort(made.rows).items()]
        return (
            f'database.open_table({table!r}).search(vector).distance_type("{metric}")'
            f"{''.join(calls)}.limit(10)"
        )


def probes(many: int) -> list[int]:
    """Return how many of the lists of an index to read, the fewest first."""
    return sorted({max(1, many // 16), min(many, max(20, many // 4)), many})


# Type of a column in pgvector, and the most numbers of one that an index takes.
VECTOR_TYPES = {"float32": "vector", "float16": "halfvec"}
MOST_INDEXED = {"vector": 2000, "halfvec": 4000, "bit": 64_000}
# Kind of index -> the extension that has it, other than pgvector.
EXTENSIONS = {"vchordrq": "vchord", "diskann": "vectorscale"}
# pgvector's operator class and operator of a metric, and the score of distance 0.
OPERATORS = {"cosine": ("cosine_ops", "<=>", 1.0), "ip": ("ip_ops", "<#>", 0.0)}
_PAGE = 8160  # bytes of a page that rows of an index may take


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

    index: Literal["hnsw", "ivfflat", "vchordrq", "diskann", "none"] = "hnsw"
    code: Literal["column", "halfvec", "bit"] = "column"
    m: Annotated[int, Field(ge=2, le=100)] = 16
    ef_construction: Annotated[int, Field(ge=4, le=1000)] = 64
    lists: Annotated[int, Field(ge=1, le=32_768)] | None = None
    maintenance_work_mem: Annotated[str, Field(pattern=r"^\d{1,12}(kB|MB|GB|TB)$")] | None = None
    max_parallel_maintenance_workers: Annotated[int, Field(ge=0, le=1024)] | None = None
    lock_timeout: Annotated[int, Field(ge=1, le=86_400)] = 10
    schema_name: str | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _code_has_an_index(self) -> Self:
        if self.code != "column" and self.index not in ("hnsw", "ivfflat"):
            raise ValueError(
                f"--option code={self.code} needs an index of pgvector; give index=hnsw or "
                "index=ivfflat, or leave code out"
            )
        return self

    def index_params(self, rows: int) -> dict[str, Any]:
        """Return the parameters of the index of a table with some rows."""
        if self.index == "hnsw":
            return {"m": self.m, "ef_construction": self.ef_construction}
        if self.index == "ivfflat":
            return {"lists": self._many(rows)}
        if self.index == "vchordrq":
            # Vectors have unit length, or are compared by dot product.
            internal = f"[build.internal]\nlists = [{self._many(rows)}]\nspherical_centroids = true"
            return {"options": f"residual_quantization = false\n{internal}"}
        return {}

    def _many(self, rows: int) -> int:
        by_default = rows // 1000 if rows <= 1_000_000 else math.isqrt(rows)
        return self.lists or max(1, min(32_768, by_default))

    def indexed_type(self, dtype: str) -> str:
        """Return the type that the index has of a vector: vector, halfvec or bit."""
        return VECTOR_TYPES[dtype] if self.code == "column" else self.code

    def indexed(
        self, k: int, dtype: str, metric: str, extension: str, vector: str = "vector"
    ) -> tuple[str, str, str]:
        """Return the expression that is indexed, its operator class, and its operator.

        ``extension`` is the schema of pgvector, quoted, with a dot; ``vector`` the SQL of a vector.
        """
        type_ = self.indexed_type(dtype)
        ops, operator, _ = OPERATORS[metric]
        if type_ == "bit":
            coded = f"({extension}binary_quantize({vector})::pg_catalog.bit({k}))"
            return coded, "bit_hamming_ops", "<~>"
        expression = vector if self.code == "column" else f"({vector}::{extension}halfvec({k}))"
        return expression, f"{type_}_{ops}", operator

    def search_sql(
        self,
        table: str,
        made: "PushedTable",
        extension: str = "",
        given: tuple[str, str, str] = ("$1", "$2", "$3"),
    ) -> str:
        """Return the SQL of a search.

        ``table`` is quoted; ``extension`` is the schema of pgvector, quoted, with a dot. ``given``
        are the SQL of the query, of the number of rows, and of candidates of a code.
        """
        vector, rows, candidates = given
        type_ = f"{extension}{VECTOR_TYPES[made.dtype]}"

        def by(operator: str) -> str:
            return f"OPERATOR({extension}{operator})" if extension else operator

        far = f"vector {by(OPERATORS[made.metric][1])} {vector}::{type_}"
        if self.code == "column":
            return f"SELECT id, {far} FROM {table} ORDER BY 2 LIMIT {rows}"
        of = made.k, made.dtype, made.metric, extension
        expression, _, operator = self.indexed(*of)
        query, _, _ = self.indexed(*of, f"{vector}::{type_}")
        inner = f"SELECT id, vector FROM {table} ORDER BY {expression} {by(operator)} {query}"
        return (
            f"SELECT id, {far} FROM ({inner} LIMIT {candidates}) AS found ORDER BY 2 LIMIT {rows}"
        )

    @classmethod
    def codes(cls, k: int) -> dict[str, Code]:
        """Return the forms of vectors that an index of pgvector has."""
        found = {
            "vector": Code(), "halfvec": Code(dtype="float16"),
            "halfvec-code": Code({"code": "halfvec"}), "bit-code": Code({"code": "bit"}),
            "halfvec-bit-code": Code({"code": "bit"}, dtype="float16"),
        }  # fmt: skip
        return {
            name: code
            for name, code in found.items()
            if k <= MOST_INDEXED[cls.parse(code.options).indexed_type(code.dtype)]
        }

    def code_bytes(self, rows: int, k: int, dtype: str) -> int:  # noqa: ARG002
        """Return the bytes of a code."""
        if self.index == "vchordrq":
            return math.ceil(k / 8)
        if self.index == "diskann":
            # Two bits of a number, of wide vectors one.
            return math.ceil(k * (2 if k < 900 else 1) / 8)
        by_type = {"bit": math.ceil(k / 8), "halfvec": 2 * k, "vector": 4 * k}
        return by_type[self.indexed_type(dtype)]

    def index_bytes(self, rows: int, k: int, dtype: str) -> int | None:
        """Return the bytes of the pages of the index, as pgvector 0.8.5 fills them."""
        code = self.code_bytes(rows, k, dtype) + 8
        if self.index == "hnsw":
            each = _aligned(72 + code) + _aligned(4 + 12 * self.m) + 14
        elif self.index == "ivfflat":
            each = _aligned(8 + code) + 4
        else:
            return 0 if self.index == "none" else None
        half_full = self._many(rows) // 2 if self.index == "ivfflat" else 0
        pages = 1 + half_full + math.ceil(rows / max(1, _PAGE // each))
        return 8192 * pages

    def build_bytes(self, rows: int, k: int, dtype: str) -> int | None:
        """Return the memory of a graph that is built within ``maintenance_work_mem``."""
        if self.index == "hnsw":
            return rows * (self.code_bytes(rows, k, dtype) + 204 + 32 * self.m)
        return None if self.index in EXTENSIONS else 64 * MB * (self.index == "ivfflat")

    def settings_for(self, rows: int, k: int, dtype: str) -> dict[str, str]:
        """Return the memory that keeps the graph out of the disk while it is built."""
        needed = self.build_bytes(rows, k, dtype) if self.index == "hnsw" else None
        if not needed:
            return {}
        # Memory is taken in whole megabytes, and each worker keeps some.
        return {"maintenance_work_mem": f"{max(64, math.ceil(1.1 * needed / MB) + 3)}MB"}

    def efforts(self, rows: int) -> Sequence[Effort]:
        """Return settings of the server; ``candidates`` are ranked again by the vectors."""
        coded = self.code != "column"
        if self.index == "hnsw":
            names = ("hnsw.ef_search", "candidates")[: 1 + coded]
            return tuple(dict.fromkeys(names, ef) for ef in (40, 100, 200))
        if self.index in ("ivfflat", "vchordrq"):
            again = {"candidates": 100} if coded else {}
            return tuple({f"{self.index}.probes": n, **again} for n in probes(self._many(rows)))
        if self.index == "diskann":
            names = ("diskann.query_search_list_size", "diskann.query_rescore")
            return tuple(dict.fromkeys(names, n) for n in (50, 100, 200))
        return ({},)

    def query(self, table: str, made: "PushedTable") -> str:
        """Return the settings and the SQL, with :query for the vector."""
        names = [self.schema_name, table] if self.schema_name else [table]
        place = ".".join('"' + name.replace('"', '""') + '"' for name in names)
        effort = dict(self.usual_effort(made.rows))
        given = ":query", "10", str(effort.pop("candidates", 0))
        settings = "".join(f"SET {name} = {value}; " for name, value in effort.items())
        return settings + self.search_sql(place, made, given=given)


def _aligned(size: int) -> int:
    return -(-size // 8) * 8
