"""Options of PostgreSQL with pgvector and other extensions, and the SQL that they give."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from whiten_index.vectordb.engine_options import Code, Effort, EngineOptions, probes

if TYPE_CHECKING:
    from whiten_index.vectordb.pushed_table import PushedTable

# Type of a column in pgvector, and the most numbers of one that an index takes.
VECTOR_TYPES = {"float32": "vector", "float16": "halfvec"}
MOST_INDEXED = {"vector": 2000, "halfvec": 4000, "bit": 64_000}
# Kind of index -> the extension that has it, other than pgvector.
EXTENSIONS = {"vchordrq": "vchord", "diskann": "vectorscale"}
# pgvector's operator class and operator of a metric, and the score of distance 0.
OPERATORS = {"cosine": ("cosine_ops", "<=>", 1.0), "ip": ("ip_ops", "<#>", 0.0)}
_MB = 1 << 20
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
        return None if self.index in EXTENSIONS else 64 * _MB * (self.index == "ivfflat")

    def settings_for(self, rows: int, k: int, dtype: str) -> dict[str, str]:
        """Return the memory that keeps the graph out of the disk while it is built."""
        needed = self.build_bytes(rows, k, dtype) if self.index == "hnsw" else None
        if not needed:
            return {}
        # Memory is taken in whole megabytes, and each worker keeps some.
        return {"maintenance_work_mem": f"{max(64, math.ceil(1.1 * needed / _MB) + 3)}MB"}

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
