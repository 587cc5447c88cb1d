"""Options of the databases that are one file: DuckDB and SQLite."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from whiten_index.vectordb.engine_options import Code, Effort, EngineOptions, Positive

if TYPE_CHECKING:
    from whiten_index.vectordb.pushed_table import PushedTable

# Both take names in any case for the same.
_NAME = (
    r"(?!sqlite_|duckdb_)(?!.*__)[A-Za-z_][A-Za-z0-9_]*", 200,
    "letters of ASCII, digits and single underscores, no digit first, and no sqlite_ or duckdb_",
)  # fmt: skip
# Metric -> distance by which an index of DuckDB ranks, and its score of distance 0; a distance that
# no index takes for its own (as it does 1 - array_cosine_similarity), whose negative is the score.
DISTANCES = {
    "cosine": ("array_cosine_distance({})", 1.0, "-array_cosine_similarity({})"),
    "ip": ("array_negative_inner_product({})", 0.0, "-array_inner_product({})"),
}


class DuckOptions(EngineOptions):
    """Options of DuckDB and its extension ``vss``."""

    engine = "DuckDB"
    schemes = ("duckdb",)
    example = "duckdb:///folder/file.duckdb"
    client, extra, writer = "duckdb", "duckdb", "duckdb_writer:DuckWriter"
    name = _NAME

    index: Literal["hnsw", "none"] = "hnsw"
    m: Annotated[int, Field(ge=2, le=512)] = 16
    ef_construction: Positive = 128

    def index_bytes(self, rows: int, k: int, dtype: str) -> int:  # noqa: ARG002
        """Return the bytes of vectors and links, of which a row has 2 m on the lowest level."""
        if self.index == "none":
            return 0
        above = (14 + 4 * self.m) / (self.m - 1)
        return math.ceil(rows * (4 * k + 14 + 8 * self.m + above))

    def efforts(self, rows: int) -> Sequence[Effort]:  # noqa: ARG002
        """Return widths of the search of the graph."""
        widths = (64, 128, 256) if self.index == "hnsw" else ()
        return tuple({"hnsw_ef_search": width} for width in widths) or ({},)

    def query(self, table: str, made: "PushedTable") -> str:
        """Return the setting and the SQL, with $query for the vector."""
        effort = self.usual_effort(made.rows).items()
        settings = "".join(f"SET {name} = {value}; " for name, value in effort)
        far = DISTANCES[made.metric][0].format(f"vector, $query::FLOAT[{made.k}]")
        return f"{settings}SELECT id, {far} FROM {table} ORDER BY 2 LIMIT 10"


class SqliteOptions(EngineOptions):
    """Options of SQLite and its extension ``sqlite-vec``; ``lock_timeout`` is in seconds."""

    engine = "SQLite"
    schemes = ("sqlite",)
    example = "sqlite:///folder/file.sqlite"
    no_index: ClassVar[Mapping[str, str]] = {}
    client, extra, writer = "apsw", "sqlite", "sqlite_writer:SqliteWriter"
    name = _NAME

    code: Literal["float32", "bit"] = "float32"
    lock_timeout: Annotated[int, Field(ge=1, le=86_400)] = 10

    @classmethod
    def codes(cls, k: int) -> dict[str, Code]:
        """Return the forms of vectors; bits fill whole bytes."""
        return {"float32": Code(), **({} if k % 8 else {"bit": Code({"code": "bit"})})}

    def code_bytes(self, rows: int, k: int, dtype: str) -> int:
        """Return the bytes of a code."""
        return super().code_bytes(rows, k, dtype) if self.code == "float32" else k // 8

    def index_bytes(self, rows: int, k: int, dtype: str) -> int:
        """Return the bytes of the codes, if there are any."""
        return 0 if self.code == "float32" else rows * self.code_bytes(rows, k, dtype)

    def build_bytes(self, rows: int, k: int, dtype: str) -> int:  # noqa: ARG002
        """Return none: rows are coded one after another."""
        return 0

    def efforts(self, rows: int) -> Sequence[Effort]:  # noqa: ARG002
        """Return numbers of rows near by their codes, which are ranked again by the vectors."""
        many = () if self.code == "float32" else (50, 100, 200)
        return tuple({"candidates": each} for each in many) or ({},)

    def search_sql(self, table: str) -> str:
        """Return the SQL of a search: :query, :k rows, and of a code :candidates."""
        if self.code == "float32":
            near = "vector MATCH :query AND k = :k"
            return f"SELECT id, distance FROM {table} WHERE {near} ORDER BY distance"
        return (
            f"WITH near AS (SELECT id, vector FROM {table} WHERE code MATCH "
            "vec_quantize_binary(:query) AND k = :candidates) SELECT id, "
            "vec_distance_cosine(vector, :query) AS distance FROM near ORDER BY distance LIMIT :k"
        )

    def query(self, table: str, made: "PushedTable") -> str:
        """Return the SQL, with :query for the bytes of the vector."""
        many = self.usual_effort(made.rows).get("candidates", 0)
        return self.search_sql(table).replace(":candidates", str(many)).replace(":k", "10")
