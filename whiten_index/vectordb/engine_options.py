"""Options of the vector databases, given as ``--option NAME=VALUE``.

They are read without the database's client.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from whiten_index.errors import ConfigError
from whiten_index.paths import cut

if TYPE_CHECKING:
    from whiten_index.vectordb.pushed_table import PushedTable

# Settings of an engine's searches: name -> value.
Effort: TypeAlias = Mapping[str, int]
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
        coded = {name: Code({"quantization": name}) for name in _QDRANT_BITS if name != "none"}
        return {"float32": Code(), "float16": Code(dtype="float16"), **coded}

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
