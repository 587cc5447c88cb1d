"""Bodies of requests, as they are checked and as OpenAPI shows them."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Number = Annotated[float, Field(allow_inf_nan=False)]
# Of millions of wrong values one is enough to refuse a body.
_SOME = Field(min_length=1, fail_fast=True)
Embedding = Annotated[list[Number], _SOME]
Texts = Annotated[list[str], _SOME]
# JSON has integers of any size; ids are of 64 bits.
# As long as those of a corpus may be.
DocumentId = (
    Annotated[str, Field(max_length=1 << 14)] | Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
)
TopK = Annotated[int, Field(ge=1, description="Hits of a query.")]
IndexName = Annotated[
    str | None, Field(description="Which index; may be left out if there is one.")
]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _few_keys(cls, body: Any) -> Any:
        if isinstance(body, dict) and len(body) > len(cls.model_fields):
            known = ", ".join(cls.model_fields)
            raise ValueError(f"the body has {len(body):,} fields; it may have {known}")
        return body


class SearchBody(_Body):
    """A search by texts, by embeddings or by a document's id; give one of them."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"texts": ["how do I catch an error"], "top_k": 3}, {"id": "doc-1"}]
        }
    )
    index: IndexName = None
    texts: str | Texts | None = None
    embeddings: Annotated[list[Embedding], _SOME] | Texts | None = Field(
        default=None,
        description="Raw embeddings of queries, as wide as the encoder's: numbers, or base64 of "
        "32-bit floats, low byte first.",
    )
    id: DocumentId | None = Field(
        default=None, description="A document, whose neighbours are wanted."
    )
    top_k: TopK = 10
    # Some 25,000 short values, which take about a second.
    filter: str | None = Field(
        default=None,
        max_length=100_000,
        description="Condition on id and kept columns.",
        examples=["lang == 'en'"],
    )
    rerank: int | None = Field(
        default=None,
        ge=0,
        lt=1 << 31,
        description="Candidates ranked again by the store; 0 for none.",
    )
    columns: list[str] | None = Field(
        default=None, fail_fast=True, description="Kept columns to return; all by default."
    )

    @model_validator(mode="after")
    def _one(self) -> "SearchBody":
        if sum(each is not None for each in (self.texts, self.embeddings, self.id)) != 1:
            raise ValueError("give one of texts, embeddings, id")
        return self


class EmbeddingsBody(BaseModel):
    """As the embeddings of OpenAI's API; the vectors are the index's reduced ones."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "docs", "input": "how do I catch an error"}]}
    )
    model: str = Field(description="Name of an index.")
    input: str | Texts
    dimensions: int | None = Field(
        default=None, ge=1, description="Keep the first dimensions only."
    )
    encoding_format: Literal["float", "base64"] = "float"


class CompareBody(_Body):
    """A text to search for by raw embeddings, by indexes, and by every width of one fit."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"text": "how do I catch an error", "top_k": 10}]}
    )
    index: IndexName = None
    text: str
    top_k: Annotated[int, Field(ge=1, le=100, description="Hits of each way.")] = 10


class HitBody(BaseModel):
    """A found document."""

    id: str | int
    score: float
    columns: dict[str, Any]


class HitsBody(BaseModel):
    """The hits of one query, best first."""

    hits: list[HitBody]


class FoundBody(BaseModel):
    """Result of a search."""

    index: str
    version: str = Field(description="The version of the index that answered.")
    results: list[HitsBody]


class VectorBody(BaseModel):
    """A vector of OpenAI's API."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class UsageBody(BaseModel):
    """Tokens that were encoded."""

    prompt_tokens: int
    total_tokens: int


class VectorsBody(BaseModel):
    """Vectors of OpenAI's API."""

    object: Literal["list"]
    data: list[VectorBody]
    model: str
    usage: UsageBody


class ComparedBody(BaseModel):
    """The hits of one way to search."""

    name: str
    kind: Literal["raw", "index", "width"]
    k: int
    bytes_a_row: float
    bytes: int
    milliseconds: float | None = Field(
        description="Time of the search, without encoding; of raw embeddings, with all widths."
    )
    overlap: float | None = Field(description="Share of the raw hits that are found.")
    hits: list[HitBody]


class ComparisonBody(BaseModel):
    """The same query, searched in several ways."""

    index: str
    version: str
    note: str | None = Field(description="Why there are no raw hits, if so.")
    columns: list[ComparedBody]
    widths: list[ComparedBody]


class ProblemBody(BaseModel):
    """An error (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    message: str
