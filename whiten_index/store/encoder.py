"""Facts of an encoder, as stores, indexes and exported transforms record them."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from whiten_index.artifacts.schema import Count, Flag, Positive, Sha256


class TransformerFacts(TypedDict):
    """A model that encodes texts; see ``EncoderSpec``."""

    kind: Literal["transformer"]
    model: str
    revision: str | None
    weights_sha256: Sha256
    files_sha256: Sha256
    dim: Positive
    pooling: str
    layers: list[Count]
    max_length: Positive
    dtype: Literal["float32", "bfloat16", "float16"]
    lower_case: Flag
    document_prompt: str
    query_prompt: str
    normalizes: Flag
    needs_code: Flag
    pools_prompt: Flag
    head_sha256: Sha256 | None
    code_revision: str | None
    fingerprint: NotRequired[str]


class ColumnFacts(TypedDict):
    """A column of embeddings, and the model of the queries if it is known."""

    kind: Literal["column"]
    column: str
    dim: Positive
    query_encoder: TransformerFacts | None
    fingerprint: NotRequired[str]


EncoderFacts = Annotated[TransformerFacts | ColumnFacts, Field(discriminator="kind")]
